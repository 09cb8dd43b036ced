"""Every Triton kernel compiles at a released size for the chips it is for, by both routes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwen4jax.pallas.registry import operations
from tests.compiled.compile_kernels import CHUNKS, MANY_PROJECTIONS

HERE = Path(__file__).parent
H200 = (HERE / "h200.txtpb").read_text()
# what differs of the larger chip as far as a compiler asks: XLA dumped no description of one here
GB300 = H200.replace("core_count: 132", "core_count: 152").replace(
    "    major: 9\n", "    major: 10\n    minor: 3\n"
)


@pytest.mark.parametrize(
    ("kind", "target", "route"),
    [
        ("NVIDIA H200", H200, "native"),
        ("NVIDIA GB300", GB300, "native"),
        ("NVIDIA H200", H200, "jax_triton"),
    ],
)
def test_every_kernel_compiles(kind: str, target: str, route: str):
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_kernels.py"), kind, route],
        input=target,
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    # XLA would copy the weights of several products into one matrix at every call
    assert found.pop("reference") == [[MANY_PROJECTIONS, 0]]
    in_triton = {
        f"{operation.name}/{name}"
        for operation in operations().values()
        for name in operation
        if name.startswith("triton")
    }
    assert set(found) == in_triton
    assert all(found.values())
    assert all(kernels > 0 for cases in found.values() for _, kernels in cases)
    for operation, names in CHUNKS.items():
        by_some = {case for name in found if name.startswith(operation) for case, _ in found[name]}
        assert set(names) <= by_some
