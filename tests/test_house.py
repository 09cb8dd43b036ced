"""The rules of the house: which way imports go, how long a file may be, what each row covers."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "qwen4jax"

# Lowest first: a module imports from its own rank or from one before it.
RANKS = (
    ("config", "hf_fields", "ablation", "ngram"),
    ("params", "state", "host_table", "quant", "sharding", "numerics", "span"),
    ("pallas",),
    ("layers",),
    ("model", "forward_pass", "linen"),
    ("weights",),
    ("decode",),
    ("data", "train"),
    ("ablate", "serve"),
    ("__init__", "__main__"),
)
RANK = {part: rank for rank, parts in enumerate(RANKS) for part in parts}

MAX_LINES = 420
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "misc", "common", "v2", "old"}
# written apart, so that this file is not its own finding
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b")


def sources(*folders: str) -> list[Path]:
    """Every Python file by hand under these folders of the repository."""
    found = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [path for path in found if "_pb2" not in path.name]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


ALL_SOURCES = sources("qwen4jax", "checkpoints", "bench", "tests")


def part_of(path: Path) -> str:
    """The part of the package a file belongs to: the first name below qwen4jax."""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_parts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, part) for each import from the package, inside functions and type checks too."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            targets = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) + 1 - node.level]) if node.level else []
            base += node.module.split(".") if node.module else []
            targets = [[*base, alias.name] for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] == PACKAGE.name:
                # `from qwen4jax import load` names no module: it asks the package's front
                below = target[1] if len(target) > 1 else "__init__"
                yield node.lineno, below if is_module(below) else "__init__"


def is_module(part: str) -> bool:
    return part in RANK or (PACKAGE / part).is_dir() or (PACKAGE / f"{part}.py").exists()


@pytest.mark.parametrize("path", sources("qwen4jax"), ids=name)
def test_imports_go_one_way(path: Path):
    part = part_of(path)
    assert part in RANK, f"{name(path)}: give {part!r} a place in RANKS"
    upward = {
        f"{name(path)}:{line} ({part}) imports {target}"
        for line, target in imported_parts(path)
        if RANK.get(target, len(RANKS)) > RANK[part]
    }
    assert not upward, "\n".join(sorted(upward))


def test_no_file_is_long():
    lengths = {name(path): len(path.read_text().splitlines()) for path in ALL_SOURCES}
    assert not {path: lines for path, lines in lengths.items() if lines > MAX_LINES}


def test_every_name_says_something():
    empty = [
        name(path)
        for path in ALL_SOURCES
        if EMPTY_NAMES & set(path.relative_to(ROOT).with_suffix("").parts)
    ]
    assert not empty


def test_nothing_is_left_unfinished():
    marks = [
        f"{name(path)}:{number}: {line.strip()}"
        for path in ALL_SOURCES
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if UNFINISHED.search(line)
    ]
    assert not marks, "\n".join(marks)


def test_only_kernels_refuse_as_not_implemented():
    """In pallas/ an implementation says so that it does not apply; elsewhere it is a stub."""
    stubs = [
        f"{name(path)}:{node.lineno}"
        for path in sources("qwen4jax", "checkpoints", "bench")
        if not path.is_relative_to(PACKAGE / "pallas")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Raise) and "NotImplementedError" in ast.unparse(node)
    ]
    assert not stubs


def test_every_case_is_covered():
    """cases_ids.txt lists the rows of the case list; `later` marks those without a feature yet."""
    rows = [line.split() for line in (ROOT / "tests" / "cases_ids.txt").read_text().splitlines()]
    due = {row[0] for row in rows if "later" not in row[1:]}
    text = "\n".join(path.read_text() for path in sources("tests"))
    covered = set(re.findall(r"\b[A-Z]{3}-\d{2}\b", text))
    missing = sorted(due - covered)
    assert not missing, f"{len(missing)} rows without a test: {' '.join(missing)}"
