"""What the warpgroups of the experts' Mosaic kernel do: one asks for weights, the others multiply.

The left operand of a product are 64 rows of weights, the right one 8 columns of tokens or hidden
values. Both products of an expert go through one ring of stages: while the last hidden values of a
tile are being made elsewhere, the first weights of down are under way.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas.moe import mosaic_decode
from qwen4jax.pallas.moe.mosaic_decode import BYTES, TILE
from qwen4jax.pallas.moe.mosaic_work import Sizes

_COLUMN: Any = TILE.reduce(0)
Refs = dict[str, Any]


def load(z: Sizes, refs: Refs) -> None:
    """Asks for all weights of this CTA's units, and for tokens."""
    stages, columns, rows = z.cut.stages, z.cut.columns, 64 * z.cut.consumers
    units, others, unit_of_down = z.shares(refs["count"][0])
    lane, (steps, down_steps) = lax.axis_index("lane"), z.steps

    def ask(i, name, expert, block, k, columns_of=None):
        slot = lax.rem(i, stages)

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(refs["empty"].at[slot])

        at = pl.ds(k * columns, columns)
        # gate and up, or the halves of down
        weight = refs[name].at[pl.ds(2 * expert, 2), pl.ds(block * rows, rows), at]
        plgpu.copy_gmem_to_smem(weight, refs["w_tiles"].at[slot], refs["full"].at[slot])
        if columns_of is not None:
            x = refs["x"].at[columns_of, pl.ds(0, 8), at]
            plgpu.copy_gmem_to_smem(x, refs["x_tiles"].at[slot], refs["x_full"].at[slot])

    def gate_up(number, carry):
        tile, block = _split(lane + number * z.lanes, z.blocks[0])
        expert = refs["experts"][tile]

        def one(k, carry):
            ask(number * steps + k, "gate_up", expert, block, k, tile if z.gathered else 0)
            return carry

        return lax.fori_loop(0, steps, one, carry)

    def down(number, carry):
        tile, block = _split(unit_of_down(number), z.blocks[1])
        expert = refs["experts"][tile]

        def one(k, carry):
            ask(units * steps + number * down_steps + k, "down", expert, block, k)
            return carry

        return lax.fori_loop(0, down_steps, one, carry)

    lax.fori_loop(0, units, gate_up, ())
    lax.fori_loop(0, others, down, ())


def multiply(z: Sizes, refs: Refs, ready: Any, role: Any) -> None:
    """Both products of this warpgroup's rows of this CTA's units.

    `ready` are semaphores that count blocks of 64 hidden values of each tile.
    """
    units, others, unit_of_down = z.shares(refs["count"][0])
    lane, (steps, down_steps) = lax.axis_index("lane"), z.steps
    total = units * steps + others * down_steps
    products = functools.partial(_products, z, refs, role, total)

    def gate_up(number, carry):
        tile, block = _split(lane + number * z.lanes, z.blocks[0])
        row = block * z.cut.consumers + role

        def scale(k):
            expert = refs["experts"][tile]
            return [refs["gate_up_scale"][expert, i, row // 2, k] for i in range(2)]

        def right(slot, k):
            del k
            plgpu.barrier_wait(refs["x_full"].at[slot])
            return refs["x_tiles"].at[slot].T

        sums = products(number * steps, steps, right, scale)
        if z.form == "fp8":
            own = refs["scales"].at[tile if z.gathered else 0]
            factor = plgpu.load(own, layout=_COLUMN, optimized=False)
            sums = [x * _columns(factor, x) for x in sums]
        gate, up = sums
        h = gate / (1.0 + jnp.exp(-gate)) * up
        # a lane's columns of a right operand of `decode` are not neighbours
        h = mosaic_decode.turn(h) if z.form == "fp8" else h.astype(jnp.bfloat16)
        refs["hidden"][tile, pl.ds(row * 64, 64)] = h
        plgpu.semaphore_signal(ready.at[tile], memory_scope="gpu")
        return carry

    lax.fori_loop(0, units, gate_up, ())

    def down(number, carry):
        known, factor = carry
        tile, block = _split(unit_of_down(number), z.blocks[1])
        row = block * z.cut.consumers + role

        def take():
            plgpu.semaphore_wait(ready.at[tile], z.width // 64, decrement=False, memory_scope="gpu")
            return _take_hidden(z, refs, tile, role)

        factor = lax.cond(tile != known, take, lambda: factor)

        def scale(k):
            expert, half = refs["experts"][tile], z.hidden // 128
            return [refs["down_scale"][expert, (i * half + row) // 2, k] for i in range(2)]

        def right(slot, k):
            del slot
            return refs["h_tile"].at[role, :, pl.ds(k * z.cut.columns, z.cut.columns)].T

        sums = products(units * steps + number * down_steps, down_steps, right, scale)
        for i, part in enumerate(sums):
            if z.form == "fp8":
                part = part * _columns(factor, part)
            own = pl.ds(i * (z.hidden // 2) + row * 64, 64)
            refs["parts"].at[tile, :, own][...] = mosaic_decode.lie(part)
        return tile, factor

    nothing = plgpu.layout_cast(jnp.zeros((8,), jnp.float32), _COLUMN)
    lax.fori_loop(0, others, down, (jnp.int32(-1), nothing))


def _split(unit, blocks):
    """Tile and block of a unit."""
    return unit // blocks, lax.rem(unit, blocks)


def _take_hidden(z, refs, tile, role):
    """Brings a tile's hidden values to shared memory; what they are to be multiplied by, by column.

    Plain loads, which the semaphore orders after the stores of other CTAs.
    """
    sources = [refs["hidden"].at[tile, pl.ds(64 * i, 64)] for i in range(z.width // 64)]
    loaded = [plgpu.load(source, layout=TILE, optimized=False) for source in sources]
    down = plgpu.layout_cast(jnp.zeros((8,), jnp.float32), _COLUMN)
    if z.form == "fp8":
        # a power of two brings the largest of a column to 2**14: float16 has all bits of what is
        # not 2**31 times smaller
        loaded = [x.astype(jnp.float32) for x in loaded]
        largest = jnp.max(functools.reduce(jnp.maximum, map(jnp.abs, loaded)), axis=0)
        bits = lax.bitcast_convert_type(largest, jnp.int32)
        exponent = lax.shift_right_logical(bits, jnp.int32(23)) - 127
        power = jnp.minimum(jnp.maximum(14 - exponent, -114), 126)
        up, down = _power(power), _power(-power)
        loaded = [(x * _columns(up, x)).astype(z.tokens) for x in loaded]
    for i, x in enumerate(loaded):
        refs["h_tile"].at[role, :, pl.ds(64 * i, 64)].T[...] = x
    plgpu.commit_smem()
    return down


def _products(z, refs, role, total, start, steps, right, scale):
    """Sums [64, 8] of both blocks from step `start` of `total` on.

    `right(slot, k)` is the right operand of step `k`, `scale(k)` has the scales of both blocks.
    """
    stages, rows = z.cut.stages, pl.ds(role * 64, 64)

    def free(step, slot):
        @pl.when(step + stages < total)
        def _():
            plgpu.barrier_arrive(refs["empty"].at[slot])

    def add(k, acc):
        slot = lax.rem(start + k, stages)
        plgpu.barrier_wait(refs["full"].at[slot])
        x = right(slot, k)
        for i in range(2):
            plgpu.wgmma(acc[i], refs["w_tiles"].at[slot, i, rows], x)
        plgpu.wgmma_wait(0)
        free(start + k, slot)

    def accumulate(*acc):
        lax.fori_loop(0, steps, lambda k, carry: (add(k, acc), carry)[1], ())
        return [plgpu.layout_cast(a[...], TILE) for a in acc]

    if z.form == "bf16":
        return accumulated(accumulate)

    def add_scaled(k, carry):
        sums, scales = carry
        slot = lax.rem(start + k, stages)
        # a step ahead
        later = scale(jnp.minimum(k + 1, steps - 1))
        plgpu.barrier_wait(refs["full"].at[slot])
        x = right(slot, k)

        def multiply(*acc):
            for i in range(2):
                w = plgpu.load(refs["w_tiles"].at[slot, i, rows], layout=BYTES, optimized=False)
                plgpu.wgmma(acc[i], mosaic_decode.decode(w), x)
            return [plgpu.layout_cast(a[...], TILE) for a in acc]

        made = accumulated(multiply)
        # loads before the copy that comes next
        plgpu.commit_smem()
        free(start + k, slot)
        made = [x * s.astype(jnp.float32) for x, s in zip(made, scales, strict=True)]
        return [t + m for t, m in zip(sums, made, strict=True)], later

    zeros = plgpu.layout_cast(jnp.zeros((64, 8), jnp.float32), TILE)
    return lax.fori_loop(0, steps, add_scaled, ([zeros, zeros], scale(0)))[0]


def accumulated(run):
    """`run` with an accumulator for each block, after whose products it waits by reading them."""
    return pl.run_scoped(run, *(plgpu.WGMMAAccumulatorRef((64, 8), jnp.float32),) * 2)


def _power(exponent):
    """`2**exponent` of a normal number."""
    return lax.bitcast_convert_type(lax.shift_left(exponent + 127, jnp.int32(23)), jnp.float32)


def _columns(x, like):
    return lax.broadcast_in_dim(x, like.shape, (1,))
