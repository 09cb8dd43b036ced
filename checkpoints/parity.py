"""Compare the tiny model's float32 logits with those of Hugging Face `transformers`.

`python checkpoints/parity.py ours FILE` writes our logits of the held-out prompts beside the
checkpoint; `python checkpoints/parity.py theirs FILE` computes them with `transformers` and
compares: exit status 1 if they differ by more than `BOUND` of the largest logit. The two run in
environments of their own (`make parity`): the second needs neither JAX nor this package.
"""

import os
import sys

if sys.path[0] == os.path.dirname(os.path.realpath(__file__)):
    # run by its path: in this folder an inspect.py hides Python's own
    sys.path[0] = os.path.dirname(sys.path[0])

import argparse
import json
from pathlib import Path

import numpy as np

TINY = Path(__file__).resolve().parent / "tiny"
# largest difference, as a share of the largest logit of the prompt
BOUND = 1e-4


def prompts(directory: Path = TINY) -> list[str]:
    """The held-out texts beside a checkpoint."""
    lines = (directory / "heldout.jsonl").read_text().splitlines()
    return [json.loads(line)["text"] for line in lines]


def ours(file: Path) -> None:
    """Writes token ids and logits of every prompt."""
    from qwen4jax import Tokenizer, forward, load

    params, tokenizer = load(TINY, dtype="float32", progress=False), Tokenizer.load(TINY)
    ids = [tokenizer.encode(text) for text in prompts()]
    # one shape for all: what stands behind a prompt does not reach it
    longest = max(map(len, ids))
    tokens, mask = np.zeros((2, len(ids), longest), np.int32)
    for row, prompt in enumerate(ids):
        tokens[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
    found = {}
    for row, prompt in enumerate(ids):
        logits = forward(params, tokens[row : row + 1], mask=mask[row : row + 1])
        found[f"ids{row}"] = np.asarray(prompt)
        found[f"logits{row}"] = np.asarray(logits)[0, : len(prompt)]
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **found)
    print(f"wrote {file}: {len(ids)} prompts of {min(map(len, ids))} to {longest} tokens")


def theirs(file: Path) -> int:
    """Compares with `transformers`, whose tokenizer has to give the same ids."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    # the n-gram table is cast from e4m3; its scale is 1, and the key is not known there
    model = transformers.AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(TINY)
    known, worst = np.load(file), 0.0
    for row, text in enumerate(prompts()):
        ids = tokenizer(text)["input_ids"]
        if ids != known[f"ids{row}"].tolist():
            print(f"prompt {row}: the tokenizers disagree")
            return 1
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0].numpy()
        error = np.abs(logits - known[f"logits{row}"]).max() / np.abs(logits).max()
        same = np.mean(logits.argmax(-1) == known[f"logits{row}"].argmax(-1))
        print(f"prompt {row}: {len(ids)} tokens, error {error:.2e}, same best id {same:.4f}")
        worst = max(worst, float(error))
    names = f"transformers {transformers.__version__}, torch {torch.__version__}"
    print(f"{names}: largest error {worst:.2e} of the largest logit, {BOUND:.0e} is allowed")
    return int(worst > BOUND)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Compare logits with transformers.")
    parser.add_argument("side", choices=("ours", "theirs"))
    parser.add_argument("file", type=Path, help=".npz that the first side writes")
    options = parser.parse_args(arguments)
    if options.side == "theirs":
        return theirs(options.file)
    ours(options.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
