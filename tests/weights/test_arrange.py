"""Experts in the order that the kernels read, and back in that of a checkpoint."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from qwen4jax import quant
from qwen4jax.config import Config, Quantization
from qwen4jax.linen import from_variables, to_variables
from qwen4jax.params import Params, init_params
from qwen4jax.sharding import shardings
from qwen4jax.weights import arrange
from qwen4jax.weights.load import load
from qwen4jax.weights.save import save
from qwen4jax.weights.store import restore, store

# experts of 128 x 128 are whole tiles, of 16 x 32 they are not
CONFIG = Config.tiny(
    hidden_size=128,
    moe_intermediate_size=128,
    quantization=Quantization(experts="nvfp4"),
    dtype="bfloat16",
)


def drawn(lead: tuple[int, ...], rows: int, columns: int) -> quant.Nvfp4:
    rng = np.random.default_rng(0)
    return quant.Nvfp4(
        rng.integers(0, 256, (*lead, rows, columns // 2), np.uint8),
        rng.integers(0, 256, (*lead, rows, columns // 16), np.uint8).view(ml_dtypes.float8_e4m3fn),
        rng.random(lead, np.float32),
        np.ones(lead, np.float32),
    )


def bits(tree: Params | quant.Nvfp4) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def codes_of(spread: jax.Array) -> np.ndarray:
    """Packed codes [16, 64] of a tile's, pair by pair as its docstring tells."""
    words = np.asarray(spread).view(np.uint32)
    pairs = np.stack(
        [
            words << 6,
            words << 2,
            words >> 4 | words << 28,
            words & ~np.uint32(0x00400040) | words >> 8 & 0x00400040,
        ],
        axis=-1,
    )
    halves = np.stack([pairs & 0xFFFF, pairs >> 16], axis=-1)
    codes = halves >> 15 << 3 | halves >> 6 & 7
    # [row, 16 columns, word, pair, even or odd]
    codes = np.swapaxes(codes.reshape(16, 8, 2, 4, 2), 2, 3)
    return (codes[..., 0] | codes[..., 1] << 4).astype(np.uint8).reshape(16, 64)


def test_a_tile_holds_sixteen_rows_of_a_hundred_and_twenty_eight_columns():
    w = drawn((2, 3), 48, 384)
    tiles = quant.TiledNvfp4.of(w)
    assert tiles.shape == w.shape == (2, 3, 48, 384)
    for row, column in ((0, 0), (1, 2), (2, 1)):
        rows = slice(16 * row, 16 * row + 16)
        codes = w.weight[1, 2, rows, 64 * column : 64 * column + 64]
        scales = w.weight_scale[1, 2, rows, 8 * column : 8 * column + 8]
        np.testing.assert_array_equal(codes_of(tiles.weight[1, 2, row, column]), codes)
        found = np.asarray(tiles.weight_scale[1, 2, row, column])
        np.testing.assert_array_equal(found.view(np.uint8), scales.view(np.uint8))
    assert bits(tiles.stored()) == bits(w)
    assert jnp.array_equal(tiles.dequantize(), w.dequantize(), equal_nan=True)


def test_one_expert_of_tiles_is_that_expert():
    w = drawn((4,), 16, 128)
    one = quant.take(quant.TiledNvfp4.of(w), jnp.int32(2))
    expected = quant.take(w, jnp.int32(2)).dequantize()
    assert jnp.array_equal(one.dequantize(), expected, equal_nan=True)


@pytest.fixture
def tiled() -> Params:
    """A model as it would be on a GPU."""
    return arrange.tiled(init_params(CONFIG))


def test_what_is_rearranged_is_given_up():
    w = jax.tree.map(jnp.asarray, drawn((2,), 16, 128))
    expected = bits(quant.TiledNvfp4.of(w))
    assert bits(arrange._in_place(w)) == expected
    assert w.weight.is_deleted()
    assert w.weight_scale.is_deleted()


def test_whole_tiles_only_and_experts_only(tiled: Params):
    matrices = tiled.layers[0].mlp.experts.gate_up_proj
    assert isinstance(matrices, quant.TiledNvfp4)
    small = Config.tiny(quantization=Quantization(experts="nvfp4"))
    plain = arrange.tiled(init_params(small)).layers[0].mlp.experts.gate_up_proj
    assert isinstance(plain, quant.Nvfp4)
    assert bits(quant.stored(tiled)) == bits(init_params(CONFIG))


def test_a_flax_variable_dict_takes_tiles(tiled: Params):
    back = from_variables(CONFIG, to_variables(tiled))
    assert jax.tree.structure(back) == jax.tree.structure(tiled)
    assert bits(back) == bits(tiled)


def test_whole_experts_in_tiles_go_to_devices(tiled: Params):
    found = shardings(tiled, AbstractMesh((2,), ("model",))).layers[0].mlp.experts.down_proj
    assert isinstance(found, quant.TiledNvfp4)
    assert found.weight.spec == PartitionSpec("model", None, None)
    matrices = tiled.layers[0].mlp.experts.down_proj
    assert isinstance(matrices, quant.TiledNvfp4)
    codes = matrices.weight
    assert found.weight.shard_shape(codes.shape) == (codes.shape[0] // 2, *codes.shape[1:])


def test_on_a_cpu_and_in_float32_nothing_is_rearranged():
    params = init_params(CONFIG)
    assert arrange.arrange(params) is params


@pytest.mark.parametrize("form", ["safetensors", "orbax"])
def test_what_is_written_is_the_order_of_a_checkpoint(tiled: Params, form: str, tmp_path: Path):
    if form == "orbax":
        store(tiled, tmp_path / "model")
        again = restore(tmp_path / "model")
    else:
        save(tiled, tmp_path / "model")
        again = load(tmp_path / "model", progress=False)
    assert jax.tree.structure(again) == jax.tree.structure(init_params(CONFIG))
    assert bits(again) == bits(init_params(CONFIG))
