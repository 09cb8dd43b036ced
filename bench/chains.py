"""Chains of operations as a round has them, each call on weights or caches of its own.

    python -m bench.chains --peers peers.json
    python -m bench.chains --chain delta --requests 1 16 --implementation default

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from bench import chain_attention, chain_links, check, timing
from bench.chain_links import Chain
from bench.kernels import failure, find_peers, keep_line, line_of
from bench.operations import Operation
from qwen4jax.config import Config
from qwen4jax.pallas import registry

CHAINS = ("residual", "select", "sparse", "delta")
# requests and tokens: one at 56k and at 256k, a batch
SELECTIONS = (1, 57344), (1, 262144), (32, 57344)
DEFAULT = "default"


@dataclasses.dataclass(frozen=True)
class Programs:
    """A chain's, of one implementation."""

    operation: Operation
    once: Any
    judge: Any
    program: Any


def named(chain: Chain, implementation: str) -> dict[str, str]:
    """The chain's operations that have an implementation of this name, with it."""
    return {op.name: implementation for op in chain.operations if implementation in op}


def call(chain: Chain, implementation: str, carry: Any, fixed: Any, passes: int) -> Any:
    """The carry behind a chain, of which the operations that have it run an implementation."""
    with registry.using(named(chain, implementation)):
        return chain.run(carry, fixed, passes)


def compile_chain(chain: Chain, implementation: str) -> Programs:
    """Checked links, and all as one program, which is given the carry."""

    def function(carry: Any, fixed: Any, implementation: str) -> Any:
        return call(chain, implementation, carry, fixed, 1)

    compared = lambda _, carry: chain.compared(carry)  # noqa: E731
    operation = Operation(chain.name, function, (implementation,), (), compared=compared)
    arrays = shapes(chain, chain.checked, 1)
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

    given = shapes(chain, chain.links, chain.passes)
    lowered = jax.jit(program, donate_argnums=0, keep_unused=True).lower(*given.values())
    return Programs(operation, once, judge, lowered.compile(timing.compile_options()))


def draw(chain: Chain, seed: int, links: int, passes: int) -> dict[str, Any]:
    """Carry and fixed arrays."""
    # bits of the device's own generator: caches are large
    carry, fixed = chain.draw(jax.random.key(seed, impl="rbg"), links, passes)
    return dict(carry=carry, fixed=fixed)


def shapes(chain: Chain, links: int, passes: int) -> dict[str, Any]:
    """Shapes of what is drawn."""
    return jax.eval_shape(lambda: draw(chain, 0, links, passes))


def measure(
    chain: Chain, implementation: str, programs: Programs, args: argparse.Namespace
) -> tuple[dict | None, str]:
    """(result line without place and peer, or None; what to print)."""
    seed = time.time_ns() % (1 << 31)
    arrays = draw(chain, seed, chain.checked, 1)
    out = shapes(chain, chain.checked, 1)["carry"]
    repeats = args.repeats or check.repeats(out, implementation)
    verdict = check.check(programs.operation, programs.once, programs.judge, arrays, out, repeats)
    if verdict.wrong:
        return None, f"WRONG: {verdict.wrong}"
    carry, fixed = draw(chain, seed, chain.links, chain.passes).values()
    carry = jax.block_until_ready(programs.program(carry, fixed))
    nbytes = chain.nbytes(carry, fixed) / chain.links
    run = lambda carry: programs.program(carry, fixed)  # noqa: E731
    measured = timing.per_call(run, carry, chain.links * chain.passes, args.quick)
    case = f"{'small' if args.small else 'released'}_{chain.case}"
    names = chain.name, case, implementation
    return line_of(names, chain.rows, int(nbytes), measured, verdict)


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
    found = find_peers(list({chain.name for chain, _ in jobs}), args.peers, args.quick)
    with ThreadPoolExecutor(args.jobs) as pool:
        programs = [pool.submit(compile_chain, *job) for job in jobs]
    bandwidth = timing.copy_bandwidth()
    bad = 0
    for (chain, name), compiled in zip(jobs, programs, strict=True):
        try:
            line, text = measure(chain, name, compiled.result(), args)
            if line is not None:
                text += keep_line(line, bandwidth, found, args.out)
        except NotImplementedError as e:
            text = f"skipped: {e}"
        except Exception as e:  # of a kernel's compilation or launch; the other rows go on
            text = f"FAILED: {failure(e)}"
        bad += text.startswith(("WRONG", "FAILED"))
        print(f"{chain.name:22} {chain.case:18} {name:16} {text}", flush=True)
    if bad:
        raise SystemExit(f"{bad} rows are wrong or failed")


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
    parser.add_argument("--jobs", type=int, default=12, help="threads that compile")
    parser.add_argument("--out", help="folder of kernels.jsonl; by default bench/results/<device>")
    parser.add_argument("--peers", type=Path, help="JSON of the peers; by default they are run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
