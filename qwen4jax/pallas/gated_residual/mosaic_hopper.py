"""The boundary of two sublayers in Pallas Mosaic GPU, for Hopper: one launch, weights asked first.

The floor at few rows is the 13.2 MB of the two projections, 3.1 us at 4.3 TB/s; what costs more is
latency: the second product needs all of the first. A kernel for each product would start its
weights only when the one before has ended. Here both are under way from the start, because all of
them fit in the shared memory of the chip: 80 CTAs hold a tile of 64 features by 640 columns each
(82 KB), and 40 others the rows of 64 columns of all four streams (164 KB), which wait for the first
at a semaphore. The 80 wait for nobody and the 40 are far fewer than there are multiprocessors, so
that they cannot keep each other from running, whatever else does.

The low-rank features are the sums of 16 slices (164 KB at 8 tokens). A few CTAs of the last stage
add them up for all and say so at a second semaphore; each for itself was slower.

Order of sums: columns of a slice in wgmma, slices of a stream, streams. No atomics on floats.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas.gated_residual import mosaic_stages as stages
from qwen4jax.pallas.gated_residual.mosaic_sizes import Sizes


# compiled apart, so that a program with many boundaries lowers one
@functools.partial(jax.jit, static_argnames=("eps",))
def boundary(streams, pending, norm, down, up, inject, counter, *, eps):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    *batch, count, hidden = streams.shape
    rows = batch[0] * batch[1]
    z = Sizes(
        rows=rows,
        streams=count,
        hidden=hidden,
        rank=down.shape[0],
        pending=pending is not None,
        inject=inject is not None,
        eps=eps,
    )
    given = {"streams": streams.reshape(rows, -1), "down": down, "up": up}
    given["norm"] = norm.reshape(-1, 64)
    if inject is not None:
        given["inject"] = inject
    if pending is not None:
        weights, y = pending
        given["weights"] = weights.astype(jnp.float32).reshape(rows, -1)
        given["y"] = y.reshape(rows, -1)
    out = stages_of(z, given)
    settled = streams if pending is None else out["settled"].reshape(streams.shape)
    wanted = None if inject is None else out["wanted"].reshape(*batch, count)
    return settled, out["x"].reshape(*batch, hidden), wanted, counter


def stages_of(z: Sizes, given: dict[str, jax.Array]) -> dict[str, Any]:
    """All stages in one launch."""

    def body(refs):
        block = lax.axis_index("block")
        unit = block - z.projects
        projected = pl.get_global(plgpu.SemaphoreType.REGULAR)
        added = pl.get_global(plgpu.SemaphoreType.REGULAR) if z.sums else None
        injected = pl.get_global(plgpu.SemaphoreType.REGULAR) if z.injects else None

        def wait():
            if not z.sums:
                _await(projected, z.projects)
                return

            @pl.when(unit < z.sums)
            def _():
                _await(projected, z.projects)
                stages.add_up(z, unit, refs)
                _signal(added)

            _await(added, z.sums)

        @pl.when(unit < 0)
        def _():
            done = functools.partial(_signal, projected)
            stages.project(z, block, refs, done, functools.partial(_signal, injected))

        @pl.when(unit >= 0)
        def _():
            stages.mix(z, unit, refs, wait)
            if z.injects:

                @pl.when(unit < z.injects)
                def _():
                    _await(injected, z.slices)
                    stages.add_up_inject(z, unit, refs)

    return launch(z, body, z.projects + z.mixes, given, z.outs(), "boundary")


def _await(semaphore: Any, count: int) -> None:
    plgpu.semaphore_wait(semaphore, count, decrement=False, memory_scope="gpu")


def _signal(semaphore: Any) -> None:
    plgpu.semaphore_signal(semaphore, memory_scope="gpu")


def launch(z, body, units, given, outs, name) -> dict[str, Any]:
    """Runs `body` on `units` CTAs, with what is given and what it makes by name."""

    def kernel(given, out):
        body(given | out)

    kernel.__name__ = f"{name}_{z.rows}x{z.streams}x{z.hidden}"
    return plgpu.kernel(kernel, out_type=outs, grid=(units,), grid_names=("block",))(given)
