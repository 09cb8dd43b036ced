"""Norm, rotation and cache writes of a sparse-attention layer's queries and keys."""

from jaxtyping import Array, Float

from qwen4jax.pallas.compress_and_store import reference
from qwen4jax.pallas.registry import Operation
from qwen4jax.span import Span
from qwen4jax.state import AttentionCache

STORE = Operation("compress_and_store.store", {"reference": reference.store})
COMPRESS = Operation("compress_and_store.compress", {"reference": reference.compress})
PREPARE = Operation("compress_and_store.prepare", {"reference": reference.prepare})


def prepare(
    x: Float[Array, "B T H C"],
    norm: Float[Array, " C"],
    span: Span,
    *,
    eps: float,
    implementation: str | None = None,
) -> Float[Array, "B T H C"]:
    """RMS norm of each head (gain `1 + norm`), then the rotary embedding of its first channels."""
    return PREPARE.run(implementation, x.shape[0] * x.shape[1], x, norm, span, eps=eps)


def store(
    cache: AttentionCache,
    key: Float[Array, "B T K C"],
    value: Float[Array, "B T K C"],
    span: Span,
    *,
    implementation: str | None = None,
) -> AttentionCache:
    """Writes prepared keys and values to the pages; tokens without a place are dropped.

    In e4m3 pages values beyond +-448 are stored as that.
    """
    return STORE.run(implementation, key.shape[0] * key.shape[1], cache, key, value, span)


def compress(
    cache: AttentionCache,
    raw_key: Float[Array, "B T C"],
    norm: Float[Array, " C"],
    span: Span,
    *,
    ratio: int,
    eps: float,
    implementation: str | None = None,
) -> AttentionCache:
    """Writes the compressed keys of the blocks that end in the span, and the ring.

    A block's key is the float32 mean of its `ratio` raw keys, rounded to their dtype, normed (gain
    `1 + norm`) and rotated at the position of its first token. Members before the span come from
    the ring, which is read before it is written.

    Args:
        cache: of the layer.
        raw_key: index keys, neither normed nor rotated.
        norm: gain minus one.
        span: places.
        ratio: tokens in a block.
        eps: of the norm.
        implementation: see `COMPRESS`; by default the fastest.

    Source: spec sections 7.2 and 7.5.
    """
    rows = raw_key.shape[0] * raw_key.shape[1]
    return COMPRESS.run(implementation, rows, cache, raw_key, norm, span, ratio=ratio, eps=eps)
