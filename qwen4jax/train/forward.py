"""The model over whole sequences, for its derivative: no caches, each layer's reference operations.

Equal to `forward` and to the draft head's steps of decoding in float32 rounding; `tests/train`
holds them together.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from qwen4jax.config import Config
from qwen4jax.numerics import rms_norm, rounded
from qwen4jax.pallas import gated_residual, moe, ple
from qwen4jax.pallas.skinny_matmul import skinny_matmul
from qwen4jax.params import (
    FinalMixer,
    GatedResidual,
    Layer,
    MixtureOfExperts,
    MultiTokenPrediction,
    Params,
    PerLayerEmbedding,
)
from qwen4jax.train.attention import (
    Drafted,
    Imitation,
    attention,
    chained_attention,
    make_table,
    shifted,
)
from qwen4jax.train.delta_net import delta_net

_matmul = functools.partial(skinny_matmul, implementation="reference")


class Router(struct.PyTreeNode):
    """What one expert sublayer's router did.

    Attributes:
        load: share of the choices that fell on each expert.
        probability: mean router probability of each expert.
    """

    load: Float[Array, " E"]
    probability: Float[Array, " E"]


class Trace(struct.PyTreeNode):
    """What the layers leave to the losses: one entry per sublayer of the kind."""

    routers: tuple[Router, ...] = ()
    imitations: tuple[Imitation, ...] = ()


def main_streams(
    params: Params, tokens: Int[Array, "B T"], *, dense: Bool[Array, ""]
) -> tuple[Float[Array, "B T R D"], Trace]:
    """Residual streams after the last layer, of sequences from their first token.

    Args:
        params: plain arrays (a stored form of the n-gram table is read as well).
        tokens: ids in [0, vocab).
        dense: whether sparse layers attend to everything before a query.
    """
    config = params.config
    table = make_table(config, tokens.shape[1])
    embedded = params.embed_tokens[tokens]
    streams = jnp.repeat(embedded[:, :, None], config.hc_count, axis=2)
    history = [(0, 0), (config.ngram_size - 1, 0)]
    ids = jnp.pad(tokens, history, constant_values=config.hash_eos_token_id)
    routers, imitations, number = [], [], 0
    for i, layer in enumerate(params.layers):
        with jax.named_scope(f"layer{i:02d}"):
            if layer.ple is not None:
                added = _ngram_embedding(layer.ple, config, number, streams, ids)
                streams = rounded(streams.astype(jnp.float32) + added, streams.dtype)
                number += 1
            x, inject = _read(layer.attn_hyper_connection, config, streams)
            if layer.linear_attn is not None:
                y = delta_net(layer.linear_attn, config, x)
            else:
                assert layer.self_attn is not None
                y, _, imitation = attention(layer.self_attn, config, x, table, dense=dense)
                imitations.append(imitation)
            streams, router = _after_attention(layer, config, streams, inject, y)
            routers.append(router)
    return streams, Trace(tuple(routers), tuple(imitations))


def draft_chain(
    params: Params,
    tokens: Int[Array, "B T"],
    streams: Float[Array, "B T R D"],
    steps: int,
    *,
    dense: Bool[Array, ""],
) -> tuple[tuple[Float[Array, "B T D"], ...], Trace]:
    """The draft head's chained steps, for a chain from every row at once, fed the true tokens.

    Step `n` (from 1) of the chain that began at row `p` is row `r = p + n - 1`: it pairs token
    `r + 1` with the residual of the step before at row `r - 1` (step 1: the main model's at `r`),
    and what it sees is what decoding shows it: the rows up to `p` from the main model's residuals,
    then the chain's own. Row `r` of every step predicts token `r + 2`.

    Args:
        params: of a model with a draft head.
        tokens: the token after each row's.
        streams: main model's, of each row.
        steps: chained steps, 1 for the first draft alone.
        dense: as `main_streams`.

    Returns:
        Output-head inputs of each step; the first `n - 1` rows of step `n` belong to no chain.
    """
    config, head = params.config, params.mtp
    assert head is not None
    layer = head.layers[0]
    assert layer.self_attn is not None
    table = make_table(config, tokens.shape[1])
    embedded = params.embed_tokens[tokens]
    hidden: list[Array] = []
    routers: list[Router] = []
    imitations: list[Imitation] = []
    rows: Drafted | None = None
    for number in range(steps):
        with jax.named_scope(f"draft_{number}"):
            residual = streams if number == 0 else shifted(streams, 1)
            both = _draft_input(head, config, embedded, residual)
            x, inject = _read(layer.attn_hyper_connection, config, both)
            if rows is None:
                y, rows, imitation = attention(layer.self_attn, config, x, table, dense=dense)
                imitations.append(imitation)
            else:
                y, rows = chained_attention(layer.self_attn, config, x, table, rows, dense=dense)
            streams, router = _after_attention(layer, config, both, inject, y)
            routers.append(router)
            hidden.append(_read_final(head.hyper_connection_mixer, config, streams))
    return tuple(hidden), Trace(tuple(routers), tuple(imitations))


def read_out(params: Params, streams: Float[Array, "B T R D"]) -> Float[Array, "B T D"]:
    """The final mixer: streams after the last layer to the output head's input."""
    return _read_final(params.hyper_connection_mixer, params.config, streams)


def logits_of(params: Params, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Logits in float32."""
    weight = params.embed_tokens if params.lm_head is None else params.lm_head
    return _matmul(hidden, weight, out_dtype=jnp.float32)


def _read(params: GatedResidual, config: Config, streams):
    x, inject, _ = gated_residual.mix(
        streams,
        params.hc_norm,
        params.input_mix_weight_down,
        params.input_mix_weight_up,
        params.block_inject_weight,
        eps=config.rms_norm_eps,
        implementation="reference",
    )
    assert inject is not None
    return x, inject


def _read_final(params: FinalMixer, config: Config, streams):
    return gated_residual.mix(
        streams,
        params.hc_norm,
        params.input_mix_weight_down,
        params.input_mix_weight_up,
        None,
        eps=config.rms_norm_eps,
        implementation="reference",
    )[0]


def _after_attention(layer: Layer, config: Config, streams, inject, y) -> tuple[Any, Router]:
    """The attention's output into the streams, and the expert sublayer."""
    update = functools.partial(gated_residual.update, implementation="reference")
    streams = update(streams, inject, y)
    x, inject = _read(layer.mlp_hyper_connection, config, streams)
    y, router = experts(layer.mlp, config, x)
    return update(streams, inject, y), router


def experts(
    params: MixtureOfExperts, config: Config, x: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T D"], Router]:
    """The expert sublayer with every expert run on every token, as two products.

    With 16 small experts that is cheaper than moving tokens to their own.
    """
    flat = x.reshape(-1, x.shape[-1])
    logits = _matmul(flat, params.gate)
    ids, weights = moe.route(
        logits,
        config.num_experts_per_tok,
        renormalize=config.norm_topk_prob,
        implementation="reference",
    )
    number = config.num_experts
    chosen = ids[..., None] == jnp.arange(number)
    share = jnp.sum(jnp.where(chosen, weights[..., None], 0.0), axis=1)
    gate_up = params.experts.gate_up_proj
    hidden = _matmul(flat, gate_up.reshape(-1, flat.shape[-1]), out_dtype=jnp.float32)
    hidden = hidden.reshape(flat.shape[0], number, 2, -1)
    hidden = jax.nn.silu(hidden[:, :, 0]) * hidden[:, :, 1]
    # rounded before it is weighted, as every expert's own product reads it
    hidden = hidden.astype(x.dtype).astype(jnp.float32) * share[..., None]
    down = jnp.moveaxis(params.experts.down_proj, 0, 1).reshape(flat.shape[-1], -1)
    hidden = hidden.astype(x.dtype).reshape(flat.shape[0], -1)
    routed = _matmul(hidden, down, out_dtype=jnp.float32)

    shared = params.shared_expert
    gate = _matmul(flat, shared.gate_proj, out_dtype=jnp.float32)
    up = _matmul(flat, shared.up_proj, out_dtype=jnp.float32)
    out = _matmul((jax.nn.silu(gate) * up).astype(x.dtype), shared.down_proj, out_dtype=jnp.float32)
    opened = jax.nn.sigmoid(_matmul(flat, params.shared_expert_gate, out_dtype=jnp.float32))
    y = (routed + opened * out).astype(x.dtype).reshape(x.shape)
    probabilities = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
    load = jnp.mean(jnp.any(chosen, axis=1), axis=0, dtype=jnp.float32)
    return y, Router(load / config.num_experts_per_tok, jnp.mean(probabilities, axis=0))


def _ngram_embedding(params: PerLayerEmbedding, config: Config, number: int, streams, ids):
    rows = ple.ngram_rows(
        ids,
        config.ngram_hash(number),
        eos=config.hash_eos_token_id,
        implementation="reference",
    )
    embedded = ple.gather(params.ngram_embedding, rows, streams.dtype, implementation="reference")
    key = _matmul(embedded, params.key_proj).reshape(streams.shape)
    value = _matmul(embedded, params.value_proj)
    past = (config.ple_conv_kernel_size - 1) * config.ngram_size
    width = streams.shape[2] * streams.shape[3]
    added, _ = ple.mix(
        key,
        value,
        streams,
        params.norm_key,
        params.norm_query,
        params.norm_conv,
        params.conv1d,
        jnp.zeros((streams.shape[0], past, width), streams.dtype),
        dilation=config.ngram_size,
        eps=config.rms_norm_eps,
        implementation="reference",
    )
    return added


def _draft_input(head: MultiTokenPrediction, config: Config, embedded, residual):
    eps = config.rms_norm_eps
    token = _matmul(rms_norm(embedded, head.pre_fc_norm_embedding, eps), head.fc_embedding)
    flat = residual.reshape(*residual.shape[:2], -1)
    normed = rms_norm(flat, head.pre_fc_norm_hidden, eps).reshape(residual.shape)
    hidden = _matmul(normed, head.fc_hidden)
    both = token.astype(jnp.float32)[:, :, None] + hidden.astype(jnp.float32)
    return both.astype(residual.dtype)
