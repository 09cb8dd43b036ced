# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Triton kernels of Gated DeltaNet's commit: all layers by one launch.

Bytes decide: a layer's state is 3.1 MB a row (48 heads of 64 KiB), read and written where a token
stays: 36 layers and one row are 226 MB, 54 us at 4.2 TB/s. Nothing waits for a commit but the next
round, so one launch serves all layers, where 36 of them took 229 us: each had a start and an end
of its own, at which the memory is idle.
"""

import dataclasses

import jax
import triton
import triton.language as tl

from qwen4jax.pallas.gated_delta import reference
from qwen4jax.pallas.triton_call import default_route, triton_call

_DECAY_FLOOR = tl.constexpr(reference.DECAY_FLOOR)


@triton.jit
def _of_layer(pointers, layer, LAYERS: tl.constexpr):
    """One layer's pointer: a chain of selects, as parameters cannot be indexed by a number."""
    chosen = pointers[0]
    for i in tl.static_range(1, LAYERS):
        chosen = tl.where(layer == i, pointers[i], chosen)
    return chosen


@triton.jit
def _state_part(V: tl.constexpr, K: tl.constexpr, E: tl.constexpr, KB: tl.constexpr):
    """Where a program's `KB` key channels of one row's value head are in a layer's state."""
    head = tl.program_id(0) // (K // KB)
    kk = tl.program_id(0) % (K // KB) * KB + tl.arange(0, KB)
    start = (tl.program_id(1) * V + head).to(tl.int64) * (K * E)
    return start + kk[:, None] * E + tl.arange(0, E)[None, :]


@triton.jit
def _advance(
    s, state, conv, window, key, delta, decay, n,
    T: tl.constexpr, J: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    K: tl.constexpr, E: tl.constexpr, KB: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """Stores the state `s` after `n` > 0 tokens, and `CB` channels of the row's convolution."""
    C: tl.constexpr = 2 * H * K + V * E
    row = tl.program_id(1)
    head = tl.program_id(0) // (K // KB)
    kk = tl.program_id(0) % (K // KB) * KB + tl.arange(0, KB)
    ee = tl.arange(0, E)
    added = tl.zeros((KB, E), tl.float32)
    # decay from each token to the end, summed backwards so that no difference is formed
    after = 0.0
    for i in tl.static_range(T):
        token = row * T + (T - 1 - i)
        stays = T - 1 - i < n
        k = tl.load(key + (token * H + head // (V // H)) * K + kk, mask=stays, other=0.0)
        d = tl.load(delta + (token * V + head) * E + ee, mask=stays, other=0.0)
        added += (k * tl.exp(after))[:, None] * d[None, :]
        g = tl.load(decay + token * V + head, mask=stays, other=0.0)
        after += tl.maximum(g, _DECAY_FLOOR)
    tl.store(state + _state_part(V, K, E, KB), s * tl.exp(after) + added)

    channel = tl.program_id(0) * CB + tl.arange(0, CB)
    for j in tl.static_range(J - 1):
        x = tl.load(window + (row * (T + J - 1) + n + j) * C + channel, mask=channel < C, other=0.0)
        tl.store(conv + (row * (J - 1) + j) * C + channel, x, mask=channel < C)


@triton.jit
def commit_kernel(
    state, conv, window, key, delta, decay, count,
    T: tl.constexpr, J: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    K: tl.constexpr, E: tl.constexpr, KB: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """`KB` key channels of one row's value head of one layer.

    The state is updated in place; rows of which no token stays are left alone.
    """
    # before it is known whether it is needed: one wait for memory less
    s = tl.load(state + _state_part(V, K, E, KB))
    n = tl.load(count + tl.program_id(1))
    if n > 0:
        _advance(s, state, conv, window, key, delta, decay, n, T, J, H, V, K, E, KB, CB)


@triton.jit
def commit_layers_kernel(
    state: tl.tuple, conv: tl.tuple, window: tl.tuple, key: tl.tuple, delta: tl.tuple,
    decay: tl.tuple, count,
    LAYERS: tl.constexpr, T: tl.constexpr, J: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    K: tl.constexpr, E: tl.constexpr, KB: tl.constexpr, CB: tl.constexpr,
):  # fmt: skip
    """`commit_kernel` of all layers: the third axis of the grid."""
    layer = tl.program_id(2)
    own = _of_layer(state, layer, LAYERS)
    s = tl.load(own + _state_part(V, K, E, KB))
    n = tl.load(count + tl.program_id(1))
    if n > 0:
        _advance(
            s, own, _of_layer(conv, layer, LAYERS), _of_layer(window, layer, LAYERS),
            _of_layer(key, layer, LAYERS), _of_layer(delta, layer, LAYERS),
            _of_layer(decay, layer, LAYERS), n, T, J, H, V, K, E, KB, CB,
        )  # fmt: skip


# key channels of a program, all of a released head: 36 layers of one row take 76.9 us on an H200,
# with 32 of them and 8 warps 82.6
_COMMIT_ROWS = 128
_COMMIT_WARPS = 16


def commit(states, factors, count):
    """See `qwen4jax.pallas.gated_delta.commit`; all layers by one launch."""
    if default_route() == "native" and len(states) > 1:
        return _commit_layers(states, factors, count)
    # jax-triton has no parameters of several arrays
    return tuple(_commit_one(*layer, count) for layer in zip(states, factors, strict=True))


def _commit_one(state, factors, count):
    grid, sizes = _commit_sizes(state, factors)
    recurrent, conv = triton_call(
        state.recurrent, state.conv, factors.window, factors.key, factors.delta, factors.decay,
        count,
        kernel=commit_kernel,
        name=f"gated_delta_commit_{count.size}x{sizes['T']}",
        out=(_like(state.recurrent), _like(state.conv)),
        grid=grid,
        num_warps=_COMMIT_WARPS,
        aliases={0: 0, 1: 1},
        **sizes,
    )  # fmt: skip
    return dataclasses.replace(state, recurrent=recurrent, conv=conv)


def _commit_layers(states, factors, count):
    layers = len(states)
    grid, sizes = _commit_sizes(states[0], factors[0])
    held = [*(s.recurrent for s in states), *(s.conv for s in states)]
    added = [getattr(f, n) for n in ("window", "key", "delta", "decay") for f in factors]
    after = triton_call(
        *held, *added, count,
        kernel=commit_layers_kernel,
        name=f"gated_delta_commit_{layers}x{count.size}x{sizes['T']}",
        out=tuple(_like(x) for x in held),
        grid=(*grid, layers),
        num_warps=_COMMIT_WARPS,
        aliases={i: i for i in range(2 * layers)},
        LAYERS=layers,
        **sizes,
    )  # fmt: skip
    pairs = zip(states, after[:layers], after[layers:], strict=True)
    return tuple(dataclasses.replace(s, recurrent=r, conv=c) for s, r, c in pairs)


def _commit_sizes(state, factors):
    """A layer's grid, and the constants of both commit kernels."""
    rows, places, key_heads, key = factors.key.shape
    _, heads, _, value = state.recurrent.shape
    history, width = state.conv.shape[1:]
    part = min(_COMMIT_ROWS, key)
    programs = heads * (key // part)
    return (programs, rows), dict(
        T=places, J=history + 1, H=key_heads, V=heads, K=key, E=value, KB=part,
        CB=triton.next_power_of_2(triton.cdiv(width, programs)),
    )  # fmt: skip


def _like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
