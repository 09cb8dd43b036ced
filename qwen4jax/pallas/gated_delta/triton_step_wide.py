# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportAssignmentType=false
"""Triton kernel of Gated DeltaNet's step for bfloat16 and heads of 128 channels: on tensor cores.

A program is one row's value head. `mma` takes its operands from registers as they lie there: lane
`4 g + t` of a warp gives rows `g` and `g + 8` of the left matrix and column `g` of the right one,
of both the keys that `t` stands for. With the right keys in the right lane the state goes from
memory to the tensor cores by loads of 16 bytes, and nothing passes between threads but the sums at
the end. Triton has no such load, but inline assembly takes a tensor of as many elements as threads
as what it is, a register of each. Queries and keys pass through shared memory of the same making,
and the products between them come from the same registers: two barriers are left in all.

Precision: queries and keys are bfloat16 and exact in the tensor cores' float32 of 10 fraction bits
(tf32); a number of the state is the sum of two of those, 22 bits of it.

On an H200, 4 tokens: one row 5.5 us, where float32 arithmetic with a thread for each column took
8.6, and 32 rows 41 us instead of 60. With few programs all of the state is asked for before the
convolution is computed. With many it pays more that four programs fit on a multiprocessor, by
asking for most of it late, and having it sent to the cache ahead then only costs.
"""

import triton
import triton.language as tl

from qwen4jax.pallas.gated_delta import reference
from qwen4jax.pallas.gated_delta.triton_step_parts import (
    convolved,
    gate,
    keep,
    log_decay,
    normed,
    raw_inputs,
    solved,
    split_columns,
    weights_of,
)
from qwen4jax.pallas.triton_math import exp, sigmoid

_DECAY_FLOOR = tl.constexpr(reference.DECAY_FLOOR)

_MULTIPLY = tl.constexpr(
    "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)
_MULTIPLY_PAIRS = tl.constexpr(
    "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
    "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
)
_MULTIPLIED = tl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f")
_FROM = tl.constexpr("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;")
# bytes from a vector of 128 bfloat16 in shared memory to the next, which thereby starts in other
# banks; and the words of 16 vectors
_STRIDE = tl.constexpr(320)
_ALLOCATE = tl.constexpr("{ .shared .align 16 .b32 words[1280]; mov.b32 $0, words; }")
_PUT_HIGH = tl.constexpr(
    "{ .reg .b32 w; .reg .b16 h; shr.u32 w, $2, 16; cvt.u16.u32 h, w; "
    "st.shared.b16 [$1], h; mov.b32 $0, 0; }"
)
_GET_4 = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")


@triton.jit
def _put(memory, vector: tl.constexpr, x, K: tl.constexpr):
    """Writes a vector, whose numbers are exact in bfloat16, to shared memory."""
    at = memory + vector * _STRIDE + 2 * tl.arange(0, K)
    tl.inline_asm_elementwise(
        _PUT_HIGH, "=r,r,r", [at, x.to(tl.int32, bitcast=True)], tl.int32, False, 1
    )


@triton.jit
def _get(memory, TILE: tl.constexpr, K: tl.constexpr, E: tl.constexpr):
    """A thread's part of 8 vectors: words of two keys, those of `t` 8 at a time.

    What is in vectors that nobody wrote only comes to rows and columns that nobody reads.
    """
    e = tl.arange(0, E)
    at = memory + (TILE * 8 + e % 32 // 4) * _STRIDE + e % 4 * 16
    words = ()
    for i in tl.static_range(K // 32):
        four = tl.inline_asm_elementwise(
            _GET_4, "=r,=r,=r,=r,r", [at + i * 64],
            (tl.int32, tl.int32, tl.int32, tl.int32), False, 1,
        )  # fmt: skip
        words = words + (four[0], four[1], four[2], four[3])  # noqa: RUF005
    return words


@triton.jit
def _state_at(own, i: tl.constexpr, E: tl.constexpr):
    """Four value channels of the `i`-th key of a thread."""
    e = tl.arange(0, E)
    at = own + e % 4 * (8 * E) + e // 32 * 32 + e % 32 // 4 * 4
    return tl.load((at + (i // 8 * 32 + i % 8) * E)[:, None] + tl.arange(0, 4)[None, :])


@triton.jit
def _added(ASM: tl.constexpr, left, right, sums):
    """`sums` and a product of 16 rows with 8 columns: what a thread has of each."""
    return tl.inline_asm_elementwise(
        ASM, _MULTIPLIED,
        [left[0], left[1], left[2], left[3], right[0], right[1],
         sums[0], sums[1], sums[2], sums[3]],
        (tl.float32, tl.float32, tl.float32, tl.float32), True, 1,
    )  # fmt: skip


@triton.jit
def _products(x, y, E: tl.constexpr):
    """Products of 8 vectors with 8: lane `4 g + t` has row g, columns 2 t and 2 t + 1."""
    zero = tl.zeros((E,), tl.float32)
    first = (zero, zero, zero, zero)
    second = first
    for j in tl.static_range(len(x) // 4):
        # rows from 8 on are nobody's
        left = (x[4 * j], x[4 * j], x[4 * j + 1], x[4 * j + 1])
        first = _added(_MULTIPLY_PAIRS, left, (y[4 * j], y[4 * j + 1]), first)
        left = (x[4 * j + 2], x[4 * j + 2], x[4 * j + 3], x[4 * j + 3])
        second = _added(_MULTIPLY_PAIRS, left, (y[4 * j + 2], y[4 * j + 3]), second)
    return first[0] + second[0], first[1] + second[1]


@triton.jit
def _from(x, lane):
    """What another lane of the warp has."""
    return tl.inline_asm_elementwise(_FROM, "=f,f,r", [x, lane], tl.float32, True, 1)


@triton.jit
def _product(products, row: tl.constexpr, column: tl.constexpr, E: tl.constexpr):
    """One of `_products`, in all threads."""
    return _from(products[column % 2], tl.full((E,), row * 4 + column // 2, tl.int32))


@triton.jit
def _pairs(x, T: tl.constexpr, TP: tl.constexpr, E: tl.constexpr):
    """Products between queries and keys, as `solved` takes them."""
    last = x[len(x) - 1]
    of_queries, of_keys, mixed = _products(x[0], x[0], E), last, last
    K_AT: tl.constexpr = TP % 8
    if TP == 4:
        mixed, of_keys = of_queries, of_queries
    else:
        mixed, of_keys = _products(x[0], last, E), _products(last, last, E)
    qq, qk, kk = (), (), ()
    for i in tl.static_range(T):
        qq = qq + (_product(of_queries, i, i, E),)  # noqa: RUF005
        for j in tl.static_range(i + 1):
            qk = qk + (_product(mixed, i, K_AT + j, E),)  # noqa: RUF005
            kk = kk + (_product(of_keys, K_AT + i, K_AT + j, E),)  # noqa: RUF005
    return qq, qk, kk


@triton.jit
def _traded(x, y, high, lane, BIT: tl.constexpr):
    """Of two lanes, `x` of both for the lower one and `y` of both for the higher one."""
    other = _from(tl.where(high, x, y), lane ^ BIT)
    return tl.where(high, other, x), tl.where(high, y, other)


@triton.jit
def _turned(rows, lane):
    """Four lanes with four rows of two columns each: a row of eight for each lane."""
    odd, high = lane % 2 == 1, lane % 4 >= 2
    of_column = ()
    for p in tl.static_range(2):
        first, second = _traded(rows[p], rows[2 + p], odd, lane, 1)
        third, fourth = _traded(rows[4 + p], rows[6 + p], odd, lane, 1)
        first, third = _traded(first, third, high, lane, 2)
        second, fourth = _traded(second, fourth, high, lane, 2)
        of_column = of_column + (first, second, third, fourth)  # noqa: RUF005
    row = ()
    for i in tl.static_range(4):
        row = row + (of_column[i], of_column[4 + i])  # noqa: RUF005
    return row


@triton.jit
def _sixteen(first, second, M: tl.constexpr):
    return first[M], first[M + 1], second[M], second[M + 1]


@triton.jit
def _total(sums, FIRST: tl.constexpr, PLACE: tl.constexpr, CHAINS: tl.constexpr):
    """One number of a sum, of all chains."""
    total = sums[FIRST][PLACE]
    for c in tl.static_range(1, CHAINS):
        total += sums[FIRST + 4 * c][PLACE]
    return total


@triton.jit
def _read(s, own, x, CHAINS: tl.constexpr, K: tl.constexpr, E: tl.constexpr):
    """Products of a thread's column of the state with tiles `x` of 8 vectors.

    `s` has the state of its first keys, the others are asked for as registers become free.
    """
    EARLY: tl.constexpr = len(s)
    TILES: tl.constexpr = len(x)
    # for each of the chains of a tile, which do not wait for each other: of 16 rows and 16 more,
    # sums of the larger parts and of the rest
    zero = tl.zeros((E,), tl.float32)
    sums = ()
    for _ in tl.static_range(4 * CHAINS * TILES):
        sums = sums + ((zero, zero, zero, zero),)  # noqa: RUF005
    for j in tl.static_range(K // 8):
        large, rest = (), ()
        for p in tl.static_range(2):
            whole = s[2 * j + p]
            high = (whole.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
            large = large + (split_columns(high, E, 4),)  # noqa: RUF005
            rest = rest + (split_columns(whole - high, E, 4),)  # noqa: RUF005
        more = ()
        for c in tl.static_range(4 * CHAINS * TILES):
            if c // 4 % CHAINS == j % CHAINS:
                word = x[c // 4 // CHAINS][j]
                even = (word << 16).to(tl.float32, bitcast=True)
                right = (even, (word & -65536).to(tl.float32, bitcast=True))
                if c % 2 == 0:
                    left = _sixteen(large[0], large[1], c % 4 // 2 * 2)
                else:
                    left = _sixteen(rest[0], rest[1], c % 4 // 2 * 2)
                more = more + (_added(_MULTIPLY, left, right, sums[c]),)  # noqa: RUF005
            else:
                more = more + (sums[c],)  # noqa: RUF005
        sums = more
        for p in tl.static_range(2):
            if 2 * j + p + EARLY < K // 4:
                s = s + (_state_at(own, 2 * j + p + EARLY, E),)  # noqa: RUF005
    read = ()
    for tile in tl.static_range(TILES):
        rows = ()
        for i in tl.static_range(8):
            large = _total(sums, 4 * CHAINS * tile + i // 4 * 2, i % 4, CHAINS)
            rest = _total(sums, 4 * CHAINS * tile + i // 4 * 2 + 1, i % 4, CHAINS)
            rows = rows + (large + rest,)  # noqa: RUF005
        read = read + _turned(rows, tl.arange(0, E) % 32)
    return read


@triton.jit
def wide_kernel(
    qkv, z, a, b, taps, a_log, dt_bias, norm, conv, state,
    out, window, key, delta, decay,
    T: tl.constexpr, TP: tl.constexpr, TN: tl.constexpr, J: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, K: tl.constexpr, E: tl.constexpr,
    EARLY: tl.constexpr, EPS: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """One row's value head.

    `TP`, the tokens that tiles of 8 vectors have room for, is 4 or 8; `TN` is the power of two not
    below `T`. Of a thread's 32 loads of the state `EARLY` come before the convolution.
    """
    C: tl.constexpr = 2 * H * K + V * E
    head, row = tl.program_id(0), tl.program_id(1)
    key_head = head // (V // H)
    e, kk = tl.arange(0, E), tl.arange(0, K)
    q_at, v_at = key_head * K + kk, 2 * H * K + head * E + e
    k_at = H * K + q_at
    # each lane has the gates of one token
    live, gates = e % TP < T, (row * T + e % TP) * V + head
    first = (row * T * V + head) * E + e

    # what the convolution needs goes before the 64 KiB of the state, behind which it would wait
    q_raw, q_taps = raw_inputs(qkv, conv, row, q_at, T, C, J), weights_of(taps, q_at, J)
    k_raw, k_taps = raw_inputs(qkv, conv, row, k_at, T, C, J), weights_of(taps, k_at, J)
    v_raw, v_taps = raw_inputs(qkv, conv, row, v_at, T, C, J), weights_of(taps, v_at, J)
    g_raw = tl.load(a + gates, mask=live, other=0.0)
    speed, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    beta = tl.load(b + gates, mask=live, other=0.0).to(tl.float32)
    own = state + (row * V + head).to(tl.int64) * (K * E)
    s = ()
    for i in tl.static_range(EARLY):
        s = s + (_state_at(own, i, E),)  # noqa: RUF005
    gain = tl.load(norm + e).to(tl.float32)
    z_raw = ()
    for t in tl.static_range(T):
        z_raw = z_raw + (tl.load(z + first + t * V * E),)  # noqa: RUF005

    q, k = convolved(q_raw, q_taps, T, J), convolved(k_raw, k_taps, T, J)
    memory = tl.inline_asm_elementwise(_ALLOCATE, "=r,r", [head], tl.int32, False, 1)
    for t in tl.static_range(T):
        _put(memory, t, q[t], K)
        _put(memory, TP + t, k[t], K)
    tl.debug_barrier()
    keep(window, v_raw, row, v_at, C, T + J - 1)
    if head % (V // H) == 0:
        keep(window, q_raw, row, q_at, C, T + J - 1)
        keep(window, k_raw, row, k_at, C, T + J - 1)
    g = log_decay(g_raw, speed, bias)
    tl.store(decay + gates, g, mask=live & (e < TP))
    fade, beta = exp(tl.maximum(g, _DECAY_FLOOR)), sigmoid(beta)
    fades, steps = (), ()
    for t in tl.static_range(T):
        fades = fades + (_from(fade, tl.full((E,), t, tl.int32)),)  # noqa: RUF005
        steps = steps + (_from(beta, tl.full((E,), t, tl.int32)),)  # noqa: RUF005
    v = convolved(v_raw, v_taps, T, J)
    gated = ()
    for t in tl.static_range(T):
        gated = gated + (gain * gate(z_raw[t].to(tl.float32), SIGMOID),)  # noqa: RUF005

    x = (_get(memory, 0, K, E),)
    if TP == 8:
        x = x + (_get(memory, 1, K, E),)  # noqa: RUF005
    pairs = _pairs(x, T, TP, E)
    read = _read(s, own, x, 8 // TP, K, E)
    d, o, k_unit = solved(read, v, pairs, fades, steps, T, TP, K)
    scaled = normed(o, EPS, T, TN, E, TN if TN < 4 else 4)
    for t in tl.static_range(T):
        y = scaled[t] * gated[t]
        tl.store(out + first + t * V * E, y.to(out.dtype.element_ty))
        tl.store(delta + first + t * V * E, d[t])
    if head % (V // H) == 0:
        for t in tl.static_range(T):
            tl.store(key + ((row * T + t) * H + key_head) * K + kk, k[t] * k_unit[t])
