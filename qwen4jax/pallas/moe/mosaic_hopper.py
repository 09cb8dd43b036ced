"""The routed experts of a few tokens in Pallas Mosaic GPU, for Hopper: one launch of CTAs that stay.

"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import llvm, vector
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas.moe import limits
from qwen4jax.pallas.moe.triton_tiles import gathered_kernel, sum_kernel, tiles_kernel
from qwen4jax.pallas.mosaic_layouts import SWIZZLED
from qwen4jax.pallas.skinny_matmul import projections, skinny_matmul
from qwen4jax.pallas.triton_call import triton_call

_PROCESSORS = 132
_TILE: Any = plgpu.Layout.WGMMA
_ROW: Any = plgpu.Layout.WGMMA.reduce(1)
_COLUMN: Any = plgpu.Layout.WGMMA.reduce(0)
# [64 rows, 64 bytes] where lane 4 r + t of a warp has rows r and r + 8 of its 16, bytes 16 t to
# 16 t + 15
BYTES = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 64), (16, 64), (8, 64), (16,))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# [64, 8] where lane and warp have the row that `decode` has as that column
TURNED = plgpu.Layout.TILED(
    plgpu.Tiling(((64, 8), (32, 8), (16, 8), (8, 8), (2, 8), (2,))),
    warp_dims=(-5,),
    lane_dims=(-9, -7, -3, -2),
    vector_dim=-1,
)
# the same of NVFP4, as part of [128 columns]: [16, 4, 8]
SPREAD = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 4, 8), (8, 2, 8), (4, 1, 8), (2, 1, 8), (2,))),
    warp_dims=(-12, -13),
    lane_dims=(-4, -10, -9, -2),
    vector_dim=-1,
)
# [8, 64], the transpose of WGMMA's
LYING = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (8, 16), (8, 8), (2, 8), (1,))),
    warp_dims=(-8,),
    lane_dims=(-2, -5),
    vector_dim=-1,
)
# 64 of those 128 columns
BLOCKED = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 2, 4, 8), (2, 2, 4, 8), (2,))),
    warp_dims=(-9,),
    lane_dims=(-4, -3, -2),
    vector_dim=-1,
)
# tiles [4, 16 rows, 64 bytes] of NVFP4's codes, and [4, 128] scales
CODES = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 16, 64), (8, 64), (16,))),
    warp_dims=(-6,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
SCALES = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 128), (64,), (2,))),
    warp_dims=(-4,),
    lane_dims=(-2,),
    vector_dim=-1,
)
# columns of a program of `sum_kernel`
_SUMMED = 256


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the work is cut.

    Attributes:
        columns: of a stage.
        stages: under way at a time.
        ctas: per multiprocessor.
    """

    columns: int
    stages: int
    ctas: int = 2
    consumers: int = 1
    fence: bool = True
    apart: bool = False


TILES = {"bf16": Tiles(64, 5), "fp8": Tiles(128, 4), "nvfp4": Tiles(128, 5, 2, 2)}


@plgpu.inline_mgpu(
    arg_types=(BYTES,),
    return_type=plgpu.ShapeDtypeStruct((64, 128), jnp.float16, layout=_TILE),
)
def decode(ctx, w):
    """e4m3 [64, 128] as float16, whose columns are in another order: bytes stay with their lanes."""
    del ctx
    pair = ir.VectorType.get((2,), ir.F16Type.get())
    # [64 columns, half of the rows]
    given = w.astype(ir.F16Type.get()).registers.reshape(2, 2)
    # [16 columns, half of them, half of the rows]
    made = np.empty((8, 2, 2), dtype=object)
    for block, i, side, rows in np.ndindex(2, 4, 2, 2):
        at = 4 * i + 2 * side
        taken = vector.extract_strided_slice(pair, given[block, rows], [at], [2], [1])
        made[block * 4 + i, side, rows] = taken
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64, 128))
    return mgpu.FragmentedArray(
        _registers=made.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
    )


@plgpu.inline_mgpu(
    arg_types=(_TILE,),
    return_type=plgpu.ShapeDtypeStruct((64, 8), jnp.bfloat16, layout=TURNED),
)
def turn(ctx, x):
    """Rounded to bfloat16, rows in the order of `decode`'s columns."""
    del ctx
    layout = TURNED.to_mgpu()
    registers = x.astype(ir.BF16Type.get()).registers.reshape(layout.registers_shape((64, 8)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


_SCALE = "{.reg .f32 a; mul.rn.f32 a, $1, 0f7B000000; cvt.rn.bf16x2.f32 $0, a, a;}"
_CODES = """{
.reg .b32 a, b;
shl.b32 a, $4, 6;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $0, a, $5;
shl.b32 a, $4, 2;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $1, a, $5;
shf.r.wrap.b32 a, $4, $4, 4;
and.b32 a, a, 0x81C081C0;
mul.rn.bf16x2 $2, a, $5;
and.b32 a, $4, 0x81808180;
shr.u32 b, $4, 8;
lop3.b32 b, b, 0x00400040, a, 0xEA;
mul.rn.bf16x2 $3, b, $5;
}"""


@plgpu.inline_mgpu(
    arg_types=(CODES, SCALES),
    return_type=plgpu.ShapeDtypeStruct((64, 128), jnp.bfloat16, layout=_TILE),
)
def decode_nvfp4(ctx, codes, scales):
    """Tiles [4, 16, 64] of codes and [4, 128] of scales as bfloat16 [64, 128], times 2**-7."""
    del ctx
    i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
    pair, words = ir.VectorType.get((2,), ir.BF16Type.get()), ir.VectorType.get((4,), i32)
    one, four = ir.VectorType.get((1,), i32), llvm.StructType.get_literal([i32] * 4)
    scales = scales.astype(f32).registers.reshape(2)
    codes = codes.registers.reshape(2)
    made = np.empty((8, 2, 2), dtype=object)
    for rows in range(2):
        word = vector.bitcast(words, codes[rows])
        for i in range(4):
            if i % 2 == 0:
                scale = vector.extract(scales[rows], [], [i // 2])
                scale = llvm.inline_asm(i32, [scale], _SCALE, "=r,f", has_side_effects=False)
            given = [vector.extract(word, [], [i]), scale]
            out = llvm.inline_asm(four, given, _CODES, "=r,=r,=r,=r,r,r", has_side_effects=False)
            for q in range(4):
                value = llvm.extractvalue(i32, out, [q])
                value = vector.bitcast(pair, vector.broadcast(one, value))
                made[2 * i + q // 2, q % 2, rows] = value
    shape = mgpu.WGMMA_LAYOUT.registers_shape((64, 128))
    return mgpu.FragmentedArray(
        _registers=made.reshape(shape), _layout=mgpu.WGMMA_LAYOUT, _is_signed=None
    )


@plgpu.inline_mgpu(
    arg_types=(_TILE,),
    return_type=plgpu.ShapeDtypeStruct((16, 4, 8), jnp.bfloat16, layout=SPREAD),
)
def spread(ctx, x):
    """Rounded to bfloat16, rows in the order of `decode_nvfp4`'s columns."""
    del ctx
    layout = SPREAD.to_mgpu()
    registers = x.astype(ir.BF16Type.get()).registers.reshape(layout.registers_shape((16, 4, 8)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


@plgpu.inline_mgpu(
    arg_types=(BLOCKED,),
    return_type=plgpu.ShapeDtypeStruct((64, 8), jnp.float32, layout=_TILE),
)
def flat(ctx, x):
    """[8, 2, 4, 8] as [64, 8] in float32."""
    del ctx
    registers = x.astype(ir.F32Type.get()).registers
    registers = registers.reshape(mgpu.WGMMA_LAYOUT.registers_shape((64, 8)))
    return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)


@plgpu.inline_mgpu(
    arg_types=(_TILE,),
    return_type=plgpu.ShapeDtypeStruct((8, 64), jnp.float32, layout=LYING),
)
def lie(ctx, x):
    """The transpose."""
    del ctx
    one, layout = ir.VectorType.get((1,), ir.F32Type.get()), LYING.to_mgpu()
    given = x.registers.reshape(2)
    made = np.empty((2, 2), dtype=object)
    for half, column in np.ndindex(2, 2):
        taken = vector.extract_strided_slice(one, given[half], [column], [1], [1])
        made[half, column] = taken
    registers = made.reshape(layout.registers_shape((8, 64)))
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def experts(x, ids, weights, gate_up, down, shared, *, out_dtype, cut=None):
    """See `qwen4jax.pallas.moe.experts`; `limits.refuses_mosaic` says what it takes."""
    tokens, hidden = x.shape
    choices, form, experts_ = ids.shape[1], limits.form(gate_up) or "", gate_up.shape[0]
    halved, few = form == "fp8", tokens <= limits.FEW_TOKENS
    shape = jax.ShapeDtypeStruct
    tiles = min(ids.size, experts_) if few else limits.most_tiles(ids.size, experts_, 8)
    columns = shape((1, 1, 8), x.dtype)
    if form != "bf16" or not few:
        dtype = jnp.float16 if halved else x.dtype
        columns = shape((1 if few else tiles, 8, hidden), dtype)
    size: dict[str, Any] = dict(TP=limits.power_of_2(tokens), KP=limits.power_of_2(choices))
    if few:
        size = dict(P=limits.power_of_2(ids.size))
    else:
        size |= dict(EP=limits.power_of_2(experts_ + 1))
    tile_experts, places, count, columns, scales = triton_call(
        ids,
        x,
        kernel=tiles_kernel if few else gathered_kernel,
        name=f"experts_tiles_{form}_{tokens}x{choices}x{hidden}",
        out=(
            shape((ids.size,), jnp.int32),
            shape(ids.shape, jnp.int32),
            shape((1,), jnp.int32),
            columns,
            shape(columns.shape[:2], jnp.float32),
        ),
        grid=((1 if form == "bf16" else 9) if few else experts_,),
        num_warps=8 if few else 4,
        num_stages=1,
        T=tokens,
        K=choices,
        E=experts_,
        D=hidden,
        DP=limits.power_of_2(hidden),
        FORM=form,
        **size,
    )
    if few and form == "bf16":
        columns = x[None]
    w1, s1, t1 = limits.stored_arrays(gate_up)
    w2, s2, t2 = limits.stored_arrays(down)
    # TMA has five dimensions: matrices come in halves, gate and up or the rows of down
    given = dict(experts=tile_experts, count=count)
    if form == "nvfp4":
        given["gate_up"] = w1.reshape(-1, *w1.shape[3:])
        given["down"] = w2.reshape(-1, *w2.shape[2:])
        given["gate_up_scale"] = s1.reshape(-1, s1.shape[3], 128)
        given["down_scale"] = s2.reshape(-1, s2.shape[2], 128)
        given |= dict(gate_up_total=t1, down_total=t2)
    else:
        given["gate_up"] = w1.reshape(-1, *w1.shape[2:])
        given["down"] = w2.reshape(len(w2) * 2, w2.shape[1] // 2, w2.shape[2])
    given["x"] = columns
    if halved:
        given |= dict(scales=scales, gate_up_scale=s1, down_scale=s2)
    parts = launched(given, tiles=tiles, width=gate_up.shape[-2], form=form, cut=cut or TILES[form])
    own, logit = parts, weights
    if shared is not None:
        own, logit = _shared(x, shared), shared.logit
    return triton_call(
        parts,
        places,
        weights,
        own,
        logit,
        kernel=sum_kernel,
        name=f"experts_tiles_sum_{tokens}x{choices}x{hidden}",
        out=shape(x.shape, out_dtype),
        grid=(-(-hidden // _SUMMED), tokens),
        num_warps=4,
        K=choices,
        D=hidden,
        BLOCK=_SUMMED,
        SHARED=shared is not None,
    )


def _shared(x, shared):
    """The shared expert's part of each token, before its share, float32."""
    f32 = jnp.float32
    gate, up = projections(x, (shared.gate, shared.up), out_dtypes=(f32, f32))
    h = (jax.nn.silu(gate) * up).astype(x.dtype)
    return skinny_matmul(h, shared.down, out_dtype=f32)


# compiled apart, so that a program with many layers lowers one
@functools.partial(jax.jit, static_argnames=("tiles", "width", "form", "cut"))
def launched(given, *, tiles, width, form, cut):
    """Parts float32 [tiles, 8, D]: `down @ (silu(gate @ x) * (up @ x))` of each tile's expert."""
    z = _Sizes.of(given, tiles, width, form, cut)

    def body(given, outs, scratch):
        refs = given | outs | scratch
        ready = pl.get_global(plgpu.SemaphoreType.REGULAR((tiles,)))
        role = lax.axis_index("role")

        @pl.when(role == z.cut.consumers)
        def _():
            _load(z, refs)

        @pl.when(role < z.cut.consumers)
        def _():
            _multiply(z, refs, ready, role)

    return run(z, body, given)["parts"]


def run(z, body, given):
    """Launches `body`."""
    weights = jnp.float8_e4m3fn if z.halved else jnp.bfloat16
    tokens = jnp.float16 if z.halved else jnp.bfloat16
    shape = jax.ShapeDtypeStruct
    hidden = (z.tiles, z.width, 8)
    if z.form == "nvfp4":
        hidden = (z.tiles, z.width // 128, 16, 2, 4, 8)
    outs = dict(
        hidden=shape(hidden, jnp.bfloat16),
        parts=shape((z.tiles, 8, z.size), jnp.float32),
    )
    lines = (
        plgpu.TilingTransform((8, 128 if z.halved else 64)),
        plgpu.SwizzleTransform(128),
    )
    stages, columns, consumers = z.cut.stages, z.cut.columns, z.cut.consumers
    if z.form == "nvfp4":
        w_tiles = plgpu.SMEM((stages, 2, 4 * consumers, 16, 64), jnp.uint8)
        s_tiles = plgpu.SMEM((stages, 2, 4 * consumers, 128), jnp.float8_e4m3fn)
    else:
        w_tiles = plgpu.SMEM((stages, 2, 64 * consumers, columns), weights, transforms=lines)
        s_tiles = None
    scratch = dict(
        w_tiles=w_tiles,
        s_tiles=s_tiles,
        x_tiles=plgpu.SMEM((stages, 8, columns), tokens, transforms=SWIZZLED),
        h_tile=plgpu.SMEM((consumers, 8, z.width), tokens, transforms=SWIZZLED),
        full=plgpu.Barrier(num_barriers=stages, num_arrivals=4 if z.form == "nvfp4" else 1),
        x_full=plgpu.Barrier(num_barriers=stages),
        empty=plgpu.Barrier(num_barriers=stages, num_arrivals=consumers),
    )
    body.__name__ = f"experts_{z.form}_{z.tiles}x{z.size}x{z.width}"
    return plgpu.kernel(
        body,
        out_type=outs,
        grid=(z.lanes,),
        grid_names=("lane",),
        num_threads=consumers + 1,
        thread_name="role",
        scratch_types=[scratch],
    )(given)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Of the kernel's work.

    Attributes:
        tiles: at most.
        size: hidden.
        width: of the experts.
        form: stored.
        gathered: whether each tile has columns of its own.
        lanes: CTAs.
        cut: into stages.
    """

    tiles: int
    size: int
    width: int
    form: str
    gathered: bool
    lanes: int
    cut: Tiles

    @classmethod
    def of(cls, given, tiles, width, form, cut):
        size = given["x"].shape[2]
        gathered = len(given["x"]) > 1
        return cls(tiles, size, width, form, gathered, _PROCESSORS * cut.ctas, cut)

    @property
    def halved(self):
        """Whether weights are e4m3 and tokens float16."""
        return self.form == "fp8"

    @property
    def blocks(self):
        """Units of a tile in both products."""
        rows = 64 * self.cut.consumers
        return self.width // rows, self.size // 2 // rows

    def shares(self, count):
        """Units of both products that are this CTA's: (of the first, first and number of down)."""
        lane, lanes = lax.axis_index("lane"), self.lanes
        units, others = (count * n for n in self.blocks)
        each, more = units // lanes, lax.rem(units, lanes)
        # what a unit of the first reads, in those of the second
        ratio = self.size // self.width
        fair = (ratio * units + others + lanes - 1) // lanes
        # lanes that have one unit more of the first have `ratio` less of the second
        heavy = jnp.minimum(jnp.maximum(fair - ratio * (each + 1), 0), others // jnp.maximum(more, 1))
        rest = others - heavy * more
        light = (rest + lanes - more - 1) // (lanes - more)
        behind = jnp.maximum(lane - more, 0)
        start = jnp.minimum(lane, more) * heavy + behind * light
        number = jnp.where(lane < more, heavy, light)
        start = jnp.minimum(start, others)
        return each + (lane < more).astype(jnp.int32), start, jnp.minimum(number, others - start)


def _load(z, refs):
    """Asks for all weights of this CTA's units, and for x."""
    stages, columns = z.cut.stages, z.cut.columns
    count = refs["count"][0]
    units, first, others = z.shares(count)
    lane = lax.axis_index("lane")
    steps, down_steps = z.size // columns, z.width // columns

    rows = 64 * z.cut.consumers

    def ask(i, name, expert, block, k, tile=None):
        slot = lax.rem(i, stages)

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(refs["empty"].at[slot])

        halves, at, full = pl.ds(2 * expert, 2), pl.ds(k * columns, columns), refs["full"].at[slot]
        if z.form == "nvfp4":
            half = (z.width if name == "gate_up" else z.size // 2) // 16
            for i in range(2):
                some = pl.ds((2 * expert + i) * half + block * (rows // 16), rows // 16)
                scale = refs[f"{name}_scale"].at[some, k]
                plgpu.copy_gmem_to_smem(refs[name].at[some, k], refs["w_tiles"].at[slot, i], full)
                plgpu.copy_gmem_to_smem(scale, refs["s_tiles"].at[slot, i], full)
        else:
            weight = refs[name].at[halves, pl.ds(block * rows, rows), at]
            plgpu.copy_gmem_to_smem(weight, refs["w_tiles"].at[slot], full)
        if tile is not None:
            x = refs["x"].at[tile, pl.ds(0, 8), at]
            plgpu.copy_gmem_to_smem(x, refs["x_tiles"].at[slot], refs["x_full"].at[slot])

    def gate_up(number, carry):
        unit = lane + number * z.lanes
        blocks = z.blocks[0]
        tile, block = unit // blocks, lax.rem(unit, blocks)
        expert = refs["experts"][tile]
        where = tile if z.gathered else 0

        def one(k, carry):
            ask(number * steps + k, "gate_up", expert, block, k, where)
            return carry

        return lax.fori_loop(0, steps, one, carry)

    def down(number, carry):
        unit = first + number
        blocks = z.blocks[1]
        expert, block = refs["experts"][unit // blocks], lax.rem(unit, blocks)

        def one(k, carry):
            ask(units * steps + number * down_steps + k, "down", expert, block, k)
            return carry

        return lax.fori_loop(0, down_steps, one, carry)

    lax.fori_loop(0, units, gate_up, ())
    lax.fori_loop(0, others, down, ())


def _multiply(z, refs, ready, role):
    """Both products of this CTA's units."""
    columns, nvfp4 = z.cut.columns, z.form == "nvfp4"
    count = refs["count"][0]
    units, first, others = z.shares(count)
    lane = lax.axis_index("lane")
    steps, down_steps = z.size // columns, z.width // columns
    total = units * steps + others * down_steps

    def gate_up(number, carry):
        unit = lane + number * z.lanes
        blocks = z.blocks[0]
        tile, row = unit // blocks, lax.rem(unit, blocks) * z.cut.consumers + role
        expert = refs["experts"][tile]

        def scale(k):
            return [refs["gate_up_scale"][expert, i, row // 2, k] for i in range(2)]

        def right(slot, k):
            del k
            plgpu.barrier_wait(refs["x_full"].at[slot])
            return refs["x_tiles"].at[slot].T

        # asked for before the products
        factors = [refs["gate_up_total"][expert, i] * 128.0 for i in range(2 * nvfp4)]
        sums = _products(z, refs, number * steps, steps, total, right, scale, role)
        if z.halved:
            factor = plgpu.load(
                refs["scales"].at[tile if z.gathered else 0], layout=_COLUMN, optimized=False
            )
            sums = [x * _columns(factor, x) for x in sums]
        if z.form == "nvfp4":
            sums = [x * f for x, f in zip(sums, factors, strict=True)]
        g, u = sums
        h = g / (1.0 + jnp.exp(-g)) * u
        if z.form == "nvfp4":
            refs["hidden"].at[tile, row // 2, :, lax.rem(row, 2)][...] = spread(h)
        else:
            h = turn(h) if z.halved else h.astype(jnp.bfloat16)
            refs["hidden"][tile, pl.ds(row * 64, 64)] = h
        plgpu.semaphore_signal(ready.at[tile], memory_scope="gpu")
        return carry

    lax.fori_loop(0, units, gate_up, ())

    def down(number, carry):
        known, factor = carry
        unit = first + number
        blocks = z.blocks[1]
        tile, row = unit // blocks, lax.rem(unit, blocks) * z.cut.consumers + role
        expert = refs["experts"][tile]

        def take():
            plgpu.semaphore_wait(ready.at[tile], z.width // 64, decrement=False, memory_scope="gpu")
            return _take_hidden(z, refs, tile, role)

        factor = lax.cond(tile != known, take, lambda: factor)

        def scale(k):
            return [refs["down_scale"][expert, (i * (z.size // 128) + row) // 2, k] for i in range(2)]

        def right(slot, k):
            del slot
            return refs["h_tile"].at[role, :, pl.ds(k * columns, columns)].T

        whole = refs["down_total"][expert] * 128.0 if nvfp4 else None
        start = units * steps + number * down_steps
        sums = _products(z, refs, start, down_steps, total, right, scale, role)
        for i, part in enumerate(sums):
            if z.halved:
                part = part * _columns(factor, part)
            if z.form == "nvfp4":
                part = part * whole
            own = pl.ds(i * (z.size // 2) + row * 64, 64)
            refs["parts"].at[tile, :, own][...] = lie(part)
        return tile, factor

    nothing = plgpu.layout_cast(jnp.zeros((8,), jnp.float32), _COLUMN)
    lax.fori_loop(0, others, down, (jnp.int32(-1), nothing))


def _take_hidden(z, refs, tile, role):
    """Brings hidden values of a tile to shared memory; what they were divided by, for each column."""
    blocks = range(z.width // 64)
    hidden = refs["hidden"]

    def load(i):
        if z.form == "nvfp4":
            source = hidden.at[tile, i // 2, pl.ds(i % 2 * 8, 8)]
            return flat(plgpu.load(source, layout=BLOCKED, optimized=False)).astype(jnp.bfloat16)
        source = hidden.at[tile, pl.ds(64 * i, 64)]
        return plgpu.load(source, layout=_TILE, optimized=False)

    loaded = [load(i) for i in blocks]
    down = plgpu.layout_cast(jnp.zeros((8,), jnp.float32), _COLUMN)
    if z.halved:
        loaded = [x.astype(jnp.float32) for x in loaded]
        largest = functools.reduce(jnp.maximum, map(jnp.abs, loaded))
        largest = jnp.max(largest, axis=0)
        exponent = lax.shift_right_logical(_bits(largest), jnp.int32(23)) - 127
        power = jnp.minimum(jnp.maximum(14 - exponent, -114), 126)
        up, down = _power(power), _power(-power)
        loaded = [(x * _columns(up, x)).astype(jnp.float16) for x in loaded]
    for i in blocks:
        refs["h_tile"].at[role, :, pl.ds(64 * i, 64)].T[...] = loaded[i]
    plgpu.commit_smem()
    return down


def _products(z, refs, start, steps, total, right, scale, role):
    """Sums [64, 8] of both halves of the tiles from step `start` on."""
    stages = z.cut.stages

    def free(step, slot):
        @pl.when(step + stages < total)
        def _():
            plgpu.barrier_arrive(refs["empty"].at[slot])

    def left(slot, i):
        own = pl.ds(role * 64, 64)
        if z.form == "bf16":
            return refs["w_tiles"].at[slot, i, own]
        if z.form == "fp8":
            w = refs["w_tiles"].at[slot, i, own]
            return decode(plgpu.load(w, layout=BYTES, optimized=False))
        own = pl.ds(role * 4, 4)
        codes = plgpu.load(refs["w_tiles"].at[slot, i, own], layout=CODES, optimized=False)
        scales = plgpu.load(refs["s_tiles"].at[slot, i, own], layout=SCALES, optimized=False)
        return decode_nvfp4(codes, scales)

    if z.form == "bf16":

        def accumulate(*acc):
            def add(k, carry):
                slot = lax.rem(start + k, stages)
                plgpu.barrier_wait(refs["full"].at[slot])
                x = right(slot, k)
                for i in range(2):
                    plgpu.wgmma(acc[i], left(slot, i), x)
                plgpu.wgmma_wait(0)
                free(start + k, slot)
                return carry

            lax.fori_loop(0, steps, add, ())
            return [plgpu.layout_cast(a[...], _TILE) for a in acc]

        return accumulated(accumulate)

    def add(k, carry):
        sums, scales = carry
        slot = lax.rem(start + k, stages)
        later = scale(jnp.minimum(k + 1, steps - 1)) if z.form == "fp8" else scales
        plgpu.barrier_wait(refs["full"].at[slot])
        x = right(slot, k)

        def multiply(*acc):
            for i in range(2):
                plgpu.wgmma(acc[i], left(slot, i), x)
            return [plgpu.layout_cast(a[...], _TILE) for a in acc]

        def alone(i):
            def multiply(acc, _):
                plgpu.wgmma(acc, left(slot, i), x)
                return [plgpu.layout_cast(acc[...], _TILE)]

            return accumulated(multiply)

        made = [*alone(0), *alone(1)] if z.cut.apart else accumulated(multiply)
        if z.cut.fence:
            plgpu.commit_smem()
        free(start + k, slot)
        if z.form == "fp8":
            made = [x * s.astype(jnp.float32) for x, s in zip(made, scales, strict=True)]
        return [t + m for t, m in zip(sums, made, strict=True)], later

    zeros = plgpu.layout_cast(jnp.zeros((64, 8), jnp.float32), _TILE)
    return lax.fori_loop(0, steps, add, ([zeros, zeros], scale(0) if z.form == "fp8" else ()))[0]


def accumulated(run):
    """`run` with an accumulator for each half, after whose products it waits by reading them."""
    return pl.run_scoped(run, *(plgpu.WGMMAAccumulatorRef((64, 8), jnp.float32),) * 2)


def _bits(x):
    return lax.bitcast_convert_type(x, jnp.int32)


def _power(exponent):
    """`2**exponent` of a normal number."""
    return lax.bitcast_convert_type(lax.shift_left(exponent + 127, jnp.int32(23)), jnp.float32)


def _columns(x, like):
    return lax.broadcast_in_dim(x, like.shape, (1,))
