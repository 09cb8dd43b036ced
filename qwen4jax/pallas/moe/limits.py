"""What the kernels take, known without their language."""

import jax.numpy as jnp

from qwen4jax import quant

# columns of one step of a warp: 64 bytes of NVFP4
CHUNK = 128
# tokens of a call: each program looks for its expert among all their choices
MOST_TOKENS = 128
# experts of a router: a warp holds a token's
MOST_EXPERTS = 2048
# steps of a row, which are unrolled
_MOST_STEPS = 16


def split(columns: int) -> int:
    """Warps among which the columns of a row of gate and up are split."""
    return next(w for w in (4, 2, 1) if columns % (CHUNK * w) == 0)


def refuses_route(logits, k, *, renormalize):
    """What keeps the Triton kernel from these arguments, if anything."""
    if logits.shape[1] > MOST_EXPERTS:
        return f"is for up to {MOST_EXPERTS} experts, these are {logits.shape[1]}"
    return None


def refuses_experts(x, ids, weights, gate_up, down):
    """What keeps the Triton kernels from these arguments, if anything."""
    if not (isinstance(gate_up, quant.Nvfp4) and isinstance(down, quant.Nvfp4)):
        return "is for experts stored in NVFP4"
    if x.dtype != jnp.bfloat16:
        return f"is for bfloat16 tokens, these are {x.dtype}"
    if x.shape[0] > MOST_TOKENS:
        return f"is for up to {MOST_TOKENS} tokens, these are {x.shape[0]}"
    for name, size in (("hidden size", x.shape[1]), ("width of the experts", gate_up.shape[-2])):
        if size % CHUNK:
            return f"needs a {name} in multiples of {CHUNK}, not {size}"
    hidden, width = x.shape[1], gate_up.shape[-2]
    if max(hidden // (CHUNK * split(hidden)), width // CHUNK) > _MOST_STEPS:
        return f"is for rows of up to {_MOST_STEPS} steps"
    return None
