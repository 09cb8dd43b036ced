"""Property tests have the same examples in every run, whatever else a process has imported."""

import importlib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

Drawn = list[tuple[list[int], str]]


def examples() -> Drawn:
    seen: Drawn = []

    @settings(max_examples=100)
    @given(st.lists(st.integers(0, 10**6), max_size=50), st.text(max_size=5))
    def look(numbers: list[int], text: str) -> None:
        seen.append((numbers, text))

    look()
    return seen


def test_a_module_more_changes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    before = examples()
    lines = (f"N{n} = {70_000 + 17 * n}\nS{n} = 'word{n}'\n" for n in range(200))
    (tmp_path / "of_the_project.py").write_text("".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("of_the_project")
    assert examples() == before
