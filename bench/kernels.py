"""Checks and times every implementation of the operations over their cases.

    python -m bench.kernels                                  # all of them, on an accelerator
    python -m bench.kernels --op gated_residual --released --implementation triton
    python -m bench.kernels --op skinny_matmul --small --out /tmp/here     # on a CPU
    python -m bench.kernels --released --compile-for "NVIDIA H200" --programs DIR  # bench/ahead.py

Each row: first the float32 check of `bench/check.py`, and no time for a wrong result; then the
median microseconds of a call among many in one CUDA graph (`bench/timing.py`), the bytes that must
move, their share of the bandwidth of a large copy in the same process, and the best public kernel
of the same run (`bench/peers.py`). One JSON line per row goes to
`bench/results/<device>/kernels.jsonl`; a CPU's go only where `--out` says.
"""

import argparse
import dataclasses
import functools
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from bench import ahead, check, peers, timing
from bench.ahead import Kept, Store
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
class Row:
    """One implementation of one case; other threads get its programs (`ahead.Kept`).

    They are what `prepare` and `prepare_judge` compile.
    """

    operation: Operation
    case: Case
    implementation: str
    programs: Future
    judge: Future

    @property
    def title(self) -> str:
        """Operation, case and implementation."""
        return f"{self.operation.name:27} {self.case.name:28} {self.implementation:20}"


def look(operation: Operation, case: Case, store: Store) -> Facts:
    """A case's facts; only those arrays are drawn that tell which bytes are read.

    Those are small arrays and indices.
    """
    static: Inputs = {}

    def drawn() -> Inputs:
        arrays, rest = split(draw(case))
        static.update(rest)
        return arrays

    def telling(x: Any) -> bool:
        return x.size * x.dtype.itemsize < 1 << 22 or x.dtype == "int32"

    arrays = jax.eval_shape(drawn)
    # XLA drops what makes the others
    few = jax.jit(lambda: [x for x in jax.tree.leaves(drawn()) if telling(x)])()
    values = iter(few)
    known = jax.tree.map(lambda x: next(values) if telling(x) else x, arrays)
    out = jax.eval_shape(_call(operation, static, "reference"), arrays)
    return Facts(store.place(arrays), static, out, operation.nbytes(known | static, out))


def _call(operation: Operation, static: Inputs, implementation: str) -> Callable[[Inputs], Any]:
    return lambda arrays: operation.function(**arrays, **static, implementation=implementation)


def prepare(
    operation: Operation, facts: Callable[[], Facts], implementation: str, calls: int
) -> Kept:
    """A row's programs: `once` on poisoned buffers, and `chain`, many calls in one graph.

    Beside them their plan, and the shapes of the result.

    Raises:
        NotImplementedError: and whatever else the implementation raises for the case.
    """
    case = facts()
    call = _call(operation, case.static, implementation)
    out = jax.eval_shape(call, case.arrays)
    plan = timing.plan(operation, case.arrays, out, case.nbytes, calls)
    once = check.compile_once(operation, call, case.arrays, out)
    chain = timing.compile_chain(operation, call, case.arrays, out, plan)
    return Kept(dict(once=once, chain=chain), dict(plan=plan, out=out))


def prepare_judge(operation: Operation, facts: Callable[[], Facts]) -> Kept:
    """`judge`, the comparison of a case."""
    case = facts()
    judge = check.compile_judge(operation, case.static, case.arrays, case.out)
    return Kept(dict(judge=judge))


def once[T](thread: ThreadPoolExecutor, function: Callable[[], T]) -> Callable[[], T]:
    """What a function gives, when it is first asked for; the pool is of one thread."""
    kept = functools.cache(function)
    return lambda: thread.submit(kept).result()


def plan_rows(
    chosen: list[Operation], keep: Callable[[Case], bool], args: Any, store: Store
) -> list[Row]:
    """The rows, in order, whose programs come from the store, most of them side by side.

    Few references are compiled at a time, because XLA times alternatives on the device. Cases are
    looked at one after the other, and only those of which something has to be compiled.
    """
    names = re.compile(args.implementation or "")
    drawing, beside = ThreadPoolExecutor(1), ThreadPoolExecutor(args.jobs)
    few = ThreadPoolExecutor(min(args.jobs, 4))
    rows = []
    for operation in chosen:
        wanted = [name for name in operation.implementations if names.search(name)]
        for case in filter(keep, operation.cases if wanted else ()):
            facts = once(drawing, functools.partial(look, operation, case, store))
            of = operation.name, case.name
            compile_judge = functools.partial(prepare_judge, operation, facts)
            judge = beside.submit(store.get, ("judge", *of), compile_judge)
            for name in wanted:
                pool = few if name == "reference" else beside
                compile_row = functools.partial(prepare, operation, facts, name, args.calls)
                key = ("kernel", *of, name, f"calls={args.calls}")
                programs = pool.submit(store.get, key, ahead.or_refused(compile_row))
                rows.append(Row(operation, case, name, programs, judge))
    return rows


def measure(row: Row, seed: int, args: Any) -> tuple[dict | None, str]:
    """(result line without place and peer, what to print) of one row."""
    if missing := without(row):
        return None, missing
    kept, operation = row.programs.result(), row.operation
    once, judge = kept.programs["once"], row.judge.result().programs["judge"]
    plan, out = kept.facts["plan"], kept.facts["out"]
    arrays, static = split(draw(row.case, seed))
    repeats = args.repeats or check.repeats(out, row.implementation)
    verdict = check.check(operation, once, judge, arrays, out, repeats)
    if verdict.wrong:
        return None, f"WRONG: {verdict.wrong}"
    if not size(operation.kept(out)):
        return None, "right, nothing to time"
    nbytes = operation.nbytes(arrays | static, out)
    measured = timing.run_chain(kept.programs["chain"], operation, arrays, out, plan, args.quick)
    names = operation.name, row.case.name, row.implementation
    line, text = line_of(names, operation.rows(arrays, out), nbytes, measured, verdict)
    return line | {"compiled": kept.compiled}, text


def without(row: Row) -> str | None:
    """Why a row has no programs, if so."""
    failed = row.programs.exception() or row.judge.exception()
    if failed is not None:
        return f"FAILED: {failure(failed)}"
    return row.programs.result().skipped


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
    store = ahead.store(args)
    found = []
    if not args.compile_for:
        found = find_peers([operation.name for operation in chosen], args.peers, args.quick)
    small = args.small or (args.compile_for or jax.default_backend()) == "cpu"
    pattern = re.compile(args.case or "")

    def keep(case: Case) -> bool:
        fits = not (small if case.device_only else args.released)
        return fits and bool(pattern.search(case.name))

    begun = time.time()
    rows = plan_rows(chosen, keep, args, store)
    if args.compile_for:
        return report((row.title, without(row) or "compiled") for row in rows)
    for row in rows:
        # waits for its programs
        without(row)
    bandwidth = timing.copy_bandwidth()
    print(
        f"# {jax.devices()[0].device_kind}: {len(rows)} rows ready in "
        f"{time.time() - begun:.1f} s; copy {bandwidth / 1e12:.3f} TB/s",
        flush=True,
    )
    seed = args.seed if args.seed is not None else time.time_ns()

    def texts() -> Iterator[tuple[str, str]]:
        timed = 0
        for row in rows:
            try:
                line, text = measure(row, seed, args)
                if line is not None:
                    text += keep_line(line, bandwidth, found, args.out)
                    timed += 1
            except Exception as e:  # of a kernel's launch; the other rows go on
                text = f"FAILED: {failure(e)}"
            yield row.title, text
        print(f"# {timed} of {len(rows)} rows timed in {time.time() - begun:.1f} s", flush=True)

    report(texts())
    return None


def report(rows: Iterable[tuple[str, str]]) -> None:
    """Prints what became of each row.

    Raises:
        SystemExit: some are wrong or failed.
    """
    bad = 0
    for title, text in rows:
        bad += text.startswith(("WRONG", "FAILED"))
        print(f"{title}{text}", flush=True)
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
    parser.add_argument(
        "--jobs",
        type=int,
        help="threads that compile; by default 12, without a device one per core",
    )
    parser.add_argument("--seed", type=int, help="of the checked inputs; by default the time")
    parser.add_argument("--out", help="folder of kernels.jsonl; by default bench/results/<device>")
    parser.add_argument("--peers", type=Path, help="JSON of the peers; by default they are run")
    ahead.add_arguments(parser)
    args = parser.parse_args(argv)
    args.jobs = args.jobs or ahead.jobs(args, 12)
    return args


if __name__ == "__main__":
    main()
