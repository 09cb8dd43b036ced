"""The model over its decode state: a step of tokens, its commit, the output head."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from qwen4jax.config import Config
from qwen4jax.layers.capture import Capture
from qwen4jax.layers.decoder import decoder_layer
from qwen4jax.layers.gated_residual import Residual, read_final
from qwen4jax.layers.mtp import DraftRows, draft_rows
from qwen4jax.layers.ple import per_layer_embedding
from qwen4jax.numerics import rounded, windows_after
from qwen4jax.pallas import gated_delta
from qwen4jax.pallas.skinny_matmul import argmax, skinny_matmul
from qwen4jax.params import Params
from qwen4jax.span import Span, make_span
from qwen4jax.state import DecodeState


class Pending(struct.PyTreeNode):
    """What a step leaves to its commit.

    Attributes:
        span: places of the step's tokens.
        residual: streams after the last layer.
        ngram_ids: ids with their history.
        ple: convolution inputs of the n-gram layers with their history.
        delta: factors of each linear layer, None elsewhere and in a final step.
    """

    span: Span
    residual: Float[Array, "B T R D"]
    ngram_ids: Int[Array, "B L"]
    ple: tuple[Float[Array, "B L2 RD"], ...]
    delta: tuple[gated_delta.Factors | None, ...]


def step(
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    count: Int[Array, " B"],
    *,
    final: bool,
    rope_positions: Int[Array, "B T 3"] | None = None,
    capture: Capture | None = None,
) -> tuple[DecodeState, Pending]:
    """Runs the main model over the next tokens of every slot.

    Keys are written to the caches, beyond the live tokens; `commit` makes the tokens live. Rows
    with `count` 0 change nothing.

    Args:
        params: of the model.
        state: slots are the rows of `tokens`.
        tokens: ids in [0, vocab); what stands from `count` on is not looked at.
        count: tokens of each row.
        final: all `count` tokens stay, so the recurrent states are advanced at once.
        rope_positions: three-axis positions; by default those of text.
        capture: of internals.
    """
    config = params.config
    capture = capture or Capture()
    with jax.named_scope("span"):
        span = make_span(config, state, state.length, count, tokens.shape[1], rope_positions)
    tokens = jnp.where(span.valid, tokens, config.hash_eos_token_id)
    ids = jnp.concatenate([state.ngram_ids, tokens], axis=1)
    with jax.named_scope("embed"):
        residual = Residual(jnp.repeat(embed(params, tokens)[:, :, None], config.hc_count, axis=2))
    caches, factors, windows = [], [], []
    for i, (layer, cache) in enumerate(zip(params.layers, state.layers, strict=True)):
        with jax.named_scope(f"layer{i:02d}"):
            if layer.ple is not None:
                number = len(windows)
                streams = residual.settled()
                added, window = per_layer_embedding(
                    layer.ple, config, number, streams, ids, state.ple[number]
                )
                streams = rounded(streams.astype(jnp.float32) + added, streams.dtype)
                residual = residual._replace(streams=streams, pending=None)
                windows.append(window)
            residual, after, _ = decoder_layer(
                layer, config, residual, cache, span, final=final,
                capture=capture.scope(f"layer{i:02d}"),
            )  # fmt: skip
        speculative = isinstance(after, gated_delta.Factors)
        caches.append(cache if speculative else after)
        factors.append(after if speculative else None)
    rows = jnp.arange(tokens.shape[0])[:, None]
    ring = state.rope_ring.at[rows, span.ring].set(span.rope_positions, mode="drop")
    state = state.replace(layers=tuple(caches), rope_ring=ring)
    return state, Pending(span, residual.settled(), ids, tuple(windows), tuple(factors))


def commit(state: DecodeState, pending: Pending, count: Int[Array, " B"]) -> DecodeState:
    """Makes the first `count` tokens of a step live in every state that a row carries.

    Args:
        state: from `step`.
        pending: from the same `step`.
        count: tokens that stay, at most the step's `count` (and equal to it in a final step).
    """
    with jax.named_scope("commit"):
        layers = _commit_layers(state.layers, pending.delta, count)
        flat = pending.residual.reshape(*pending.residual.shape[:2], -1)
        last = jnp.maximum(count - 1, 0)[:, None, None]
        residual = jnp.take_along_axis(flat, last, axis=1)[:, 0]
        idle = (count == 0)[:, None]
        furthest = jnp.where(
            jnp.arange(flat.shape[1])[None, :, None] < count[:, None, None],
            pending.span.rope_positions,
            -1,
        )
        next_position = jnp.max(furthest, axis=(1, 2)) + 1
        length = state.length + count
        return state.replace(
            length=length,
            rope_delta=jnp.where(count > 0, next_position - length, state.rope_delta),
            ngram_ids=_ids_after(pending.ngram_ids, count, state.ngram_ids.shape[1]),
            residual=jnp.where(idle, state.residual, residual.astype(state.residual.dtype)),
            layers=layers,
            ple=tuple(
                windows_after(window, count, old.shape[1])
                for window, old in zip(pending.ple, state.ple, strict=True)
            ),
        )


def embed(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Embeddings of ids in [0, vocab)."""
    return params.embed_tokens.at[tokens].get(mode="clip")


def read_out(params: Params, residual: Float[Array, "B T R D"]) -> Float[Array, "B T D"]:
    """The final mixer: streams after the last layer to the output head's input."""
    return read_final(params.hyper_connection_mixer, params.config, Residual(residual))[0]


def head(params: Params, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
    """Logits in float32."""
    with jax.named_scope("lm_head"):
        return skinny_matmul(hidden, _output_weight(params), out_dtype=jnp.float32)


def likeliest(
    params: Params, hidden: Float[Array, "B T D"], *, draft: bool = False
) -> tuple[Int[Array, "B T"], Bool[Array, "B T"]]:
    """The id with the largest logit, the lowest of a tie, and whether all logits are finite.

    Args:
        params: of the model.
        hidden: output-head input.
        draft: reads the draft head's own copy of the output head, where it has one.
    """
    own = params.mtp.lm_head if draft and params.mtp is not None else None
    with jax.named_scope("lm_head"):
        return argmax(hidden, _output_weight(params) if own is None else own)


def _output_weight(params: Params) -> Array:
    return params.embed_tokens if params.lm_head is None else params.lm_head


def draft_step(
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    residual: Float[Array, "B T R D"],
    start: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    rope_positions: Int[Array, "B T 3"] | None = None,
    selected: Int[Array, "B T M"] | None = None,
    capture: Capture | None = None,
) -> tuple[DecodeState, DraftRows]:
    """Runs the draft head on rows `start ..`, pairing each row's residual with the next token.

    Args:
        params: of the model, which has a draft head.
        state: slots are the rows of `tokens`.
        tokens: the token after each row's.
        residual: streams of each row.
        start: first row; -1 where the first place holds no row.
        count: places that are filled.
        rope_positions: three-axis positions of the rows; by default those of text.
        selected: given selection, see `qwen4jax.layers.attention.attention`.
        capture: of internals.
    """
    assert params.mtp is not None
    assert state.mtp is not None
    config: Config = params.config
    span = make_span(config, state, start, count, tokens.shape[1], rope_positions)
    tokens = jnp.where(span.valid, tokens, config.hash_eos_token_id)
    with jax.named_scope("mtp"):
        rows = draft_rows(
            params.mtp, config, embed(params, tokens), residual, state.mtp, span,
            selected=selected, capture=capture or Capture(),
        )  # fmt: skip
    return state.replace(mtp=rows.cache), rows


def _ids_after(ids: Int[Array, "B L"], count: Int[Array, " B"], length: int) -> Any:
    return jnp.take_along_axis(ids, count[:, None] + jnp.arange(length), axis=1)


def _commit_layers(
    caches: tuple[Any, ...], factors: tuple[gated_delta.Factors | None, ...], count: Array
) -> tuple[Any, ...]:
    """The layers' caches, the linear ones after `count` tokens of a step: all of them at once."""
    pairs = [(c, f) for c, f in zip(caches, factors, strict=True) if f is not None]
    if not pairs:
        return caches
    states, given = zip(*pairs, strict=True)
    after = iter(gated_delta.commit(states, given, count))
    return tuple(
        cache if f is None else next(after) for cache, f in zip(caches, factors, strict=True)
    )
