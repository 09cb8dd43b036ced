# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""The weighted sum of a token's experts, the shared one last."""

import triton
import triton.language as tl

# columns of a program of `combine_kernel`
COMBINED = 512


@triton.jit
def total(
    parts,
    own,
    weights,
    logit,
    token,
    at,
    there,
    inside,
    K: tl.constexpr,
    D: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Sums over the choices of some tokens, in their order, at some columns; the shared one last.

    `own` has its part of each token.
    Past the first cache: other multiprocessors wrote the parts, maybe a moment ago.
    """
    live = there[:, None] & inside[None, :]
    y = tl.zeros((token.shape[0], at.shape[0]), tl.float32)
    for j in tl.static_range(K):
        share = tl.load(weights + token * K + j, there, 0.0)
        from_ = parts + (token * K + j)[:, None] * D + at[None, :]
        y += share[:, None] * tl.load(from_, live, 0.0, cache_modifier=".cg")
    if SHARED > 0:
        share = tl.sigmoid(tl.load(logit + token, there, 0.0))
        from_ = own + token[:, None] * D + at[None, :]
        y += share[:, None] * tl.load(from_, live, 0.0, cache_modifier=".cg")
    return y


@triton.jit
def combine_kernel(
    parts,
    own,
    weights,
    logit,
    out,
    T: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    OWN: tl.constexpr,
):
    """out[t], the sum of token t's parts: grid (D/BLOCK, T); see `triton_down.down_kernel`.

    The shared expert's stand in row OWN of `own` and those below it.
    """
    token = tl.program_id(1) + tl.arange(0, 1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own += OWN * D
    y = total(parts, own, weights, logit, token, at, token < T, at < D, K, D, SHARED)
    to = out + token[:, None] * D + at[None, :]
    tl.store(to, y.to(out.dtype.element_ty), (at < D)[None, :])
