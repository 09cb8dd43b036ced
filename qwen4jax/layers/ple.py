"""The per-layer n-gram embedding, added to the streams before a layer's attention."""

import jax
from jaxtyping import Array, Float, Int

from qwen4jax.config import Config
from qwen4jax.pallas import ple as op
from qwen4jax.pallas.skinny_matmul import skinny_matmul
from qwen4jax.params import PerLayerEmbedding


def per_layer_embedding(
    params: PerLayerEmbedding,
    config: Config,
    ple_index: int,
    streams: Float[Array, "B T R D"],
    ids: Int[Array, "B L"],
    history: Float[Array, "B W RD"],
) -> tuple[Float[Array, "B T R D"], Float[Array, "B L2 RD"]]:
    """What the n-grams ending at each token add to the streams.

    Args:
        params: of the block.
        config: of the model.
        ple_index: which n-gram layer this is, from 0.
        streams: residual streams.
        ids: the last `ngram_size - 1` ids and the tokens.
        history: earlier inputs of the convolution.

    Returns:
        The addend, and the convolution's inputs with their history.
    """
    with jax.named_scope("ple"):
        hash = config.ngram_hash(ple_index)
        embedded = op.embed(
            params.ngram_embedding, ids, hash, streams.dtype, eos=config.hash_eos_token_id
        )
        key = skinny_matmul(embedded, params.key_proj).reshape(streams.shape)
        value = skinny_matmul(embedded, params.value_proj)
        norms = (params.norm_key, params.norm_query, params.norm_conv)
        return op.mix(
            key,
            value,
            streams,
            *norms,
            params.conv1d,
            history,
            dilation=config.ngram_size,
            eps=config.rms_norm_eps,
        )
