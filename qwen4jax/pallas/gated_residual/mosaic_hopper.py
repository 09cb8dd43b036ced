"""The boundary of two sublayers in Pallas Mosaic GPU, for Hopper: one launch, weights asked first.

The floor at few rows is the 13.2 MB of the two projections, 3.1 us at 4.3 TB/s; what costs more is
latency: the second product needs all of the first. A kernel for each product would start its
weights only when the one before has ended. Here both are under way from the start, because all of
them fit in the shared memory of the chip: 80 CTAs hold a tile of 64 features by 640 columns each
(82 KB), and 40 others the rows of 64 columns of all four streams (164 KB), which wait for the first
at a semaphore. The 80 wait for nobody and the 40 are far fewer than there are multiprocessors, so
that they cannot keep each other from running, whatever else does.

Up to `DIRECT_ROWS` every CTA of the last stage adds up the slices' sums for itself (164 KB from the
L2 cache); beyond, some of them do it for all, and a second semaphore says so.

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
from qwen4jax.pallas.gated_residual.mosaic_stages import Sizes

DIRECT_ROWS = 8  # up to which each CTA adds up all low-rank features


def boundary(streams, pending, norm, down, up, inject, *, eps):
    """See `qwen4jax.pallas.gated_residual.boundary`."""
    return run(streams, pending, norm, down, up, inject, eps=eps, fused=True)


def boundary_parts(streams, pending, norm, down, up, inject, *, eps):
    """The same stages, a launch for each: for the simulator, which has no semaphores."""
    return run(streams, pending, norm, down, up, inject, eps=eps, fused=False)


@functools.partial(jax.jit, static_argnames=("eps", "fused"))
def run(streams, pending, norm, down, up, inject, *, eps: float, fused: bool):
    """`boundary`, in one launch or in parts."""
    *batch, count, hidden = streams.shape
    rows = batch[0] * batch[1]
    z = Sizes(
        rows=rows,
        streams=count,
        hidden=hidden,
        rank=down.shape[0],
        pending=pending is not None,
        inject=inject is not None,
        direct=rows <= DIRECT_ROWS,
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
    out = _fused(z, given) if fused else _parts(z, given)
    settled = streams if pending is None else out["settled"].reshape(streams.shape)
    wanted = None if inject is None else out["wanted"].reshape(*batch, count)
    return settled, out["x"].reshape(*batch, hidden), wanted


def _fused(z: Sizes, given: dict[str, jax.Array]) -> dict[str, Any]:
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

    return _launch(z, body, z.projects + z.mixes, given, z.outs(), "boundary")


def _await(semaphore: Any, count: int) -> None:
    plgpu.semaphore_wait(semaphore, count, decrement=False, memory_scope="gpu")


def _signal(semaphore: Any) -> None:
    plgpu.semaphore_signal(semaphore, memory_scope="gpu")


def _nothing() -> None:
    pass


def _parts(z: Sizes, given: dict[str, jax.Array]) -> dict[str, Any]:
    """A launch for each stage."""
    outs = {name: of for name, of in z.outs().items() if of is not None}

    def project(refs):
        stages.project(z, lax.axis_index("block"), refs, _nothing, _nothing)

    def add_up(refs):
        unit = lax.axis_index("block")
        if z.sums:

            @pl.when(unit < z.sums)
            def _():
                stages.add_up(z, unit, refs)

        if z.injects:

            @pl.when(unit >= z.sums)
            def _():
                stages.add_up_inject(z, unit - z.sums, refs)

    def mix(refs):
        stages.mix(z, lax.axis_index("block"), refs, _nothing)

    known = dict(given)
    for body, units, names in (
        (project, z.projects, ("partial", "squares")),
        (add_up, z.sums + z.injects, ("low", "wanted")),
        (mix, z.mixes, ("settled", "x")),
    ):
        made = {name: outs[name] for name in names if name in outs}
        if made:
            known |= _launch(z, body, units, known, made, f"boundary_{body.__name__}")
    return known


def _launch(z, body, units, given, outs, name) -> dict[str, Any]:
    """Runs `body` on `units` CTAs, with what is given and what it makes by name."""

    def kernel(given, out):
        body(given | out)

    kernel.__name__ = f"{name}_{z.rows}x{z.streams}x{z.hidden}"
    return plgpu.kernel(kernel, out_type=outs, grid=(units,), grid_names=("block",))(given)
