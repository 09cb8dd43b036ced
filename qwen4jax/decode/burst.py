"""What a round gives each slot, and how it leaves the device.

A burst's memory goes back into the next round (`run_round(..., room=burst)`): then no buffer of the
round's program moves, and its CUDA graph is launched as it is. With one buffer at a new address XLA
updates every node first, which took the host longer than the device needs for a round. What the
host reads is a copy, `send`, made before the memory is given back.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float, Int


class Burst(struct.PyTreeNode):
    """What a round gives each slot.

    Attributes:
        tokens: new tokens, the first `count` of them.
        count: tokens given, 0 for a slot that is not active.
        accepted: drafts accepted, before any stop.
        logprobs: of the tokens under the model's own distribution, float32; None if not asked for.
        finished: the slot ended with this burst.
        reason: why, a `FinishReason`; ERROR where logits were not finite.
        top_ids: the most probable ids in each token's place, best first; None if not asked for.
        top_logprobs: theirs, as `logprobs`.
    """

    tokens: Int[Array, "S T"]
    count: Int[Array, " S"]
    accepted: Int[Array, " S"]
    logprobs: Float[Array, "S T"] | None
    finished: Bool[Array, " S"]
    reason: Int[Array, " S"]
    top_ids: Int[Array, "S T K"] | None = None
    top_logprobs: Float[Array, "S T K"] | None = None


def empty(slots: int, drafts: int, *, logprobs: bool = False, top: int = 0) -> Burst:
    """Room for the bursts of rounds of these sizes: no tokens."""
    ints = lambda *more: jnp.zeros((slots, *more), jnp.int32)  # noqa: E731
    floats = lambda *more: jnp.zeros((slots, *more), jnp.float32)  # noqa: E731
    tokens = drafts + 1
    return Burst(
        tokens=ints(tokens),
        count=ints(),
        accepted=ints(),
        logprobs=floats(tokens) if logprobs else None,
        finished=jnp.zeros(slots, bool),
        reason=ints(),
        top_ids=ints(tokens, top) if top else None,
        top_logprobs=floats(tokens, top) if top else None,
    )


class Sent(NamedTuple):
    """A burst on its way to the host.

    Attributes:
        words: the bits of all fields, one row per slot.
        fields: shape and dtype of each that is there, in the order of the words.
    """

    words: Int[Array, "S W"]
    fields: dict[str, jax.ShapeDtypeStruct]

    def read(self) -> dict[str, np.ndarray]:
        """The burst's fields by name, without those it does not have; waits for the device."""
        widths = [math.prod(x.shape[1:]) for x in self.fields.values()]
        parts = np.split(np.asarray(self.words), np.cumsum(widths)[:-1], axis=1)
        return {
            name: _value(np.ascontiguousarray(part), like)
            for part, (name, like) in zip(parts, self.fields.items(), strict=True)
        }


def send(burst: Burst) -> Sent:
    """A copy of a burst for the host: one array, so one transfer."""
    fields = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype)
        for name, x in vars(burst).items()
        if x is not None
    }
    return Sent(_words(burst), fields)


@jax.jit
def _words(burst: Burst) -> Int[Array, "S W"]:
    def bits(x: Array) -> Array:
        exact = x.astype(jnp.int32) if x.dtype == bool else x
        if exact.dtype != jnp.int32:
            exact = jax.lax.bitcast_convert_type(exact, jnp.int32)
        return exact.reshape(len(x), -1)

    return jnp.concatenate([bits(x) for x in jax.tree.leaves(burst)], axis=1)


def _value(words: np.ndarray, like: jax.ShapeDtypeStruct) -> np.ndarray:
    value = words.astype(bool) if like.dtype == bool else words.view(like.dtype)
    return value.reshape(like.shape)
