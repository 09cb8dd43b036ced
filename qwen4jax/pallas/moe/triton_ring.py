# pyright: reportGeneralTypeIssues=false, reportArgumentType=false
"""NVFP4 gate and up of listed tiles: a warp copies its weights to shared memory ahead of use.

Registers cannot hold what memory has under way: whatever the source asks for ahead, the assembler
moves loads down to where registers are free, about one step before use, and loads held above cost
programs (a branch in every step: 431 to 502 us instead of 429 for 128 tokens on an H200). A copy
needs none. Each warp has a ring of STAGES steps of its own, waits for its own copies, and meets no
other warp before the sums; a lane reads back the 16 bytes of a row that it copied itself, so only
the scales pass between lanes. An H200 takes 381 us instead of 415 for 128 tokens with the shared
expert, and 189 instead of 197 for 32; without the bound on registers 387 and 191.

One block of instructions is a product of one matrix: what `triton_stored` leaves to the compiler's
layouts is written for each thread, which has rows g and g + 8 of a tile, tokens 2 t and 2 t + 1.
"""

import triton
import triton.language as tl

# steps of a ring, and the bound on the registers of a thread
STAGES, REGISTERS = 3, 80
# 16 rows of 128 columns of gate and of up, then their scales
_STAGE = tl.constexpr(2 * 1024 + 2 * 128)
_RINGS = [
    f"{{ .shared .align 128 .b8 ring[{_STAGE.value * STAGES * w}]; mov.b32 $0, ring; }}"
    for w in (1, 2, 4)
]
_RING_1, _RING_2, _RING_4 = (tl.constexpr(text) for text in _RINGS)
_FETCH = tl.constexpr("""{
bar.warp.sync 0xffffffff;
cp.async.cg.shared.global [$1], [$2], 16;
cp.async.cg.shared.global [$1+512], [$2+512], 16;
cp.async.cg.shared.global [$1+1024], [$3], 16;
cp.async.cg.shared.global [$1+1536], [$3+512], 16;
cp.async.ca.shared.global [$4], [$5], 4;
cp.async.ca.shared.global [$4+128], [$6], 4;
cp.async.commit_group;
mov.b32 $0, 0;
}""")
_WAIT_0, _WAIT_1, _WAIT_2 = (
    tl.constexpr(
        f"{{ cp.async.wait_group {n}; bar.warp.sync 0xffffffff; mov.b32 $0, 0; }}",
    )
    for n in range(3)
)
_PUT = tl.constexpr("st.shared.b32 [$1], $2; mov.b32 $0, 0;")
_GET = tl.constexpr("ld.shared.b32 $0, [$1];")
_TOKENS = tl.constexpr(
    "".join(
        f"ld.global.v4.b32 {{${4 * i}, ${4 * i + 1}, ${4 * i + 2}, ${4 * i + 3}}}, [$16+{16 * i}]; "
        for i in range(4)
    )
)
_TOKENS_HOW = tl.constexpr("=r," * 16 + "l")


def _decode(pairs, word, scale):
    """`triton_stored._DECODE`."""
    p = [f"{pairs}{i}" for i in range(4)]
    return f"""
shl.b32 a, {word}, 6;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 {p[0]}, a, {scale};
shl.b32 a, {word}, 2;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 {p[1]}, a, {scale};
shf.r.wrap.b32 a, {word}, {word}, 4;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 {p[2]}, a, {scale};
and.b32 a, {word}, 0x81808180;
shr.u32 b, {word}, 8;
lop3.b32 b, b, 0x00400040, a, 0xEA;
mul.rn.bf16x2 {p[3]}, b, {scale};
"""


def _product():
    """Results: 4 sums. Operands: where words and scales are, 16 words of tokens, 4 sums."""
    text = [
        "{",
        ".reg .b32 a, b, h, s<4>, u<4>, v<4>, k<4>, l<4>, m<4>, n<4>;",
        ".reg .b16 c, d, e;",
        ".reg .f32 f, g, z<4>;",
        # words of the row, and of the one 8 below
        "ld.shared.v4.b32 {u0, u1, u2, u3}, [$4];",
        "ld.shared.v4.b32 {v0, v1, v2, v3}, [$4+512];",
    ]
    for row in range(2):
        text += [
            f"ld.shared.u16 c, [$5+{64 * row}];",
            "cvt.rn.f16x2.e4m3x2 h, c;",
            "mov.b32 {d, e}, h;",
            "cvt.f32.f16 f, d;",
            "cvt.f32.f16 g, e;",
            # `triton_stored.SCALE_UP`
            "mul.f32 f, f, 0f7B000000;",
            "mul.f32 g, g, 0f7B000000;",
            f"cvt.rn.bf16x2.f32 s{2 * row}, f, f;",
            f"cvt.rn.bf16x2.f32 s{2 * row + 1}, g, g;",
        ]
    text += [f"mov.f32 z{i}, ${22 + i};" for i in range(4)]
    for group in range(2):
        text += [
            _decode("k", f"u{2 * group}", f"s{group}"),
            _decode("l", f"v{2 * group}", f"s{2 + group}"),
            _decode("m", f"u{2 * group + 1}", f"s{group}"),
            _decode("n", f"v{2 * group + 1}", f"s{2 + group}"),
        ]
        text += [
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {z0, z1, z2, z3}, "
            f"{{k{j}, l{j}, m{j}, n{j}}}, "
            f"{{${6 + 8 * group + 2 * j}, ${6 + 8 * group + 2 * j + 1}}}, {{z0, z1, z2, z3}};"
            for j in range(4)
        ]
    text += [f"mov.f32 ${i}, z{i};" for i in range(4)]
    return "\n".join([*text, "}"])


_PRODUCT = tl.constexpr(_product())
_PRODUCT_HOW = tl.constexpr("=f,=f,=f,=f,r,r," + "r," * 16 + "f,f,f,f")


@triton.jit
def _do(ASM: tl.constexpr, a):
    return tl.inline_asm_elementwise(ASM, "=r,r", [a], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _allocate(W: tl.constexpr):
    """Address of the rings of W warps, once in a program."""
    if W == 4:
        at = _do(_RING_4, tl.program_id(0))
    elif W == 2:
        at = _do(_RING_2, tl.program_id(0))
    else:
        at = _do(_RING_1, tl.program_id(0))
    return at


@triton.jit
def _wait(lane, LEFT: tl.constexpr):
    """Waits for all of a warp's copies but those of the LEFT last steps."""
    if LEFT == 0:
        _do(_WAIT_0, lane)
    elif LEFT == 1:
        _do(_WAIT_1, lane)
    else:
        _do(_WAIT_2, lane)


@triton.jit
def _fetch(at, lane, gate, up, gate_scale, up_scale):
    """Begins to copy a step to `at`, after all lanes are through with what was there."""
    tl.inline_asm_elementwise(
        _FETCH,
        "=r,r,l,l,r,l,l",
        [
            at + lane * 16,
            gate.to(tl.int64),
            up.to(tl.int64),
            at + 2048 + lane * 4,
            gate_scale,
            up_scale,
        ],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _put(address, value):
    tl.inline_asm_elementwise(
        _PUT, "=r,r,f", [address, value], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _get(address):
    return tl.inline_asm_elementwise(
        _GET, "=f,r", [address], dtype=tl.float32, is_pure=False, pack=1
    )


@triton.jit
def _tokens(x):
    """32 columns of a thread's token: 16 words of two bfloat16."""
    return tl.inline_asm_elementwise(
        _TOKENS,
        _TOKENS_HOW,
        [x.to(tl.int64)],
        dtype=(
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
            tl.int32,
        ),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add_product(weights, scales, x, a, b, c, d):
    """A thread's sums plus those of a step."""
    args = [
        weights, scales, x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8],
        x[9], x[10], x[11], x[12], x[13], x[14], x[15], a, b, c, d,
    ]  # fmt: skip
    return tl.inline_asm_elementwise(
        _PRODUCT,
        _PRODUCT_HOW,
        args,
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _put_sums(address, lane, a, b, c, d):
    """A thread's sums as [16, 8] at `address`."""
    to = address + (lane // 4 * 8 + lane % 4 * 2) * 4
    _put(to, a)
    _put(to + 4, b)
    _put(to + 256, c)
    _put(to + 260, d)


@triton.jit
def ring_gate_up(
    x,
    weight,
    scale,
    pairs,
    expert,
    row,
    K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
):
    """Sums [16, 8] of 16 rows of gate and of up with a tile's tokens, 2**-7 of them.

    The warps split the columns as in `triton_gate_up`, and are added in their order. Columns of
    pairs that are none are token 0's.

    Args:
        x: tokens [T, D].
        weight: `quant.TiledNvfp4`'s of gate and up.
        scale: its scales.
        pairs: of the tile, 8 of them.
        expert: int64.
        row: tile of 16 rows.
        K: choices of a token.
        D: hidden size.
        F: width of the experts.
        W: warps: 1, 2 or 4.
        S: `STAGES`.
    """
    STEPS: tl.constexpr = D // (128 * W)
    memory = _allocate(W)
    thread = tl.arange(0, 32 * W)
    lane, warp = thread % 32, thread // 32
    ring = memory + warp * (_STAGE * S)
    first = expert * (2 * F) + row * 16
    gate = weight + first * (D // 2) + warp * 1024 + lane * 16
    up = gate + F * (D // 2)
    gate_scale = scale.to(tl.int64) + first * (D // 16) + warp * 128 + lane * 4
    up_scale = gate_scale + F * (D // 16)
    EACH: tl.constexpr = 1024 * W
    SCALES: tl.constexpr = 128 * W
    for i in tl.static_range(min(S - 1, STEPS)):
        w, s = i * EACH, i * SCALES
        _fetch(ring + i * _STAGE, lane, gate + w, up + w, gate_scale + s, up_scale + s)
    token = tl.maximum(tl.load(pairs + lane // 4), 0) // K
    xs = x + token * D + warp * 128 + lane % 4 * 32
    zero = tl.zeros((32 * W,), tl.float32)
    g0, g1, g2, g3 = zero, zero, zero, zero
    u0, u1, u2, u3 = zero, zero, zero, zero
    for i in tl.static_range(STEPS):
        if i + S - 1 < STEPS:
            w, s = (i + S - 1) * EACH, (i + S - 1) * SCALES
            to = ring + (i + S - 1) % S * _STAGE
            _fetch(to, lane, gate + w, up + w, gate_scale + s, up_scale + s)
        chunk = _tokens(xs + i * (128 * W))
        _wait(lane, min(S - 1, STEPS - 1 - i))
        at = ring + i % S * _STAGE
        words, scales = at + lane * 16, at + 2048 + lane * 2
        g0, g1, g2, g3 = _add_product(words, scales, chunk, g0, g1, g2, g3)
        u0, u1, u2, u3 = _add_product(words + 1024, scales + 128, chunk, u0, u1, u2, u3)
    # every warp is through with the rings
    tl.debug_barrier()
    to = memory + warp * 1024
    _put_sums(to, lane, g0, g1, g2, g3)
    _put_sums(to + 512, lane, u0, u1, u2, u3)
    tl.debug_barrier()
    place = tl.arange(0, 16)[:, None] * 32 + tl.arange(0, 8)[None, :] * 4 + memory
    g, u = _get(place), _get(place + 512)
    for i in tl.static_range(1, W):
        g += _get(place + i * 1024)
        u += _get(place + i * 1024 + 512)
    return g, u
