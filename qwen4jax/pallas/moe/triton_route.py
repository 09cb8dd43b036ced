"""The router's choice, one warp a token.

Latency decides: a row is 512 numbers, 16 a lane, and the 10 choices follow one another. Each takes
two warp-wide integer reductions (probabilities order like their bits), the largest and the first
place that has it; there is no barrier and nothing is sorted.
"""

import triton
import triton.language as tl


@triton.jit
def route_kernel(
    logits,
    ids,
    weights,
    E: tl.constexpr,
    K: tl.constexpr,
    EP: tl.constexpr,
    KP: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    """The K largest of softmax(logits[t]) and where they stand, ties to the lower: grid (T,).

    EP and KP are E and K rounded up to powers of two.
    """
    token = tl.program_id(0)
    e = tl.arange(0, EP)
    j = tl.arange(0, KP)
    logit = tl.load(logits + token * E + e, e < E, -float("inf")).to(tl.float32)
    shares = tl.exp(logit - tl.max(logit, 0))
    shares = shares / tl.sum(shares, 0)
    # a negative number is never chosen, for there are always K experts left that have none; NaN
    # loses its sign, so that this holds of a row of it, too
    bits = tl.where(e < E, shares.to(tl.int32, bitcast=True) & 0x7FFFFFFF, -1)
    chosen = tl.zeros((KP,), tl.int32)
    values = tl.zeros((KP,), tl.int32)
    for i in tl.static_range(K):
        most = tl.max(bits, 0)
        first = tl.min(tl.where(bits == most, e, EP), 0)
        bits = tl.where(e == first, -1, bits)
        chosen = tl.where(j == i, first, chosen)
        values = tl.where(j == i, most, values)
    share = values.to(tl.float32, bitcast=True)
    if RENORMALIZE:
        share = share / tl.sum(share, 0)
    tl.store(ids + token * K + j, chosen, j < K)
    tl.store(weights + token * K + j, share, j < K)
