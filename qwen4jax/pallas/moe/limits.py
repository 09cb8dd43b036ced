"""What the kernels take, known without their language."""

import jax.numpy as jnp

from qwen4jax import quant
from qwen4jax.pallas import counters

# stored form -> columns of one step of a warp, and their elements in the stored array: 64 bytes
CHUNKS = {"nvfp4": (128, 64), "fp8": (64, 64), "bf16": (32, 32)}
# rows of a program of down: warps of 16
DOWN_WARPS = 4
# tokens up to which the kernels for few tokens run
MOST_FEW = 128
# tokens from which sorting their pairs can pay
LEAST_SORTED = 64
# tokens up to which a program finds its pairs itself: the columns of a tile
FEW_TOKENS = 8
# tokens up to which the last programs of down add up
SUM_TOKENS = 8
# experts of a router: a warp holds a token's
MOST_EXPERTS = 2048
# of a router that chooses too: groups of 8 tokens, each of which counts its own programs
ROUTER_GROUPS = counters.ROUTER_GROUPS
# rows of its tile, and columns of a step of a warp
ROUTER_ROWS, ROUTER_CHUNK = 16, 32
# tokens up to which a router is one launch
MOST_ROUTED = 8 * ROUTER_GROUPS
# of a router of more: rows and columns of a step, and programs among which columns are split
MANY_ROWS, MANY_COLUMNS, MANY_SLICES = 64, 64, 10
# steps of a warp at most, whose weights are all asked for at once
_ROUTER_STEPS = 10
# of the Mosaic kernel: a tile's hidden values are in registers, all of whose CTAs have to fit, and
# the pairs of few tokens are compared with each other by one program
_MOST_WIDTH, _MOST_CHOICES = 640, 16
# whose CTAs wait for each other, so that all run at once
MOSAIC_DEVICES = r"^(?!.*MIG).*(H100 80GB HBM3|H200)"
MOSAIC_TEXT = "a whole Hopper GPU with 132 multiprocessors (H100 SXM, H200)"
# programs along the second axis of a grid
_MOST_GRID = 65535
# steps of a row, which are unrolled
_MOST_STEPS = 24


def form(w) -> str | None:
    """The stored form of experts' matrices, if the kernels take it."""
    if isinstance(w, quant.TiledNvfp4):
        return "nvfp4"
    if isinstance(w, quant.BlockFp8):
        return "fp8"
    return "bf16" if getattr(w, "dtype", None) == jnp.bfloat16 else None


def split(columns: int, chunk: int) -> int:
    """Warps among which the columns of a row of gate and up are split."""
    return next(w for w in (4, 2, 1) if columns % (chunk * w) == 0)


def power_of_2(n: int) -> int:
    """The next from `n` on."""
    return 1 << max(n - 1, 0).bit_length()


def most_tiles(pairs: int, experts: int, rows: int) -> int:
    """Tiles of up to `rows` pairs of one expert that there are at most."""
    return (pairs + (rows - 1) * min(pairs, experts)) // rows


def stored_arrays(w):
    """The stored arrays of experts' matrices: weights, scales, scales of matrices."""
    if isinstance(w, quant.TiledNvfp4):
        return w.weight, w.weight_scale, w.weight_scale_2
    if isinstance(w, quant.BlockFp8):
        return w.weight, w.weight_scale_inv, w.weight_scale_inv
    # never read
    return w, w, w


def many_warps(hidden: int, width: int) -> int:
    """Warps of a program of many tokens, each with 16 rows of two blocks."""
    return 8 if width % 128 == 0 and hidden % 256 == 0 else 4


def refuses_route(logits, k, *, renormalize):
    """What keeps the Triton kernel from these arguments, if anything."""
    if logits.shape[1] > MOST_EXPERTS:
        return f"is for up to {MOST_EXPERTS} experts, these are {logits.shape[1]}"
    return None


def router_cut(hidden: int) -> tuple[int, int]:
    """Programs, and warps of each, among which the columns of a router's row are split."""
    chunks = hidden // ROUTER_CHUNK
    parts = next(n for n in (16, 8, 4, 2, 1) if chunks % n == 0)
    warps = min(parts, 4)
    return parts // warps, warps


def refuses_router(x, gate, shared_gate, k, counter, *, renormalize):
    """What keeps the Triton kernel from these arguments, if anything."""
    if any(a.dtype != jnp.bfloat16 for a in (x, gate, shared_gate)):
        return "is for tokens and weights in bfloat16"
    if x.shape[0] > MOST_FEW:
        return f"is for up to {MOST_FEW} tokens, these are {x.shape[0]}"
    experts, hidden = gate.shape
    if experts % ROUTER_ROWS or experts > MOST_EXPERTS:
        return f"is for up to {MOST_EXPERTS} experts in multiples of {ROUTER_ROWS}, not {experts}"
    many = x.shape[0] > MOST_ROUTED
    chunk = MANY_COLUMNS if many else ROUTER_CHUNK
    if hidden % chunk:
        return f"needs a hidden size in multiples of {chunk}, not {hidden}"
    splits, warps = router_cut(hidden)
    if not many and (steps := hidden // (ROUTER_CHUNK * splits * warps)) > _ROUTER_STEPS:
        return f"is for rows of up to {_ROUTER_STEPS} steps of a warp, {hidden} columns are {steps}"
    return None


def refuses_experts(x, ids, weights, gate_up, down, shared, *, out_dtype):
    """What keeps the Triton kernels that read experts once a tile from these arguments."""
    if x.shape[0] > MOST_FEW:
        return f"is for up to {MOST_FEW} tokens, these are {x.shape[0]}"
    reason = _refuses_forms(x, gate_up, down, shared)
    return reason or _refuses_sizes(x.shape[1], gate_up.shape[-2], form(gate_up) or "", shared)


def refuses_mosaic(x, ids, weights, gate_up, down, shared, *, out_dtype):
    """What keeps the Mosaic kernel from these arguments, if anything."""
    if not 1 <= x.shape[0] <= MOST_FEW:
        return f"is for 1 to {MOST_FEW} tokens, these are {x.shape[0]}"
    if form(gate_up) == "nvfp4":
        return "is for experts in FP8 or bfloat16"
    if x.shape[0] == 1 and shared is not None and form(gate_up) == "fp8":
        # an H200 takes 37.8 us, 28.6 of them without the shared expert, and 33.4 in Triton
        return "has launches apart for the shared expert: one token in FP8 is faster in Triton"
    if reason := _refuses_forms(x, gate_up, down, shared):
        return reason
    hidden, width = x.shape[1], gate_up.shape[-2]
    if hidden % 256:
        return f"needs a hidden size in multiples of 256, not {hidden}"
    if width % 128 or width > _MOST_WIDTH:
        return f"is for experts up to {_MOST_WIDTH} wide, in multiples of 128, not {width}"
    if ids.shape[1] > _MOST_CHOICES:
        return f"is for up to {_MOST_CHOICES} choices of a token"
    return None


def refuses_sorted(x, ids, weights, gate_up, down, shared, *, out_dtype):
    """What keeps the Triton kernels that sort pairs by expert from these arguments."""
    if x.shape[0] < LEAST_SORTED:
        return f"is for {LEAST_SORTED} tokens and more, these are {x.shape[0]}"
    reason = _refuses_forms(x, gate_up, down, shared)
    return reason or _refuses_many(ids, form(gate_up), x.shape[1], gate_up.shape[-2])


def _refuses_forms(x, gate_up, down, shared):
    stored = form(gate_up)
    if stored is None or form(down) != stored:
        return "is for experts in tiled NVFP4, FP8 or bfloat16, both matrices alike"
    if x.dtype != jnp.bfloat16:
        return f"is for bfloat16 tokens, these are {x.dtype}"
    if shared is not None and any(w.dtype != jnp.bfloat16 for w in shared[:3]):
        return "is for a shared expert in bfloat16"
    return None


def _refuses_sizes(hidden, width, stored, shared):
    chunk = CHUNKS[stored][0]
    for name, size, step in (
        ("hidden size", hidden, max(chunk, 16 * DOWN_WARPS)),
        ("width of the experts", width, chunk),
    ):
        if size % step:
            return f"needs a {name} in multiples of {step}, not {size}"
    warps = split(hidden, chunk)
    if shared is not None:
        if shared[0].shape[0] != width:
            return f"needs a shared expert as wide as the others, {width}"
        chunk = CHUNKS["bf16"][0]
    if max(hidden // (chunk * warps), width // chunk) > _MOST_STEPS:
        return f"is for rows of up to {_MOST_STEPS} steps"
    return None


def _refuses_many(ids, stored, hidden, width):
    least = 128 if stored == "nvfp4" else 64
    for name, size, step in (("hidden size", hidden, 128), ("width of the experts", width, least)):
        if size % step:
            return f"needs a {name} in multiples of {step} for many tokens, not {size}"
    if ids.shape[0] > _MOST_GRID or ids.size * max(hidden, width) >= 1 << 31:
        return "is for fewer tokens: their results before the sum have too many elements"
    if ids.shape[1] > 127:
        return "is for up to 127 choices of a token"
    return None
