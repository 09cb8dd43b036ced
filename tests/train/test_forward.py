"""The training forward pass is the model's: the main model's logits, and what decoding drafts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.config import LINEAR, SPARSE, Config, Quantization
from qwen4jax.decode.prefill import feed
from qwen4jax.forward_pass import forward
from qwen4jax.layers.attention import FrozenSelection
from qwen4jax.model import draft_step
from qwen4jax.params import init_params
from qwen4jax.state import init_state
from qwen4jax.train.forward import draft_chain, logits_of, main_streams, read_out

PLACES = 128


@pytest.fixture(scope="module")
def params():
    # two sparse layers, so that a wrong selection in the first is seen by the second
    return init_params(
        Config.tiny(
            num_hidden_layers=3,
            layer_types=(LINEAR, SPARSE, SPARSE),
            ple_layer_ids=(1,),
            quantization=Quantization(ngram_embedding="fp8"),
        ),
        seed=3,
    )


@pytest.fixture(scope="module")
def tokens(params):
    ids = np.random.default_rng(0).integers(0, params.config.vocab_size, (2, PLACES + 1))
    ids[0, 40] = params.config.hash_eos_token_id
    return jnp.asarray(ids)


@jax.jit
def streams_of(params, tokens, dense):
    return main_streams(params, tokens, dense=dense)[0]


@pytest.fixture(scope="module")
def streams(params, tokens):
    return streams_of(params, tokens[:, :-1], jnp.asarray(False))


def test_logits_are_those_of_a_forward_pass(params, tokens, streams):
    ours = logits_of(params, read_out(params, streams))
    reference = forward(params, tokens[:, :-1])
    np.testing.assert_allclose(ours, reference, rtol=0, atol=2e-4 * float(jnp.abs(reference).max()))


def test_dense_attention_is_that_of_an_unlimited_budget(params, tokens, streams):
    dense = streams_of(params, tokens[:, :-1], jnp.asarray(True))
    wide = params.replace(config=params.config.replace(indexer_budget=PLACES))
    ours = logits_of(params, read_out(params, dense))
    reference = forward(wide, tokens[:, :-1])
    bound = 2e-4 * float(jnp.abs(reference).max())
    np.testing.assert_allclose(ours, reference, rtol=0, atol=bound)
    # and here the selection leaves something out
    assert float(jnp.abs(dense - streams).max()) > 100 * bound


def test_chained_steps_are_those_that_decoding_takes(params, tokens, streams):
    steps = 3
    chain = jax.jit(lambda p, t, s: draft_chain(p, t, s, steps, dense=jnp.asarray(False))[0])(
        params, tokens[:, 1:], streams
    )
    rows = tokens.shape[0]
    run, fill = jax.jit(draft_step), jax.jit(feed)
    for begin in (0, 2, 39, PLACES - steps):
        state = init_state(params.config, slots=rows, max_length=PLACES + 8, drafts=steps)
        count = jnp.full(rows, begin + 1, jnp.int32)
        state, _ = fill(params, state, tokens[:, :PLACES], count)
        residual, one = streams[:, begin : begin + 1], jnp.ones(rows, jnp.int32)
        frozen = None
        for number in range(steps):
            place = begin + number
            given = None if frozen is None else frozen.at_step(number, append=True)
            state, made = run(
                params,
                state,
                tokens[:, place + 1 : place + 2],
                residual,
                jnp.full(rows, place, jnp.int32),
                one,
                selected=given,
            )
            residual = made.residual
            if frozen is None:
                frozen = FrozenSelection(made.selected[:, 0], count)
            np.testing.assert_allclose(
                chain[number][:, place],
                made.hidden[:, 0],
                rtol=0,
                atol=1e-4,
                err_msg=f"step {number + 1} of the chain from row {begin}",
            )
