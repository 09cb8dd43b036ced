"""Weights kept as on disk: NVFP4, block-scaled FP8, and an FP8 table with one scale.

Each form is a pytree that stands where a plain array would; `take` and `dequantize` read either.
Formats: NVIDIA modelopt's NVFP4 (groups of 16 along the input), DeepSeek-style FP8 (128 x 128
blocks), and the n-gram table of the released checkpoints (one scale for the whole table).
"""

import math
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import struct

from qwen4jax.host_table import HostTable

NVFP4_GROUP = 16
FP8_BLOCK = 128
# of `TiledNvfp4`: what a warp of the experts' kernels reads in a step
TILE_ROWS, TILE_COLUMNS = 16, 128


class Nvfp4(struct.PyTreeNode):
    """Matrices `[..., O, I]` as packed E2M1 with e4m3 group scales and a float32 scale.

    `w[..., o, i] = e2m1(code) * weight_scale[..., o, i // 16] * weight_scale_2[...]`

    Attributes:
        weight: uint8 [..., O, I/2]; the even column in the low nibble.
        weight_scale: float8_e4m3fn [..., O, I/16].
        weight_scale_2: float32 [...].
        input_scale: float32 [...], or None for a weight-only checkpoint. Only arithmetic with
            4-bit activations needs it; it is kept so that a checkpoint can be written back.
    """

    weight: Any
    weight_scale: Any
    weight_scale_2: Any
    input_scale: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrices that are stood for."""
        return (*self.weight.shape[:-1], self.weight.shape[-1] * 2)

    def dequantize(self, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        """The matrices [..., O, I]; exact in float32 before the last scale, then rounded."""
        low = _e2m1(self.weight & 0xF)
        high = _e2m1(self.weight >> 4)
        codes = jnp.stack([low, high], axis=-1).reshape(self.shape)
        scale = jnp.repeat(self.weight_scale.astype(jnp.float32), NVFP4_GROUP, axis=-1)
        return (codes * scale * self.weight_scale_2[..., None, None]).astype(dtype)


class TiledNvfp4(struct.PyTreeNode):
    """`Nvfp4` in the order in which the experts' kernels read it: tiles of 16 rows x 128 columns.

    A tile is 1,024 bytes of codes and 128 of scales, each in one piece, where the rows of the
    stored order are a whole row apart. The same bits in another order: `stored` gives them back.

    Of 16 columns, a word of 32 bits has those of which the column over 2 is even, the next the
    others: four pairs of neighbours each, whose bits are spread (`_FIELDS`) so that a shift and a
    mask make them numbers of 16 bits each, the even column in the low half: sign in bit 15,
    magnitude in bits 8 to 6. The first pair comes by a shift left by 6, the second by one by 2, the
    third by a rotation right by 4. The last stands there but for bit 6, which bit 14 has.

    Attributes:
        weight: uint8 [..., O/16, I/128, 16, 64], words from their low byte on.
        weight_scale: float8_e4m3fn [..., O/16, I/128, 16, 8].
        weight_scale_2: as of `Nvfp4`.
        input_scale: as of `Nvfp4`.
    """

    weight: Any
    weight_scale: Any
    weight_scale_2: Any
    input_scale: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrices that are stood for."""
        *lead, rows, columns, _, _ = self.weight.shape
        return (*lead, rows * TILE_ROWS, columns * TILE_COLUMNS)

    @classmethod
    def of(cls, w: Nvfp4) -> Self:
        """The tiles of stored matrices, whose shape `fits_tiles`."""
        arrays = _tiles(w.weight), _tiles(w.weight_scale)
        return cls(*arrays, w.weight_scale_2, w.input_scale)

    def stored(self) -> Nvfp4:
        """The matrices as a checkpoint has them."""
        arrays = rows_of_tiles(self.weight), rows_of_tiles(self.weight_scale)
        return Nvfp4(*arrays, self.weight_scale_2, self.input_scale)

    def dequantize(self, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        """As of `Nvfp4`."""
        return self.stored().dequantize(dtype)


def fits_tiles(shape: tuple[int, ...]) -> bool:
    """Whether matrices [..., O, I] are made of whole tiles."""
    return shape[-2] % TILE_ROWS == 0 and shape[-1] % TILE_COLUMNS == 0


def stored(tree: Any) -> Any:
    """A tree with the order of a checkpoint everywhere."""
    tiled = lambda w: isinstance(w, TiledNvfp4)  # noqa: E731
    return jax.tree.map(lambda w: w.stored() if tiled(w) else w, tree, is_leaf=tiled)


# for each pair of a word: (first of its byte's bits, how many, their place in the word)
_FIELDS = (
    ((0, 3, 0), (3, 1, 9), (4, 3, 16), (7, 1, 25)),
    ((0, 3, 4), (3, 1, 13), (4, 3, 20), (7, 1, 29)),
    ((0, 3, 10), (3, 1, 19), (4, 3, 26), (7, 1, 3)),
    ((0, 1, 14), (1, 2, 7), (3, 1, 15), (4, 1, 30), (5, 2, 23), (7, 1, 31)),
)


def _spread(codes: Any) -> Any:
    """Bytes [..., 8 n], bits of each eight in the order of `TiledNvfp4`."""
    # [..., pair, word]
    pairs = codes.reshape(*codes.shape[:-1], -1, 4, 2).astype(jnp.uint32)
    words = jnp.zeros_like(pairs[..., 0, :])
    for pair, fields in enumerate(_FIELDS):
        for first, number, place in fields:
            words |= (pairs[..., pair, :] >> first & (1 << number) - 1) << place
    return jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(codes.shape)


def _gathered(codes: Any) -> Any:
    """What `_spread` has made these of."""
    words = jax.lax.bitcast_convert_type(codes.reshape(*codes.shape[:-1], -1, 2, 4), jnp.uint32)
    pairs = (
        sum((words >> place & (1 << number) - 1) << first for first, number, place in fields)
        for fields in _FIELDS
    )
    return jnp.stack([jnp.asarray(p, jnp.uint8) for p in pairs], axis=-2).reshape(codes.shape)


def _tiles(x: Any) -> Any:
    """[..., O, n c] as [..., O/16, n, 16, c]; `c` is what 128 columns take. Codes are spread."""
    *lead, rows, columns = x.shape
    width = columns * TILE_COLUMNS // _columns_of(x)
    split = x.reshape(*lead, rows // TILE_ROWS, TILE_ROWS, columns // width, width)
    tiles = jnp.swapaxes(split, -3, -2)
    return _spread(tiles) if x.dtype == jnp.uint8 else tiles


def rows_of_tiles(x: Any) -> Any:
    """Codes or scales of `TiledNvfp4` in the order of `Nvfp4`."""
    *lead, rows, columns, _, width = x.shape
    x = _gathered(x) if x.dtype == jnp.uint8 else x
    return jnp.swapaxes(x, -3, -2).reshape(*lead, rows * TILE_ROWS, columns * width)


def _columns_of(x: Any) -> int:
    """Columns of the matrices whose codes or group scales `x` has."""
    return x.shape[-1] * (2 if x.dtype == jnp.uint8 else NVFP4_GROUP)


class BlockFp8(struct.PyTreeNode):
    """Matrices `[..., O, I]` in e4m3 with one scale per 128 x 128 block; edge blocks are partial.

    `w[..., o, i] = weight[..., o, i] * weight_scale_inv[..., o // 128, i // 128]`

    Attributes:
        weight: float8_e4m3fn [..., O, I].
        weight_scale_inv: bfloat16 or float32 [..., ceil(O/128), ceil(I/128)].
    """

    weight: Any
    weight_scale_inv: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrices that are stood for."""
        return tuple(self.weight.shape)

    def dequantize(self, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        """The matrices [..., O, I], products in float32, then rounded to `dtype`."""
        rows, columns = self.shape[-2:]
        scale = self.weight_scale_inv.astype(jnp.float32)
        scale = jnp.repeat(scale, FP8_BLOCK, axis=-2)[..., :rows, :]
        scale = jnp.repeat(scale, FP8_BLOCK, axis=-1)[..., :columns]
        return (self.weight.astype(jnp.float32) * scale).astype(dtype)


class ScaledTable(struct.PyTreeNode):
    """An embedding table [rows, width] in e4m3 with one scale.

    A row's value is `bf16(weight) * bf16(weight_scale)` rounded to bfloat16, as public engines
    read it, whatever dtype it is then used in.

    Attributes:
        weight: float8_e4m3fn [rows, width], an array or a `HostTable`.
        weight_scale: bfloat16 [].
    """

    weight: Any
    weight_scale: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the table that is stood for."""
        return tuple(self.weight.shape)

    def dequantize(self, dtype: jnp.dtype = jnp.float32) -> jax.Array:
        """The whole table (or what was taken of it), rounded to bfloat16 and then cast."""
        scale = self.weight_scale.astype(jnp.bfloat16).astype(jnp.float32)
        # a float32 product of two bfloat16 values is exact, so this rounds once
        value = self.weight.astype(jnp.float32) * scale
        # the barrier keeps XLA from folding bf16 -> wider casts into one wider product
        return jax.lax.reduce_precision(value, 8, 7).astype(dtype)


Quantized = Nvfp4 | TiledNvfp4 | BlockFp8 | ScaledTable


def take(w: Any, ids: jax.Array) -> Any:
    """`w[ids]` along the first axis, in stored form; ids must be in range."""
    if isinstance(w, HostTable):
        return w.take(ids)
    if isinstance(w, ScaledTable):
        return ScaledTable(take(w.weight, ids), w.weight_scale)
    return jax.tree.map(lambda leaf: leaf[ids], w)


def dequantize(w: Any, dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """The plain array that `w` stands for, in `dtype`."""
    return w.dequantize(dtype) if isinstance(w, Quantized) else w.astype(dtype)


def stored_form(
    form: str, shape: tuple[int, ...], dtype: str
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Component name -> (shape, dtype) of matrices or a table of `shape` stored in `form`.

    Args:
        form: `bf16` (a plain array of `dtype`, the component's name is empty), `fp8`, `nvfp4` or
            `fp8_table`.
        shape: of the values stood for.
        dtype: of plain arrays.

    Raises:
        ValueError: the form does not fit the shape.
    """
    *batch, rows, columns = shape
    lead = tuple(batch)
    if form == "bf16":
        return {"": (shape, dtype)}
    if form == "fp8_table":
        return {"weight": (shape, "float8_e4m3fn"), "weight_scale": ((), "bfloat16")}
    if form == "fp8":
        blocks = (math.ceil(rows / FP8_BLOCK), math.ceil(columns / FP8_BLOCK))
        return {
            "weight": (shape, "float8_e4m3fn"),
            "weight_scale_inv": ((*lead, *blocks), "bfloat16"),
        }
    if form == "nvfp4":
        if columns % NVFP4_GROUP:
            raise ValueError(f"NVFP4 needs inputs in groups of {NVFP4_GROUP}, found {columns}")
        return {
            "weight": ((*lead, rows, columns // 2), "uint8"),
            "weight_scale": ((*lead, rows, columns // NVFP4_GROUP), "float8_e4m3fn"),
            "weight_scale_2": (lead, "float32"),
            "input_scale": (lead, "float32"),
        }
    raise ValueError(f"{form!r} is no stored form")


FORMS: dict[str, type] = {"fp8": BlockFp8, "nvfp4": Nvfp4, "fp8_table": ScaledTable}


def _e2m1(code: jax.Array) -> jax.Array:
    """Values of 4-bit codes (sign, two exponent bits, one mantissa bit), float32.

    By arithmetic: a table look-up or a cast to `float4_e2m1fn` keeps XLA from fusing the decoding
    into the product that reads it.
    """
    code = code.astype(jnp.int32)
    exponent, mantissa = (code >> 1) & 3, code & 1
    halves = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent - 1, 0))
    return jnp.where(code >= 8, -halves, halves).astype(jnp.float32) * 0.5
