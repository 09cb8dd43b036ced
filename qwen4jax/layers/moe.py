"""The mixture-of-experts sublayer: routed experts and the gated shared expert."""

import jax
from jaxtyping import Array, Float, Int

from qwen4jax.config import Config
from qwen4jax.layers.capture import Capture
from qwen4jax.pallas.moe import Shared, experts, router
from qwen4jax.params import MixtureOfExperts


def moe(
    params: MixtureOfExperts,
    config: Config,
    x: Float[Array, "B T D"],
    counter: Int[Array, " N"] | None = None,
    filled: Int[Array, "B T"] | None = None,
    *,
    capture: Capture,
) -> tuple[Float[Array, "B T D"], Int[Array, " N"]]:
    """One expert sublayer; the sum of both parts is formed in float32 and rounded once.

    Args:
        params: of the sublayer.
        config: of the model.
        x: its input.
        counter: goes in and out as it does of the router (`qwen4jax.pallas.moe.router`).
        filled: of places without a token, such as idle slots', a place whose experts they pass, as
            `Span.filled` gives it: no expert is read for them alone. None if all have one.
        capture: of internals.
    """
    flat = x.reshape(-1, x.shape[-1])
    with jax.named_scope("router"):
        (ids, weights, share), counter = router(
            flat,
            params.gate,
            params.shared_expert_gate,
            config.num_experts_per_tok,
            counter,
            renormalize=config.norm_topk_prob,
        )
    capture("router.ids", ids.reshape(*x.shape[:2], -1))
    capture("router.weights", weights.reshape(*x.shape[:2], -1))
    if filled is not None:
        ids = ids[filled.reshape(-1)]
    own = params.shared_expert
    shared = Shared(own.gate_proj, own.up_proj, own.down_proj, share)
    matrices = (params.experts.gate_up_proj, params.experts.down_proj)
    with jax.named_scope("experts"):
        y = experts(flat, ids, weights, *matrices, shared, out_dtype=x.dtype)
    return y.reshape(x.shape), counter
