"""The freedoms of the stored forms: what a checkpoint may have other than `params.declare` says.

NVFP4 experts may lack input scales (a weight-only checkpoint), and the block scales of FP8 may be
float32. Either holds for all experts of the main model, or for all of the draft head.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax

from qwen4jax.params import Params
from qwen4jax.quant import BlockFp8, Nvfp4
from qwen4jax.weights.names import MTP


def as_found(declared: Params, input_scales: Iterable[str], wide_scales: Iterable[str]) -> Params:
    """`declared` with those freedoms as they were found.

    Args:
        declared: from `params.declare`.
        input_scales: names or paths of all input scales there are.
        wide_scales: names or paths of the block scales that are float32.
    """
    scaled = {name.startswith(MTP) for name in input_scales}
    wide = {name.startswith(MTP) for name in wide_scales}

    def fit(weights: Any, mtp: bool) -> Any:
        if isinstance(weights, Nvfp4) and mtp not in scaled:
            return dataclasses.replace(weights, input_scale=None)
        if isinstance(weights, BlockFp8) and mtp in wide:
            scale = dataclasses.replace(weights.weight_scale_inv, dtype="float32")
            return dataclasses.replace(weights, weight_scale_inv=scale)
        return weights

    def fit_all(tree: Any, mtp: bool) -> Any:
        return jax.tree.map(
            lambda w: fit(w, mtp), tree, is_leaf=lambda w: isinstance(w, Nvfp4 | BlockFp8)
        )

    layers = tuple(fit_all(layer, mtp=False) for layer in declared.layers)
    return dataclasses.replace(declared, layers=layers, mtp=fit_all(declared.mtp, mtp=True))
