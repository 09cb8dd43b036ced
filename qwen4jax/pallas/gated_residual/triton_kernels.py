# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false
"""The kernels of `triton_launches.py`, which says what they are for and why they are so."""

import triton
import triton.language as tl

from qwen4jax.pallas.triton_math import sigmoid

# by one thread: whoever else reads the bytes soon finds them in the cache
_ASK = tl.constexpr("""{
.reg .pred p;
.reg .b32 t;
mov.b32 t, %tid.x;
setp.eq.u32 p, t, 0;
@p cp.async.bulk.prefetch.L2.global [$1], $2;
mov.b32 $0, $2;
}""")
_ADDED = tl.constexpr("""{
.reg .b32 a, b, c, d;
shl.b32 a, $1, 16;
and.b32 b, $1, 0xFFFF0000;
shl.b32 c, $2, 16;
and.b32 d, $2, 0xFFFF0000;
fma.rn.f32 a, c, $3, a;
fma.rn.f32 b, d, $4, b;
cvt.rn.bf16x2.f32 $0, b, a;
}""")


@triton.jit
def added(value, more, scale):
    """`value + scale * more` of bfloat16 and a float32 scale, rounded once.

    In pairs, here and below: the compiler takes a slow conversion for each element. Where many
    programs do the same for themselves, what an element costs is what the launch costs.
    """
    return tl.inline_asm_elementwise(
        _ADDED, "=r,r,r,f,f", [value, more, scale], tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def gained(value, gain):
    """`value * (1 + gain)` of bfloat16, rounded once, in pairs."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $1;", "=r,r,r", [value, gain], tl.bfloat16, True, 2
    )


@triton.jit
def rounded(value):
    """float32 as bfloat16, in pairs."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [value], tl.bfloat16, is_pure=True, pack=2
    )


@triton.jit
def ask(matrix, program, PROGRAMS: tl.constexpr, SIZE: tl.constexpr):
    """Has memory send a program's share of a matrix of SIZE bfloat16 to the cache; waits not."""
    SHARE: tl.constexpr = min((SIZE + PROGRAMS * 8 - 1) // (PROGRAMS * 8) * 8, SIZE)
    first = matrix + tl.minimum(program * SHARE, SIZE - SHARE)
    tl.inline_asm_elementwise(
        _ASK, "=r,l,r", [first.to(tl.int64), SHARE * 2], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def norm_kernel(
    streams,
    weights,
    y,
    norm,
    new,
    normed,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    PENDING: tl.constexpr,
    EPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """The pending output's update of a row's stream, and its norm: grid (T, R).

    Args:
        streams: [T, R D].
        weights: with which `y` is injected [T, R].
        y: output of the sublayer before [T, D].
        norm: gain minus one [R D].
        new: streams with `y` in them [T, R D].
        normed: RMS norm of each stream [T, R D].
        T: rows.
        R: streams.
        D: channels of a stream.
        PENDING: whether there is `y`.
        EPS: of the norm.
        CHUNK: channels of a load.
    """
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, CHUNK)
    place = row * (R * D) + stream * D + channel
    values, extra, gains = (), (), ()
    for i in tl.static_range(D // CHUNK):
        values = values + (tl.load(streams + place + i * CHUNK),)  # noqa: RUF005
        gains = gains + (tl.load(norm + stream * D + channel + i * CHUNK),)  # noqa: RUF005
        if PENDING:
            extra = extra + (tl.load(y + row * D + channel + i * CHUNK),)  # noqa: RUF005
    scale = 0.0
    if PENDING:
        scale = tl.load(weights + row * R + stream)
    square = tl.zeros((CHUNK,), tl.float32)
    updated = ()
    for i in tl.static_range(D // CHUNK):
        value = values[i]
        if PENDING:
            value = added(value, extra[i], scale)
            tl.store(new + place + i * CHUNK, value)
        updated = updated + (value,)  # noqa: RUF005
        square += value.to(tl.float32) * value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(square, axis=0) / D + EPS)
    for i in tl.static_range(D // CHUNK):
        value = updated[i].to(tl.float32) * factor * (1.0 + gains[i].to(tl.float32))
        tl.store(normed + place + i * CHUNK, rounded(value))


@triton.jit
def _outputs(
    down, inject, tile, output, R: tl.constexpr, D: tl.constexpr, L: tl.constexpr, N: tl.constexpr
):
    """A tile's rows of `down`, or of `inject` the last tile's: them, which there are, the first."""
    if tile < (L + N - 1) // N:
        matrix = down + tile * N * (R * D)
        there = tile * N + output < L
        first = tile * N
    else:
        matrix = inject
        there = output < R
        first = L
    return matrix, there, first


@triton.jit
def down_kernel(
    normed,
    down,
    inject,
    parts,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
):
    """Sums of N outputs over a slice of the streams: grid (blocks of rows, slices, tiles).

    Args:
        normed: of `norm_kernel`.
        down: low-rank projection [L, R D].
        inject: projection to the injection weights [R, R D], the last tile's.
        parts: sums [R D / WIDTH, blocks, L + 16, ROWS]; those past the weights are not written.
        T: rows.
        R: streams.
        D: channels of a stream.
        L: rank.
        ROWS: of a block.
        WIDTH: columns of a slice.
        BLOCK: columns of a step.
        N: outputs.
    """
    block, part, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    output = tl.arange(0, N)
    matrix, there, first = _outputs(down, inject, tile, output, R, D, L, N)
    row = block * ROWS + tl.arange(0, ROWS)
    column = part * WIDTH + tl.arange(0, BLOCK)
    w = matrix + output[:, None] * (R * D) + column[None, :]
    n = normed + row.to(tl.int64)[None, :] * (R * D) + column[:, None]
    acc = tl.zeros((N, ROWS), tl.float32)
    for k in tl.range(0, WIDTH, BLOCK):
        left = tl.load(w + k, there[:, None], 0.0)
        right = tl.load(n + k, (row < T)[None, :], 0.0)
        acc = tl.dot(left, right, acc)
    base = (part * tl.num_programs(0) + block) * (L + 16) + first
    place = (base + output)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tl.store(parts + place, acc, there[:, None])


@triton.jit
def update_down_kernel(
    streams,
    weights,
    y,
    norm,
    down,
    inject,
    new,
    parts,
    squares,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    N: tl.constexpr,
    PENDING: tl.constexpr,
):
    """`norm_kernel` and `down_kernel` of up to 16 rows in one: grid (slices, tiles).

    The norm's factor is one number for each row and stream: it is left to those who add the slices
    up. The last tile has the fewest weights, and stores what all tiles know.

    Args:
        streams: [T, R D].
        weights: with which `y` is injected [T, R].
        y: output of the sublayer before [T, D].
        norm: gain minus one [R D].
        down: low-rank projection [L, R D].
        inject: projection to the injection weights [R, R D], the last tile's.
        new: streams with `y` in them [T, R D].
        parts: sums without the norm's factor [R D / WIDTH, 1, L + 16, ROWS].
        squares: sums of the streams' squares [R D / WIDTH, ROWS].
        T: rows.
        R: streams.
        D: channels of a stream.
        L: rank.
        ROWS: of a product.
        WIDTH: columns of a slice, all of one stream.
        BLOCK: columns of a step.
        N: outputs.
        PENDING: whether there is `y`.
    """
    part, tile = tl.program_id(0), tl.program_id(1)
    stream = part // (D // WIDTH)
    output = tl.arange(0, N)
    matrix, there, first = _outputs(down, inject, tile, output, R, D, L, N)
    row = tl.arange(0, ROWS)
    live = (row < T)[:, None]
    scale = 0.0
    if PENDING:
        scale = tl.load(weights + row * R + stream, row < T, 0.0)[:, None]
    acc = tl.zeros((N, ROWS), tl.float32)
    square = tl.zeros((ROWS, BLOCK), tl.float32)
    for k in tl.range(0, WIDTH, BLOCK):
        column = part * WIDTH + k + tl.arange(0, BLOCK)
        left = tl.load(matrix + output[:, None] * (R * D) + column[None, :], there[:, None], 0.0)
        place = row[:, None] * (R * D) + column[None, :]
        value = tl.load(streams + place, live, 0.0)
        # for all rows: what is copied to shared memory ahead is 16 bytes a thread or nothing
        gain = tl.load(norm + column[None, :] + row[:, None] * 0)
        if PENDING:
            beside = row[:, None] * D + (column - stream * D)[None, :]
            value = added(value, tl.load(y + beside, live, 0.0), scale)
            # a branch would have the compiler double the loop and its buffers
            tl.store(new + place, value, live & (tile == tl.num_programs(1) - 1))
        exact = value.to(tl.float32)
        square += exact * exact
        right = gained(value, gain)
        acc = tl.dot(left, right.T, acc)
    at = (part * (L + 16) + first + output)[:, None] * ROWS + row[None, :]
    tl.store(parts + at, acc, there[:, None])
    if tile == tl.num_programs(1) - 1:
        tl.store(squares + part * ROWS + row, tl.sum(square, axis=1))


@triton.jit
def squeeze_kernel(
    parts,
    squares,
    low,
    wanted,
    factors,
    T: tl.constexpr,
    R: tl.constexpr,
    D: tl.constexpr,
    L: tl.constexpr,
    ROWS: tl.constexpr,
    SLICES: tl.constexpr,
    ALL: tl.constexpr,
    SUMS: tl.constexpr,
    FACTORS: tl.constexpr,
    EPS: tl.constexpr,
):
    """Sums over slices and what is made of them: grid (blocks of rows, (L + R) ROWS / SUMS).

    Args:
        parts: of `down_kernel` or `update_down_kernel`.
        squares: of `update_down_kernel`.
        low: SiLU of the low-rank sums over R [blocks, L, ROWS].
        wanted: injection weights [T, R].
        factors: of the norm [R, ROWS].
        T: rows.
        R: streams.
        D: channels of a stream.
        L: rank.
        ROWS: of a block.
        SLICES: of all streams.
        ALL: the power of two that is not less.
        SUMS: of a program.
        FACTORS: whether the sums are without the norm's factors.
        EPS: of the norm.
    """
    block, group = tl.program_id(0), tl.program_id(1)
    part = tl.arange(0, ALL)[:, None]
    # in [L + 16, ROWS]
    place = group * SUMS + tl.arange(0, SUMS)
    inside = (part < SLICES) & (place < (L + R) * ROWS)[None, :]
    at = (part * tl.num_programs(0) + block) * ((L + 16) * ROWS) + place[None, :]
    loaded = tl.load(parts + at, inside, 0.0)
    if FACTORS:
        # each element for itself: to hand sums around takes longer than to read them again
        EACH: tl.constexpr = SLICES // R
        first = squares + part // EACH * (EACH * ROWS) + (place % ROWS)[None, :]
        square = tl.load(first, inside, 0.0)
        for i in tl.static_range(1, EACH):
            square += tl.load(first + i * ROWS, inside, 0.0)
        factor = tl.rsqrt(square / D + EPS)
        loaded *= factor
        own = inside & (part % EACH == 0) & (place < ROWS)[None, :]
        tl.store(factors + part // EACH * ROWS + place[None, :], factor, own)
    total = tl.sum(loaded, axis=0) / R
    if group < L * ROWS // SUMS:
        value = (total * sigmoid(total)).to(tl.bfloat16)
        tl.store(low + block * (L * ROWS) + place, value)
    else:
        row = block * ROWS + place % ROWS
        stream = place // ROWS - L
        tl.store(wanted + row * R + stream, 2.0 * sigmoid(total), (row < T) & (stream < R))
