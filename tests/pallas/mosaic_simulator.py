"""Runs Pallas Mosaic GPU kernels on a CPU, in the simulator of jax, which finds races.

with simulated():
    step(..., implementation="mosaic_hopper")

What it cannot do, kernels are asked in another way: it has no semaphores, so that stages that wait
for each other in one launch run one after the other.
"""

import contextlib
import io
from collections.abc import Iterator
from unittest import mock

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas import registry
from qwen4jax.pallas.gated_residual import mosaic_hopper as gated_residual


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Within it kernels of a Hopper GPU run here; a race is an error when it ends."""
    printed = io.StringIO()
    with (
        registry.using(device="NVIDIA H200"),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
        mock.patch.object(gated_residual, "boundary", gated_residual.boundary_parts),
        contextlib.redirect_stdout(printed),
    ):
        yield
        jax.effects_barrier()
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()
