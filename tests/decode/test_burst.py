"""Bursts leave the device as one array, and give their memory to the next round."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.decode.burst import Sent, empty, fields_of, to_host
from qwen4jax.decode.round import next_round
from tests.decode.planted import SLOTS, Play, Request, random_prompt, t0
from tests.decode.small import GREEDY


@pytest.mark.parametrize(("logprobs", "top"), [(False, 0), (True, 0), (True, 3)])
def test_the_host_reads_the_bits_that_were_sent(logprobs: bool, top: int):
    rng = np.random.default_rng(0)

    def drawn(x: jax.Array) -> jax.Array:
        if x.dtype == bool:
            return jnp.asarray(rng.random(x.shape) < 0.5)
        if x.dtype == jnp.int32:
            return jnp.asarray(rng.integers(-(2**31), 2**31, x.shape, np.int32))
        return jnp.asarray(rng.choice([np.nan, -np.inf, -0.0, 1e-42, -3.5], x.shape), x.dtype)

    burst = jax.tree.map(drawn, empty(3, 2, logprobs=logprobs, top=top))
    want = {name: np.asarray(x) for name, x in vars(burst).items() if x is not None}
    _, words = jax.jit(to_host)((burst,))
    assert words.sharding.memory_kind == "pinned_host"
    got = Sent(words, fields_of(burst)).read()
    assert list(got) == list(want)
    for name, value in want.items():
        assert (got[name].dtype, got[name].shape) == (value.dtype, value.shape)
        assert got[name].tobytes() == value.tobytes()


def test_no_result_of_a_round_needs_new_memory():
    """What a round gives lies where its state and the burst before lay."""
    drafts = 1
    play = Play(t0(), drafts, [Request(random_prompt(5, seed=1), GREEDY)])
    room = empty(SLOTS, drafts)
    given = (play.state, play.controls, play.active, room)
    before = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(given)]
    *after, words = next_round(play.params, *given)
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == before
    assert all(x.is_deleted() for x in jax.tree.leaves(given))
    assert Sent(words, fields_of(room)).read()["count"][0] > 0
