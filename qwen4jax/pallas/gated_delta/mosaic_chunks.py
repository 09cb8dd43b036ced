"""Gated DeltaNet over many tokens for Hopper: the recurrence in Pallas Mosaic GPU.

What needs no state is `triton_chunks`'s, and so are the form and the precision. Its recurrence
waits after every product. Here

* a CTA, 64 value channels of one row's value head, has two warpgroups, so that what leads from
  state to state, the chain, does nothing else: the other one has TMA bring the operands of later
  chunks, and makes the outputs, a product behind the chain;
* the products of a sum follow each other without a wait, and what else the chain has to do it does
  while they are under way;
* the state is kept divided by a power of two for each value channel, ready for float16. That power
  is a bound, known before the state is: a look at the new numbers would be one more wait.

Tried and slower: outputs that are normed here, for which the two halves of a head exchange sums of
squares through memory, in a cluster: 756 us for 8,192 tokens, 634 without. With the largest numbers
of the state themselves instead of the bound it is 619, and 615 as it is.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas.gated_delta import triton_chunks
from qwen4jax.pallas.mosaic_layouts import SWIZZLED

_CHUNK = triton_chunks.CHUNK.value
_SCALE = triton_chunks.SCALE.value
# value channels of a CTA: the rows of one wgmma
_PART = 64
# exponents to which rows are brought in float16: by their largest number, and by a bound of it,
# which may be 2**9 too high before the 22 bits of two float16 are not there
_LARGEST, _BOUND = 8, 15
# chunks under way: of what the chain reads, and of what only the outputs need
_STAGES, _OUT_STAGES = 3, 2
_MATRIX: Any = plgpu.Layout.WGMMA
_ROW: Any = _MATRIX.reduce(1)
_COLUMN: Any = _MATRIX.reduce(0)


def chunks(qkv, z, a, b, weights, state, count, *, key_heads, activation, eps):
    """See `qwen4jax.pallas.gated_delta.chunks`."""
    heads = state.recurrent.shape[1]
    history, prepared = triton_chunks.prepared(
        qkv, a, b, weights, state, count, key_heads=key_heads
    )
    given = dict(zip(("mixed", "narrow", "solve", "mixing", "scales"), prepared, strict=True))
    # wgmma's registers hold neighbours of a row, so those of the state have to be key channels
    given |= dict(state=jnp.swapaxes(state.recurrent, 2, 3), count=count)
    made = _recur(given, places=qkv.shape[1])
    recurrent = jnp.swapaxes(made["state"], 2, 3)
    out = triton_chunks.finished(made["raw"], z, weights.norm, count, activation, eps, heads)
    return out, dataclasses.replace(state, conv=history, recurrent=recurrent)


# compiled apart, so that a program with many layers lowers one
@functools.partial(jax.jit, static_argnames=("places",))
def _recur(given, *, places):
    """States [B, V, E, K] after `count` tokens, and outputs before their norm, `raw`."""
    rows, heads, value, key = given["state"].shape
    f32, f16, bf16 = jnp.float32, jnp.float16, jnp.bfloat16
    shape = jax.ShapeDtypeStruct
    outs = dict(
        state=shape(given["state"].shape, f32),
        raw=shape((rows, places, heads * value), bf16),
    )
    tiles = functools.partial(plgpu.SMEM, transforms=SWIZZLED)
    scratch: Any = dict(
        k=tiles((_STAGES, _CHUNK, key), f16),
        v=tiles((_STAGES, _CHUNK, _PART), bf16),
        solve=tiles((_STAGES, 2, _CHUNK, _CHUNK), f16),
        scales=plgpu.SMEM((_STAGES, 4, _CHUNK), f32),
        q=tiles((_OUT_STAGES, _CHUNK, key), f16),
        mixing=tiles((_OUT_STAGES, _CHUNK, _CHUNK), f16),
        # from the chain to the outputs, with the powers of two that their rows were divided by
        old=tiles((_PART, key), f16),
        old_power=plgpu.SMEM((_PART,), f32),
        delta=tiles((_PART, _CHUNK), f16),
        delta_power=plgpu.SMEM((_PART,), f32),
        out=tiles((_CHUNK, _PART), bf16),
        full=plgpu.Barrier(num_arrivals=4, num_barriers=_STAGES),
        out_full=plgpu.Barrier(num_arrivals=2, num_barriers=_OUT_STAGES),
        old_here=plgpu.Barrier(),
        old_free=plgpu.Barrier(),
        delta_here=plgpu.Barrier(),
        delta_free=plgpu.Barrier(),
    )

    def kernel(given, outs, scratch):
        part, row, role = (lax.axis_index(name) for name in ("part", "row", "role"))
        number = (given["count"][row] + _CHUNK - 1) // _CHUNK
        where = row, part // (value // _PART), lax.rem(part, value // _PART) * _PART, number

        @pl.when(role == 0)
        def _():
            _chain(given, outs, scratch, where)

        @pl.when(role == 1)
        def _():
            _outputs(given, outs, scratch, where)

    kernel.__name__ = f"gated_delta_recur_{rows}x{places}"
    return plgpu.kernel(
        kernel,
        out_type=outs,
        grid=(heads * value // _PART, rows),
        grid_names=("part", "row"),
        num_threads=2,
        thread_name="role",
        scratch_types=[scratch],
    )(given)


def _chain(given, outs, scratch, where):
    """The state after all chunks; what an output needs of it on the way goes to shared memory."""
    row, head, first, number = where
    own = row, head, pl.ds(first, _PART)
    key = scratch["k"].shape[2]
    s = plgpu.load(given["state"].at[own], layout=_MATRIX, optimized=False)
    # 0 where no token comes: the state stays bit for bit
    size = _size(s) * jnp.minimum(number, 1)

    def one(chunk, carry):
        # the state is `s * 2**s_size`
        s, s_size = carry
        slot = lax.rem(chunk, _STAGES)
        plgpu.barrier_wait(scratch["full"].at[slot])
        k, solve, scales = (scratch[name].at[slot] for name in ("k", "solve", "scales"))

        def read_state(acc):
            old = _multiply(acc, s, k.T)
            _hand_over(scratch, "old", old, _power(s_size), chunk)
            v = plgpu.load(scratch["v"].at[slot].T, layout=_MATRIX, optimized=False)
            total = plgpu.load(scales.at[3], layout=_ROW, optimized=False)
            largest = jnp.maximum(_exponent(jnp.max(jnp.abs(s), axis=1)), -60)
            return acc[...], v.astype(jnp.float32), total, largest

        read, v, total, largest = accumulate(read_state, _PART, _CHUNK)
        since = plgpu.load(scales.at[0], layout=_COLUMN, optimized=False)
        right = v - read * _rows(_power(s_size), read) * _columns(since, read)
        size = _size(right)
        right = right * _rows(_power(-size), right)

        def correct(acc):
            _multiply(acc, right, solve.at[0].T, solve.at[1].T)
            return acc[...]

        delta = accumulate(correct, _PART, _CHUNK) * (1 / _SCALE)
        rest = plgpu.load(scales.at[2], layout=_COLUMN, optimized=False)
        # a chunk may have decayed to far below its corrections: again a power of its own
        pushed = delta * _columns(rest, delta)
        more = _size(pushed)
        pushed = pushed * _rows(_power(-more), pushed)

        def push(acc):
            _multiply(acc, pushed, k)
            halved = delta.astype(jnp.float16)
            _hand_over(scratch, "delta", halved, _power(size) * (1 / _SCALE), chunk)
            # the sum is below 2**(the larger one + 1): what is kept, and 64 products of what is
            # pushed with keys below 2
            fade = _exponent(total)
            bound = jnp.maximum(s_size + largest + fade + 2, size + more + _LARGEST + 8) + 1
            to = jnp.minimum(jnp.maximum(bound, -80), 120) - _BOUND
            keep = _mantissa(total) * _power(jnp.maximum(s_size - to + fade, -126))
            keep = jnp.where(total > 0, keep, jnp.zeros_like(keep))
            return acc[...], keep, _power(jnp.maximum(size + more - to, -126)), to

        added, keep, add, to = accumulate(push, _PART, key)
        # added up here: tensor cores cut sums off, and the state must not shrink with every chunk
        return s * _rows(keep, s) + added * _rows(add, added), to

    s, size = lax.fori_loop(0, number, one, (s * _rows(_power(-size), s), size))

    @pl.when(number > 0)
    def _():
        plgpu.barrier_wait(scratch["old_free"])
        plgpu.barrier_wait(scratch["delta_free"])

    outs["state"].at[own][...] = s * _rows(_power(size), s)


def _hand_over(scratch, name, x, power, chunk):
    """Gives the outputs' warpgroup a matrix once it is done with the last chunk's."""

    @pl.when(chunk > 0)
    def _():
        plgpu.barrier_wait(scratch[f"{name}_free"])

    scratch[name][...] = x
    scratch[f"{name}_power"][...] = power
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch[f"{name}_here"])


def _outputs(given, outs, scratch, where):
    """Asks for all operands, and makes the outputs."""
    row, head, first, number = where
    (_, heads, value, _), key_heads = given["state"].shape, given["narrow"].shape[3]
    key_head = head // (heads // key_heads)
    first += head * value
    own = pl.ds(first, _PART)

    def ask(chunk, stages, full, sources):
        @pl.when(chunk < number)
        def _():
            slot = lax.rem(chunk, stages)
            for name, source in sources.items():
                plgpu.copy_gmem_to_smem(source, scratch[name].at[slot], full.at[slot])

    def ask_for_chain(chunk):
        tokens = pl.ds(chunk * _CHUNK, _CHUNK)
        sources = dict(
            k=given["narrow"].at[row, tokens, 1, key_head],
            v=given["mixed"].at[row, tokens, own],
            solve=given["solve"].at[row, chunk, head],
            scales=given["scales"].at[row, chunk, head],
        )
        ask(chunk, _STAGES, scratch["full"], sources)

    def ask_for_outputs(chunk):
        tokens = pl.ds(chunk * _CHUNK, _CHUNK)
        sources = dict(
            q=given["narrow"].at[row, tokens, 0, key_head],
            mixing=given["mixing"].at[row, chunk, head],
        )
        ask(chunk, _OUT_STAGES, scratch["out_full"], sources)

    ask_for_chain(0)
    ask_for_outputs(0)
    if given["mixing"].shape[1] > 1:
        ask_for_chain(1)

    def one(chunk, carry):
        slot, out_slot = lax.rem(chunk, _STAGES), lax.rem(chunk, _OUT_STAGES)
        tokens = pl.ds(chunk * _CHUNK, _CHUNK)
        plgpu.barrier_wait(scratch["old_here"])
        # both warpgroups are done with the chunk before, whose place these take
        ask_for_chain(chunk + 2)
        ask_for_outputs(chunk + 1)
        plgpu.barrier_wait(scratch["full"].at[slot])
        plgpu.barrier_wait(scratch["out_full"].at[out_slot])
        out = _take(scratch, "old", scratch["q"].at[out_slot].T)
        scale = plgpu.load(scratch["scales"].at[slot, 1], layout=_COLUMN, optimized=False)
        out = out * _columns(scale, out)
        plgpu.barrier_wait(scratch["delta_here"])
        out = out + _take(scratch, "delta", scratch["mixing"].at[out_slot].T)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch["out"].T[...] = plgpu.layout_cast(out.astype(jnp.bfloat16), _MATRIX)
        plgpu.commit_smem()
        # what is behind the last place TMA leaves out
        plgpu.copy_smem_to_gmem(scratch["out"], outs["raw"].at[row, tokens, own])
        return carry

    lax.fori_loop(0, number, one, ())
    plgpu.wait_smem_to_gmem(0)


def _take(scratch, name, right):
    """The product of what the chain handed over, whose place is free then."""

    def run(acc):
        plgpu.wgmma(acc, scratch[name], right)
        return acc[...]

    product = accumulate(run, _PART, _CHUNK)
    power = plgpu.load(scratch[f"{name}_power"], layout=_ROW, optimized=False)
    plgpu.barrier_arrive(scratch[f"{name}_free"])
    return product * _rows(power, product)


def accumulate(run, rows, columns):
    """`run` with an accumulator, after whose products it waits by reading it."""
    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32))


def _multiply(acc, x, right, right_low=None):
    """Adds the product of `x`, to 22 bits, and `right`; returns the larger part of `x`."""
    high = x.astype(jnp.float16)
    # under way while the rest is made
    plgpu.wgmma(acc, high, right)
    if right_low is not None:
        plgpu.wgmma(acc, high, right_low)
    plgpu.wgmma(acc, (x - high.astype(jnp.float32)).astype(jnp.float16), right)
    return high


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def _exponent(x):
    """The power of two not above `x`, which is not negative."""
    return lax.shift_right_arithmetic(_bits(x), jnp.int32(23)) - 127


def _power(exponent):
    """`2**exponent` of a normal number."""
    return lax.bitcast_convert_type(lax.shift_left(exponent + 127, jnp.int32(23)), jnp.float32)


def _mantissa(x):
    """`x`, which is not negative, by its power of two."""
    return lax.bitcast_convert_type((_bits(x) & 0x7FFFFF) | 0x3F800000, jnp.float32)


def _size(x):
    """Exponents of the powers of two that rows of `x` are divided by to go into float16.

    They are cut where a power or its inverse would not be a normal number.
    """
    largest = _exponent(jnp.max(jnp.abs(x), axis=1))
    return jnp.minimum(jnp.maximum(largest, -80), 120) - _LARGEST


def _rows(x, like):
    return lax.broadcast_in_dim(x, like.shape, (0,))


def _columns(x, like):
    return lax.broadcast_in_dim(x, like.shape, (1,))
