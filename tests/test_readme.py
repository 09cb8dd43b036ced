"""The README's notebook lines run as they are written."""

import re
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def test_notebook_lines_run(capsys):
    # the second block is of the server's client: tests/serve/test_readme.py
    code, _ = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(code, str(README), "exec"), {})
    ids, shapes = capsys.readouterr().out.splitlines()
    assert re.match(r"\[\d+(, \d+)*\] (stop|length) ", ids)
    assert shapes.startswith("(1, 4, 384) ")
    assert "layer03.indexer.selected" in shapes
