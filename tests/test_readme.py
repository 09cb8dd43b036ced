"""The README's notebook lines run as they are written."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def lines_of(heading: str) -> str:
    """The Python lines below a heading."""
    section = README.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return code


def test_notebook_lines_run(capsys):
    names = {}
    exec(compile(lines_of("In a notebook"), str(README), "exec"), names)
    ids, shapes = capsys.readouterr().out.splitlines()
    assert re.match(r"\[\d+(, \d+)*\] (stop|length) ", ids)
    assert shapes.startswith("(1, 4, 4096) ")
    assert "layer03.indexer.selected" in shapes
    exec(compile(lines_of("Kernels"), str(README), "exec"), names)
    said = capsys.readouterr().out
    assert said.startswith("device: cpu\n")
    assert re.match(r"\[\d+(, \d+)*\]$", said.splitlines()[-1])
