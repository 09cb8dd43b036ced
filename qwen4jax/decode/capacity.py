"""What fits into a device's memory, by arithmetic: refused before anything is allocated.

    python -m qwen4jax.decode.capacity                        # the released model, an H200
    python -m qwen4jax.decode.capacity DIR --memory 80 --slots 1 8

prints the longest context that every slot can have at once, for each dtype of keys and values and
each place of the n-gram table.
"""

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qwen4jax.config import Config, Quantization
from qwen4jax.pallas.index_topk.select import WORKSPACE
from qwen4jax.params import declare, tensors
from qwen4jax.state import DEFAULT_PAGE_SIZE, abstract_state
from qwen4jax.weights.checkpoint import survey
from qwen4jax.weights.draft import check_draft
from qwen4jax.weights.placement import Placement

GB = 1e9
# most temporaries of the round beside its logits, as far as was seen; never more than the weights
_WORK = int(2 * GB)
# temporaries of prefill for each token of a step, in widths of the streams and, for each layer, in
# hidden states; from XLA's memory analyses for an H200 of 4 to 48 layers, 64 to 8,192 tokens and 1
# to 4 rows, which stay below `prefill_bytes` (2.2 GB of 2.7 for 24 layers and 8,192 tokens)
_STREAMS_A_TOKEN, _HIDDEN_A_LAYER = 5.5, 1.4
# rows and tokens of a step of many prompts, as `generate` has it
USUAL_PREFILL = (4, 2048)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device.

    Attributes:
        weights: parameters without the n-gram tables, a quantised draft head's copies included.
        table: n-gram tables, as far as they are on the device.
        state: decode state.
        work: estimate of what the compiled programs need besides, one at a time.
    """

    weights: int
    table: int
    state: int
    work: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.table + self.state + self.work

    def describe(self) -> str:
        """The arithmetic, in GB."""
        parts = dataclasses.asdict(self)
        terms = " + ".join(f"{name} {value / GB:.1f}" for name, value in parts.items())
        return f"{terms} = {self.total / GB:.1f} GB"


def plan_memory(
    config: Config,
    *,
    slots: int,
    max_length: int,
    drafts: int = 3,
    kv_dtype: str | None = None,
    table: Placement = "device",
    prefill: tuple[int, int] = USUAL_PREFILL,
) -> MemoryPlan:
    """What a model and a state of `slots` requests of up to `max_length` tokens hold.

    `prefill` is (rows, tokens) of the largest prefill step.

    Raises:
        ValueError: of `abstract_state`.
    """
    shapes = dict(slots=slots, max_length=max_length, drafts=drafts, kv_dtype=kv_dtype)
    state = nbytes(abstract_state(config, **shapes))  # pyright: ignore[reportArgumentType]
    weights, rows = weight_bytes(config)
    here = rows if table == "device" else 0
    return MemoryPlan(weights, here, state, work_bytes(config, slots, drafts, prefill))


def weight_bytes(config: Config) -> tuple[int, int]:
    """Bytes of the parameters without the n-gram tables, and of these."""
    declared = declare(config)
    everything = sum(t.nbytes for t in tensors(declared))
    tables = [layer.ple.ngram_embedding for layer in declared.layers if layer.ple is not None]
    rows = sum(t.nbytes for t in tensors(tables))
    return everything - rows, rows


def work_bytes(
    config: Config, slots: int, drafts: int, prefill: tuple[int, int] = USUAL_PREFILL
) -> int:
    """Estimate of the temporaries of a round or a prefill step, whichever has more of them."""
    return max(round_bytes(config, slots, drafts), prefill_bytes(config, *prefill))


def round_bytes(config: Config, slots: int, drafts: int) -> int:
    """Estimate of a compiled round's temporaries, with float32 logits as sampling needs them.

    Five times: they, the scores, what sorts them and their ids, and probabilities.
    """
    logits = slots * (drafts + 1) * config.vocab_size * 4
    return min(_WORK, weight_bytes(config)[0]) + 5 * logits


def prefill_bytes(config: Config, rows: int, tokens: int) -> int:
    """Estimate of the temporaries of a prefill step of `rows` x `tokens`.

    Every layer leaves something of each token, the indexer has its scores, and the rows' recurrent
    states are taken out of their slots.
    """
    item = jnp.dtype(config.dtype).itemsize
    streams = _STREAMS_A_TOKEN * config.hc_count * config.hidden_size * item
    hidden = _HIDDEN_A_LAYER * config.hidden_size * item * config.num_hidden_layers
    one, two = (
        nbytes(abstract_state(config, slots=n, max_length=DEFAULT_PAGE_SIZE, drafts=0))
        for n in (1, 2)
    )
    scores = min(WORKSPACE, weight_bytes(config)[0])
    logits = 2 * rows * config.vocab_size * 4
    return int(rows * tokens * (streams + hidden)) + rows * (two - one) + scores + logits


def nbytes(tree: Any) -> int:
    """Bytes of the arrays of a tree, abstract or not."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def free_bytes() -> int | None:
    """Memory of the first device that this process may still take; None where it is not known."""
    stats = jax.devices()[0].memory_stats() or {}
    if "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def require_room(
    config: Config,
    *,
    slots: int,
    max_length: int,
    drafts: int,
    kv_dtype: str | None,
    prefill: tuple[int, int],
) -> None:
    """Refuses a state that does not fit beside what the device holds already, and its programs.

    `prefill` is (rows, tokens) of the largest prefill step.

    Raises:
        ValueError: with the arithmetic, and the length that would fit.
    """
    free = free_bytes()
    if free is None:
        return
    sizes: dict[str, Any] = dict(slots=slots, drafts=drafts, kv_dtype=kv_dtype)
    state = nbytes(abstract_state(config, max_length=max_length, **sizes))
    work = work_bytes(config, slots, drafts, prefill)
    if state + work <= free:
        return
    fits = longest_context(config, free - work, **sizes)
    chunk = ""
    if work > round_bytes(config, slots, drafts):
        chunk = f" (of which a smaller chunk than {prefill[0]} x {prefill[1]} tokens needs less)"
    raise ValueError(
        f"slots, max_length: {slots} x {max_length} tokens need state {state / GB:.1f} + work "
        f"{work / GB:.1f} GB{chunk}, and {free / GB:.1f} GB are free: {slots} x {fits} tokens "
        "would fit"
    )


def longest_context(
    config: Config, available: int, *, slots: int, drafts: int = 3, kv_dtype: str | None = None
) -> int:
    """Tokens that each of `slots` requests can have in a state of `available` bytes; 0 if none."""

    def held(pages: int) -> int:
        length = pages * DEFAULT_PAGE_SIZE
        shapes: dict[str, Any] = dict(slots=slots, drafts=drafts, kv_dtype=kv_dtype)
        return nbytes(abstract_state(config, max_length=length, **shapes))

    low, high = 0, config.max_position_embeddings // DEFAULT_PAGE_SIZE
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if held(middle) <= available else (low, middle - 1)
    return low * DEFAULT_PAGE_SIZE


def report(
    config: Config, memory: int, slots: Sequence[int], drafts: int = 3, chunk: int = 2048
) -> str:
    """The longest contexts as a Markdown table; `memory` in bytes, `chunk` of prompts in tokens.

    Prompts are fed as `generate` does, up to 4 at a time; a server's whole chunks are of one.
    """
    weights, rows = weight_bytes(config)
    head = [f"{n} slot{'s' * (n > 1)}" for n in slots]
    lines = [
        f"weights {weights / GB:.1f} GB, n-gram tables {rows / GB:.1f} GB, "
        f"memory {memory / GB:.1f} GB; tokens of context per slot:",
        "",
        "| table | keys and values | " + " | ".join(head) + " |",
        "|---" * (len(slots) + 2) + "|",
    ]
    for place, dtype in itertools.product(("pinned or host", "device"), (None, "float8_e4m3fn")):
        held = weights + (rows if place == "device" else 0)
        cells = [
            longest_context(
                config,
                memory - held - work_bytes(config, n, drafts, (min(n, USUAL_PREFILL[0]), chunk)),
                slots=n,
                drafts=drafts,
                kv_dtype=dtype,
            )
            for n in slots
        ]
        lines.append(f"| {place} | {dtype or config.dtype} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Prints the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m qwen4jax.decode.capacity", description="How much context fits."
    )
    parser.add_argument("model", metavar="DIR", nargs="?", help="checkpoint (the released model)")
    parser.add_argument("--memory", metavar="GB", type=float, default=138.0, help="usable (138)")
    parser.add_argument("--slots", metavar="N", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--draft", metavar="N", type=int, default=3, help="tokens per round (3)")
    parser.add_argument("--chunk", metavar="N", type=int, default=2048, help="of prompts (2048)")
    parser.add_argument("--draft-weights", choices=("fp8", "nvfp4"), help="default: as stored")
    parser.add_argument("--draft-vocab", metavar="N", type=int, help="draft among the N lowest ids")
    args = parser.parse_args(argv)
    if args.memory <= 0 or min(args.slots) < 1:
        parser.error("--memory and --slots: must be over 0")
    if not 0 <= args.draft <= 7:
        parser.error(f"--draft: {args.draft} is not in 0..7")
    if args.chunk < 1:
        parser.error(f"--chunk: {args.chunk} is not over 0")
    try:
        config = Config.flash_next(
            quantization=Quantization(experts="nvfp4", ngram_embedding="fp8")
        )
        if args.model is not None:
            config = survey(args.model).config
        check_draft(config, args.draft_weights, args.draft_vocab)
    except ValueError as error:
        print(f"qwen4jax: {error}", file=sys.stderr)
        return 2
    stored = dataclasses.replace(config.quantization, draft_vocab=args.draft_vocab)
    if args.draft_weights:
        stored = dataclasses.replace(
            stored, mtp_experts=args.draft_weights, draft=args.draft_weights
        )
    config = config.replace(quantization=stored)
    print(report(config, int(args.memory * GB), args.slots, args.draft, args.chunk))
    return 0


if __name__ == "__main__":
    sys.exit(main())
