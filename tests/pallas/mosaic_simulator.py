"""Runs Pallas Mosaic GPU kernels on a CPU, in the simulator of jax, which finds races.

What the simulator does not know is checked here: a copy of TMA starts on a boundary of 16 bytes.

with simulated():
    step(..., implementation="mosaic_hopper")

It knows wgmma with both operands in shared memory only: `accumulate` of `gated_delta.mosaic_chunks`
gets sums of its own here, made at once: whether operands outlive a product that is under way is
seen on a device only (`tests/gpu/test_cases.py`). It has no semaphores, so that the stages of the
gated residual's boundary, and the products of the experts, which wait for each other in one launch,
are launched here one after the other. Registers' layouts it has none: what only renames registers
is a permutation here (`tests/pallas/test_mosaic.py` asks the layouts whether it is the same).
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.state import indexing
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas import registry
from qwen4jax.pallas.gated_delta import mosaic_chunks
from qwen4jax.pallas.gated_residual import mosaic_hopper, mosaic_stages
from qwen4jax.pallas.gated_residual.mosaic_sizes import Sizes
from qwen4jax.pallas.moe import mosaic_decode, mosaic_products, mosaic_work
from qwen4jax.pallas.moe import mosaic_hopper as mosaic_experts

# bytes of their rows at which copies between memories start
_STARTS: set[int] = set()


@contextlib.contextmanager
def simulated() -> Iterator[None]:
    """Within it kernels of a Hopper GPU run here; a race is an error when it ends."""
    printed = io.StringIO()
    _STARTS.clear()
    with (
        registry.using(device="NVIDIA H200"),
        plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)),
        mock.patch.object(mosaic_hopper, "stages_of", _one_after_the_other),
        mock.patch.object(mosaic_chunks, "accumulate", lambda run, *shape: run(_Sum(shape))),
        mock.patch.object(mosaic_experts, "parts_of", _one_product_after_the_other),
        mock.patch.object(mosaic_work, "PROCESSORS", 2),
        mock.patch.object(mosaic_decode, "decode", lambda w: decoded(_halved(w))),
        mock.patch.object(mosaic_decode, "turn", lambda h: turned(h.astype(jnp.bfloat16))),
        mock.patch.object(mosaic_decode, "lie", jnp.transpose),
        mock.patch.object(plgpu, "wgmma", _of_sums(plgpu.wgmma)),
        mock.patch.object(plgpu, "copy_gmem_to_smem", _noting(plgpu.copy_gmem_to_smem, 0)),
        mock.patch.object(plgpu, "copy_smem_to_gmem", _noting(plgpu.copy_smem_to_gmem, 1)),
        contextlib.redirect_stdout(printed),
    ):
        yield
        jax.effects_barrier()
    assert "RACE DETECTED" not in printed.getvalue(), printed.getvalue()
    # a GPU calls it an illegal instruction
    assert not any(start % 16 for start in _STARTS), f"copies from bytes {sorted(_STARTS)}"


class _Sum:
    """Sums of products whose left operand may be in registers."""

    def __init__(self, shape: tuple[int, ...]):
        self.value = jnp.zeros(shape, jnp.float32)

    def __getitem__(self, index: Any) -> jax.Array:
        return self.value[index]


def _of_sums(wgmma: Callable[..., None]) -> Callable[..., None]:
    """The product, added to a `_Sum` where the accumulator is one."""

    def run(acc: Any, a: Any, b: Any) -> None:
        if isinstance(acc, _Sum):
            a, b = (x.astype(jnp.float32) if isinstance(x, jax.Array) else x[...] for x in (a, b))
            product = jnp.dot(a.astype(jnp.float32), b.astype(jnp.float32), precision="highest")
            acc.value = acc.value + product
        else:
            wgmma(acc, a, b)

    return run


def _noting(copy: Callable[..., None], at: int) -> Callable[..., None]:
    """The copy, after which `_STARTS` has the byte in its row where argument `at` starts."""

    def run(*refs: Any, **more: Any) -> None:
        transforms = getattr(refs[at], "transforms", ())
        last = [t.indices[-1] for t in transforms if isinstance(t, indexing.NDIndexer)]
        for part in last:
            if (start := getattr(part, "start", None)) is not None:
                start = start * refs[at].dtype.itemsize
                jax.debug.callback(lambda start: _STARTS.add(int(start)), start)
        copy(*refs, **more)

    return run


def _one_after_the_other(z: Sizes, given: dict[str, jax.Array]) -> dict[str, Any]:
    """A launch for each stage of the boundary."""
    outs = {name: of for name, of in z.outs().items() if of is not None}

    def nothing() -> None:
        pass

    def project(refs):
        mosaic_stages.project(z, lax.axis_index("block"), refs, nothing, nothing)

    def add_up(refs):
        unit = lax.axis_index("block")
        if z.sums:
            pl.when(unit < z.sums)(lambda: mosaic_stages.add_up(z, unit, refs))
        if z.injects:
            add = mosaic_stages.add_up_inject
            pl.when(unit >= z.sums)(lambda: add(z, unit - z.sums, refs))

    def mix(refs):
        mosaic_stages.mix(z, lax.axis_index("block"), refs, nothing)

    known = dict(given)
    for body, units, names in (
        (project, z.projects, ("partial", "squares")),
        (add_up, z.sums + z.injects, ("low", "wanted")),
        (mix, z.mixes, ("settled", "x")),
    ):
        made = {name: outs[name] for name in names if name in outs}
        if made:
            known |= mosaic_hopper.launch(z, body, units, known, made, body.__name__)
    return known


def _one_product_after_the_other(given: dict[str, jax.Array], z: mosaic_work.Sizes) -> jax.Array:
    """A launch for each product of the experts."""
    shares = mosaic_work.Sizes.shares

    def of_gate_up(z, count):
        units, others, unit = shares(z, count)
        return units, 0 * others, unit

    def of_down(z, count):
        units, others, unit = shares(z, count)
        return 0 * units, others, unit

    def body(refs):
        load = mosaic_products.load
        multiply = mosaic_products.multiply
        role = lax.axis_index("role")
        pl.when(role == z.cut.consumers)(lambda: load(z, refs))
        pl.when(role < z.cut.consumers)(lambda: multiply(z, refs, _Ready(), role))

    known = dict(given)
    for own in (of_gate_up, of_down):
        with contextlib.ExitStack() as stack:
            patch = lambda *a: stack.enter_context(mock.patch.object(*a))  # noqa: E731
            patch(mosaic_work.Sizes, "shares", own)
            patch(plgpu, "semaphore_signal", _nothing)
            patch(plgpu, "semaphore_wait", _nothing)
            if z.form == "fp8":
                sums = lambda run: run(*(_Sum((64, 8)) for _ in range(2)))  # noqa: E731
                patch(mosaic_products, "accumulated", sums)
            made = mosaic_experts.launch(z, body, known)
        known["hidden"] = made["hidden"]
    return made["parts"]


class _Ready:
    """Semaphores that nobody asks."""

    @property
    def at(self) -> Any:
        return self

    def __getitem__(self, index: Any) -> None:
        del index


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _halved(w: jax.Array) -> jax.Array:
    return w.astype(jnp.float32).astype(jnp.float16)


def decoded(w: Any) -> Any:
    """Of 64 columns (lane, 16 columns, half of them, neighbour) in the order of wgmma's operand."""
    return w.reshape(64, 2, 4, 4, 2, 2).transpose(0, 1, 3, 4, 2, 5).reshape(64, 128)


def turned(h: Any) -> Any:
    """Rows likewise."""
    return h.reshape(4, 4, 2, 2, 8).transpose(1, 2, 0, 3, 4).reshape(64, 8)
