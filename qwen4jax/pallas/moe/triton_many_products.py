# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""The products of the experts with many tokens: a grouped GEMM over tiles of pairs.

A program has a tile of up to ROWS pairs of one expert (`triton_many_lists.py`) and two blocks of
16 W rows of its matrices: gate and up of the same columns of the hidden values, or two blocks of
down. The weights are the left operand of `wgmma`, decoded in registers: what a lane reads of a row
of NVFP4 or FP8, 16 contiguous bytes, *is* its fragment once it is decoded, because the columns of
the activations come in the order that this makes (`ordered` in `triton_many.py`; the hidden values
are written in it). The activations are the right operand, read by way of shared memory, as the
weights are: nothing is waited for that was not asked for two steps ago.

Floors at the released sizes (9.83 MFLOP a pair, 1.41 GB of NVFP4 experts, 780 TFLOP/s, 4.3 TB/s):
512 and 2,048 tokens 0.33 ms (bytes), 8,192 1.03 ms (flops). An H200 takes 0.55 ms for 512 tokens.
A step of 128 columns of a tile of 64 brings 16 KB of activations and 18 KB of weights into a
multiprocessor, mostly from the L2 cache, and takes 1,024 cycles of its tensor cores. A wider tile
has fewer bytes a product and decodes less often; one with few pairs is cut, to compute less for
nobody.
"""

import triton
import triton.language as tl

from qwen4jax.pallas.moe.triton_stored import (
    BF16,
    FP8,
    NVFP4,
    PRODUCT_UP,
    SCALE_UP,
    TILE_COLUMNS,
    activated,
    next_matrix,
    weight_pointers,
)

# columns to which a tile is cut at the most
LEAST = tl.constexpr(32)

# As `triton_stored`'s decoder, for a word of each of two rows. The compiler chooses which elements
# come together: those of the product's operand, two columns of two rows, and again eight columns
# on. `_nvfp4` hands them over in this order, which makes each register half a word of both.
_WORD = """
prmt.b32 w, $8, $9, {word};
shl.b32 a, w, 6;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 ${0}, a, ${4};
shl.b32 a, w, 2;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 ${1}, a, ${5};
shf.r.wrap.b32 a, w, w, 4;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 ${2}, a, ${4};
and.b32 a, w, 0x81808180;
shr.u32 b, w, 8;
lop3.b32 b, b, 0x00400040, a, 0xEA;
mul.rn.bf16x2 ${3}, b, ${5};
"""
DECODE = tl.constexpr(
    "{\n.reg .b32 a, b, w;"
    + _WORD.format(0, 2, 4, 6, 10, 12, word="0x5410")
    + _WORD.format(1, 3, 5, 7, 11, 13, word="0x7632")
    + "}"
)


@triton.jit
def _scales(
    scale,
    matrix,
    row,
    R: tl.constexpr,
    N: tl.constexpr,
    FORM: tl.constexpr,
    W: tl.constexpr,
):
    """Pointers to the scales of a block's first step: NVFP4 [16 W, 8] in the order of the weights.

    FP8: one for 128 x 128. bfloat16 has none.
    """
    if FORM == NVFP4:
        line = tl.arange(0, 16 * W)
        at = (line // (8 * W) * 8 + line % 8) * 8 + line // 8 % W * N
        scale += (matrix * R + row) * (N // 16) + at[:, None] + tl.arange(0, 8)[None, :]
    if FORM == FP8:
        scale += (matrix * ((R + 127) // 128) + row // 128) * ((N + 127) // 128)
    return scale


@triton.jit
def _in_rows(w, W: tl.constexpr):
    """(half, warp, row, t, i, h, p) as rows (warp, half, row), columns (i, h, t, p)."""
    w = tl.permute(tl.reshape(w, (2, W, 8, 4, 4, 2, 2)), (1, 0, 2, 4, 5, 3, 6))
    return tl.reshape(w, (16 * W, 64))


@triton.jit
def _operand(w, W: tl.constexpr):
    """(warp, row, t, i1, i0, h, half, p) as rows (warp, half, row), columns (i, h, t, p)."""
    return tl.reshape(tl.permute(w, (0, 6, 1, 3, 4, 5, 2, 7)), (16 * W, 64))


@triton.jit
def _nvfp4(w, s, W: tl.constexpr):
    """Codes [16 W, 64] and scales [16 W, 8], lines (half, warp, 8), as two of [16 W, 64] bfloat16.

    The first eight columns of each 16, and the others: joined, XLA's Triton took one for the other.
    """
    w = tl.permute(tl.reshape(w, (2, W, 8, 4, 2, 2, 2, 2)), (1, 2, 3, 4, 5, 6, 0, 7))
    s = tl.reshape((s.to(tl.float32) * SCALE_UP).to(tl.bfloat16), (2, W, 8, 4, 2, 1, 1, 1))
    s = tl.broadcast_to(tl.permute(s, (1, 2, 3, 4, 5, 6, 0, 7)), (W, 8, 4, 2, 2, 2, 2, 2))
    first, second = tl.inline_asm_elementwise(
        DECODE,
        "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r",
        [w, s],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=8,
    )
    return _operand(first, W), _operand(second, W)


@triton.jit
def _fp8(w, s, W: tl.constexpr):
    """e4m3 [16 W, 64], lines (half, warp, 8), times the scale of their block."""
    return _in_rows((w.to(tl.float32) * s.to(tl.float32)).to(tl.bfloat16), W)


@triton.jit
def _product(w, s, x, y, acc, FORM: tl.constexpr, W: tl.constexpr):
    """`acc` and a step's product with activations x, of NVFP4 x and y; then 2**-7 of it."""
    if FORM == NVFP4:
        first, second = _nvfp4(w, s, W)
        acc = tl.dot(first, x, acc)
        acc = tl.dot(second, y, acc)
    elif FORM == FP8:
        acc = tl.dot(_fp8(w, s, W), x, acc)
    else:
        acc = tl.dot(w, x, acc)
    return acc


@triton.jit
def _rows(
    weight,
    row,
    N: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    W: tl.constexpr,
):
    """Pointers to the first step of 16 W rows: bfloat16 in their order, else (half, warp, 8)."""
    if FORM == BF16:
        return weight + row * N + tl.arange(0, 16 * W)[:, None] * N + tl.arange(0, C)[None, :]
    return weight_pointers(weight, row, N, C, L, False, W)


@triton.jit
def _two_blocks(
    x,
    first,
    first_scale,
    second,
    second_scale,
    N: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Products [16 W, ROWS] of two blocks of rows of N columns with the activations of a tile."""
    # tiles of 16 rows x 128 columns lie one after the other, and so do their scales
    STEP: tl.constexpr = 16 * L if C == TILE_COLUMNS else L
    xs = x + tl.arange(0, 64)[None, :]
    a = tl.zeros((16 * W, ROWS), tl.float32)
    b = tl.zeros((16 * W, ROWS), tl.float32)
    one = tl.where(tl.program_id(0) >= 0, 1.0, 0.0)
    for i in tl.range(0, N // C, num_stages=STAGES):
        w1, w2 = tl.load(first + i * STEP), tl.load(second + i * STEP)
        s1, s2 = 1.0, 1.0
        if FORM == NVFP4:
            s1, s2 = tl.load(first_scale + i * 128), tl.load(second_scale + i * 128)
        if FORM == FP8:
            s1, s2 = tl.load(first_scale + i * C // 128), tl.load(second_scale + i * C // 128)
        x1 = tl.trans(tl.load(xs + i * C))
        x2 = x1
        if C == TILE_COLUMNS:
            x2 = tl.trans(tl.load(xs + i * C + 64))
        a = _product(w1, s1, x1, x2, a, FORM, W)
        b = _product(w2, s2, x1, x2, b, FORM, W)
        if FORM != BF16:
            # A product whose operand is in registers is cut in two by Triton; left in flight till
            # the end of the loop's body, its first half is copied, and ptxas then waits for each
            # of the 8 instructions. A use makes it wait once; LLVM knows that it changes nothing.
            a *= one
            b *= one
    return a, b


@triton.jit
def _columns_in_order(h, row, FORM: tl.constexpr, ROWS: tl.constexpr, W: tl.constexpr):
    """16 W columns [ROWS, 16 W] from column `row` on as the next product reads them, and where."""
    c = tl.arange(0, 16 * W)
    at = row + c
    if FORM == NVFP4:
        # (t, i1, second, h, i0, p) of a chunk of 128, or of a half of one, as (second, i, h, t, p)
        h = tl.permute(tl.reshape(h, (ROWS, W // 2, 2, 2, 2, 2, 2)), (0, 3, 2, 5, 4, 1, 6))
        at = row // 128 * 128 + row % 128 // 16 + c // W * 8 + c % W
    if FORM == FP8:
        # (t, i, h, p) of chunks of 64 as (i, h, t, p)
        h = tl.permute(tl.reshape(h, (ROWS, W // 4, 4, 4, 2, 2)), (0, 1, 3, 4, 2, 5))
    return tl.reshape(h, (ROWS, 16 * W)), at


@triton.jit
def _size(pairs, ROWS: tl.constexpr, SMALL: tl.constexpr):
    """Columns to compute of a tile: as many as it has pairs, up to ROWS, ROWS/2 or SMALL."""
    size = ROWS
    if ROWS > SMALL:
        small = tl.where(tl.load(pairs + SMALL) >= 0, ROWS // 2, SMALL)
        size = tl.where(tl.load(pairs + ROWS // 2) >= 0, ROWS, small)
    return size


@triton.jit
def _gate_up(
    x,
    pairs,
    stored,
    hidden,
    expert,
    row,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    STAGES: tl.constexpr,
):
    """16 W columns, from `row` on, of the hidden values of the first ROWS pairs of a tile."""
    weight, scale, scale_2 = stored
    pair = tl.load(pairs + tl.arange(0, ROWS))
    # columns of pairs that are none get some token's and are stored nowhere
    xs = x + (tl.maximum(pair, 0) // K)[:, None] * D
    w = _rows(weight, expert * (2 * F) + row, D, C, L, FORM, W)
    s = _scales(scale, expert * 2, row, F, D, FORM, W)
    apart, scales_apart = next_matrix(F, D, C, L, FORM)
    g, u = _two_blocks(xs, w, s, w + apart, s + scales_apart, D, C, L, FORM, ROWS, W, STAGES)
    if FORM == NVFP4:
        g *= tl.load(scale_2 + expert * 2) * PRODUCT_UP
        u *= tl.load(scale_2 + expert * 2 + 1) * PRODUCT_UP
    h = activated(g, u).to(hidden.dtype.element_ty)
    h, at = _columns_in_order(tl.trans(h), row, FORM, ROWS, W)
    tl.store(hidden + pair[:, None] * F + at[None, :], h, (pair >= 0)[:, None])


@triton.jit
def gate_up_many_kernel(
    x,
    experts,
    pairs,
    weight,
    scale,
    scale_2,
    hidden,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    STAGES: tl.constexpr,
):
    """hidden[p] = silu(gate x) * (up x), 16 W columns of a tile a program: grid (F/(16 W), tiles).

    Args:
        x: tokens [T, D], their columns `ordered`.
        experts: of each tile, -1 where none.
        pairs: of each tile [tiles, ROWS], -1 where none.
        weight: stored array of gate and up.
        scale: stored scales.
        scale_2: stored scales of whole matrices.
        hidden: [T K, F], columns `ordered`.
        K: choices of a token.
        D: hidden size.
        F: width of the experts.
        C: columns of a step.
        L: its elements in a row of the stored array.
        FORM: stored form.
        ROWS: pairs of a tile.
        W: warps.
        STAGES: of the pipeline.
    """
    row, tile = tl.program_id(0) * (16 * W), tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert >= 0:
        own = pairs + tile * ROWS
        stored = (weight, scale, scale_2)
        SMALL: tl.constexpr = max(ROWS // 4, LEAST)
        size = _size(own, ROWS, SMALL)
        if size == ROWS:
            _gate_up(x, own, stored, hidden, expert, row, K, D, F, C, L, FORM, ROWS, W, STAGES)
        elif size == SMALL:
            _gate_up(x, own, stored, hidden, expert, row, K, D, F, C, L, FORM, SMALL, W, STAGES)
        elif ROWS // 2 > SMALL:
            _gate_up(x, own, stored, hidden, expert, row, K, D, F, C, L, FORM, ROWS // 2, W, STAGES)


@triton.jit
def _down(
    hidden,
    pairs,
    stored,
    parts,
    expert,
    row,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    STAGES: tl.constexpr,
):
    """32 W columns, from `row` on, of the parts of the first ROWS pairs of a tile."""
    weight, scale, scale_2 = stored
    pair = tl.load(pairs + tl.arange(0, ROWS))
    hs = hidden + tl.maximum(pair, 0)[:, None] * F
    w1 = _rows(weight, expert * D + row, F, C, L, FORM, W)
    w2 = _rows(weight, expert * D + row + 16 * W, F, C, L, FORM, W)
    s1 = _scales(scale, expert, row, D, F, FORM, W)
    s2 = _scales(scale, expert, row + 16 * W, D, F, FORM, W)
    a, b = _two_blocks(hs, w1, s1, w2, s2, F, C, L, FORM, ROWS, W, STAGES)
    if FORM == NVFP4:
        total = tl.load(scale_2 + expert) * PRODUCT_UP
        a *= total
        b *= total
    to = parts + pair[:, None] * D + row + tl.arange(0, 16 * W)[None, :]
    there = (pair >= 0)[:, None]
    tl.store(to, tl.trans(a).to(parts.dtype.element_ty), there)
    tl.store(to + 16 * W, tl.trans(b).to(parts.dtype.element_ty), there)


@triton.jit
def down_many_kernel(
    hidden,
    experts,
    pairs,
    weight,
    scale,
    scale_2,
    parts,
    D: tl.constexpr,
    F: tl.constexpr,
    C: tl.constexpr,
    L: tl.constexpr,
    FORM: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    STAGES: tl.constexpr,
):
    """parts[p] = down hidden[p], 32 W columns of a tile a program: grid (D/(32 W), tiles).

    Args:
        hidden: of `gate_up_many_kernel`, as are the arguments named like its.
        experts: of each tile, -1 where none.
        pairs: of each tile [tiles, ROWS], -1 where none.
        weight: stored array of down.
        scale: stored scales.
        scale_2: stored scales of whole matrices.
        parts: [T K, D].
        D: hidden size.
        F: width of the experts.
        C: columns of a step.
        L: its elements in a row of the stored array.
        FORM: stored form.
        ROWS: pairs of a tile.
        W: warps.
        STAGES: of the pipeline.
    """
    row, tile = tl.program_id(0) * (32 * W), tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert >= 0:
        own = pairs + tile * ROWS
        stored = (weight, scale, scale_2)
        SMALL: tl.constexpr = max(ROWS // 4, LEAST)
        size = _size(own, ROWS, SMALL)
        if size == ROWS:
            _down(hidden, own, stored, parts, expert, row, D, F, C, L, FORM, ROWS, W, STAGES)
        elif size == SMALL:
            _down(hidden, own, stored, parts, expert, row, D, F, C, L, FORM, SMALL, W, STAGES)
        elif ROWS // 2 > SMALL:
            _down(hidden, own, stored, parts, expert, row, D, F, C, L, FORM, ROWS // 2, W, STAGES)
