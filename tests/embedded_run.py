"""What the embedded checkpoint generates: `python -m tests.embedded_run` prints it as JSON.

A process of its own: the checks of shapes that tests trace with cost more than its run. All
requests run the same two programs, with drafts and without, in float32.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

from qwen4jax.decode.generate import stream
from qwen4jax.decode.options import Sampling
from qwen4jax.decode.text import Tokenizer
from qwen4jax.params import Params
from qwen4jax.weights.embedded import embedded_checkpoint
from qwen4jax.weights.load import load

NEW, PROMPT, REQUESTS = 16, 256, 20
GREEDY = Sampling(temperature=0, max_new_tokens=NEW, ignore_eos=True)


def prompts(directory: Path) -> list[list[int]]:
    """Of every held-out text two or more, as long as what a query may select."""
    tokenizer = Tokenizer.load(directory)
    lines = (directory / "heldout.jsonl").read_text().splitlines()
    ids = [tokenizer.encode(json.loads(line)["text"]) for line in lines]
    return [row[start : start + PROMPT] for start in (0, 40, 80, 120) for row in ids][:REQUESTS]


def options(number: int) -> Sampling:
    """Every fourth request is sampled."""
    if number % 4 != 3:
        return GREEDY
    return dataclasses.replace(GREEDY, temperature=0.8, top_p=0.95, seed=number)


def serve(params: Params, asked: list[list[int]], draft: int) -> dict[str, Any]:
    """Runs the requests through eight slots; a slot is taken over when its request ends.

    Returns:
        The ids of every request, and the drafts that each round accepted, in the order they came.
    """
    ids: list[list[int]] = [[] for _ in asked]
    accepted = []
    sampling = [options(number) for number in range(len(asked))]
    for delta in stream(params, asked, sampling=sampling, draft=draft, slots=8, chunk=256):
        ids[delta.request] += delta.token_ids
        # the last round of a request may be cut short
        if delta.rounds and delta.finish_reason is None:
            accepted.append(len(delta.token_ids) - 1)
    return {"ids": ids, "accepted": accepted}


def main() -> None:
    directory = embedded_checkpoint()
    params, asked = load(directory, dtype="float32", progress=False), prompts(directory)
    head = params.mtp
    assert head is not None
    # the token's half of the input where the residual's belongs
    swapped = head.replace(fc_embedding=head.fc_hidden, fc_hidden=head.fc_embedding)
    # the main model's last norm for the head's own
    normed = head.replace(pre_fc_norm_hidden=params.hyper_connection_mixer.hc_norm)
    found = {
        "plain": serve(params, asked, 0),
        "drafted": serve(params, asked, 3),
        "swapped": serve(params.replace(mtp=swapped), asked, 3),
        "normed": serve(params.replace(mtp=normed), asked, 3),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
