"""The n-gram embedding: hash and gather, then its gate and dilated convolution."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from qwen4jax.ngram import NgramHash
from qwen4jax.pallas.ple import limits, reference
from qwen4jax.pallas.registry import Kernel, Operation

_TRITON = "qwen4jax.pallas.ple.triton_kernels."
_kernel = functools.partial(Kernel, needs=("triton",))

ROWS = Operation("ple.ngram_rows", {"reference": reference.ngram_rows})
GATHER = Operation(
    "ple.gather",
    {
        "reference": reference.gather,
        "triton": _kernel(_TRITON + "gather", refuses=limits.gather),
    },
)
EMBED = Operation(
    "ple.embed",
    {
        "reference": reference.embed,
        "triton": _kernel(_TRITON + "embed", refuses=limits.gather),
    },
)
MIX = Operation(
    "ple.mix",
    {"reference": reference.mix, "triton": _kernel(_TRITON + "mix", refuses=limits.mix)},
)


def ngram_rows(
    ids: Int[Array, "B L"], hash: NgramHash, *, eos: int, implementation: str | None = None
) -> Int[Array, "B T heads"]:
    """Table rows of each token's n-grams.

    An n-gram does not reach past an end-of-sequence id: with `eos` at some place before the
    token, that place and all before it count as `eos`. The token itself may be `eos`.

    Args:
        ids: history and tokens, `L = ngram_size - 1 + T`; ids in [0, vocab).
        hash: constants of the layer.
        eos: the id that ends a document and stands where there is no history.
        implementation: see `ROWS`; by default the fastest.

    Source: spec section 5; `Qwen4ExpTextNGramEmbedding` of transformers 5.17.
    """
    return ROWS.run(implementation, ids.size, ids, hash, eos=eos)


def gather(
    table: Any, rows: Int[Array, "B T heads"], dtype: Any, *, implementation: str | None = None
) -> Float[Array, "B T E"]:
    """Rows of the table side by side, `E = heads * width`, in `dtype`.

    Args:
        table: [rows, width], an array or a `quant.ScaledTable`, or a `HostTable` in place of the
            array, which the reference calls back for.
        rows: row numbers, in range.
        dtype: of the result.
        implementation: see `GATHER`; by default the fastest.
    """
    return GATHER.run(implementation, rows.size // rows.shape[-1], table, rows, dtype)


def embed(
    table: Any,
    ids: Int[Array, "B L"],
    hash: NgramHash,
    dtype: Any,
    *,
    eos: int,
    implementation: str | None = None,
) -> Float[Array, "B T E"]:
    """`gather` of `ngram_rows`: the embedding of each token's n-grams, in `dtype`.

    Args:
        table: as `gather`. A kernel also reads one in pinned host memory, where it lies.
        ids: as `ngram_rows`.
        hash: as `ngram_rows`.
        dtype: of the result.
        eos: as `ngram_rows`.
        implementation: see `EMBED`; by default the fastest.
    """
    if implementation is None and _in_host_memory(table):
        # XLA's own gather would not read it from there
        implementation = "triton"
    return EMBED.run(implementation, ids.size, table, ids, hash, dtype, eos=eos)


def _in_host_memory(table: Any) -> bool:
    spaces = [jax.typeof(leaf).memory_space for leaf in jax.tree.leaves(table)]
    return jax.memory.Space.Host in spaces


def mix(
    key: Float[Array, "B T R D"],
    value: Float[Array, "B T D"],
    streams: Float[Array, "B T R D"],
    norm_key: Float[Array, " RD"],
    norm_query: Float[Array, " RD"],
    norm_conv: Float[Array, " RD"],
    conv1d: Float[Array, "RD J"],
    history: Float[Array, "B W RD"],
    *,
    dilation: int,
    eps: float,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T R D"], Float[Array, "B L RD"]]:
    """`u + silu(conv(norm(u)))` with `u = sigmoid(signed_sqrt(k . q / sqrt(D))) * value`.

    `k` and `q` are the keys and the streams, each stream normed for itself;
    `signed_sqrt(s) = sign(s) sqrt(max(|s|, 1e-6))`. The convolution is causal and depthwise with
    `dilation`, oldest tap first.

    Args:
        key: projected embedding, one key per stream.
        value: projected embedding, shared by the streams.
        streams: residual streams.
        norm_key: gain minus one of the keys.
        norm_query: of the streams.
        norm_conv: of the convolution's input.
        conv1d: taps.
        history: the last `W = (J - 1) * dilation` inputs of the convolution.
        dilation: between taps.
        eps: of the norms.
        implementation: see `MIX`; by default the fastest.

    Returns:
        What is added to the streams, and the convolution's inputs with their history,
        `L = W + T`.
    """
    return MIX.run(
        implementation, streams.shape[0] * streams.shape[1],
        key, value, streams, norm_key, norm_query, norm_conv, conv1d, history,
        dilation=dilation, eps=eps,
    )  # fmt: skip
