"""What a round gives each slot, and how it leaves the device.

A loop of rounds launches one CUDA graph over and over (`round.next_round`). If a buffer of the
graph is at another address than before, XLA first updates all its nodes, which can take the host
longer than the device needs for a round. So a burst's memory goes back into the next round, and
what the host reads is a copy in pinned memory that the same program makes behind the graph: a
second small program in between would move the first one's temporaries.
"""

import math
from typing import Any, NamedTuple

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


Fields = dict[str, jax.ShapeDtypeStruct]


def fields_of(burst: Burst) -> Fields:
    """Shape and dtype of each field that is there, in order."""
    given = {name: x for name, x in vars(burst).items() if x is not None}
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in given.items()}


def to_host(results: tuple[Any, ...]) -> tuple[Any, ...]:
    """`results`, the last of which is a burst, and the burst's words in host memory; under jit.

    The words are the bits of all fields, one row per slot. Their copy begins when all results are
    there: in the middle of the program it would cut the CUDA graph in two.
    """

    def bits(x: Array) -> Array:
        exact = x.astype(jnp.int32) if x.dtype == bool else x
        if exact.dtype != jnp.int32:
            exact = jax.lax.bitcast_convert_type(exact, jnp.int32)
        return exact.reshape(len(x), -1)

    words = jnp.concatenate([bits(x) for x in jax.tree.leaves(results[-1])], axis=1)
    results, words = jax.lax.optimization_barrier((results, words))
    return *results, jax.device_put(words, jax.memory.Space.Host)


class Sent(NamedTuple):
    """A burst on its way to the host.

    Attributes:
        words: of `to_host`.
        fields: of the burst.
    """

    words: Int[Array, "S W"]
    fields: Fields

    def read(self) -> dict[str, np.ndarray]:
        """The burst's fields by name; waits for the device."""
        widths = [math.prod(x.shape[1:]) for x in self.fields.values()]
        parts = np.split(np.asarray(self.words), np.cumsum(widths)[:-1], axis=1)
        return {
            name: _value(np.ascontiguousarray(part), like)
            for part, (name, like) in zip(parts, self.fields.items(), strict=True)
        }


def _value(words: np.ndarray, like: jax.ShapeDtypeStruct) -> np.ndarray:
    value = words.astype(bool) if like.dtype == bool else words.view(like.dtype)
    return value.reshape(like.shape)
