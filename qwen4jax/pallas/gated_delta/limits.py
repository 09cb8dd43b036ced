"""What keeps the Triton kernels of Gated DeltaNet from given arguments."""

import jax.numpy as jnp

# tokens of a row: their products with the state are held at once
MOST_PLACES = 8


def step(qkv, z, a, b, weights, state, **_) -> str | None:
    """Limits of a step."""
    if qkv.dtype != state.conv.dtype:
        return f"needs {state.conv.dtype} projections as the history's, not {qkv.dtype}"
    return _heads(state, qkv.shape[1])


def commit(states, factors, count) -> str | None:
    """Limits of a commit."""
    if len({(s.recurrent.shape, f.decay.shape) for s, f in zip(states, factors, strict=True)}) > 1:
        return "needs layers of one shape"
    return next((_heads(s, f.decay.shape[1]) for s, f in zip(states, factors, strict=True)), None)


def _heads(state, places: int) -> str | None:
    _, _, key, value = state.recurrent.shape
    if places > MOST_PLACES:
        return f"takes up to {MOST_PLACES} tokens of a row, not {places}"
    if key & (key - 1) or value & (value - 1) or max(key, value) > 128:
        return f"needs heads of a power of two up to 128 channels, not {key} and {value}"
    if state.recurrent.dtype != jnp.float32:
        return f"needs a float32 state, not {state.recurrent.dtype}"
    return None
