"""Norm, rotation and cache writes of a sparse-attention layer's queries and keys."""

from typing import NamedTuple

from jaxtyping import Array, Float

from qwen4jax.pallas.compress_and_store import limits, reference
from qwen4jax.pallas.registry import Kernel, Operation
from qwen4jax.span import Span
from qwen4jax.state import AttentionCache

STORE = Operation("compress_and_store.store", {"reference": reference.store})
COMPRESS = Operation("compress_and_store.compress", {"reference": reference.compress})
PREPARE = Operation("compress_and_store.prepare", {"reference": reference.prepare})
PREPARE_AND_STORE = Operation(
    "compress_and_store.prepare_and_store",
    {
        "reference": reference.prepare_and_store,
        "triton": Kernel(
            "qwen4jax.pallas.compress_and_store.triton_kernels.prepare_and_store",
            needs=("triton",),
            refuses=limits.refuses,
        ),
    },
)


class Gains(NamedTuple):
    """Gains minus one of a layer's norms."""

    query: Float[Array, " C"]
    key: Float[Array, " C"]
    index_query: Float[Array, " I"]
    index_key: Float[Array, " I"]


def prepare_and_store(
    cache: AttentionCache,
    query_gate: Float[Array, "B T H 2 C"],
    key: Float[Array, "B T K C"],
    value: Float[Array, "B T K C"],
    index_qk: Float[Array, "B T J I"],
    gains: Gains,
    span: Span,
    *,
    ratio: int,
    eps: float,
    implementation: str | None = None,
) -> tuple[
    AttentionCache,
    Float[Array, "B T H C"],
    Float[Array, "B T H C"],
    Float[Array, "B T Q I"],
]:
    """All that lies between a layer's projections and its scores: `prepare`, `store`, `compress`.

    Args:
        cache: of the layer.
        query_gate: each head's query and output gate, as projected.
        key: neither normed nor rotated.
        value: as stored.
        index_qk: index queries and, last, the index key; the queries may be missing.
        gains: of the norms.
        span: places.
        ratio: tokens in a block.
        eps: of the norms.
        implementation: see `PREPARE_AND_STORE`; by default the fastest.

    Returns:
        The cache, the queries normed and rotated, the gates, and the index queries, `Q = J - 1`.
    """
    rows = query_gate.shape[0] * query_gate.shape[1]
    given = (cache, query_gate, key, value, index_qk, gains, span)
    return PREPARE_AND_STORE.run(implementation, rows, *given, ratio=ratio, eps=eps)


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
