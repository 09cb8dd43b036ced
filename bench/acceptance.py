"""How much speculation gains on the trained model: tokens per round on held-out text.

    python -m bench.acceptance --text build/tiny --out bench/results/cpu

Texts are windows spread evenly over the held-out ids (`checkpoints/tiny_text.py` makes them), of
each context in turn. Each is continued greedily for some rounds, past the end of a document; then
`STRIDE` more of its own ids are fed, and it is continued from there, and so on. By default in
float32: the ids of the three ways to share a selection are then the same, and their acceptance is
of the same text.

A small model that is always given its likeliest token soon ends in a loop, which is easy to draft:
hence many starts and few rounds. Every line says how many rows are in a loop all the same, and what
rounds gave before that: a row is in a loop from where it repeats what stood up to `PERIOD` tokens
before, to its end and at least twice over.

`--drafts stored,fp8,nvfp4:256` does it for the draft head in each form, the last with the 256
lowest ids only. The prompts are then fed again for each, since the draft head's keys and values
come of its weights.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import record
from qwen4jax import Ablation, Sampling, load
from qwen4jax.decode.options import Row as Request
from qwen4jax.decode.options import make_controls
from qwen4jax.decode.prefill import prefill
from qwen4jax.decode.round import begin_slots, run_round
from qwen4jax.params import Params
from qwen4jax.state import DecodeState, init_state
from qwen4jax.weights.draft import check_vocab, lighten_draft

TINY = Path(__file__).parent.parent / "checkpoints" / "tiny"
NAME = "acceptance.jsonl"
MODES = ("share", "share_frozen", "fresh")
FORMS = ("stored", "fp8", "nvfp4")
DRAFTS = 3
# ids of a text from one start to the next
STRIDE = 64
# longest period of a loop, and the fewest tokens of one
PERIOD, SHORTEST = 128, 16


@dataclasses.dataclass(frozen=True)
class Row:
    """What was generated for a prompt.

    Attributes:
        ids: the first one and those of every round.
        bursts: tokens of each round.
    """

    ids: list[int]
    bursts: list[int]

    def free_rounds(self) -> list[int]:
        """The bursts of rounds that began before the loop, if there is one."""
        # the first id came with the prompt
        starts = 1 + np.cumsum([0, *self.bursts])[:-1]
        end = loop_start(self.ids)
        return [b for b, s in zip(self.bursts, starts, strict=True) if s < end]


def loop_start(ids: Sequence[int]) -> int:
    """Where the loop begins that `ids` ends in; their number if there is none."""
    row, start = np.asarray(ids), len(ids)
    for period in range(1, min(PERIOD, len(row) // 3) + 1):
        other = np.nonzero(row[period:] != row[:-period])[0]
        begin = int(other[-1]) + 1 if len(other) else 0
        if len(row) - begin >= max(3 * period, SHORTEST):
            start = min(start, begin)
    return start


def distinct(ids: Sequence[int], size: int = 4) -> float:
    """Share of the runs of `size` ids that are different from each other."""
    runs = [tuple(ids[i : i + size]) for i in range(len(ids) - size + 1)]
    return len(set(runs)) / max(1, len(runs))


def windows(ids: np.ndarray, length: int, count: int) -> np.ndarray:
    """`count` windows of `length` ids, spread over all of them."""
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return np.stack([ids[s : s + length] for s in starts])


def measure(params: Params, state: DecodeState, hidden: Any, mode: Any, rounds: int) -> list[Row]:
    """Runs rounds of all slots after their prompts; one row each.

    Args:
        params: of the model.
        state: after the prompts; kept.
        hidden: the output head's input at their last tokens.
        mode: how draft steps share a selection.
        rounds: how many.
    """
    slots, config = state.slots, params.config
    params = params.replace(config=config.replace(ablation=Ablation(index_share=mode)))
    options = Sampling(temperature=0, max_new_tokens=config.max_position_embeddings)
    rows = [Request(options, int(n)) for n in state.length]
    controls = make_controls(rows, slots, config.vocab_size, max_length=state.capacity)
    state, controls, first = begin_slots(
        params, jax.tree.map(jnp.copy, state), controls, hidden, jnp.arange(slots)
    )
    active, bursts = jnp.ones(slots, bool), [first]
    for _ in range(rounds):
        state, controls, active, burst = run_round(params, state, controls, active)
        bursts.append(burst)
    tokens, counts = jax.device_get(([b.tokens for b in bursts], [b.count for b in bursts]))
    found = []
    for slot in range(slots):
        ids = [t[slot, : c[slot]].tolist() for t, c in zip(tokens, counts, strict=True)]
        found.append(Row([i for burst in ids for i in burst], [len(burst) for burst in ids[1:]]))
    return found


def starts_of(
    params: Params, ids: np.ndarray, sizes: tuple[int, int, int, int], modes: Sequence[str]
) -> dict[str, list[Row]]:
    """What each mode makes of every start in some texts: one row per start and text."""
    context, texts, starts, rounds = sizes
    rows: dict[str, list[Row]] = {mode: [] for mode in modes}
    window = windows(ids, context + (starts - 1) * STRIDE, texts)
    state = init_state(
        params.config,
        slots=texts,
        max_length=window.shape[1] + (DRAFTS + 1) * (rounds + 2),
        drafts=DRAFTS,
    )
    fed, slots = 0, range(texts)
    for start in range(starts):
        end = context + start * STRIDE
        chunk = STRIDE if start else 512
        state, hidden = prefill(params, state, window[:, fed:end].tolist(), slots, chunk=chunk)
        fed = end
        for mode in modes:
            rows[mode] += measure(params, state, hidden, mode, rounds)
    return rows


def line_of(rows: Sequence[Row]) -> dict:
    """The figures of some rows."""
    bursts = np.concatenate([r.bursts for r in rows])
    free = np.concatenate([r.free_rounds() for r in rows])
    return {
        "continuations": len(rows),
        "rounds": len(bursts),
        "tokens": int(bursts.sum()),
        "tokens_per_round": round(float(bursts.mean()), 3),
        "accepted": [round(float((bursts > n).mean()), 4) for n in range(1, DRAFTS + 1)],
        "rows_in_a_loop": sum(loop_start(r.ids) < len(r.ids) for r in rows),
        "distinct_4grams": round(float(np.mean([distinct(r.ids) for r in rows])), 3),
        "tokens_before_loops": int(free.sum()),
        "tokens_per_round_before_loops": round(float(free.mean()), 3) if len(free) else None,
    }


def same_ids(rows: Sequence[Row], others: Sequence[Row]) -> bool:
    """Whether two ways gave the same text, as far as both have come."""
    pairs = ((a.ids, b.ids) for a, b in zip(rows, others, strict=True))
    return all(a[: len(b)] == b[: len(a)] for a, b in pairs)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Tokens per round of a trained checkpoint.")
    parser.add_argument("--model", type=Path, default=TINY)
    parser.add_argument("--text", type=Path, required=True, help="folder of tiny_text.py")
    parser.add_argument(
        "--sizes",
        default="512:32:6:14,2048:16:12:14,8192:8:20:16",
        help="context:texts:starts:rounds, comma-separated",
    )
    parser.add_argument("--modes", type=_some_of(MODES), default=",".join(MODES))
    parser.add_argument("--drafts", type=_drafts, default="stored")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", help="folder of results")
    options = parser.parse_args(arguments)
    sizes = [tuple(map(int, size.split(":"))) for size in options.sizes.split(",")]
    stored = load(options.model, dtype=options.dtype, progress=False)
    for form in options.drafts:
        check_vocab(_form_and_vocab(form)[1], stored.config.vocab_size)
    ids = np.load(options.text / "heldout.npy")
    ways = [(form, mode) for form in options.drafts for mode in options.modes]
    all_rows: dict[tuple[str, str], list[Row]] = {way: [] for way in ways}
    for context, texts, starts, rounds in sizes:
        found: dict[tuple[str, str], list[Row]] = {}
        for form in options.drafts:
            params = lighten_draft(stored, *_form_and_vocab(form))
            began = time.monotonic()
            rows = starts_of(params, ids, (context, texts, starts, rounds), options.modes)
            seconds = round(time.monotonic() - began, 1)
            for mode in options.modes:
                found[form, mode] = rows[mode]
                line = _named(form, mode, context, options.dtype)
                line |= {"texts": texts, "starts": starts} | line_of(rows[mode])
                line |= {"same_ids": same_ids(found[ways[0]], rows[mode]), "seconds": seconds}
                _keep(line, options.out)
        for way in ways:
            all_rows[way] += found[way]
    contexts = [context for context, *_ in sizes]
    for (form, mode), rows in all_rows.items():
        _keep(_named(form, mode, contexts, options.dtype) | line_of(rows), options.out)


def _named(form: str, mode: str, context: Any, dtype: str) -> dict:
    """What a line is of."""
    line = {"index_share": mode, "context": context, "dtype": dtype}
    return line if form == "stored" else line | {"drafts": form}


def _keep(line: dict, out: str | None) -> None:
    print(json.dumps(line), flush=True)
    record.append([line | record.stamp()], NAME, out)


def _form_and_vocab(text: str) -> tuple[Any, int | None]:
    """The form, None as stored, and the number of ids, None for all."""
    form, _, vocab = text.partition(":")
    if form not in FORMS:
        raise argparse.ArgumentTypeError(f"{form!r} is not one of {', '.join(FORMS)}")
    if vocab and not vocab.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: {vocab!r} is no number of ids")
    return None if form == "stored" else form, int(vocab) if vocab else None


def _drafts(text: str) -> list[str]:
    """The argument, checked."""
    forms = text.split(",")
    for form in forms:
        _form_and_vocab(form)
    return forms


def _some_of(known: tuple[str, ...]) -> Any:
    """Type of an argument that lists some of `known`."""

    def parse(text: str) -> list[str]:
        named = text.split(",")
        if unknown := set(named) - set(known):
            raise argparse.ArgumentTypeError(f"{sorted(unknown)} not in {', '.join(known)}")
        return named

    return parse


if __name__ == "__main__":
    main()
