"""Chains of operations as a round has them, each call on weights or caches of its own.

    python -m bench.chains --peers peers.json
    python -m bench.chains --chain delta --requests 1 16 --implementation default
    python -m bench.chains --compile-for "NVIDIA H200" --programs DIR      # see bench/ahead.py

`residual`: update, norm and mix of the gated residual over 32 sets of weights, what the public
benchmark times as `chain`. `select`: scoring and selection of 512 blocks. `sparse`: scoring,
selection and attention. `delta`: Gated DeltaNet with convolution and norm, of one token with the
commit (`decode`), of four tokens without it and with it (`verify`, `verify_commit`); the commit is
one launch for all layers, as in the round. The arrays of all links outgrow the cache, a call waits
for the one before, all are one CUDA graph; `us` is per link.

Some links are first checked against float32: a selection has to be one of the best up to float32's
rounding of the scores, the rest as `bench.check` has it. Lines go to `kernels.jsonl` as operations
of their own. The public kernels beside them are chains where the public benchmark has one, and
sums of parts timed alone elsewhere.

Dependent launch (a kernel that starts while the one before ends): the public kernels have it. In an
XLA graph it does nothing, so there is no chain with it here. Measured on chains of small Mosaic
kernels: `griddepcontrol` shortens the steps of a stream and changes nothing in a graph. The likely
reasons: a Mosaic or jax-triton call is captured as a child graph, whose edges are not programmatic,
and XLA does not set the launch attribute for Triton kernels that it did not make itself, with or
without the `xla.pdl_launch` attribute. Its own fusions are compiled with it.
"""

import argparse
import dataclasses
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from bench import ahead, chain_attention, chain_links, check, timing
from bench.ahead import Kept, Store
from bench.chain_links import Chain
from bench.kernels import failure, find_peers, keep_line, line_of, report
from bench.operations import Operation
from qwen4jax.config import Config
from qwen4jax.pallas import registry

CHAINS = ("residual", "select", "sparse", "delta")
# requests and tokens: one at 56k and at 256k, a batch
SELECTIONS = (1, 57344), (1, 262144), (32, 57344)
DEFAULT = "default"


def named(chain: Chain, implementation: str) -> dict[str, str]:
    """The chain's operations that have an implementation of this name, with it."""
    return {op.name: implementation for op in chain.operations if implementation in op}


def call(chain: Chain, implementation: str, carry: Any, fixed: Any, passes: int) -> Any:
    """The carry behind a chain, of which the operations that have it run an implementation."""
    with registry.using(named(chain, implementation)):
        return chain.run(carry, fixed, passes)


def operation_of(chain: Chain, implementation: str) -> Operation:
    """A chain of one implementation, as what is checked."""

    def function(carry: Any, fixed: Any, implementation: str) -> Any:
        return call(chain, implementation, carry, fixed, 1)

    compared = lambda _, carry: chain.compared(carry)  # noqa: E731
    return Operation(chain.name, function, (implementation,), (), compared=compared)


def compile_chain(chain: Chain, implementation: str, store: Store) -> Kept:
    """`once` and `judge` of the checked links; `chain` of all, which is given the carry."""
    operation = operation_of(chain, implementation)
    arrays = store.place(shapes(chain, chain.checked, 1))
    checked = lambda given: operation.function(**given, implementation=implementation)  # noqa: E731
    out = jax.eval_shape(checked, arrays)
    once = check.compile_once(operation, checked, arrays, out)
    if chain.judge is None:
        judge = check.compile_judge(operation, {}, arrays, out)
    else:
        with jax.default_matmul_precision("highest"):
            judge = jax.jit(chain.judge).lower(arrays, out).compile()

    def program(carry: Any, fixed: Any) -> Any:
        return call(chain, implementation, carry, fixed, chain.passes)

    given = store.place(shapes(chain, chain.links, chain.passes))
    lowered = jax.jit(program, donate_argnums=0, keep_unused=True).lower(*given.values())
    compiled = lowered.compile(timing.compile_options())
    return Kept(dict(once=once, judge=judge, chain=compiled))


def draw(chain: Chain, seed: int, links: int, passes: int) -> dict[str, Any]:
    """Carry and fixed arrays."""
    # bits of the device's own generator: caches are large
    carry, fixed = chain.draw(jax.random.key(seed, impl="rbg"), links, passes)
    return dict(carry=carry, fixed=fixed)


def shapes(chain: Chain, links: int, passes: int) -> dict[str, Any]:
    """Shapes of what is drawn."""
    return jax.eval_shape(lambda: draw(chain, 0, links, passes))


def measure(
    chain: Chain, implementation: str, kept: Kept, args: argparse.Namespace
) -> tuple[dict | None, str]:
    """(result line without place and peer, or None; what to print)."""
    if kept.skipped:
        return None, kept.skipped
    programs, operation = kept.programs, operation_of(chain, implementation)
    seed = time.time_ns() % (1 << 31)
    arrays = draw(chain, seed, chain.checked, 1)
    out = shapes(chain, chain.checked, 1)["carry"]
    repeats = args.repeats or check.repeats(out, implementation)
    verdict = check.check(operation, programs["once"], programs["judge"], arrays, out, repeats)
    if verdict.wrong:
        return None, f"WRONG: {verdict.wrong}"
    carry, fixed = draw(chain, seed, chain.links, chain.passes).values()
    carry = jax.block_until_ready(programs["chain"](carry, fixed))
    nbytes = chain.nbytes(carry, fixed) / chain.links
    run = lambda carry: programs["chain"](carry, fixed)  # noqa: E731
    measured = timing.per_call(run, carry, chain.links * chain.passes, args.quick)
    case = f"{'small' if args.small else 'released'}_{chain.case}"
    names = chain.name, case, implementation
    line, text = line_of(names, chain.rows, int(nbytes), measured, verdict)
    return line | {"compiled": kept.compiled}, text


def kept_of(chain: Chain, implementation: str, small: bool, store: Store) -> Kept:
    """A chain's programs."""
    size = "small" if small else "released"
    key = "chain", chain.name, chain.case, size, f"links={chain.links}", implementation
    compile_it = lambda: compile_chain(chain, implementation, store)  # noqa: E731
    return store.get(key, ahead.or_refused(compile_it))


def chains(args: argparse.Namespace) -> list[Chain]:
    """Those that are asked for, at their sizes."""
    config = Config.tiny() if args.small else Config.flash_next()
    tokens = 1024 if args.small else 57344
    found = []
    for name in args.chain or CHAINS:
        if name == "residual":
            found += [chain_links.residual(config, rows) for rows in args.rows]
        elif name == "select":
            sizes = [(n, tokens) for n in args.requests] if args.small else SELECTIONS
            found += [chain_attention.selection(config, *size) for size in sizes]
        elif name == "sparse":
            found += [chain_attention.sparse(config, n, tokens) for n in args.requests]
        else:
            kinds = ("decode", "verify", "verify_commit")
            found += [chain_links.delta(config, k, n) for k in kinds for n in args.requests]
    if args.small:
        found = [dataclasses.replace(chain, links=2) for chain in found]
    return [chain for chain in found if re.search(args.case or "", chain.case)]


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    names = args.implementation or [DEFAULT]
    jobs = [
        (chain, name)
        for chain in chains(args)
        for name in names
        if name == DEFAULT or named(chain, name)
    ]
    if not jobs:
        raise SystemExit("no chain: of --chain, --case and --implementation none is left")
    store = ahead.store(args)
    found = []
    if not args.compile_for:
        found = find_peers(list({chain.name for chain, _ in jobs}), args.peers, args.quick)
    with ThreadPoolExecutor(args.jobs) as pool:
        programs = [pool.submit(kept_of, *job, args.small, store) for job in jobs]
    bandwidth = 0 if args.compile_for else timing.copy_bandwidth()

    def texts() -> Iterator[tuple[str, str]]:
        for (chain, name), compiled in zip(jobs, programs, strict=True):
            try:
                kept = compiled.result()
                if args.compile_for:
                    text = kept.skipped or "compiled"
                else:
                    line, text = measure(chain, name, kept, args)
                    if line is not None:
                        text += keep_line(line, bandwidth, found, args.out)
            except Exception as e:  # of a kernel's compilation or launch; the other rows go on
                text = f"FAILED: {failure(e)}"
            yield f"{chain.name:22} {chain.case:18} {name:16} ", text

    report(texts())


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--chain", action="append", choices=CHAINS, help="by default all")
    parser.add_argument("--case", help="regular expression of cases")
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 4, 16, 32, 128, 2048], help="of residual"
    )
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[1, 16], help="of sparse and delta"
    )
    parser.add_argument(
        "--implementation", action="append", help="or default, which is the registry's choice"
    )
    parser.add_argument("--small", action="store_true", help="sizes for a CPU")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--repeats", type=int, help="runs that must agree bit for bit")
    parser.add_argument(
        "--jobs",
        type=int,
        help="threads that compile; by default 12, without a device one per core",
    )
    parser.add_argument("--out", help="folder of kernels.jsonl; by default bench/results/<device>")
    parser.add_argument("--peers", type=Path, help="JSON of the peers; by default they are run")
    ahead.add_arguments(parser)
    args = parser.parse_args(argv)
    args.jobs = args.jobs or ahead.jobs(args, 12)
    return args


if __name__ == "__main__":
    main()
