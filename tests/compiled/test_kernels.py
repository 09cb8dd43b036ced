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


@pytest.mark.parametrize(
    ("kind", "route"),
    [("NVIDIA H200", "native"), ("NVIDIA GB300", "native"), ("NVIDIA H200", "jax_triton")],
)
def test_every_kernel_compiles(kind: str, route: str):
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_kernels.py"), kind, route],
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
