"""The order in memory that kernels read best, made once when a model is on its device.

The experts' kernels read NVFP4 in tiles (`quant.TiledNvfp4`): on the H200 1.4 times as fast at 32
tokens as in the rows of a checkpoint. `save` and the Orbax store write the checkpoint's order.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax

from qwen4jax import quant
from qwen4jax.params import Params
from qwen4jax.weights.names import leaves


def arrange(params: Params) -> Params:
    """`params`, whose NVFP4 experts are in tiles where kernels will read them.

    They are on NVIDIA GPUs, for models that compute in bfloat16. The memory of what is rearranged
    is given up, one tensor after the other.
    """
    platform = next(iter(jax.tree.leaves(params.embed_tokens)[0].devices())).platform
    if platform != "gpu" or params.config.dtype != "bfloat16":
        return params
    return tiled(params, _in_place)


def tiled(tree: Any, tile: Callable[[quant.Nvfp4], quant.TiledNvfp4] = quant.TiledNvfp4.of) -> Any:
    """`tree`, whose experts' NVFP4 matrices are in tiles where they have the shape for it."""

    def one(w: Any) -> Any:
        experts = isinstance(w, quant.Nvfp4) and len(w.shape) > 2
        return tile(w) if experts and quant.fits_tiles(w.shape) else w

    return jax.tree.map(one, tree, is_leaf=lambda w: isinstance(w, quant.Nvfp4))


def _in_place(w: quant.Nvfp4) -> quant.TiledNvfp4:
    """The tiles of `w`, whose codes and scales are given up: the caller's tree still holds them."""
    tiles = _tile(w)
    w.weight.delete()
    w.weight_scale.delete()
    return tiles


_tile = jax.jit(quant.TiledNvfp4.of)
_rows = jax.jit(quant.rows_of_tiles)


def stored_leaves(
    params: Params,
) -> Iterator[tuple[str, jax.ShapeDtypeStruct, Callable[[], jax.Array]]]:
    """Path, shape and dtype of every leaf as a checkpoint has it, and what gives the array.

    What is in tiles is put back in rows when it is asked for: no second copy of the model.
    """
    plain = jax.eval_shape(quant.stored, params)
    for (path, shape), (_, leaf) in zip(leaves(plain), leaves(params), strict=True):
        yield path, shape, functools.partial(_in_order, leaf, shape.shape)


def _in_order(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return leaf if leaf.shape == shape else _rows(leaf)
