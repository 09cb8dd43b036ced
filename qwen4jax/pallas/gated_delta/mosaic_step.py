"""Gated DeltaNet's step of up to 8 tokens in Pallas Mosaic GPU, for GPUs that have TMA.

Bytes decide: the state, 64 KiB a head, is read once and not written, 3.1 MB a row (48 heads): 0.7
us at 4.3 TB/s. A call of this language is a captured node of a CUDA graph, which costs more than a
native one on the device and on the host, so a round keeps Triton's form.

A CTA is one row's value head. TMA brings the head's state, window of the convolution and output
gate to shared memory, all asked for at once, and takes the window from there to the factors. Three
warpgroups share the work:

* the first does what is small: convolution, norms, decays and the products between the tokens while
  the state is on its way, then the corrections of the tokens one after the other, a channel to a
  thread, and the gated norm;
* the others multiply the state with the keys and queries of all tokens in one pass (WY form,
  `reference.one_chunk`), each half of the key channels.

The tensor cores would round the state. Order of sums: key channels of a warp (4 apart), then warps.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas.gated_delta.limits import MOSAIC_CHANNELS as CHANNELS
from qwen4jax.pallas.gated_delta.reference import DECAY_FLOOR, UNIT_EPS

_WARPS = 4  # of a warpgroup
# warpgroups that read the state, and rows that each of their warps takes at a time
_READERS, _TOGETHER = 2, 4
_PARTS = _READERS * _WARPS

# [4, 128]: a row to a warp, and four neighbours of it to a lane, or every 32nd, which can be loaded
# from anywhere
_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((_WARPS, CHANNELS), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)
_LINES = plgpu.Layout.TILED(
    plgpu.Tiling(((_WARPS, CHANNELS), (32,), (1,))),
    warp_dims=(-4,),
    lane_dims=(-2,),
    vector_dim=-1,
)
# [.., 128]: a channel to a thread
_THREADS = plgpu.Layout.TILED(
    plgpu.Tiling(((CHANNELS,), (32,), (1,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


# compiled apart, so that a program with many layers lowers one
@functools.partial(jax.jit, static_argnames=("key_heads", "activation", "eps"))
def step(qkv, z, a, b, weights, state, *, key_heads, activation, eps):
    """See `qwen4jax.pallas.gated_delta.step`."""
    rows, places, width = qkv.shape
    _, heads, key, value = state.recurrent.shape
    history = state.conv.shape[1]
    filled = -(-places // _WARPS) * _WARPS
    f32 = jnp.float32
    given = dict(
        qkv=qkv, z=z, a=a, b=b, conv=state.conv,
        taps=weights.conv1d, a_log=weights.A_log, dt_bias=weights.dt_bias, norm=weights.norm,
        state=state.recurrent.reshape(rows * heads, key, value),
    )  # fmt: skip
    shape = jax.ShapeDtypeStruct
    outs = dict(
        out=shape(z.shape, qkv.dtype),
        window=shape((rows, history + places, width), qkv.dtype),
        key=shape((rows, places, key_heads, key), f32),
        delta=shape((rows, places, heads, value), f32),
        decay=shape((rows, places, heads), f32),
    )
    scratch: Any = dict(
        tile=plgpu.SMEM((key, value), f32),
        # of queries, keys and values
        inputs=plgpu.SMEM((3, history + filled, CHANNELS), qkv.dtype),
        gates=plgpu.SMEM((filled, value), z.dtype),
        # queries, then keys; and the products with each key
        normed=plgpu.SMEM((2 * filled, key), f32),
        pairs=plgpu.SMEM((places, 2 * filled), f32),
        parts=plgpu.SMEM((2, places, _PARTS, value), f32),
        delta=plgpu.SMEM((places, value), f32),
        raw=plgpu.SMEM((filled, value), f32),
        out=plgpu.SMEM((filled, value), qkv.dtype),
        tile_here=plgpu.Barrier(),
        inputs_here=plgpu.Barrier(num_arrivals=6),
        gates_here=plgpu.Barrier(),
        normed_here=plgpu.Barrier(),
        parts_here=plgpu.Barrier(num_arrivals=_READERS),
    )
    body = functools.partial(
        _body, groups=heads // key_heads, key_heads=key_heads, activation=activation, eps=eps
    )

    def kernel(given, outs, scratch):
        body(given, outs, scratch)

    kernel.__name__ = f"gated_delta_step_{rows}x{places}"
    made = plgpu.kernel(
        kernel,
        out_type=outs,
        grid=(heads, rows),
        grid_names=("head", "row"),
        num_threads=1 + _READERS,
        thread_name="role",
        scratch_types=[scratch],
    )(given)
    return tuple(made[name] for name in ("out", "window", "key", "delta", "decay"))


def _body(given, outs, scratch, *, groups, key_heads, activation, eps):
    head, row, role = (lax.axis_index(name) for name in ("head", "row", "role"))
    heads = outs["decay"].shape[2]

    @pl.when(role == 0)
    def _():
        at = row * heads + head
        plgpu.copy_gmem_to_smem(given["state"].at[at], scratch["tile"], scratch["tile_here"])
        _first(given, outs, scratch, row, head, groups, key_heads, activation, eps)

    @pl.when(role > 0)
    def _():
        plgpu.barrier_wait(scratch["normed_here"])
        plgpu.barrier_wait(scratch["tile_here"])
        _read(scratch, role - 1)
        plgpu.barrier_arrive(scratch["parts_here"])


def _read(scratch, reader):
    """A part of the state's products with the keys and queries of all tokens, for each warp."""
    tile, normed, parts = scratch["tile"], scratch["normed"], scratch["parts"]
    rows, places = tile.shape[0] // _READERS, parts.shape[1]
    which = [(side, t) for side in range(2) for t in range(places)]
    filled = normed.shape[0] // 2

    def some(i, sums):
        for n in range(_TOGETHER):
            here = pl.ds(reader * rows + (i * _TOGETHER + n) * _WARPS, _WARPS)
            state = _load(tile.at[here], _ROWS)
            factors = [_load(normed.at[s * filled + t, here], _ROWS.reduce(1)) for s, t in which]
            terms = [state * lax.broadcast_in_dim(f, state.shape, (0,)) for f in factors]
            sums = tuple(total + term for total, term in zip(sums, terms, strict=True))
        return sums

    nothing = plgpu.layout_cast(jnp.zeros((_WARPS, CHANNELS), jnp.float32), _ROWS)
    sums = lax.fori_loop(0, rows // (_TOGETHER * _WARPS), some, (nothing,) * len(which))
    for total, (side, t) in zip(sums, which, strict=True):
        parts[side, t, pl.ds(reader * _WARPS, _WARPS)] = total


def _first(given, outs, scratch, row, head, groups, key_heads, activation, eps):
    inputs, normed, pairs = scratch["inputs"], scratch["normed"], scratch["pairs"]
    places, filled = scratch["delta"].shape[0], normed.shape[0] // 2
    history = inputs.shape[1] - filled
    key_head = head // groups
    value_columns = pl.ds(head * CHANNELS, CHANNELS)
    columns = [
        pl.ds(first * CHANNELS, CHANNELS)
        for first in (key_head, key_heads + key_head, 2 * key_heads + head)
    ]
    for i, of in enumerate(columns):
        old, new = inputs.at[i, pl.ds(0, history)], inputs.at[i, pl.ds(history, places)]
        plgpu.copy_gmem_to_smem(given["conv"].at[row, :, of], old, scratch["inputs_here"])
        plgpu.copy_gmem_to_smem(given["qkv"].at[row, :, of], new, scratch["inputs_here"])
    gates = scratch["gates"].at[pl.ds(0, places)]
    plgpu.copy_gmem_to_smem(given["z"].at[row, :, value_columns], gates, scratch["gates_here"])
    plgpu.barrier_wait(scratch["inputs_here"])

    def keep(i):
        whole = inputs.at[i, pl.ds(0, history + places)]
        plgpu.copy_smem_to_gmem(whole, outs["window"].at[row, :, columns[i]])

    keep(2)
    taps = given["taps"]
    dtype = outs["out"].dtype

    def tap(i, j, layout):
        return _load(taps.at[columns[i], j], layout)

    def silu(x):
        return (x * jax.nn.sigmoid(x)).astype(dtype).astype(jnp.float32)

    # the rows behind the last token hold anything, and stay by themselves
    tile = (filled, CHANNELS)
    for i, scale in ((0, CHANNELS**-0.5), (1, 1.0)):
        mixed = None
        for j in range(history + 1):
            x = _load(inputs.at[i, pl.ds(j, filled)], _LINES)
            term = x * lax.broadcast_in_dim(tap(i, j, _LINES.reduce(0)), tile, (1,))
            mixed = term if mixed is None else mixed + term
        mixed = silu(mixed)
        unit = lax.rsqrt(jnp.sum(mixed * mixed, axis=1) + UNIT_EPS) * scale
        mixed = mixed * lax.broadcast_in_dim(unit, tile, (0,))
        normed[pl.ds(i * filled, filled)] = mixed
    plgpu.commit_smem()
    plgpu.barrier_arrive(scratch["normed_here"])

    @pl.when(lax.rem(head, groups) == 0)
    def _():
        keep(0)
        keep(1)
        keys = normed.at[pl.ds(filled, places)]
        plgpu.copy_smem_to_gmem(keys, outs["key"].at[row, :, key_head])

    both = _load(normed, _LINES)
    for t in range(places):
        key = _load(normed.at[filled + t], _LINES.reduce(0))
        pairs[t] = jnp.sum(both * lax.broadcast_in_dim(key, both.shape, (1,)), axis=1)

    values = []
    for t in range(places):
        mixed = None
        for j in range(history + 1):
            term = _load(inputs.at[2, t + j], _THREADS) * tap(2, j, _THREADS)
            mixed = term if mixed is None else mixed + term
        values.append(silu(mixed))
    decays, steps = _gates(given, outs, row, head, places)

    plgpu.barrier_wait(scratch["parts_here"])
    _solve(scratch, values, decays, steps)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch["delta"], outs["delta"].at[row, :, head])

    x = _load(scratch["raw"], _LINES)
    scale = lax.rsqrt(jnp.sum(x * x, axis=1) / CHANNELS + eps)
    gain = _load(given["norm"], _LINES.reduce(0))
    plgpu.barrier_wait(scratch["gates_here"])
    gate = _load(scratch["gates"], _LINES)
    opened = jax.nn.sigmoid(gate)
    if activation != "sigmoid":
        opened = opened * gate
    x = x * lax.broadcast_in_dim(scale, tile, (0,)) * lax.broadcast_in_dim(gain, tile, (1,))
    scratch["out"][...] = (x * opened).astype(dtype)
    plgpu.commit_smem()
    rounded = scratch["out"].at[pl.ds(0, places)]
    plgpu.copy_smem_to_gmem(rounded, outs["out"].at[row, :, value_columns])
    plgpu.wait_smem_to_gmem(0)


def _gates(given, outs, row, head, places):
    """Log decay of each token, no lower than a float32 has use for, and its step size."""
    speed = -jnp.exp(given["a_log"][head].astype(jnp.float32))
    bias = given["dt_bias"][head].astype(jnp.float32)
    decays, steps = [], []
    for t in range(places):
        x = given["a"][row, t, head].astype(jnp.float32) + bias
        decay = speed * (jnp.maximum(x, 0.0) + _log1p(jnp.exp(-jnp.abs(x))))
        outs["decay"][row, t, head] = decay
        decays.append(jnp.maximum(decay, DECAY_FLOOR))
        steps.append(jax.nn.sigmoid(given["b"][row, t, head].astype(jnp.float32)))
    return decays, steps


def _log1p(x):
    """`log(1 + x)` of x in [0, 1], to float32 rounding: 2 atanh(x / (2 + x)) as a series."""
    s = x / (2.0 + x)
    power, total = s * s, jnp.float32(1 / 19)
    for n in range(17, 0, -2):
        total = total * power + 1 / n
    return 2.0 * s * total


def _solve(scratch, values, decays, steps):
    """Corrections of the tokens, each from those before, and their outputs before the norm."""
    pairs, parts = scratch["pairs"], scratch["parts"]
    filled, deltas = pairs.shape[1] // 2, []
    for t, (value, step_size) in enumerate(zip(values, steps, strict=True)):
        from_query, from_key = (jnp.sum(_load(parts.at[i, t], _THREADS), axis=0) for i in (0, 1))
        # log decay between tokens as a sum of its own terms, never a difference of running sums
        between = [sum(decays[j + 1 : t + 1], jnp.float32(0)) for j in range(-1, t)]
        since, *between = map(jnp.exp, between)
        delta = value - since * from_key
        for j, weight in enumerate(between):
            delta = delta - weight * pairs[j, filled + t] * deltas[j]
        deltas.append(step_size * delta)
        out = since * from_query
        for j, weight in enumerate([*between, 1.0]):
            out = out + weight * pairs[j, t] * deltas[j]
        scratch["delta"][t] = deltas[t]
        scratch["raw"][t] = out


def _load(ref: Any, layout: Any) -> Any:
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)
