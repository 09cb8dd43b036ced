# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""The router for many tokens: products by tiles of tokens, and a second launch that chooses.

Latency decides here too: of 128 tokens all bytes are 3.3 MB, 0.8 us at 4.3 TB/s. A program of the
first launch has 64 rows of the weights and a slice of the columns, and asks for nearly all of them
at once. The second adds the slices up in their order, and is what chooses in `triton_router`. An
H200 takes 8.0 us for 128 tokens, and 10.0 by `projections` and `route`.
"""

import triton
import triton.language as tl

from qwen4jax.pallas.moe import limits
from qwen4jax.pallas.moe.triton_router import ROWS, choose, load_parts

# rows of the weights of a program, and columns of a step
_TILE = tl.constexpr(limits.MANY_ROWS)
_BLOCK = tl.constexpr(limits.MANY_COLUMNS)


@triton.jit
def parts_kernel(
    x,
    weight,
    shared_weight,
    parts,
    T: tl.constexpr,
    E: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Sums of 64 rows over a slice of the columns: grid (blocks of tokens, slices, E / 64 + 1).

    Args:
        x: tokens [T, D].
        weight: [E, D].
        shared_weight: [1, D], of the shared expert's gate, the last tile's.
        parts: float32 [slices, T, E + 16], the shared expert's in column E.
        T: tokens.
        E: experts, in multiples of 16.
        D: hidden size, in multiples of 64.
        TOKENS: of a block.
    """
    block, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slices = tl.num_programs(1)
    STEPS: tl.constexpr = D // _BLOCK
    row = tl.arange(0, _TILE)
    if tile < tl.num_programs(2) - 1:
        first = tile * _TILE
        matrix, last = weight + first * D, tl.minimum(E - first, _TILE) - 1
    else:
        first = E
        matrix, last = shared_weight, 0
    token = block * TOKENS + tl.arange(0, TOKENS)
    column = tl.arange(0, _BLOCK)
    w = matrix + tl.minimum(row, last)[:, None] * D + column[None, :]
    t = x + token[:, None] * D + column[None, :]
    acc = tl.zeros((TOKENS, _TILE), tl.float32)
    for step in tl.range(part * STEPS // slices, (part + 1) * STEPS // slices):
        left = tl.load(t + step * _BLOCK, (token < T)[:, None], 0.0)
        acc = tl.dot(left, tl.load(w + step * _BLOCK).T, acc)
    place = parts + (part * T + token)[:, None] * (E + ROWS) + (first + row)[None, :]
    if tile < E // _TILE:
        # 16 bytes at once
        tl.store(place, acc, (token < T)[:, None])
    else:
        tl.store(place, acc, (token < T)[:, None] & (row <= last)[None, :])


@triton.jit
def choose_kernel(
    parts,
    ids,
    shares,
    shared,
    T: tl.constexpr,
    E: tl.constexpr,
    K: tl.constexpr,
    R: tl.constexpr,
    KP: tl.constexpr,
    SLICES: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """One warp chooses for a token, as those of `triton_router.router_kernel`: grid (T,).

    Args:
        parts: of `parts_kernel`.
        ids: experts [T, K].
        shares: float32 [T, K].
        shared: float32 [T, 1], the shared expert's logit.
        T: tokens.
        E: experts.
        K: choices of a token.
        R: E over 128, rounded up to a power of two.
        KP: K rounded up to a power of two.
        SLICES: of the columns.
        RENORMALIZE: whether the shares of the chosen sum to one.
    """
    token = tl.program_id(0)
    loaded, gate = load_parts(parts, token, T, E, R, 1, SLICES, 1)
    # loads stay above the barrier, and below the branch, which is always taken, what needs them
    tl.debug_barrier()
    if token < T:
        choose(loaded, gate, ids, shares, shared, token, T, E, K, R, 1, KP, SLICES, 1, RENORMALIZE)
