"""What the cases of the operations do not show of the Mosaic kernels, simulated or compiled."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.pallas import registry
from qwen4jax.pallas.cases import BF16, F32, normal, weight
from qwen4jax.pallas.skinny_matmul import mosaic_hopper, skinny_matmul
from qwen4jax.pallas.skinny_matmul.mosaic_hopper import Tiles
from tests.pallas.calls import assert_matches, f64
from tests.pallas.mosaic_simulator import simulated

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtypes", "tiles"),
    [
        (3, (136,), 384, (BF16,), Tiles(1, 2, 1, 1)),
        (8, (192, 48), 384, (F32, BF16), Tiles(2, 3, 1, 1)),
        (12, (128,), 768, (BF16,), Tiles(1, 2, 1, 3)),
        (24, (264,), 256, (BF16,), Tiles(2, 2, 1, 1)),
    ],
)
def test_stages_are_reused_over_tiles(rows, outputs, inputs, dtypes, tiles, monkeypatch):
    # two CTAs have all tiles between them
    monkeypatch.setattr(mosaic_hopper, "_PROCESSORS", 2)
    rng = np.random.default_rng(0)
    x = normal(rng, (rows, inputs), BF16)
    weights = tuple(weight(rng, (o, inputs), BF16) for o in outputs)
    with simulated():
        given = tuple(map(jnp.dtype, dtypes))
        ys = mosaic_hopper.multiply(x, weights, dtypes=given, tiles=tiles)
    for y, w, dtype in zip(ys, weights, dtypes, strict=True):
        assert y.dtype == dtype
        assert_matches(y, f64(x) @ f64(w).T)


def test_a_nan_row_stays_alone():
    rng = np.random.default_rng(0)
    x = normal(rng, (3, 128), BF16).at[1].set(np.nan)
    with simulated():
        y = skinny_matmul(x, weight(rng, (64, 128), BF16), implementation="mosaic_hopper")
    np.testing.assert_array_equal(np.isnan(f64(y)).any(1), [False, True, False])


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "dtype", "reason"),
    [
        (2, 64, 128, F32, "bfloat16"),
        (33, 64, 128, BF16, "1 to 32 rows"),
        (2, 63, 128, BF16, "outputs of 8"),
        (2, 64, 96, BF16, "inputs in multiples of 128"),
    ],
)
def test_refuses_in_words(rows, outputs, inputs, dtype, reason):
    rng = np.random.default_rng(0)
    x, w = normal(rng, (rows, inputs), dtype), weight(rng, (outputs, inputs), dtype)
    with registry.using(device="NVIDIA H200"), pytest.raises(NotImplementedError, match=reason):
        skinny_matmul(x, w, implementation="mosaic_hopper")


def test_is_for_hopper():
    x, w = jnp.zeros((1, 128), BF16), jnp.zeros((64, 128), BF16)
    with (
        registry.using(device="NVIDIA GB300"),
        pytest.raises(NotImplementedError, match="needs a Hopper GPU"),
    ):
        skinny_matmul(x, w, implementation="mosaic_hopper")


def test_released_sizes_assemble_without_spills():
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_mosaic.py"), str(HERE.parent / "compiled/h200.txtpb")],
        env=os.environ
        | {
            "JAX_PLATFORMS": "cpu",
            "MOSAIC_GPU_DUMP_PTXAS": "1",
            "XLA_FLAGS": "",
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = done.stdout + done.stderr
    spills = re.findall(r"(\d+) bytes spill stores", report)
    assert len(spills) == 9
    assert set(spills) == {"0"}
    # ptxas waits for each wgmma alone where it sees the sums read between two
    assert "wgmma.mma_async instructions are serialized" not in report
