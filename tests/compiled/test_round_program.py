"""The compiled round, by XLA's own GPU compiler without a GPU.

The limits: no autotuning, so that GEMM kernels may differ on the chip.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.launches import NAME, RESULTS, launches

HERE = Path(__file__).parent
# elements of the smallest projection of a layer: a copy as large may be of a weight
SMALLEST_WEIGHT = 48 * 2560


def compile_round(kind: str, index_share: str, mode: str, dump: Path) -> dict:
    flags = f"--xla_dump_to={dump} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*next_round.*"
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_round.py"), kind, index_share, mode],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags,
            "DUMP_DIR": str(dump),
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


# (largest copy allowed, scorings): where every draft step scores, XLA copies the draft head's index
# keys once; one sparse layer scores, and the draft head once or in each of 3 steps (SPC-07). Each
# for another chip: to XLA they differ little, and a compilation takes half a minute
@pytest.mark.parametrize(
    ("kind", "index_share", "mode", "largest_copy", "scorings"),
    [
        ("NVIDIA H200", "share", "greedy", SMALLEST_WEIGHT - 1, 2),
        ("NVIDIA GB300", "fresh", "server", 524288, 4),
    ],
)
def test_round_program(
    kind: str, index_share: str, mode: str, largest_copy: int, scorings: int, tmp_path: Path
):
    found = compile_round(kind, index_share, mode, tmp_path)
    # one graph, nothing beside it
    assert found["command_buffers"] == 1
    # the burst's copy to the host, and what is left of the slots' numbers
    assert set(found["outside"]) <= {"kAsyncStart", "kAsyncDone", "kCopy"}
    assert found["kernels"] > 0
    # every layer's experts are read by the kernel, whose tiles `load` makes
    assert found["experts"] == found["layers"]
    # every state buffer is updated in place, no weight is copied
    assert found["aliased_bytes"] >= found["state_bytes"]
    assert found["largest_copy"] <= largest_copy
    # shared steps neither score nor select
    assert found["scorings"] == scorings
    if mode == "greedy":
        assert found["selections"] == scorings
        assert found["sorts"] == found["sorts_in_a_branch"] == found["conditionals"] == 0
    else:
        # of groups and of their members, and of groups for the log-probabilities
        assert found["selections"] == scorings + 3
        # the numbers of the groups, and the vocabulary where a row needs more than candidates
        assert found["sorts"] == found["conditionals"] == 1
        assert found["sorts_in_a_branch"] > 1
    # layers have the same kernels on either chip, none of them fell back to XLA's operations
    got = launches(found["triton"], found["layer_types"])
    reported = json.loads((RESULTS / "nvidia-h200" / NAME).read_text())
    for place in ("GDN layer", "QSA layer", "n-gram embedding", "commit"):
        assert got[place] == reported[place], place
    if mode == "greedy":
        # `python -m bench.launches` writes the report anew
        assert got == reported
        # XLA's own, sums, masks and angles of few numbers, are 55 here
        assert found["xla_kernels"] <= 60
