"""The gated residual over 32 sets of weights: update, norm and mix, sublayer after sublayer.

    python -m bench.chains --peers peers.json

What the public benchmark times as `chain`: the previous sublayer's output is added to the streams,
the streams are normed, and the mixer makes the next input and its injection weights. Each of the 32
banks has its own weights, 13.2 MB, so none is in the cache when it is needed; the input of a
sublayer stands for its output, so the chain is as serial as the model. One CUDA graph; `us` is per
bank. One boundary is first checked against float32; lines go to `kernels.jsonl` as the operation
`gated_residual.chain`.
"""

import argparse
import dataclasses
import functools
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import check, timing
from bench.kernels import failure, find_peers, keep_line, line_of
from bench.operations import Operation
from bench.traffic import size
from qwen4jax.pallas import counters
from qwen4jax.pallas.gated_residual import BOUNDARY, boundary

NAME = "gated_residual.chain"
STREAMS = 4
_STATE = "streams", "inject", "y", "counter"


def step(
    streams: jax.Array,
    inject: jax.Array,
    y: jax.Array,
    counter: jax.Array,
    weights: dict[str, jax.Array],
    *,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Streams, injection weights, input, counter of the sublayer after one whose output is `y`."""
    pending = inject, y
    streams, x, given, counter = boundary(
        streams, pending, **weights, counter=counter, eps=1e-6, implementation=implementation
    )
    assert given is not None
    return streams, given, x, counter


@functools.partial(jax.jit, static_argnames=("rows", "hidden"))
def draw_state(key: jax.Array, rows: int, hidden: int) -> tuple[jax.Array, ...]:
    """Random streams, injection weights and sublayer output of one token per row; a counter."""
    a, b, c = jax.random.split(key, 3)
    return (
        jax.random.normal(a, (rows, 1, STREAMS, hidden), jnp.bfloat16),
        2 * jax.random.uniform(b, (rows, 1, STREAMS)),
        jax.random.normal(c, (rows, 1, hidden), jnp.bfloat16),
        counters.fresh(),
    )


@functools.partial(jax.jit, static_argnames=("hidden", "rank"))
def draw_bank(key: jax.Array, hidden: int, rank: int) -> dict[str, jax.Array]:
    """Random weights of one mixer that keep the size of what they multiply."""
    width = STREAMS * hidden
    made = {}
    for name, shape in dict(down=(rank, width), up=(width, rank), inject=(STREAMS, width)).items():
        key, own = jax.random.split(key)
        made[name] = (jax.random.normal(own, shape) * shape[1] ** -0.5).astype(jnp.bfloat16)
    return made | dict(norm=(jax.random.normal(key, (width,)) * 0.1).astype(jnp.bfloat16))


@dataclasses.dataclass(frozen=True)
class Chain:
    """Compiled programs of one number of rows and one implementation."""

    rows: int
    implementation: str
    once: Any
    judge: Any
    program: Any


def compile_chain(
    rows: int, implementation: str, args: argparse.Namespace, operation: Operation
) -> Chain:
    """The chain as one program, and one boundary with its judge."""
    name = None if implementation == "default" else implementation
    state = jax.eval_shape(lambda: draw_state(jax.random.key(0), rows, args.hidden))
    bank = jax.eval_shape(lambda: draw_bank(jax.random.key(0), args.hidden, args.rank))
    one = jax.jit(functools.partial(step, implementation=name))

    def program(state: Any, banks: list[Any]) -> Any:
        for _ in range(args.passes):
            for own in banks:
                # a sublayer stands between the mixer and the update: they are not fused
                state = jax.lax.optimization_barrier(one(*state, own))
        return state

    lowered = jax.jit(program, donate_argnums=0).lower(state, [bank] * args.banks)
    arrays = named(state, bank)
    call = lambda given: step(**given, implementation=name)  # noqa: E731
    once = check.compile_once(operation, call, arrays, state)
    judge = check.compile_judge(operation, {}, arrays, state)
    return Chain(rows, implementation, once, judge, lowered.compile(timing.compile_options()))


def named(state: tuple, bank: dict) -> dict[str, Any]:
    """Keyword arguments of `step`."""
    return dict(zip(_STATE, state, strict=True)) | dict(weights=bank)


def measure(
    chain: Chain, banks: list[Any], args: argparse.Namespace, operation: Operation
) -> tuple[dict | None, str]:
    """(result line without place and peer, or None; what to print)."""
    state = draw_state(jax.random.key(time.time_ns() % (1 << 31)), chain.rows, args.hidden)
    verdict = check.check(
        operation, chain.once, chain.judge, named(state, banks[0]), timing.abstract(state), 3
    )
    if verdict.wrong:
        return None, f"WRONG: {verdict.wrong}"
    run = lambda state: chain.program(state, banks)  # noqa: E731
    # streams, injection weights and output are read and written, the weights read
    nbytes = size(banks[0]) + 2 * size(state)
    measured = timing.per_call(run, state, args.banks * args.passes, args.quick)
    case = f"released_{chain.rows}" if args.hidden == 2560 else f"small_{chain.rows}"
    names = NAME, case, chain.implementation
    return line_of(names, chain.rows, nbytes, measured, verdict)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    found = find_peers([NAME], args.peers, args.quick)
    names = args.implementation or ["default", *BOUNDARY]
    operation = Operation(NAME, step, tuple(names), (), compared=lambda _, out: out[:3])
    jobs = [(rows, name) for rows in args.rows for name in names]
    with ThreadPoolExecutor(args.jobs) as pool:
        chains = [pool.submit(compile_chain, *job, args, operation) for job in jobs]
    bandwidth = timing.copy_bandwidth()
    banks = [draw_bank(jax.random.key(i), args.hidden, args.rank) for i in range(args.banks)]
    bad = 0
    for (rows, name), chain in zip(jobs, chains, strict=True):
        try:
            line, text = measure(chain.result(), banks, args, operation)
        except NotImplementedError as e:
            line, text = None, f"skipped: {e}"
        except Exception as e:  # of a kernel's compilation or launch; the other rows go on
            line, text = None, f"FAILED: {failure(e)}"
        if line is not None:
            text += keep_line(line, bandwidth, found, args.out)
        bad += text.startswith(("WRONG", "FAILED"))
        print(f"{NAME} {rows:5} rows  {name:20} {text}", flush=True)
    if bad:
        raise SystemExit(f"{bad} rows are wrong or failed")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 128, 2048])
    parser.add_argument("--implementation", action="append", help="by default each, and the choice")
    parser.add_argument("--banks", type=int, default=32)
    parser.add_argument("--passes", type=int, default=2, help="over all banks in one graph")
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--rank", type=int, default=320)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--jobs", type=int, default=12, help="threads that compile")
    parser.add_argument("--out", help="folder of kernels.jsonl; by default bench/results/<device>")
    parser.add_argument("--peers", type=Path, help="JSON of the peers; by default they are run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
