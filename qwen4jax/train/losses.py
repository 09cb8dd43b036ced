"""The training loss, and what is measured beside it."""

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from qwen4jax.params import Params
from qwen4jax.train.attention import Imitation, shifted
from qwen4jax.train.forward import Router, draft_chain, main_streams, read_out
from qwen4jax.train.head import draft_nats, token_nats
from qwen4jax.train.recipe import Recipe

Metrics = dict[str, Float[Array, "..."]]


def tokens_needed(length: int, drafts: int) -> int:
    """Tokens of a training window: every place has the tokens that all heads predict."""
    return length + (2 if drafts else 1)


class Mode(struct.PyTreeNode):
    """What may change from step to step without a compilation.

    Attributes:
        dense: whether sparse layers attend to everything.
        indexer_weight: of the indexers' imitation loss; 0 for a model that never asks them.
    """

    dense: Bool[Array, ""]
    indexer_weight: Float[Array, ""]


def total_loss(
    params: Params, window: Int[Array, "B W"], mode: Mode, recipe: Recipe
) -> tuple[Float[Array, ""], Metrics]:
    """The weighted sum of all losses over a batch of windows.

    * `loss`: next-token cross entropy of the main model, nats per token.
    * `draft_loss`: the same of the draft head's chained steps, each fed the true token and the
      step before's residual, mixed with the divergence from the main model's distribution.
    * `balance`: `E * sum(load * probability)`, 1 when even (Fedus et al., arXiv 2101.03961).
    * `index_divergence`: imitation of dense attention by the indexers, see `attention.py`.

    Args:
        params: in the dtype of computation.
        window: `tokens_needed` ids of each sequence.
        mode: of this step.
        recipe: weights of the other losses.

    Returns:
        The loss, and the metrics: those named, `accepted` [drafts] (share of the chains whose
        first `n` steps all agree with the main model's choice), `index_overlap` and
        `index_captured` (see `Imitation`), `largest_load` (of an expert, 1 when even).
    """
    drafts = recipe.drafts if params.mtp is not None else 0
    length = window.shape[1] - (2 if drafts else 1)
    streams, trace = main_streams(params, window[:, :length], dense=mode.dense)
    hidden = read_out(params, streams)
    head = params.embed_tokens if params.lm_head is None else params.lm_head
    nats, chosen = token_nats(hidden, head, window[:, 1 : length + 1])
    metrics: Metrics = {"loss": jnp.mean(nats)}
    total = metrics["loss"]
    routers, imitations = trace.routers, trace.imitations
    if drafts:
        following = window[:, 1 : length + 1]
        steps, drafted = draft_chain(params, following, streams, drafts, dense=mode.dense)
        routers, imitations = (*routers, *drafted.routers), (*imitations, *drafted.imitations)
        losses, agrees = [], []
        # row r of a step predicts what the main model predicts at r + 1
        # (of which the last row is not worth another shape)
        teacher = shifted(hidden[:, ::-1], 1)[:, ::-1]
        for number, rows in enumerate(steps):
            nats, divergence, guess = draft_nats(rows, head, window[:, 2 : length + 2], teacher)
            mixed = (1 - recipe.draft_imitation) * nats + recipe.draft_imitation * divergence
            losses.append(jnp.mean(mixed[:, number:-1]))
            agrees.append(guess[:, :-1] == chosen[:, 1:])
        metrics["draft_loss"] = jnp.stack(losses)
        metrics["accepted"] = _accepted(agrees)
        total += recipe.draft_weight * jnp.mean(metrics["draft_loss"])
    metrics["balance"] = _balance(routers)
    metrics["largest_load"] = jnp.max(
        jnp.stack([jnp.max(r.load) * r.load.shape[0] for r in routers])
    )
    total += recipe.balance_weight * metrics["balance"]
    if imitations:
        metrics |= _imitated(imitations)
        total += mode.indexer_weight * metrics["index_divergence"]
    return total, metrics


def _accepted(agrees: list[Array]) -> Float[Array, " drafts"]:
    """Share of chains whose first steps all agree; step `n` of a chain is one row further on."""
    chains = agrees[0].shape[1] - len(agrees) + 1
    so_far, shares = jnp.ones((agrees[0].shape[0], chains), bool), []
    for number, agree in enumerate(agrees):
        so_far = so_far & agree[:, number : number + chains]
        shares.append(jnp.mean(so_far, dtype=jnp.float32))
    return jnp.stack(shares)


def _balance(routers: tuple[Router, ...]) -> Float[Array, ""]:
    each = [
        jnp.sum(jax.lax.stop_gradient(r.load) * r.probability) * r.load.shape[0] for r in routers
    ]
    return jnp.mean(jnp.stack(each))


def _imitated(imitations: tuple[Imitation, ...]) -> Metrics:
    mean = lambda x, n: jnp.mean(jnp.stack(x) / jnp.maximum(jnp.stack(n), 1))  # noqa: E731
    queries, contested = [i.queries for i in imitations], [i.contested for i in imitations]
    return {
        "index_divergence": mean([i.divergence for i in imitations], queries),
        "index_overlap": mean([i.overlap for i in imitations], contested),
        "index_captured": mean([i.captured for i in imitations], contested),
    }
