"""Named inputs of the operations: what tests hold implementations to and benchmarks time."""

import dataclasses
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen4jax import quant

# above this NumPy is slow enough to notice; the device draws instead
_LARGE = 1 << 22

F32, BF16, E4M3 = jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of one function of an operation.

    Attributes:
        function: name of the function in the operation's package.
        name: of the case, unique for the function.
        build: makes the function's keyword arguments; arrays are traced, all else is static.
        device_only: of the released model's size, for an accelerator.
    """

    function: str
    name: str
    build: Callable[[np.random.Generator], dict[str, Any]]
    device_only: bool = False

    def inputs(self) -> dict[str, Any]:
        """The keyword arguments, the same in every process."""
        seed = zlib.crc32(f"{self.function}/{self.name}".encode())
        return self.build(np.random.default_rng(seed))

    def __str__(self) -> str:
        return f"{self.function}-{self.name}"


def normal(
    rng: np.random.Generator, shape: Sequence[int], dtype: Any = F32, scale: float = 1.0
) -> jax.Array:
    """Normal values with a standard deviation of `scale`, on the default device."""
    if math.prod(shape) > _LARGE:
        key = jax.random.key(int(rng.integers(1 << 31)))
        return (jax.random.normal(key, tuple(shape), F32) * scale).astype(dtype)
    return jnp.asarray(rng.standard_normal(shape) * scale).astype(dtype)


def weight(rng: np.random.Generator, shape: Sequence[int], dtype: Any = F32) -> jax.Array:
    """A matrix [outputs, inputs] that keeps the size of what it multiplies."""
    return normal(rng, shape, dtype, shape[-1] ** -0.5)


def stored(rng: np.random.Generator, shape: Sequence[int], form: str) -> Any:
    """Matrices in a stored form of `quant.py` ("fp8", "nvfp4"), of the size `weight` gives."""
    scale = shape[-1] ** -0.5 / (3 if form == "nvfp4" else 1)
    parts = {}
    for name, (part, kind) in quant.stored_form(form, tuple(shape), "bfloat16").items():
        key = jax.random.key(int(rng.integers(1 << 31)))
        if name == "weight":
            codes = kind == "uint8"
            parts[name] = jax.random.bits(key, part, kind) if codes else normal(rng, part, kind)
        elif name == "weight_scale":
            parts[name] = 2.0 ** jax.random.randint(key, part, -1, 2).astype(F32)
        elif name == "input_scale":
            parts[name] = jnp.ones(part)
        else:
            parts[name] = jax.random.uniform(key, part, F32, 0.5, 2) * scale
        parts[name] = parts[name].astype(kind)
    return quant.FORMS[form](**parts)


def integers(values: Any) -> jax.Array:
    """Values as int32."""
    return jnp.asarray(np.asarray(values), jnp.int32)
