"""Where the n-gram table lies: on the device, pinned in host memory, or in its files.

JAX allocates pinned memory from a pool of XLA's, whose size is set before JAX starts. The table is
allocated once and filled in place, straight from the mapped files: a second copy of 51 GB would
not fit beside it on most machines.
"""

import ctypes
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from qwen4jax.params import Tensor

Placement = Literal["device", "pinned", "host"]

# of XLA's pinned pool, in GiB
_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
_USUAL_LIMIT = 64
_GIB = 1 << 30
_MEMORY = Path("/proc/meminfo")


def check_pinned(tables: Sequence[Tensor], platform: str) -> None:
    """Whether tables can be pinned, before anything is allocated.

    Args:
        tables: their declarations.
        platform: of the device that reads them.

    Raises:
        ValueError: the device is no GPU.
        MemoryError: they do not fit into the pool or into free host memory; with the arithmetic.
    """
    if platform != "gpu":
        why = f"table='pinned' is for GPUs, this is a {platform}"
        raise ValueError(f"{why}: use table='device' or table='host'")
    size = sum(t.nbytes for t in tables)
    shapes = ", ".join(f"{list(t.shape)} {t.dtype}" for t in tables)
    what = f"table='pinned': {shapes} take {size:,} bytes ({size / _GIB:.1f} GiB)"
    limit = int(os.environ.get(_LIMIT, _USUAL_LIMIT))
    if size > limit * _GIB:
        raise MemoryError(
            f"{what}, XLA's pinned pool holds {limit} GiB: set "
            f"{_LIMIT}={math.ceil(size / _GIB) + 4} before JAX starts"
        )
    free = free_host_bytes()
    if free is not None and size > free:
        raise MemoryError(f"{what}, {free:,} bytes of host memory are free")


def free_host_bytes() -> int | None:
    """Host memory that can be allocated, None where the system does not say."""
    if not _MEMORY.exists():
        return None
    for line in _MEMORY.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def pinned_array(
    shape: tuple[int, ...], dtype: np.dtype, device: Any
) -> tuple[jax.Array, np.ndarray]:
    """Zeros in pinned host memory, and the same memory to be filled before anything reads it.

    The second is valid as long as the first is.
    """
    there = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    # pages of zeros that nobody has written take no memory of their own
    array = jax.device_put(np.zeros(shape, dtype), there).block_until_ready()
    memory = (ctypes.c_uint8 * array.nbytes).from_address(array.unsafe_buffer_pointer())
    return array, np.ctypeslib.as_array(memory).view(dtype).reshape(shape)
