"""Gated DeltaNet against the recurrence in NumPy float64."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwen4jax.pallas.gated_delta import CHUNK, COMMIT, STEP, Weights, chunks, commit, step
from qwen4jax.pallas.gated_delta.cases import CASES
from qwen4jax.state import DeltaNetState
from tests import oracle
from tests.pallas.calls import assert_matches, call, f64, over_cases


@jax.jit
def _commit(state, factors, count):
    """A commit of one layer."""
    return commit((state,), (factors,), count)[0]


def case_inputs(function, name):
    return next(c for c in CASES if c.function == function and c.name == name).inputs()


def expected(inputs, row, count):
    """Outputs, state matrices and convolution history after `count` tokens of one row."""
    w, state = inputs["weights"], inputs["state"]
    value_heads, key_dim, value_dim = state.recurrent.shape[1:]
    heads = (inputs["key_heads"], value_heads, key_dim, value_dim)
    qkv, z, a, b = (f64(inputs[n][row, :count]) for n in ("qkv", "z", "a", "b"))
    history = f64(state.conv[row])
    bfloat16 = inputs["qkv"].dtype == jnp.bfloat16
    round_to = (lambda x: x.astype(ml_dtypes.bfloat16).astype(float)) if bfloat16 else lambda x: x
    weights = (f64(w.conv1d), f64(w.A_log), f64(w.dt_bias))
    rule = oracle.delta_inputs(qkv, a, b, *weights, history, heads, round_to)
    out, after = oracle.delta_rule(*rule, f64(state.recurrent[row]))
    out = oracle.delta_output(out, z, f64(w.norm), inputs["activation"], inputs["eps"])
    window = np.concatenate([history, qkv])
    return out, after, window[count : count + len(history)]


def tolerance(inputs):
    return 2.0**-8 if inputs["qkv"].dtype == jnp.bfloat16 else 5e-6


@over_cases(CASES, "step", STEP)
def test_step_and_commit_match_float64(case, implementation):
    """After every count the state is that of so many plain tokens; a step changes nothing."""
    inputs = case.inputs()
    out, factors = call(step, inputs, implementation)
    assert out.dtype == inputs["qkv"].dtype
    assert factors.decay.dtype == jnp.float32
    rows, places = inputs["qkv"].shape[:2]
    for count in range(places + 1):
        after = _commit(inputs["state"], factors, jnp.full(rows, count))
        for row in range(rows):
            want_out, want, conv = expected(inputs, row, count)
            assert_matches(out[row, :count], want_out, share=tolerance(inputs))
            assert_matches(after.recurrent[row], want, share=5e-6)
            np.testing.assert_array_equal(f64(after.conv[row]), conv)


@over_cases(CASES, "commit", COMMIT)
def test_commit_applies_the_accepted_factors(case, implementation):
    """Rejected tokens may hold NaN; a count of 0 leaves every bit."""
    inputs = case.inputs()
    got = call(commit, inputs, implementation)
    for layer in zip(inputs["states"], inputs["factors"], got, strict=True):
        _assert_applied(*layer, np.asarray(inputs["count"]))


def _assert_applied(state, factors, got, counts):
    groups = factors.delta.shape[2] // factors.key.shape[2]
    for row, count in enumerate(counts):
        want = f64(state.recurrent[row])
        for t in range(count):
            for h in range(len(want)):
                want[h] *= np.exp(f64(factors.decay[row, t, h]))
                want[h] += np.outer(
                    f64(factors.key[row, t, h // groups]), f64(factors.delta[row, t, h])
                )
        assert_matches(got.recurrent[row], want)
        window = f64(factors.window[row, count : count + state.conv.shape[1]])
        np.testing.assert_array_equal(f64(got.conv[row]), window)
        if count == 0:
            np.testing.assert_array_equal(f64(got.recurrent[row]), f64(state.recurrent[row]))


@over_cases(CASES, "chunks", CHUNK)
def test_chunks_match_float64(case, implementation):
    """NUM-14: any count, any length, strong decays; what stands behind the tokens is NaN."""
    inputs = case.inputs()
    out, after = call(chunks, inputs, implementation)
    assert out.dtype == inputs["qkv"].dtype
    for row, count in enumerate(np.asarray(inputs["count"])):
        want_out, want, conv = expected(inputs, row, int(count))
        assert np.isfinite(f64(out[row, :count])).all()
        assert_matches(out[row, :count], want_out, share=tolerance(inputs))
        assert_matches(after.recurrent[row], want, share=5e-6)
        np.testing.assert_array_equal(f64(after.conv[row]), conv)
        if count == 0:
            before = f64(inputs["state"].recurrent[row])
            np.testing.assert_array_equal(f64(after.recurrent[row]), before)


@pytest.mark.parametrize("implementation", CHUNK)
def test_an_infinite_decay_resets_the_state(implementation):
    """NUM-14: after a token with log decay -inf nothing of the old state is left."""
    tensor_cores = {"triton": "tensor_", "mosaic_hopper": "wide_"}.get(implementation, "")
    inputs = case_inputs("chunks", f"{tensor_cores}strong_decay_and_reset")
    state = inputs["state"]
    one = call(chunks, inputs, implementation)
    other = dataclasses.replace(state, recurrent=1e3 - state.recurrent * 7)
    two = call(chunks, inputs | {"state": other}, implementation)
    np.testing.assert_array_equal(f64(one[0][:, 60:]), f64(two[0][:, 60:]))
    # the size of what was there before may decide how the last digits are rounded
    left = 1e-7 if tensor_cores else 0.0
    assert_matches(one[1].recurrent, f64(two[1].recurrent), share=left, steps=0)
    assert np.abs(f64(one[0][:, :5]) - f64(two[0][:, :5])).max() > 1e-3


def single_channel(k, v, decay_logit, step_logit, channels):
    """One head in whose first channel all is; its convolution passes its input: silu, unit norm."""
    width = 3 * channels
    first = jnp.zeros(width).at[::channels].set(jnp.asarray([1.0, k, v]))
    state = jnp.zeros((1, 1, channels, channels)).at[0, 0, 0, 0].set(1.0)
    return dict(
        qkv=first[None, None],
        z=jnp.zeros((1, 1, channels)),
        a=jnp.full((1, 1, 1), decay_logit),
        b=jnp.full((1, 1, 1), step_logit),
        weights=Weights(
            jnp.zeros((width, 4)).at[:, 3].set(1.0), jnp.zeros(1), jnp.zeros(1), jnp.ones(channels)
        ),
        state=DeltaNetState(jnp.zeros((1, 3, width)), state),
        key_heads=1,
        activation="sigmoid",
        eps=1e-6,
    )


@pytest.mark.parametrize("implementation", STEP)
def test_decay_comes_before_the_error(implementation):
    """NUM-13: g 0.5, S 1, k 1, v 0, beta 1 give 0; the other order gives -0.5."""
    # softplus(0) is log 2, so the decay is 1/2; a step logit of 40 is a beta of 1
    inputs = single_channel(5.0, 0.0, 0.0, 40.0, 128 if implementation == "mosaic" else 1)
    _, factors = call(step, inputs, implementation)
    after = _commit(inputs["state"], factors, jnp.ones(1, jnp.int32))
    assert abs(float(after.recurrent[0, 0, 0, 0])) < 1e-5
    _, after = call(chunks, inputs | {"count": jnp.ones(1, jnp.int32)})
    assert abs(float(after.recurrent[0, 0, 0, 0])) < 1e-5


def test_a_step_of_many_rows_has_the_bits_of_few(monkeypatch):
    """With many programs less of the state is asked for at once: no result depends on it."""
    from qwen4jax.pallas.gated_delta import triton_step

    inputs = case_inputs("step", "wide_heads_of_three_tokens")
    want = call(step, inputs, "triton")
    monkeypatch.setattr(triton_step, "_FEW", 0)
    got = call(step, inputs, "triton")
    for own, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(own, other)


@pytest.mark.parametrize("name", ["every_count", "length_65", "uneven"])
def test_the_two_forms_agree(name):
    """Chunks of any length, cut anywhere, equal steps of one token."""
    source = {"uneven": "length_130_odd_heads"}.get(name, name)
    inputs = case_inputs("chunks", source)
    length = min(inputs["qkv"].shape[1], 12)
    tokens = {n: jnp.nan_to_num(inputs[n][:, :length]) for n in ("qkv", "z", "a", "b")}
    fixed = {k: inputs[k] for k in ("weights", "key_heads", "activation", "eps")}

    @jax.jit
    def one(state, token):
        out, factors = step(**token, state=state, **fixed)
        return _commit(state, factors, jnp.ones(len(out), jnp.int32)), out

    state, found = inputs["state"], []
    for t in range(length):
        state, out = one(state, {n: x[:, t : t + 1] for n, x in tokens.items()})
        found.append(out)
    count = jnp.full(inputs["qkv"].shape[0], length, jnp.int32)
    whole, after = call(chunks, tokens | fixed | dict(state=inputs["state"], count=count))
    assert_matches(jnp.concatenate(found, axis=1), f64(whole), share=5e-6)
    assert_matches(state.recurrent, f64(after.recurrent), share=5e-6)
    np.testing.assert_array_equal(f64(state.conv), f64(after.conv))


@pytest.mark.parametrize("implementation", CHUNK)
def test_a_cut_between_calls_changes_nothing_much(implementation):
    """A prompt in pieces, not of whole chunks, ends in the state of the prompt in one piece."""
    width = "wide" if implementation == "mosaic_hopper" else "tensor"
    inputs = case_inputs("chunks", f"{width}_three_groups")
    tokens = {n: inputs[n] for n in ("qkv", "z", "a", "b")}
    whole, after = call(chunks, inputs, implementation)
    state, found = inputs["state"], []
    for begin, end in ((0, 1), (1, 17), (17, 70)):
        piece = {n: x[:, begin:end] for n, x in tokens.items()}
        count = jnp.full(1, end - begin, jnp.int32)
        out, state = call(chunks, inputs | piece | dict(state=state, count=count), implementation)
        found.append(out)
    assert_matches(jnp.concatenate(found, axis=1), f64(whole), share=tolerance(inputs))
    assert_matches(state.recurrent, f64(after.recurrent), share=5e-6)
    np.testing.assert_array_equal(f64(state.conv), f64(after.conv))


@pytest.mark.parametrize("form", ["chunks", "steps", "triton", "mosaic_hopper"])
def test_two_thousand_tokens_stay_near_float64(form):
    """NUM-11: bfloat16 inputs, error of the state under 2e-3 of it and not growing."""
    kernels = {"triton": "tensor_every_count", "mosaic_hopper": "wide_one_key"}
    source = case_inputs("chunks", kernels.get(form, "bfloat16"))
    rng = np.random.default_rng(11)
    length, marks = 2000, (500, 1000, 1500, 2000)
    inputs = source | {"state": jax.tree.map(lambda x: x[:1], source["state"])}
    for name in ("qkv", "z", "a", "b"):
        shape = (1, length, source[name].shape[-1])
        inputs[name] = jnp.asarray(rng.standard_normal(shape), jnp.bfloat16)
    # slow decay, so that errors could add up
    inputs["a"] = inputs["a"] - 4
    fixed = {k: inputs[k] for k in ("weights", "key_heads", "activation", "eps")}
    tokens = {n: inputs[n] for n in ("qkv", "z", "a", "b")}

    @jax.jit
    def by_steps(tokens, state):
        def one(state, token):
            token = {n: x[:, None] for n, x in token.items()}
            _, factors = step(**token, state=state, **fixed)
            state = _commit(state, factors, jnp.ones(1, jnp.int32))
            return state, state.recurrent

        swapped = {n: jnp.swapaxes(x, 0, 1) for n, x in tokens.items()}
        return jax.lax.scan(one, state, swapped)[1]

    @jax.jit
    def by_chunks(tokens, state, count):
        return chunks(**tokens, state=state, count=count, **fixed)[1].recurrent

    if form == "steps":
        states = by_steps(tokens, inputs["state"])
        found = [states[m - 1, 0] for m in marks]
    elif form in kernels:
        # in pieces, since the interpreter takes its time
        state, found = inputs["state"], []
        for mark in marks:
            piece = {n: x[:, mark - 500 : mark] for n, x in tokens.items()}
            given = fixed | piece | dict(state=state, count=jnp.full(1, 500, jnp.int32))
            state = call(chunks, given, form)[1]
            found.append(state.recurrent[0])
    else:
        found = [by_chunks(tokens, inputs["state"], jnp.full(1, m))[0] for m in marks]
    errors = []
    for mark, got in zip(marks, found, strict=True):
        want = expected(inputs, 0, mark)[1]
        errors.append(np.linalg.norm(f64(got) - want) / np.linalg.norm(want))
    assert max(errors) < 2e-3
    assert errors[-1] < 2 * max(errors[:-1])
