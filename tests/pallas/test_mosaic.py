"""What the cases of the operations do not show of the Mosaic kernels, simulated or compiled."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from qwen4jax.pallas import registry
from qwen4jax.pallas.cases import BF16, F32, integers, normal, weight
from qwen4jax.pallas.index_score import index_score
from qwen4jax.pallas.index_score import mosaic_hopper as scores_of_blocks
from qwen4jax.pallas.moe import mosaic_decode
from qwen4jax.pallas.moe import mosaic_hopper as mosaic_experts
from qwen4jax.pallas.moe.mosaic_work import Sizes
from qwen4jax.pallas.skinny_matmul import mosaic_hopper, skinny_matmul
from qwen4jax.pallas.skinny_matmul.mosaic_hopper import Tiles
from qwen4jax.pallas.sparse_attention import mosaic_hopper as attention
from qwen4jax.pallas.sparse_attention import sparse_attention
from tests.pallas import mosaic_simulator
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


def test_stages_are_reused_over_tiles_of_keys(monkeypatch):
    monkeypatch.setattr(scores_of_blocks, "_CTAS", 1)
    monkeypatch.setattr(scores_of_blocks, "_STAGES", 2)
    rng, page = np.random.default_rng(0), 64
    inputs: dict[str, Any] = dict(
        query=normal(rng, (1, 3, 2, 16), BF16),
        index_key=normal(rng, (320 // page + 1, page, 16), BF16),
        page_table=integers(rng.permutation(320 // page))[None],
        complete=integers([[317, 318, 318]]),
    )
    with simulated():
        got = index_score(**inputs, implementation="mosaic_hopper")
    want = index_score(**inputs, implementation="reference")
    seen = np.isfinite(want)
    np.testing.assert_array_equal(np.isneginf(got), ~seen)
    assert_matches(got[seen], f64(want)[seen])


def test_stages_are_reused_over_tiles_of_tokens(monkeypatch):
    """One CTA has all tiles of a selection, the last of which is an open block's tail."""
    monkeypatch.setattr(attention, "_CTAS", 1)
    rng, blocks = np.random.default_rng(0), 48
    first = rng.permutation(60)[:blocks] * 4
    slots = (first[:, None] + np.arange(4)).reshape(-1)
    # the first token alone, and at last one of an open block
    slots = np.concatenate([[-1, 0, -1, -1], slots, [240, -1, -1]])
    inputs: dict[str, Any] = dict(
        query=normal(rng, (1, 1, 5, 64), BF16, 4.0),
        gate=normal(rng, (1, 1, 5, 64), BF16),
        key=normal(rng, (16, 16, 1, 64), BF16),
        value=normal(rng, (16, 16, 1, 64), BF16),
        slots=integers(slots)[None, None],
    )
    with simulated():
        got = sparse_attention(**inputs, implementation="mosaic_hopper")
    want = sparse_attention(**inputs, implementation="reference")
    assert_matches(got, f64(want), share=3e-6, steps=2)


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


def test_what_renames_registers_permutes():
    """The simulator's permutations are those of the layouts that a GPU's lanes have."""

    def held(layout: Any, *shape: int) -> np.ndarray:
        """Elements' places in the array: [warp, lane, register, element]."""
        layout = layout.to_mgpu()
        places = np.arange(np.prod(shape)).reshape(shape)
        for tile in layout.tiling.tiles:
            lead, n = places.ndim - len(tile), len(tile)
            sizes = [s for d, t in zip(places.shape[lead:], tile, strict=True) for s in (d // t, t)]
            places = places.reshape(*places.shape[:lead], *sizes)
            order = [*range(lead, lead + 2 * n, 2), *range(lead + 1, lead + 2 * n, 2)]
            places = places.transpose(*range(lead), *order)
        first = [places.ndim + d for d in (*layout.warp_dims, *layout.lane_dims)]
        last = places.ndim + layout.vector_dim
        rest = [d for d in range(places.ndim) if d not in (*first, last)]
        return places.transpose(*first, *rest, last).reshape(4, 32, -1, places.shape[last])

    sums = held(mosaic_decode.TILE, 64, 8)
    turned = np.zeros(512, int)
    turned[held(mosaic_decode.TURNED, 64, 8)] = sums
    np.testing.assert_array_equal(turned, mosaic_simulator.turned(np.arange(512.0)).reshape(-1))
    lying = held(mosaic_decode.LYING, 8, 64).reshape(4, 32, 2, 2)
    np.testing.assert_array_equal(lying % 64 * 8 + lying // 64, sums)
    # registers of 16 columns, half of them, half of the rows, of 4 * 16 bytes of a row
    bytes_ = held(mosaic_decode.BYTES, 64, 128).reshape(4, 32, 2, 2, 4, 2, 2)
    operand = held(mosaic_decode.TILE, 64, 128).reshape(4, 32, 2, 4, 2, 2, 2)
    decoded = np.zeros(64 * 128, int)
    decoded[operand] = bytes_.transpose(0, 1, 2, 4, 5, 3, 6)
    want = mosaic_simulator.decoded(np.arange(64 * 128.0)).reshape(-1)
    np.testing.assert_array_equal(decoded, want)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("count", [1, 2, 13, 39, 40, 144])
def test_every_unit_of_the_experts_has_one_cta(lanes: int, count: int):
    z = Sizes(160, 2560, 640, "fp8", False, mosaic_experts.TILES["fp8"])
    z = dataclasses.replace(z, cut=dataclasses.replace(z.cut, ctas=lanes))

    def own(lane):
        with mock.patch.object(lax, "axis_index", return_value=lane):
            units, others, unit = z.shares(jnp.int32(count))
        return units, others, jax.vmap(unit)(jnp.arange(80))

    units, others, down = map(np.asarray, jax.vmap(own)(jnp.arange(z.lanes)))
    assert others.max() <= 80
    assert units.sum() == count * z.blocks[0]
    given = [unit for n, of_lane in zip(others, down, strict=True) for unit in of_lane[:n]]
    assert sorted(given) == list(range(count * z.blocks[1]))
    # bytes, in units of down
    work = 4 * units + others
    assert work.max() <= work.mean() + 4


@pytest.mark.parametrize(("kind", "kernels"), [("NVIDIA H200", 16), ("NVIDIA GB300", 1)])
def test_released_sizes_assemble_without_spills(kind: str, kernels: int):
    done = subprocess.run(
        [sys.executable, str(HERE / "compile_mosaic.py"), kind],
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
    assert len(spills) == kernels
    assert set(spills) == {"0"}
    # two CTAs of 256 threads a multiprocessor, which wait for others, have all registers there are
    used = re.findall(r"function 'experts_.*?Used (\d+) registers", report, re.DOTALL)
    assert len(used) == (4 if kernels > 1 else 0)
    assert all(int(registers) <= 128 for registers in used)
    # ptxas waits for each wgmma alone where it sees the sums read between two
    assert "wgmma.mma_async instructions are serialized" not in report
