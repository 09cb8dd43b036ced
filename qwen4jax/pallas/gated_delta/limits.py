"""What keeps the kernels of Gated DeltaNet from given arguments."""

import jax.numpy as jnp

# tokens of a row: their products with the state are held at once
MOST_PLACES = 8
# of the convolution of chunks
TAPS = 4
# the tensor cores' smallest depth
LEAST_CHANNELS = 16
# of a head in Mosaic: a thread of a warpgroup each, or two CTAs' rows of wgmma
MOSAIC_CHANNELS = 128


def step(qkv, z, a, b, weights, state, **_) -> str | None:
    """Limits of a step."""
    if qkv.dtype != state.conv.dtype:
        return f"needs {state.conv.dtype} projections as the history's, not {qkv.dtype}"
    return _heads(state, qkv.shape[1])


def mosaic_step(qkv, z, a, b, weights, state, **_) -> str | None:
    """Limits of a step in Mosaic."""
    if reason := _mosaic_heads(state):
        return reason
    if any(x.dtype not in (jnp.bfloat16, jnp.float32) for x in (qkv, z)):
        return f"takes bfloat16 or float32 projections, not {qkv.dtype} and {z.dtype}"
    return step(qkv, z, a, b, weights, state)


def commit(states, factors, count) -> str | None:
    """Limits of a commit."""
    if len({(s.recurrent.shape, f.decay.shape) for s, f in zip(states, factors, strict=True)}) > 1:
        return "needs layers of one shape"
    return next((_heads(s, f.decay.shape[1]) for s, f in zip(states, factors, strict=True)), None)


def chunks(qkv, z, a, b, weights, state, count, **_) -> str | None:
    """Limits of a run of chunks, whose operands are exact in bfloat16."""
    if not qkv.dtype == z.dtype == state.conv.dtype == jnp.bfloat16:
        return f"needs bfloat16 projections and history, not {qkv.dtype} and {state.conv.dtype}"
    if weights.conv1d.shape[1] != TAPS:
        return f"needs a convolution of {TAPS} taps, not {weights.conv1d.shape[1]}"
    if weights.conv1d.dtype != jnp.bfloat16:
        return f"needs bfloat16 taps, not {weights.conv1d.dtype}"
    if min(state.recurrent.shape[2:]) < LEAST_CHANNELS:
        return f"needs heads of at least {LEAST_CHANNELS} channels"
    return _heads(state, 1)


def mosaic_chunks(qkv, z, a, b, weights, state, count, **_) -> str | None:
    """Limits of a run of chunks in Mosaic."""
    return _mosaic_heads(state) or chunks(qkv, z, a, b, weights, state, count)


def _mosaic_heads(state) -> str | None:
    if state.recurrent.shape[2:] != (MOSAIC_CHANNELS, MOSAIC_CHANNELS):
        key, value = state.recurrent.shape[2:]
        return f"needs heads of {MOSAIC_CHANNELS} channels, not {key} and {value}"
    return None


def _heads(state, places: int) -> str | None:
    _, _, key, value = state.recurrent.shape
    if places > MOST_PLACES:
        return f"takes up to {MOST_PLACES} tokens of a row, not {places}"
    if key & (key - 1) or value & (value - 1) or max(key, value) > 128:
        return f"needs heads of a power of two up to 128 channels, not {key} and {value}"
    if state.recurrent.dtype != jnp.float32:
        return f"needs a float32 state, not {state.recurrent.dtype}"
    return None
