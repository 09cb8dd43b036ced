"""Rounding matrices to the stored forms of `quant.py`: to the nearest code.

Scales follow the exporters of the released checkpoints: the largest magnitude of a group, block or
table takes the largest code. All arithmetic is float32. What a matrix is encoded with takes JAX
arrays as well, on their device.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from qwen4jax.quant import FP8_BLOCK, NVFP4_GROUP

_E2M1_MAX = 6.0
_E4M3_MAX = 448.0
_E4M3_SMALLEST = 2.0**-9
# halfway between neighbours of 0, 0.5, 1, 1.5, 2, 3, 4, 6; a tie takes the smaller magnitude
_E2M1_MIDPOINTS = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], np.float32)
_SMALLEST_BLOCK_SCALE = np.float32(1e-6)


def largest_magnitude(parts: Iterable[np.ndarray]) -> np.float32:
    """The largest magnitude in several arrays.

    Raises:
        ValueError: there is a value that is not finite.
    """
    largest = np.float32(0)
    for part in parts:
        if part.size:
            # a NaN is the maximum of whatever holds it
            found = np.abs(part.astype(np.float32)).max()
            if not np.isfinite(found):
                raise ValueError("holds values that are not finite")
            largest = max(largest, found)
    return largest


def nvfp4_scale(matrix: np.ndarray) -> np.ndarray:
    """The float32 scale [] of a matrix [O, I] in NVFP4: its largest group scale is the largest."""
    return np.asarray(matrix_scale(largest_magnitude([matrix])), np.float32)


def matrix_scale(largest: Any) -> Any:
    """The same of a matrix with this largest magnitude, float32 []."""
    xp = _namespace(largest)
    scale = largest / np.float32(_E2M1_MAX * _E4M3_MAX)
    return xp.where(scale > 0, scale, np.float32(1))


def nvfp4_encode(matrix: Any, scale_2: Any) -> tuple[Any, Any]:
    """(uint8 [O, I/2], e4m3 group scales [O, I/16]) of a matrix [O, I].

    Args:
        matrix: the values; I is a multiple of 16.
        scale_2: from `nvfp4_scale`.
    """
    xp = _namespace(matrix)
    rows, columns = matrix.shape
    groups = matrix.astype(np.float32).reshape(rows, columns // NVFP4_GROUP, NVFP4_GROUP)
    scale = xp.abs(groups).max(-1) / np.float32(_E2M1_MAX) / scale_2
    scale = xp.maximum(scale, np.float32(_E4M3_SMALLEST)).astype(ml_dtypes.float8_e4m3fn)
    values = groups / (scale.astype(np.float32) * scale_2)[..., None]
    magnitude = xp.abs(values)
    codes = np.uint8(8) * (values < 0)
    for midpoint in _E2M1_MIDPOINTS:
        codes = codes + (magnitude > midpoint)
    codes = codes.astype(np.uint8).reshape(rows, columns)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), scale


def fp8_scale(matrix: np.ndarray) -> np.ndarray:
    """The bfloat16 scale of each 128 x 128 block of a matrix [O, I], blocks at the edge partial.

    Raises:
        ValueError: there is a value that is not finite.
    """
    largest_magnitude([matrix])
    return block_scale(matrix)


def block_scale(matrix: Any) -> Any:
    """The same of a matrix whose values are not looked at."""
    xp = _namespace(matrix)
    rows, columns = matrix.shape
    missing = ((0, -rows % FP8_BLOCK), (0, -columns % FP8_BLOCK))
    padded = xp.pad(xp.abs(matrix.astype(np.float32)), missing)
    blocks = padded.reshape(-(-rows // FP8_BLOCK), FP8_BLOCK, -1, FP8_BLOCK)
    scale = blocks.max((1, 3)) / np.float32(_E4M3_MAX)
    return xp.maximum(scale, _SMALLEST_BLOCK_SCALE).astype(ml_dtypes.bfloat16)


def fp8_encode(matrix: Any, scale: Any) -> Any:
    """The e4m3 codes [O, I] of a matrix under its block scales from `fp8_scale`."""
    rows, columns = matrix.shape
    full = scale.astype(np.float32).repeat(FP8_BLOCK, 0)[:rows].repeat(FP8_BLOCK, 1)[:, :columns]
    return _e4m3(matrix.astype(np.float32) / full)


def table_scale(parts: Iterable[np.ndarray]) -> np.ndarray:
    """The bfloat16 scale [1] of an n-gram table that is given in parts.

    Raises:
        ValueError: there is a value that is not finite.
    """
    scale = largest_magnitude(parts) / np.float32(_E4M3_MAX)
    return np.array([scale or 1.0], np.float32).astype(ml_dtypes.bfloat16)


def table_encode(rows: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The e4m3 codes of rows of an n-gram table under its scale from `table_scale`."""
    return _e4m3(rows.astype(np.float32) / scale.astype(np.float32))


def _namespace(array: Any) -> Any:
    return jnp if isinstance(array, jax.Array) else np


def _e4m3(values: Any) -> Any:
    # the format has no infinity: what exceeds its range by rounding would become NaN
    return _namespace(values).clip(values, -_E4M3_MAX, _E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
