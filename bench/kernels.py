"""Checks and times every implementation of the operations over their cases.

    python -m bench.kernels                                  # all of them, on an accelerator
    python -m bench.kernels --op gated_residual --released --implementation triton
    python -m bench.kernels --op skinny_matmul --small --out /tmp/here     # on a CPU

Each row: first the float32 check of `bench/check.py`, and no time for a wrong result; then the
median microseconds of a call among many in one CUDA graph (`bench/timing.py`), the bytes that must
move, their share of the bandwidth of a large copy in the same process, and the best public kernel
of the same run (`bench/peers.py`). One JSON line per row goes to
`bench/results/<device>/kernels.jsonl`; a CPU's go only where `--out` says.
"""

import argparse
import dataclasses
import re
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from bench import check, peers, timing
from bench.operations import Inputs, Operation, draw, named, operations, split
from bench.record import append, stamp
from bench.traffic import size
from qwen4jax.pallas.cases import Case


@dataclasses.dataclass(frozen=True)
class Facts:
    """A case without its arrays: shapes, what is static, the result's shapes, bytes to move."""

    arrays: Inputs
    static: Inputs
    out: Any
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Programs:
    """What a row runs: once on poisoned buffers, and many times in one graph."""

    once: Any
    chain: Any
    plan: timing.Plan
    out: Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One implementation of one case; programs are compiled in other threads."""

    operation: Operation
    case: Case
    implementation: str
    programs: Future
    judge: Future

    @property
    def title(self) -> str:
        """Operation, case and implementation."""
        return f"{self.operation.name:27} {self.case.name:28} {self.implementation:20}"


def look(operation: Operation, case: Case) -> Facts:
    """Draws a case's inputs, keeps what tells which bytes are read for as long as they are counted.

    Those are small arrays and indices.
    """
    arrays, static = split(draw(case))
    kept = lambda x: x.nbytes < 1 << 22 or x.dtype == "int32"  # noqa: E731
    values = jax.tree.map(lambda x: x if kept(x) else timing.abstract(x), arrays)
    arrays = timing.abstract(arrays)
    out = jax.eval_shape(_call(operation, static, "reference"), arrays)
    return Facts(arrays, static, out, operation.nbytes(values | static, out))


def _call(operation: Operation, static: Inputs, implementation: str) -> Callable[[Inputs], Any]:
    return lambda arrays: operation.function(**arrays, **static, implementation=implementation)


def prepare(operation: Operation, facts: Future, implementation: str, calls: int) -> Programs:
    """Compiles a row's programs; raises what the implementation raises for the case."""
    case: Facts = facts.result()
    call = _call(operation, case.static, implementation)
    out = jax.eval_shape(call, case.arrays)
    plan = timing.plan(operation, case.arrays, out, case.nbytes, calls)
    once = check.compile_once(operation, call, case.arrays, out)
    chain = timing.compile_chain(operation, call, case.arrays, out, plan)
    return Programs(once, chain, plan, out)


def prepare_judge(operation: Operation, facts: Future) -> Any:
    """Compiles the comparison of a case."""
    case: Facts = facts.result()
    return check.compile_judge(operation, case.static, case.arrays, case.out)


def plan_rows(chosen: list[Operation], keep: Callable[[Case], bool], args: Any) -> list[Row]:
    """The rows, in order, with their programs being compiled.

    Inputs are drawn one case after the other, for they are large. Few references are compiled at
    a time, because XLA times alternatives on the device; the rest all side by side.
    """
    names = re.compile(args.implementation or "")
    drawing, beside = ThreadPoolExecutor(1), ThreadPoolExecutor(args.jobs)
    few = ThreadPoolExecutor(min(args.jobs, 4))
    rows = []
    for operation in chosen:
        wanted = [name for name in operation.implementations if names.search(name)]
        for case in filter(keep, operation.cases if wanted else ()):
            facts = drawing.submit(look, operation, case)
            judge = beside.submit(prepare_judge, operation, facts)
            for name in wanted:
                pool = few if name == "reference" else beside
                programs = pool.submit(prepare, operation, facts, name, args.calls)
                rows.append(Row(operation, case, name, programs, judge))
    return rows


def measure(row: Row, seed: int, args: Any) -> tuple[dict | None, str]:
    """(result line without place and peer, what to print) of one row."""
    failed = row.programs.exception() or row.judge.exception()
    if isinstance(failed, NotImplementedError):
        return None, f"skipped: {failed}"
    if failed is not None:
        return None, f"FAILED: {failure(failed)}"
    programs, operation = row.programs.result(), row.operation
    arrays, static = split(draw(row.case, seed))
    repeats = args.repeats or check.repeats(programs.out, row.implementation)
    verdict = check.check(
        operation, programs.once, row.judge.result(), arrays, programs.out, repeats
    )
    if verdict.wrong:
        return None, f"WRONG: {verdict.wrong}"
    if not size(operation.kept(programs.out)):
        return None, "right, nothing to time"
    nbytes = operation.nbytes(arrays | static, programs.out)
    measured = timing.run_chain(
        programs.chain, operation, arrays, programs.out, programs.plan, args.quick
    )
    names = operation.name, row.case.name, row.implementation
    return line_of(names, operation.rows(arrays, programs.out), nbytes, measured, verdict)


def line_of(
    names: tuple[str, str, str],
    rows: int,
    nbytes: int,
    measured: timing.Measured,
    verdict: check.Verdict,
) -> tuple[dict, str]:
    """(result line without place and peer, what to print) of an operation, case, implementation."""
    line = dict(zip(("op", "case", "implementation"), names, strict=True)) | {
        "rows": rows,
        "us": round(measured.us, 3),
        "bytes": nbytes,
        "host_us": round(measured.host_us, 3),
        "error": float(f"{verdict.error:.2e}"),
    }
    bound = "  ! host" if measured.host_us > 0.85 * measured.us else ""
    return line, f"{measured.us:10.2f} us {nbytes / 1e6:9.2f} MB {verdict.error:.0e}{bound}"


def finish(line: dict, bandwidth: float, found: list[dict]) -> dict:
    """A result line in the order of the table, with the bandwidth's share and the peer."""
    line["bandwidth_fraction"] = round(line["bytes"] / line["us"] * 1e6 / bandwidth, 4)
    wanted = peers.terms(line["op"], line["case"], line["rows"])
    line["peer"], line["peer_us"] = peers.best(found, wanted)
    line |= stamp()
    first = "op case rows implementation us bytes bandwidth_fraction peer peer_us device commit"
    return {name: line.pop(name) for name in first.split()} | line


def keep_line(line: dict, bandwidth: float, found: list[dict], out: str | None) -> str:
    """Finishes a result line and appends it; what more to print."""
    line = finish(line, bandwidth, found)
    append([line], "kernels.jsonl", out)
    peer = f"  peer {line['peer_us']:.2f} us" if line["peer_us"] else ""
    return f" {line['bandwidth_fraction']:7.1%}{peer}"


def find_peers(names: list[str], given: Path | None, quick: bool) -> list[dict]:
    """Rows of a file, or of a run of the peers before this process takes the device's memory."""
    if given is not None and not given.exists():
        print(f"{given}: no such file, so no public kernel is compared", flush=True)
        return []
    if given is not None:
        return peers.load(given)
    if jax.config.jax_platforms == "cpu":
        return []
    wanted = [group for name in names for group in peers.groups(name)]
    with tempfile.TemporaryDirectory() as scratch:
        return peers.run(wanted, Path(scratch) / "peers.json", quick=quick)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    table = operations()
    chosen = [operation for name, operation in table.items() if named(name, args.op)]
    if not chosen:
        raise SystemExit(f"--op: none of {', '.join(args.op)}; there are: {', '.join(table)}")
    found = find_peers([operation.name for operation in chosen], args.peers, args.quick)
    small = args.small or jax.default_backend() == "cpu"
    pattern = re.compile(args.case or "")

    def keep(case: Case) -> bool:
        fits = not (small if case.device_only else args.released)
        return fits and bool(pattern.search(case.name))

    begun = time.time()
    rows = plan_rows(chosen, keep, args)
    for row in rows:
        row.programs.exception()
        row.judge.exception()
    bandwidth = timing.copy_bandwidth()
    print(
        f"# {jax.devices()[0].device_kind}: {len(rows)} rows compiled in "
        f"{time.time() - begun:.1f} s; copy {bandwidth / 1e12:.3f} TB/s",
        flush=True,
    )
    seed = args.seed if args.seed is not None else time.time_ns()
    timed = bad = 0
    for row in rows:
        try:
            line, text = measure(row, seed, args)
            if line is not None:
                text += keep_line(line, bandwidth, found, args.out)
                timed += 1
        except Exception as e:  # of a kernel's launch; the other rows go on
            text = f"FAILED: {failure(e)}"
        bad += text.startswith(("WRONG", "FAILED"))
        print(f"{row.title}{text}", flush=True)
    print(f"# {timed} of {len(rows)} rows timed in {time.time() - begun:.1f} s", flush=True)
    if bad:
        raise SystemExit(f"{bad} rows are wrong or failed")


def failure(error: BaseException) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--op", action="append", help="operation or package; by default all")
    parser.add_argument("--case", help="regular expression of case names")
    parser.add_argument("--implementation", help="regular expression of implementations")
    parser.add_argument("--small", action="store_true", help="only cases that fit everywhere")
    parser.add_argument("--released", action="store_true", help="only cases of released size")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--calls", type=int, default=64, help="most calls in one graph")
    parser.add_argument(
        "--repeats",
        type=int,
        help="runs that must agree bit for bit; by default 20, but 3 of the reference and of "
        "results over 64 MiB",
    )
    parser.add_argument("--jobs", type=int, default=12, help="threads that compile")
    parser.add_argument("--seed", type=int, help="of the checked inputs; by default the time")
    parser.add_argument("--out", help="folder of kernels.jsonl; by default bench/results/<device>")
    parser.add_argument("--peers", type=Path, help="JSON of the peers; by default they are run")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
