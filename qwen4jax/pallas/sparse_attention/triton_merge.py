# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""The splits of each query's selection put together, in their order, and its gate.

A thread has one channel and goes through the parts by itself, so that threads exchange nothing; of
the parts of a single query, which are many for few programs, through a quarter. All that it reads
is asked for before anything is waited for.
"""

import jax
import triton
import triton.language as tl

from qwen4jax.pallas.triton_call import triton_call

# parts up to which a program has so many channels, and so many threads share a channel's parts
_SHAPES = ((16, 128, 1), (33, 64, 1))
_MORE = (64, 4)


def merge(parts, weights, gate, *, name):
    """Gated attention from that to each part of a selection.

    Args:
        parts: float32 `[queries, heads, parts, channels]`.
        weights: float32 `[queries, heads, parts]`, binary logarithms of the softmax's denominators.
        gate: of the shape and dtype of queries, `[B, T, heads, channels]`.
        name: of the call that made the parts.
    """
    rows, places, heads, channels = gate.shape
    total = parts.shape[2]
    columns, groups = next((shape for most, *shape in _SHAPES if total <= most), _MORE)
    return triton_call(
        parts,
        weights,
        gate,
        kernel=_merge,
        name=f"sparse_attention_merge_{name}",
        out=jax.ShapeDtypeStruct((rows, places, heads * channels), gate.dtype),
        grid=(rows * places * heads, -(-channels // columns)),
        num_warps=groups * columns // 32,
        num_stages=1,
        PARTS=total,
        CHANNELS=channels,
        SLICE=columns,
        GROUPS=groups,
    )


@triton.jit
def _merge(
    part_ptr,
    weight_ptr,
    gate_ptr,
    out_ptr,
    PARTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLICE: tl.constexpr,
    GROUPS: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    # one axis of threads: with two, weights and values would be loaded in different orders of them
    thread = tl.arange(0, GROUPS * SLICE)
    group = thread // SLICE
    column = tl.program_id(1) * SLICE + thread % SLICE
    EACH: tl.constexpr = (PARTS + GROUPS - 1) // GROUPS
    logs, values = (), ()
    for i in tl.static_range(EACH):
        part = group * EACH + i
        there = part < PARTS
        log = tl.load(weight_ptr + head * PARTS + part, mask=there, other=float("-inf"))
        at = (head * PARTS + part) * CHANNELS + column
        value = tl.load(part_ptr + at, mask=there & (column < CHANNELS), other=0.0)
        logs, values = logs + (log,), values + (value,)  # noqa: RUF005
    channel = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = channel < CHANNELS
    gate = tl.load(gate_ptr + head * CHANNELS + channel, mask=inside, other=0.0)
    # keeps the loads above it
    tl.debug_barrier()

    top = logs[0]
    for i in tl.static_range(1, EACH):
        top = tl.maximum(top, logs[i])
    if GROUPS > 1:
        both = tl.broadcast_to(
            tl.max(tl.reshape(top, (GROUPS, SLICE)), 0)[None, :], (GROUPS, SLICE)
        )
        top = tl.reshape(both, (GROUPS * SLICE,))
    top = tl.where(top == float("-inf"), 0.0, top)
    total, out = tl.zeros_like(top), tl.zeros_like(top)
    for i in tl.static_range(EACH):
        weight = tl.exp2(logs[i] - top)
        total += weight
        out += values[i] * weight
    if GROUPS > 1:
        sums = (tl.reshape(out, (GROUPS, SLICE)), tl.reshape(total, (GROUPS, SLICE)))
        out, total = tl.reduce(sums, 0, _add)
    out = out / tl.where(total == 0, 1.0, total) * tl.sigmoid(gate.to(tl.float32))
    tl.store(out_ptr + head * CHANNELS + channel, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _add(out, total, other_out, other_total):
    return out + other_out, total + other_total
