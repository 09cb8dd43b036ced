# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""The splits of each query's selection put together, in their order, and its gate."""

import jax
import triton
import triton.language as tl

from qwen4jax.pallas.triton_call import triton_call

# channels of a program: up to the 33 parts that 4 queries have, and of more, which a single one has
_CHANNELS, _FEW_PARTS, _FEW_CHANNELS = 64, 33, 32


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
    columns = _CHANNELS if total <= _FEW_PARTS else _FEW_CHANNELS
    return triton_call(
        parts,
        weights,
        gate,
        kernel=_merge,
        name=f"sparse_attention_merge_{name}",
        out=jax.ShapeDtypeStruct((rows, places, heads * channels), gate.dtype),
        grid=(rows * places * heads, -(-channels // columns)),
        num_warps=4,
        num_stages=1,
        PARTS=total,
        PARTS_UP=triton.next_power_of_2(total),
        CHANNELS=channels,
        SLICE=min(columns, triton.next_power_of_2(channels)),
    )


@triton.jit
def _merge(
    part_ptr,
    weight_ptr,
    gate_ptr,
    out_ptr,
    PARTS: tl.constexpr,
    PARTS_UP: tl.constexpr,
    CHANNELS: tl.constexpr,
    SLICE: tl.constexpr,
):
    head = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_UP)
    channel = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    inside = channel < CHANNELS
    log = tl.load(weight_ptr + head * PARTS + part, mask=part < PARTS, other=float("-inf"))
    at = (head * PARTS + part)[:, None] * CHANNELS + channel[None, :]
    there = (part < PARTS)[:, None] & inside[None, :]
    value = tl.load(part_ptr + at, mask=there, other=0.0)
    gate = tl.load(gate_ptr + head * CHANNELS + channel, mask=inside, other=0.0).to(tl.float32)
    top = tl.max(log, 0)
    weight = tl.exp2(log - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight, 0)
    out = tl.sum(value * weight[:, None], 0) / tl.where(total == 0, 1.0, total)
    out = out * tl.sigmoid(gate)
    tl.store(out_ptr + head * CHANNELS + channel, out.to(out_ptr.dtype.element_ty), mask=inside)
