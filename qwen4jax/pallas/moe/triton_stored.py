# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Tensor-core products of a few tokens with tiles of stored weights, by way of registers only.

A warp owns 16 rows of a matrix. A lane loads 16 contiguous bytes of one row, decodes them in place,
and what it then holds *is* its operand of `mma.m16n8k16`: the order of the columns inside a chunk
is free as long as the activations come in the same order, and likewise the order of the rows. So
reshapes and permutes below only rename registers; there is no shared memory and no barrier.

A step of a warp takes a chunk of 64 bytes of each row: 128 columns of NVFP4, 64 of FP8, 32 of
bfloat16. Those of NVFP4 lie in one piece (`quant.TiledNvfp4`): read a row apart from each other
they come at 2.0 TB/s instead of 2.8 (32 tokens), whatever is asked for ahead. Lane 4 r + t of a
warp has rows r and r + 8 of the tile. Of NVFP4 it has columns 32 t to 32 t + 31 of a chunk: two
scale groups, so that two bytes of scales serve its 32 values.
"""

import triton
import triton.language as tl

# A code's sign in bit 15 and magnitude in bits 8..6 of a bfloat16 are its value times 2**-126 (a
# bfloat16 subnormal where the exponent's bits are 0: exact). Scales are handed in times 2**119,
# which keeps every product of code and scale (6 significant bits) a normal bfloat16, 2**-7 times
# its value.
SCALE_UP = tl.constexpr(2.0**119)
PRODUCT_UP = tl.constexpr(2.0**7)

# A word of `quant.TiledNvfp4` holds 8 codes, and leaves as 4 pairs of neighbours in their order.
_DECODE = tl.constexpr("""{
.reg .b32 a, b;
shl.b32 a, $4, 6;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $0, a, $5;
shl.b32 a, $4, 2;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $1, a, $6;
shf.r.wrap.b32 a, $4, $4, 4;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $2, a, $5;
and.b32 a, $4, 0x81808180;
shr.u32 b, $4, 8;
lop3.b32 b, b, 0x00400040, a, 0xEA;
mul.rn.bf16x2 $3, b, $6;
}""")


NVFP4 = tl.constexpr("nvfp4")
# of a chunk of NVFP4, which `quant.TiledNvfp4` keeps together with those of the 15 rows below it
TILE_COLUMNS = tl.constexpr(128)
FP8 = tl.constexpr("fp8")
BF16 = tl.constexpr("bf16")
# of a shared expert in bfloat16: columns of a chunk, and steps that are asked for ahead
SHARED_CHUNK = tl.constexpr(32)
SHARED_AHEAD = tl.constexpr(4)
# Weights are read once: they leave the level-1 cache to the tokens. An H200 takes 204.6 us instead
# of 212.5 for 32 tokens, 48.8 instead of 49.2 for 4 (NVFP4, with the shared expert).
ONCE = tl.constexpr("evict_first")


@triton.jit
def weight_pointers(
    weight,
    row,
    N: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    SPLIT: tl.constexpr,
    W: tl.constexpr,
):
    """Pointers [16 W, L] to each warp's first chunk of 16 rows of [..., N].

    Two dimensions only, rows of 8 lanes before warps before halves: the compiler hands out lanes
    in this order whatever it does with equals.

    Args:
        weight: the stored array.
        row: the first, over all matrices.
        N: columns.
        C: columns of a chunk.
        L: elements of a chunk in the stored array.
        SPLIT: whether the warps take chunks of the same rows in turn, or 16 rows each.
        W: warps.
    """
    line = tl.arange(0, 16 * W)
    warp, half = line // 8 % W, line // (8 * W)
    ROW: tl.constexpr = N // C * L
    if C == TILE_COLUMNS:
        inside = (half * 8 + line % 8) * L
        at = inside + warp * (16 * L if SPLIT else 16 * ROW)
    elif SPLIT:
        at = (half * 8 + line % 8) * ROW + warp * L
    else:
        at = (warp * 16 + half * 8 + line % 8) * ROW
    return weight + row * ROW + at[:, None] + tl.arange(0, L)[None, :]


@triton.jit
def scale_pointers(
    scale,
    matrix,
    row,
    R: tl.constexpr,
    N: tl.constexpr,
    FORM: tl.constexpr,
    SPLIT: tl.constexpr,
    W: tl.constexpr,
):
    """Pointers to the scales of the chunks that `weight_pointers` starts with.

    NVFP4: [8 W, 8], of rows 0 to 7 of each 16. FP8: to the first of a row of blocks. bfloat16 has
    none.

    Args:
        scale: the stored array.
        matrix: number of the matrix.
        row: the first, in the matrix.
        R: rows of a matrix.
        N: its columns.
        FORM: `NVFP4`, `FP8`, or another for bfloat16.
        SPLIT: of `weight_pointers`.
        W: warps.
    """
    if FORM == NVFP4:
        # a tile's 128 scales after those of the tile before
        line = tl.arange(0, 8 * W)
        at = line % 8 * 8 + line // 8 * (128 if SPLIT else N)
        scale += (matrix * R + row) * (N // 16) + at[:, None] + tl.arange(0, 8)[None, :]
    if FORM == FP8:
        scale += (matrix * ((R + 127) // 128) + row // 128) * ((N + 127) // 128)
    return scale


@triton.jit
def next_matrix(
    R: tl.constexpr, N: tl.constexpr, C: tl.constexpr, L: tl.constexpr, FORM: tl.constexpr
):
    """Distance of matrices [R, N] in the stored weights and in the scales."""
    if FORM == FP8:
        scales: tl.constexpr = ((R + 127) // 128) * ((N + 127) // 128)
    else:
        scales: tl.constexpr = R * (N // 16)
    return R * (N // C * L), scales


@triton.jit
def load_chunk(
    w,
    s,
    step: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    SPLIT: tl.constexpr,
    W: tl.constexpr,
):
    """(weights, scales) for `product`, `step` chunks of each warp after the pointers'."""
    FIRST: tl.constexpr = step * W if SPLIT else step
    weights = tl.load(w + FIRST * (16 * L if C == TILE_COLUMNS else L), eviction_policy=ONCE)
    if FORM == NVFP4:
        s += FIRST * 128
        # 8 rows down are 64 scales away
        scales = tl.load(s, eviction_policy=ONCE), tl.load(s + 64, eviction_policy=ONCE)
    elif FORM == FP8:
        if SPLIT:
            scales = tl.load(s + (FIRST + tl.arange(0, W)) * C // 128)[:, None, None]
        else:
            scales = tl.load(s + FIRST * C // 128)
    else:
        scales = 1.0
    return weights, scales


@triton.jit
def lane_columns(COLUMNS: tl.constexpr):
    """Column of each element of a row of `load_tokens`' pointers: 8 of each lane's."""
    c = tl.arange(0, 32)
    return c // 8 * (COLUMNS // 4) + c % 8


@triton.jit
def lines(tokens, N: tl.constexpr, APART: tl.constexpr, W: tl.constexpr):
    """Where the rows [.., N] of 8 n tokens begin for each warp, as `load_tokens` takes them.

    [8 n W, 1]: the 8 tokens of a tensor-core tile, then the warps, then the tiles. A warp begins
    APART columns after the one before.
    """
    TILES: tl.constexpr = tokens.shape[0] // 8
    place = tl.reshape(tokens, (TILES, 1, 8)) * N + tl.arange(0, W)[None, :, None] * APART
    return tl.reshape(place, (TILES * W * 8, 1))


@triton.jit
def arranged(x, W: tl.constexpr):
    """32 columns of 8 n tokens, [8 n W, 32], in the order of bfloat16 weights: [W, 32, 8 n]."""
    TILES: tl.constexpr = x.shape[0] // (8 * W)
    # columns 8 t + 4 i + 2 h + p stand at 16 i + 8 h + 2 t + p
    x = tl.permute(tl.reshape(x, (TILES, W, 8, 4, 2, 2, 2)), (1, 4, 5, 3, 6, 0, 2))
    return tl.reshape(x, (W, 32, TILES * 8))


@triton.jit
def load_tokens(x, COLUMNS: tl.constexpr, W: tl.constexpr):
    """A chunk of 8 tokens in the order of the weights: a tuple of one or two [W, K, 8].

    Of bfloat16 weights also of 8 n tokens.

    Args:
        x: pointers [8 n W, (t, 8)] (rows of `lines`) to the first 8 of lane t's columns.
        COLUMNS: of a chunk, which tells the stored forms apart.
        W: warps.
    """
    if COLUMNS == 32:
        chunk = (arranged(tl.load(x), W),)
    elif COLUMNS == 64:
        # [W, token, t, (i0, b), i1]
        ab = tl.join(tl.load(x), tl.load(x + 8))
        x4 = tl.permute(tl.reshape(ab, (W, 8, 4, 2, 4, 2)), (0, 5, 3, 2, 4, 1))
        chunk = (tl.reshape(x4, (W, 64, 8)),)
    else:
        ab = tl.join(tl.load(x), tl.load(x + 8))
        cd = tl.join(tl.load(x + 16), tl.load(x + 24))
        # [W, token, t, (h, i0, p), half of the word, i1]: `_fragment`'s i is (i1, i0), b is (h, p)
        x8 = tl.reshape(tl.join(ab, cd), (W, 8, 4, 2, 2, 2, 2, 2))
        x8 = tl.permute(x8, (0, 7, 4, 2, 3, 5, 1, 6))
        chunk = tl.split(tl.reshape(x8, (W, 64, 8, 2)))
    return chunk


@triton.jit
def _fragment(w, W: tl.constexpr):
    """[2, W, 8, (t, i, b)] as rows of 64 columns (i, t, b): [W, 16, 64]."""
    w = tl.permute(tl.reshape(w, (2, W, 8, 4, 4, 4)), (1, 0, 2, 4, 3, 5))
    return tl.reshape(w, (W, 16, 64))


@triton.jit
def product(w, s, x, acc, FORM: tl.constexpr, W: tl.constexpr):
    """`acc` plus the products of a chunk of 16 W rows and 8 tokens (or 8 n); of NVFP4 2**-7 of it.

    Args:
        w: stored weights [16 W, chunk] of `load_chunk`.
        s: NVFP4: e4m3 scales, two of [8 W, 8]; FP8: the scale of each warp's block.
        x: of `load_tokens`.
        acc: float32 [W, 16, 8], of bfloat16 [W, 16, 8 n].
        FORM: `NVFP4`, `FP8`, or another for bfloat16.
        W: warps.
    """
    if FORM == NVFP4:
        acc = _nvfp4_product(w, s, x, acc, W)
    elif FORM == FP8:
        # by way of float32: the direct conversion takes one slow instruction a value
        exact = w.to(tl.float32).to(tl.bfloat16)
        part = tl.dot(_fragment(exact, W), x[0])
        acc += part * s.to(tl.float32)
    else:
        w = tl.permute(tl.reshape(w, (2, W, 8, 4, 2, 2, 2)), (1, 0, 2, 4, 5, 3, 6))
        acc = tl.dot(tl.reshape(w, (W, 16, 32)), x[0], acc)
    return acc


@triton.jit
def _scale(s):
    return (s.to(tl.float32) * SCALE_UP).to(tl.bfloat16)


@triton.jit
def _nvfp4_product(w, s, x, acc, W: tl.constexpr):
    w = tl.reshape(w, (2, W, 8, 4, 2, 8))
    # by themselves: joined first, bytes would be picked one by one
    s = tl.join(_scale(s[0]), _scale(s[1]))
    s = tl.permute(tl.reshape(s, (W, 8, 4, 2, 2)), (4, 0, 1, 2, 3))
    s = tl.broadcast_to(tl.reshape(s, (2, W, 8, 4, 2, 1)), (2, W, 8, 4, 2, 8))
    first, second = tl.inline_asm_elementwise(
        _DECODE,
        "=r,=r,=r,=r,r,r,r",
        [w, s],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
    acc = tl.dot(_fragment(first, W), x[0], acc)
    return tl.dot(_fragment(second, W), x[1], acc)


@triton.jit
def activated(gate, up):
    """`silu(gate) * up`, an expert's hidden values."""
    return gate / (1.0 + tl.exp(-gate)) * up
