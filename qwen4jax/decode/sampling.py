"""Which token follows: sampling on the device, by the options that `Controls` holds.

The random numbers of a position depend on (seed, sample, position) only, so that a request's ids
do not depend on drafts, their number, the slot or the other requests. Processors apply in the order
bias and the mask of early stop ids; repetition, frequency, presence penalty; temperature; min-p;
top-k; top-p over what is left, renormalised. Sources: vLLM `v1/sample/sampler.py` (the same order
and meaning), Hugging Face `logits_process.py`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qwen4jax.decode.leading import best, truncate
from qwen4jax.decode.stopping import Controls

# within these bounds no float32 step below gives NaN; the options stay within them too
_LOGIT = 1e30


class Sampled(NamedTuple):
    """One sampled token per row.

    Attributes:
        ids: in [0, V) whatever the logits are.
        logprobs: of the ids under `log_softmax(logits)`, before any processor; never NaN.
        finite: whether all logits were; an id without it means nothing.
        top_ids: the most probable ids, best first; None if not asked for.
        top_logprobs: theirs, as `logprobs`.
    """

    ids: Int[Array, "B T"]
    logprobs: Float[Array, "B T"] | None
    finite: Bool[Array, "B T"]
    top_ids: Int[Array, "B T K"] | None = None
    top_logprobs: Float[Array, "B T K"] | None = None


def sample(
    logits: Float[Array, "B T V"],
    fed: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    controls: Controls,
    *,
    logprobs: bool = True,
    top: int = 0,
) -> Sampled:
    """The token that follows each fed token, every processor applied in every row; float32.

    Args:
        logits: of the token after `fed[b, t]`.
        fed: `fed[b, 0]` is the last committed token, already counted in `controls`; the others are
            drafts, and count as output in the rows at and after them.
        positions: where the sampled token will stand, from 0: that of `fed[b, t]` plus 1.
        controls: of the B rows.
        logprobs: whether to return them; a greedy mode without them exponentiates nothing.
        top: how many of the most probable ids to return beside `logprobs`.

    Returns:
        For each row a function of its own logits, options, position and history alone.
    """
    finite = jnp.isfinite(logits).all(axis=-1)
    raw = jnp.where(jnp.isnan(logits), -_LOGIT, logits.astype(jnp.float32))
    raw = jnp.clip(raw, -_LOGIT, _LOGIT)
    scores = _penalise(_mask(raw, positions, controls), fed, controls)
    if controls.temperature is not None:
        scores = _perturb(scores, positions, controls)
    ids = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    if not logprobs:
        return Sampled(ids, None, finite)
    chosen = jnp.take_along_axis(raw, ids[..., None], axis=-1)[..., 0]
    total = jax.nn.logsumexp(raw, axis=-1)
    if not top:
        return Sampled(ids, chosen - total, finite)
    leaders, top_ids = best(raw, top)
    return Sampled(ids, chosen - total, finite, top_ids, leaders - total[..., None])


def takes_the_largest(controls: Controls) -> bool:
    """Whether every row's id is that of its largest logit: the mode has no option beside."""
    of_every_mode = ("max_length", "stop_ids")
    return all(v is None for name, v in vars(controls).items() if name not in of_every_mode)


def _mask(
    logits: Float[Array, "B T V"], positions: Int[Array, "B T"], controls: Controls
) -> Float[Array, "B T V"]:
    """Adds the bias, and masks stop ids at positions that come too early for them."""
    if controls.bias is not None:
        logits = logits + controls.bias[:, None, :]
    if controls.min_length is None:
        return logits
    is_stop = (controls.stop_ids[:, :, None] == jnp.arange(logits.shape[-1])).any(axis=1)
    early = positions < controls.min_length[:, None]
    return jnp.where(early[..., None] & is_stop[:, None, :], -jnp.inf, logits)


def _penalise(
    logits: Float[Array, "B T V"], fed: Int[Array, "B T"], controls: Controls
) -> Float[Array, "B T V"]:
    """Applies the penalties; row t has seen the drafts fed[:, 1..t] too."""
    if controls.output_counts is None:
        return logits
    rows, vocab = jnp.arange(fed.shape[1])[:, None], jnp.arange(logits.shape[-1])
    counts = controls.output_counts[:, None, :]
    # compared one by one, which XLA fuses into the reader; a scatter would write [B, T, V] counts
    for t in range(1, fed.shape[1]):
        counts = counts + ((fed[:, t, None, None] == vocab) & (rows >= t))
    present = counts > 0
    seen = present | controls.prompt_seen[:, None, :]
    factor = jnp.where(seen, controls.repetition[:, None, None], 1.0)
    logits = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = logits - controls.frequency[:, None, None] * counts
    return logits - controls.presence[:, None, None] * present


def _perturb(
    logits: Float[Array, "B T V"], positions: Int[Array, "B T"], controls: Controls
) -> Float[Array, "B T V"]:
    """Scores whose largest is a draw of the row's distribution; greedy rows stay as they are."""
    temperature = controls.temperature[:, None, None]
    greedy = temperature == 0
    # the largest becomes 0 before the division, so that none gives inf - inf
    scores = logits - logits.max(axis=-1, keepdims=True)
    scores = scores / jnp.where(greedy, 1.0, temperature)
    if controls.min_p is not None:
        scores = jnp.where(scores >= jnp.log(controls.min_p)[:, None, None], scores, -jnp.inf)
    if controls.top_k is not None:
        # for a row that nothing is drawn from, the vocabulary would be sorted for nothing
        none = controls.temperature == 0
        top_k = jnp.where(none, 0, controls.top_k)
        scores = truncate(scores, top_k, jnp.where(none, 1.0, controls.top_p))
    noise = jax.vmap(jax.vmap(_gumbel, (None, None, 0, None)), (0, 0, 0, None))
    drawn = scores + noise(controls.seed, controls.sample, positions, logits.shape[-1])
    return jnp.where(greedy, logits, drawn)


def _gumbel(
    seed: Array, index: Int[Array, ""], position: Int[Array, ""], size: int
) -> Float[Array, " V"]:
    """Standard Gumbel noise of one position, always finite: -inf would lose to masked ids."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    key = jax.random.fold_in(jax.random.fold_in(key, index), position)
    bits = jax.random.bits(key, (size,), jnp.uint32)
    # large noise comes from small uniforms, which are fine to 2**-33; 23 bits would bias the tail
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))
