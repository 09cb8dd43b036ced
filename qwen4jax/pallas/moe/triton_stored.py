# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""Tensor-core products of a few tokens with tiles of stored weights, by way of registers only.

A warp owns 16 rows of a matrix. A lane loads 16 contiguous bytes of one row, decodes them in place,
and what it then holds *is* its operand of `mma.m16n8k16`: the order of the columns inside a chunk
is free as long as the activations come in the same order, and likewise the order of the rows. So
reshapes and permutes below only rename registers; there is no shared memory and no barrier.

Lane 4 r + t of a warp has rows r and r + 8 of the tile. Its columns of a chunk of 128 NVFP4 values
(64 bytes) are 32 t to 32 t + 31: two scale groups, so that two bytes of scales serve its 32 values.
"""

import triton
import triton.language as tl

# A code's bits s|ee|m moved to bit 15 and bits 8..6 of a bfloat16 are its value times 2**-126 (a
# bfloat16 subnormal where ee is 0: exact). Scales are handed in times 2**119, which keeps every
# product of code and scale (6 significant bits) a normal bfloat16, 2**-7 times its value.
SCALE_UP = tl.constexpr(2.0**119)
PRODUCT_UP = tl.constexpr(2.0**7)

# 4 bytes hold 8 codes; the codes at the same place of the two halves make one pair. Pairs leave as
# bytes 0, 2, 1, 3.
_DECODE = tl.constexpr("""{
.reg .b32 a, b;
shl.b32 a, $4, 12;
and.b32 a, a, 0x80008000;
shl.b32 b, $4, 6;
lop3.b32 b, b, 0x01C001C0, a, 0xEA;
mul.rn.bf16x2 $0, b, $5;
shl.b32 a, $4, 4;
and.b32 a, a, 0x80008000;
shr.u32 b, $4, 2;
lop3.b32 b, b, 0x01C001C0, a, 0xEA;
mul.rn.bf16x2 $1, b, $6;
shl.b32 a, $4, 8;
and.b32 a, a, 0x80008000;
shl.b32 b, $4, 2;
lop3.b32 b, b, 0x01C001C0, a, 0xEA;
mul.rn.bf16x2 $2, b, $5;
shr.u32 b, $4, 6;
and.b32 b, b, 0x01C001C0;
lop3.b32 b, $4, 0x80008000, b, 0xEA;
mul.rn.bf16x2 $3, b, $6;
}""")


@triton.jit
def byte_lines(W: tl.constexpr):
    """(warp, row in the warp's 16) of each line of a tile of bytes [16 W, 64].

    Two dimensions only, rows of 8 lanes before warps before halves: the compiler hands out lanes
    in this order whatever it does with equals.
    """
    line = tl.arange(0, 16 * W)
    return line // 8 % W, line // (8 * W) * 8 + line % 8


@triton.jit
def load_scales(s, rows: tl.constexpr):
    """Scales of a tile [8 W, 8, 2]: of rows 0 to 7 of the warps, and `rows` elements later 8 to 15.

    Args:
        s: pointers [8 W, 8] to the 8 groups of a chunk.
        rows: distance of 8 rows.
    """
    return tl.join(tl.load(s), tl.load(s + rows))


@triton.jit
def load_tokens(x, there, W: tl.constexpr):
    """Columns of 8 tokens for `nvfp4_product`: even ones and odd ones, each [W, 64, 8].

    Args:
        x: pointers [8 W, (t, 8)] (warp and token first) to the first 8 of lane t's 32 columns.
        there: [8 W, 1], whether there is such a token.
        W: warps.
    """
    ab = tl.join(tl.load(x, there, 0.0), tl.load(x + 8, there, 0.0))
    cd = tl.join(tl.load(x + 16, there, 0.0), tl.load(x + 24, there, 0.0))
    # [W, token, t, (b1, b0, odd), i0, i1]
    x8 = tl.reshape(tl.join(ab, cd), (W, 8, 4, 2, 2, 2, 2, 2))
    # bytes in the order of the decoder: b0 before b1
    x8 = tl.permute(x8, (0, 7, 6, 2, 4, 3, 1, 5))
    return tl.split(tl.reshape(x8, (W, 64, 8, 2)))


@triton.jit
def lane_columns():
    """Column of each element of a row of `load_tokens`' pointers: 8 from each 32."""
    c = tl.arange(0, 32)
    return c // 8 * 32 + c % 8


@triton.jit
def _fragment(w, W: tl.constexpr):
    """[2, W, 8, (t, i, b)] as rows of 64 columns (i, t, b): [W, 16, 64]."""
    w = tl.permute(tl.reshape(w, (2, W, 8, 4, 4, 4)), (1, 0, 2, 4, 3, 5))
    return tl.reshape(w, (W, 16, 64))


@triton.jit
def nvfp4_product(w, s, even, odd, acc, W: tl.constexpr):
    """`acc` plus 2**-7 times a chunk of 128 columns of 16 W rows times 8 tokens.

    Args:
        w: packed bytes [16 W, 64], lines as in `byte_lines`.
        s: e4m3 scales of `load_scales`.
        even: columns of `load_tokens`.
        odd: likewise.
        acc: float32 [W, 16, 8].
        W: warps.
    """
    w = tl.reshape(w, (2, W, 8, 4, 2, 8))
    s = (s.to(tl.float32) * SCALE_UP).to(tl.bfloat16)
    s = tl.permute(tl.reshape(s, (W, 8, 4, 2, 2)), (4, 0, 1, 2, 3))
    s = tl.broadcast_to(tl.reshape(s, (2, W, 8, 4, 2, 1)), (2, W, 8, 4, 2, 8))
    e, o = tl.inline_asm_elementwise(
        _DECODE,
        "=r,=r,=r,=r,r,r,r",
        [w, s],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )
    acc = tl.dot(_fragment(e, W), even, acc)
    return tl.dot(_fragment(o, W), odd, acc)
