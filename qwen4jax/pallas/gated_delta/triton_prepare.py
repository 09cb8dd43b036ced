# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Triton kernel of what a chunk of 64 tokens needs before it knows its state: see `triton_chunks`.

Queries and keys are bfloat16 by powers of two, so exact operands; what is left to unit norm are
factors of rows and columns. The triangular system is inverted in float32 and kept to 22 bits.
"""

import triton
import triton.language as tl

from qwen4jax.pallas.gated_delta import reference
from qwen4jax.pallas.triton_math import exp, softplus

# tokens of a chunk: the rows of one tensor-core instruction
CHUNK = tl.constexpr(64)
# rows that are solved one by one, each after those above it
_BLOCK = tl.constexpr(16)
# what is kept in float16 is at most 1 (steps and unit norms are) and grows by this: its lowest
# digits, 2**-24 absolute, are then 2**-36
SCALE = tl.constexpr(4096.0)
_DECAY_FLOOR = tl.constexpr(reference.DECAY_FLOOR)
# grid on which sums of 64 decays are exact in float32: 88 * 64 < 2**13
_GRID = tl.constexpr(1024.0)


@triton.jit
def split(x):
    """A float32 as the sum of two float16: 22 bits, where it is neither large nor tiny."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def power(exponent):
    """`2**exponent` of a normal number."""
    return ((127 + exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponent_of(x):
    """The power of two not above `x`, which is not negative."""
    return (x.to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _gates(a, b, a_log, dt_bias, here):
    """Log decay and step size of tokens from their logits; neutral where none is `here`."""
    g = a.to(tl.float32) + dt_bias.to(tl.float32)
    g = softplus(g)
    g = -tl.exp(a_log.to(tl.float32)) * g
    beta = tl.sigmoid(b.to(tl.float32))
    return tl.where(here, tl.maximum(g, _DECAY_FLOOR), 0.0), tl.where(here, beta, 0.0)


@triton.jit
def _four(at, N: tl.constexpr):
    """Four neighbours from each of `N` addresses, by one load of 16 bytes."""
    even, odd = tl.load(at[:, None] + tl.arange(0, 4)[None, :]).reshape(N, 2, 2).split()
    first, third = even.split()
    second, fourth = odd.split()
    return first, second, third, fourth


@triton.jit
def _invert_blocks(m, heads):
    """In place: `A` in each diagonal block of 16 rows becomes `(I + A)^-1`, for one or two heads.

    A thread solves for a column, row by row: nothing passes between threads. For one head two do
    for the same one, as Triton gives a load of 16 bytes only to a tensor that has four values for
    each of them.
    """
    column = tl.arange(0, 2 * CHUNK)
    c = column % CHUNK
    own = m + tl.minimum(column // CHUNK, heads - 1) * (CHUNK * CHUNK)
    own += c // _BLOCK * (_BLOCK * CHUNK + _BLOCK)
    solved, minus = (), ()
    for i in tl.static_range(_BLOCK):
        x = tl.where(c % _BLOCK == i, 1.0, 0.0)
        for j in tl.static_range(0, i, 4):
            four = _four(own + (i * CHUNK + j), 2 * CHUNK)
            for k in tl.static_range(4):
                if j + k < i:
                    x = tl.fma(four[k], minus[j + k], x)
        # Triton knows no stars
        solved, minus = solved + (x,), minus + (-x,)  # noqa: RUF005
    tl.debug_barrier()
    for i in tl.static_range(_BLOCK):
        tl.store(own + i * CHUNK + c % _BLOCK, solved[i], mask=column < heads * CHUNK)
    tl.debug_barrier()


@triton.jit
def _product(x, y):
    """`x y` of matrices with entries up to about 1, to 22 bits of the largest."""
    x, x_low = split(x * SCALE)
    y, y_low = split(y * SCALE)
    return tl.dot(x, y, tl.dot(x, y_low, tl.dot(x_low, y))) * (1 / SCALE / SCALE)


@triton.jit
def _join(m, N: tl.constexpr, PADDED: tl.constexpr, SIZE: tl.constexpr):
    """In place: `N` inverses of `2 SIZE` rows from those of their halves.

    The inverse of `[[A, 0], [X, B]]` is `[[A', 0], [-B' X A', B']]`. A head's come one after the
    other, then the next head's. `PADDED` is a power of two.
    """
    PER: tl.constexpr = CHUNK // (2 * SIZE)
    n, i = tl.arange(0, PADDED), tl.arange(0, SIZE)
    own = tl.minimum(n, N - 1)
    start = m + own // PER * (CHUNK * CHUNK) + own % PER * (2 * SIZE * (CHUNK + 1))
    at = start[:, None, None] + i[None, :, None] * CHUNK + i[None, None, :]
    corner = at + SIZE * CHUNK
    x = _product(_product(tl.load(corner + SIZE), tl.load(corner)), tl.load(at))
    tl.debug_barrier()
    tl.store(corner, -x, mask=(n < N)[:, None, None])
    tl.debug_barrier()


@triton.jit
def _column(x, i):
    """Column `i` of [CHUNK, a power of two]."""
    own = (tl.arange(0, x.shape[1]) == i)[None, :]
    return tl.sum(tl.where(own, x, 0.0), axis=1)


@triton.jit
def prepare_kernel(
    narrow, units, a, b, a_log, dt_bias, count,
    solve, mixing, scales,
    T: tl.constexpr, N: tl.constexpr, H: tl.constexpr, V: tl.constexpr,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
):  # fmt: skip
    """One chunk of `G` value heads of a key head: all that does not depend on the state.

    `GP` is the power of two not below `G`.
    `solve` is `(I + A)^-1 diag(beta)` with `A = beta_i k_i k_j exp(g_j+1 + ... + g_i)` below the
    diagonal, as two float16 matrices in the memory of one of float32, where it is also inverted;
    `mixing` has the products of queries with keys; `scales` the factors of rows.
    """
    SQUARE: tl.constexpr = CHUNK * CHUNK
    chunk, row = tl.program_id(0), tl.program_id(2)
    head = tl.program_id(1) * G
    t, h = tl.arange(0, CHUNK), tl.arange(0, GP)
    tokens = row.to(tl.int64) * (N * CHUNK) + chunk * CHUNK + t
    key_head, kk = head // (V // H), tl.arange(0, K)
    # all at once, as a load behind a branch waits for those before it
    n = tl.load(count + row)
    at = narrow + (tokens * (2 * H) + key_head)[:, None] * K + kk[None, :]
    q = tl.load(at)
    q_unit = tl.load(units + tokens * (2 * H) + key_head)
    k_unit = tl.load(units + tokens * (2 * H) + H + key_head)
    token = chunk * CHUNK + t
    gate = ((row * T + token) * V + head)[:, None] + h[None, :]
    there = (token < T)[:, None] & (h < G)[None, :]
    a = tl.load(a + gate, mask=there, other=0.0)
    b = tl.load(b + gate, mask=there, other=0.0)
    of = head + tl.minimum(h, G - 1)
    a_log, dt_bias = tl.load(a_log + of)[None, :], tl.load(dt_bias + of)[None, :]
    if chunk * CHUNK < n:
        k = tl.load(at + H * K)

        g, beta = _gates(a, b, a_log, dt_bias, (token < n)[:, None])
        # sums of the coarse parts are exact and those of the rest small: a difference of two sums
        # is then as good as a sum of the tokens between them
        coarse = tl.floor(g * _GRID + 0.5) / _GRID
        parts = tl.join(coarse, g - coarse)
        total_coarse, total_fine = tl.sum(parts, axis=0).split()
        coarse, fine = tl.cumsum(parts, axis=0).split()
        since = exp(coarse + fine)
        left = (total_coarse[None, :] - coarse) + (total_fine[None, :] - fine)
        rest = exp(tl.minimum(left, 0.0))

        part = (row * N + chunk) * V + head
        to = scales + (part + h)[None, :] * (4 * CHUNK) + t[:, None]
        here = (h < G)[None, :] & (t >= 0)[:, None]
        tl.store(to, since * k_unit[:, None], mask=here)
        tl.store(to + CHUNK, since * (q_unit * K**-0.5)[:, None], mask=here)
        tl.store(to + 2 * CHUNK, rest * k_unit[:, None], mask=here)
        whole = exp(total_coarse + total_fine)[None, :] + tl.zeros_like(rest)
        tl.store(to + 3 * CHUNK, whole, mask=here)

        start = part.to(tl.int64) * SQUARE
        square = t[:, None] * CHUNK + t[None, :]
        lower, below = t[:, None] >= t[None, :], t[:, None] > t[None, :]
        mixed_pairs = tl.dot(q, tl.trans(k)) * (q_unit * (SCALE * K**-0.5))[:, None]
        mixed_pairs = tl.where(lower, mixed_pairs * k_unit[None, :], 0.0)
        pairs = tl.where(below, tl.dot(k, tl.trans(k)) * k_unit[:, None] * k_unit[None, :], 0.0)
        m = solve.to(tl.pointer_type(tl.float32), bitcast=True) + start
        for i in tl.range(G, num_stages=1):
            coarse_i, fine_i = _column(coarse, i), _column(fine, i)
            between = coarse_i[:, None] - coarse_i[None, :]
            between += fine_i[:, None] - fine_i[None, :]
            weight = exp(tl.minimum(between, 0.0))
            tl.store(mixing + start + i * SQUARE + square, (mixed_pairs * weight).to(tl.float16))
            tl.store(m + i * SQUARE + square, pairs * weight * _column(beta, i)[:, None])
        tl.debug_barrier()
        for i in tl.range(0, G, 2, num_stages=1):
            _invert_blocks(m + i * SQUARE, tl.minimum(G - i, 2))
        _join(m, 2 * G, 2 * GP, _BLOCK)
        _join(m, G, GP, 2 * _BLOCK)
        to = solve + 2 * start + square
        for i in tl.range(G, num_stages=1):
            inverse = tl.load(m + i * SQUARE + square)
            high, low = split(inverse * (_column(beta, i) * SCALE)[None, :])
            tl.debug_barrier()
            tl.store(to + 2 * i * SQUARE, high)
            tl.store(to + (2 * i + 1) * SQUARE, low)
