"""Controls of slots, accepted drafts, the end of a row inside a burst, and stop strings."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.sampling import sample
from qwen4jax.decode.stopping import (
    Controls,
    FinishReason,
    StopStrings,
    accept,
    count_tokens,
    cut,
    set_row,
    synthetic_accept,
)

VOCAB = 16
GREEDY = Sampling(temperature=0)
OPTIONS: dict[str, Any] = dict(
    temperature=0.8, top_k=12, top_p=0.95, min_p=0.01, presence_penalty=0.5
)
NONE, STOP, LENGTH, ERROR, CANCELLED = FinishReason

run = jax.jit(sample, static_argnames="logprobs")


@pytest.mark.parametrize(
    ("row", "match"),
    [
        (Row(GREEDY, 0), "prompt_length"),
        (Row(GREEDY, 32), "prompt_length"),
        (Row(GREEDY, 3, sample=1), "sample"),
        (Row(GREEDY, 3, (1, 99, 2)), r"prompt_ids\[1\]: 99"),
        (Row(GREEDY, 3, output_ids=(-1,)), r"output_ids\[0\]: -1"),
        (Row(Sampling(repetition_penalty=2), 3, (1, 2)), "prompt_ids"),
    ],
)
def test_a_bad_row_is_named(row: Row, match: str):
    with pytest.raises(ValueError, match=f"^row 0: {match}"):
        make_controls([row], 1, VOCAB, max_length=32)


def test_too_many_rows_and_bad_eos_are_errors():
    with pytest.raises(ValueError, match="2 rows for 1 slots"):
        make_controls([Row(GREEDY, 1)] * 2, 1, VOCAB)
    with pytest.raises(ValueError, match=r"eos_ids\[0\]: 16"):
        make_controls([], 1, VOCAB, eos_ids=(16,))


@pytest.mark.parametrize("name", ["stop_ids", "logit_bias"])
def test_an_id_outside_the_vocabulary_is_named(name: str):
    options: dict[str, Any] = dict(stop_ids=(3, 16), logit_bias={16: 1.0})
    s = Sampling(**{name: options[name]})
    with pytest.raises(ValueError, match=rf"^{name}.*16 is outside the vocabulary \[0, 16\)"):
        s.validate_for(16)
    with pytest.raises(ValueError, match=f"^row 1: {name}"):
        make_controls([Row(GREEDY, 1), Row(s, 1)], 2, 16)


def program(s: Sampling, **options: bool) -> str:
    controls = make_controls([Row(s, 1)], 1, VOCAB)
    positions = jnp.ones((1, 2), jnp.int32)
    return run.lower(jnp.zeros((1, 2, VOCAB)), positions, positions, controls, **options).as_text()


def test_the_mode_is_in_the_structure():
    """A greedy program sorts, draws and exponentiates nothing; only top-k and top-p sort."""
    greedy = program(Sampling(temperature=0, top_k=5, top_p=0.5, min_p=0.1, seed=9), logprobs=False)
    plain = program(Sampling(), logprobs=False)
    for operation in ("stablehlo.sort", "stablehlo.xor", "stablehlo.exponential", "stablehlo.log"):
        assert operation not in greedy
    assert "stablehlo.exponential" in program(GREEDY, logprobs=True)
    assert "stablehlo.xor" in plain
    assert "stablehlo.sort" not in plain
    assert "stablehlo.sort" not in program(Sampling(min_p=0.5), logprobs=False)
    assert "stablehlo.sort" in program(Sampling(top_k=5), logprobs=False)
    assert "stablehlo.sort" in program(Sampling(top_p=0.5), logprobs=False)


def test_admitting_a_request_compiles_once():
    like = make_controls(
        [Row(Sampling(**OPTIONS, logit_bias={2: 1.0}, min_new_tokens=1), 1)], 3, VOCAB
    )
    traced = []

    @jax.jit
    def admit(controls: Controls, slot: jax.Array, row: Controls) -> Controls:
        traced.append(slot)
        return set_row(controls, slot, row)

    rows = [
        Row(GREEDY, 1),
        Row(Sampling(top_k=3, seed=2**63 + 5, stop_ids=(1, 2)), 4, (1, 2, 3, 4), (5, 5)),
        Row(Sampling(presence_penalty=1, min_new_tokens=3, logit_bias={4: -1.0}), 2, (6, 7)),
    ]
    controls = make_controls([], 3, VOCAB, like=like)
    for slot in (2, 0, 1):
        row = make_controls([rows[slot]], 1, VOCAB, like=controls)
        controls = admit(controls, jnp.array(slot), row)
    assert len(traced) == 1
    at_once = make_controls(rows, 3, VOCAB, like=like)
    for got, wanted in zip(jax.tree.leaves(controls), jax.tree.leaves(at_once), strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)
    # controls in an abstract form too, for compiling ahead of time
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), controls)
    assert jax.eval_shape(set_row, abstract, 0, row).seed.shape == (3, 2)


def test_a_row_of_another_mode_is_refused():
    like = make_controls([Row(Sampling(), 1)], 2, VOCAB)
    for needs in (
        Sampling(top_k=3),
        Sampling(min_p=0.1),
        Sampling(presence_penalty=1),
        Sampling(logit_bias={1: 1.0}),
        Sampling(min_new_tokens=1),
        Sampling(stop_ids=(1, 2, 3, 4, 5)),
    ):
        with pytest.raises(ValueError, match="a row needs"):
            make_controls([Row(needs, 1)], 1, VOCAB, like=like)
        row = make_controls([Row(needs, 1)], 1, VOCAB)
        with pytest.raises(ValueError, match=r"mode|Custom node|None"):
            set_row(like, 0, row)


def test_counts_grow_by_the_committed_tokens():
    s = Sampling(frequency_penalty=1)
    controls = make_controls([Row(s, 1, output_ids=(3,)), Row(s, 1)], 2, VOCAB)
    tokens = jnp.array([[3, 3, 5, 9], [VOCAB, -1, 2, 2]])
    counted = jax.jit(count_tokens)(controls, tokens, jnp.array([3, 0]))
    assert counted.output_counts.tolist() == [
        [0, 0, 0, 3, 0, 1, *[0] * 10],
        [0] * VOCAB,
    ]
    off = make_controls([Row(GREEDY, 1)], 1, VOCAB)
    assert count_tokens(off, tokens[:1], jnp.array([4])) is off


def test_the_end_of_a_row():
    rows = [Row(Sampling(max_new_tokens=8, min_new_tokens=6), n) for n in (28, 20, 31)]
    controls = make_controls(rows, 4, VOCAB, eos_ids=(1, 2), max_length=32)
    assert controls.max_length.tolist() == [32, 28, 32, 0]
    assert controls.min_length.tolist() == [32, 26, 32, 0]
    assert controls.stop_ids.tolist() == [[1, 2, -1, -1]] * 3 + [[-1] * 4]
    huge = Row(Sampling(max_new_tokens=2**31 - 1, min_new_tokens=2**31 - 1), 2**31 - 2)
    controls = make_controls([huge], 1, VOCAB)
    assert controls.max_length.tolist() == controls.min_length.tolist() == [2**31 - 1]


def test_smp_04_acceptance_by_equality_keeps_the_distribution():
    """SMP-04: p=[.5,.3,.2], drafts from q=[.2,.3,.5]; output p, draft d accepted with p(d)."""
    p, q, rows = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), 1 << 18
    controls = make_controls([Row(Sampling(seed=11), 1)], 1, 3)
    positions = jnp.arange(1, rows + 1)[None]
    logits = jnp.broadcast_to(jnp.log(p), (1, rows, 3))
    output = np.asarray(run(logits, jnp.zeros_like(positions), positions, controls).ids[0])
    drafts = np.random.default_rng(5).choice(3, size=rows, p=q)
    # the bonus token after the draft is not looked at
    sampled = jnp.asarray(np.stack([output, drafts], axis=1))
    accepted = np.asarray(accept(sampled, jnp.asarray(drafts)[:, None]))
    np.testing.assert_allclose(np.bincount(output) / rows, p, atol=0.005)
    by_draft = [accepted[drafts == draft].mean() for draft in range(3)]
    np.testing.assert_allclose(by_draft, p, atol=0.005)
    assert accepted.mean() == pytest.approx(p @ q, abs=0.005)


@given(st.integers(0, 5), st.lists(st.booleans(), min_size=5, max_size=5))
def test_accept_counts_the_equal_prefix(drafts: int, equal: list[bool]):
    sampled = np.arange(10, 10 + drafts + 1)
    planted = [t if same else 0 for t, same in zip(sampled[:drafts], equal, strict=False)]
    wanted = next((i for i in range(drafts) if not equal[i]), drafts)
    got = accept(jnp.asarray(sampled)[None], jnp.asarray(planted, jnp.int32)[None])
    assert got.tolist() == [wanted]


@pytest.mark.parametrize(("mean", "drafts"), [(1.0, 3), (1.0, 0), (3.23, 3), (3.23, 5), (4.0, 3)])
def test_synthetic_acceptance_has_the_mean(mean: float, drafts: int):
    slots = jnp.arange(64)
    one_round = functools.partial(synthetic_accept, mean, 7, slots=slots, num_drafts=drafts)
    tokens = np.asarray(jax.jit(jax.vmap(one_round))(jnp.arange(1024))) + 1
    assert set(np.unique(tokens)) == {math.floor(mean), math.ceil(mean)}
    assert tokens.mean() == pytest.approx(mean, abs=0.01)
    # rows and rounds draw apart, and the same again
    if mean % 1:
        assert tokens.std(axis=1).min() > 0
        assert tokens.std(axis=0).min() > 0
    np.testing.assert_array_equal(one_round(5) + 1, tokens[5])


@pytest.mark.parametrize("mean", [0.99, 4.01, math.nan])
def test_synthetic_acceptance_refuses_a_mean_out_of_reach(mean: float):
    with pytest.raises(ValueError, match="mean_tokens_per_round"):
        synthetic_accept(mean, 0, 0, jnp.arange(2), 3)


def end_of(
    tokens: list[int], n: int, length: int, row: Row, finite: list[bool] | None = None, **to: Any
) -> tuple[list[int], FinishReason]:
    """(what stands of the burst, why it ended) of one row."""
    controls = make_controls([row], 1, VOCAB, **to)
    flags = None if finite is None else jnp.array([finite])
    ended = jax.jit(cut)(jnp.array([tokens]), jnp.array([n]), jnp.array([length]), controls, flags)
    assert bool(ended.finished[0]) == (ended.reason[0] != NONE)
    return tokens[: int(ended.n[0])], FinishReason(int(ended.reason[0]))


@pytest.mark.parametrize("eos", [1, 2])
@pytest.mark.parametrize("index", [0, 1, 2, 3])
def test_spc_15_a_row_ends_at_the_first_accepted_eos(eos: int, index: int):
    """SPC-15 (tokens): either EOS, as an accepted draft or as the bonus token, ends the burst."""
    burst = [7, 8, 9, 10]
    burst[index] = eos
    ended = end_of(burst, 4, 5, Row(GREEDY, 5), eos_ids=(1, 2))
    assert ended == (burst[: index + 1], STOP)
    # what was not accepted does not end a row
    if index:
        assert end_of(burst, index, 5, Row(GREEDY, 5), eos_ids=(1, 2)) == (burst[:index], NONE)
    ignoring = Row(Sampling(temperature=0, ignore_eos=True, stop_ids=(10,)), 5)
    last = STOP if burst[-1] == 10 else NONE
    assert end_of(burst, 4, 5, ignoring, eos_ids=(1, 2)) == (burst, last)


@pytest.mark.parametrize(
    ("burst", "kept", "reason"),
    [
        ([12, 13, 14, 3, 10, 11], 4, STOP),
        ([12, 13, 14, 15, 3, 11], 5, STOP),
        ([12, 13, 14, 15, 10, 3], 5, LENGTH),
    ],
)
def test_spc_16_the_earliest_event_ends_the_row(burst: list[int], kept: int, reason: FinishReason):
    """SPC-16: max_new 5 and a stop id before, at and behind the last position."""
    row = Row(Sampling(max_new_tokens=5, stop_ids=(3,)), 9)
    assert end_of(burst, 6, 9, row) == (burst[:kept], reason)


def test_spc_17_a_drafted_eos_is_verified():
    """SPC-17: the draft says EOS where the target says 7: the row goes on with 7."""
    sampled, drafts = [4, 7, 5, 6], [4, 1, 5]
    accepted = accept(jnp.array([sampled]), jnp.array([drafts]))
    assert accepted.tolist() == [1]
    assert end_of(sampled, int(accepted[0]) + 1, 5, Row(GREEDY, 5), eos_ids=(1,)) == ([4, 7], NONE)


@pytest.mark.parametrize("prompt", [28, 30, 31])
@pytest.mark.parametrize("accepted", [0, 3])
def test_spc_20_a_row_ends_exactly_at_the_context_end(prompt: int, accepted: int):
    """SPC-20: max_len 32, max_new 8, 3 drafts that are all rejected or all accepted."""
    row, output, reason = Row(Sampling(max_new_tokens=8), prompt), [], NONE
    while reason == NONE:
        kept, reason = end_of([5, 6, 7, 8], accepted + 1, prompt + len(output), row, max_length=32)
        output += kept
    assert (len(output), reason) == (32 - prompt, LENGTH)


def test_min_tokens_mask_stop_ids_until_their_position():
    s = Sampling(temperature=0, min_new_tokens=2, stop_ids=(3,))
    logits = jnp.zeros(VOCAB).at[jnp.array([6, 1, 3])].set(jnp.array([7.0, 8.0, 9.0]))
    controls = make_controls([Row(s, 5), Row(GREEDY, 5)], 2, VOCAB, eos_ids=(1,))
    positions = jnp.broadcast_to(jnp.arange(5, 9), (2, 4))
    ids = run(jnp.broadcast_to(logits, (2, 4, VOCAB)), positions, positions, controls).ids
    assert ids.tolist() == [[6, 6, 3, 3], [3, 3, 3, 3]]


def test_stop_ids_before_min_length_do_not_stop():
    row = Row(Sampling(min_new_tokens=2, stop_ids=(3,)), 5)
    assert end_of([3, 3, 3, 3], 4, 5, row) == ([3, 3, 3], STOP)


def test_srv_11_a_token_from_logits_that_are_not_finite_does_not_stand():
    """SRV-11 (row): the row ends as an error unless it ended before; companions are untouched."""
    row = Row(Sampling(max_new_tokens=3, stop_ids=(3,)), 5)
    bad = [True, False, True, True]
    assert end_of([6, 7, 8, 9], 4, 5, row, bad) == ([6], ERROR)
    assert end_of([3, 7, 8, 9], 4, 5, row, bad) == ([3], STOP)
    assert end_of([6, 3, 8, 9], 4, 5, row, bad) == ([6], ERROR)
    assert end_of([6, 7, 8, 9], 1, 5, row, bad) == ([6], NONE)
    assert end_of([6, 7, 8, 9], 4, 7, row, bad) == ([6], LENGTH)
    controls = make_controls([row, row], 2, VOCAB)
    ended = cut(
        jnp.array([[6, 7], [6, 7]]),
        jnp.array([2, 2]),
        jnp.array([5, 5]),
        controls,
        jnp.array([[False, True], [True, True]]),
    )
    assert ended.n.tolist() == [0, 2]
    assert ended.reason.tolist() == [ERROR, NONE]


def test_idle_rows_and_rows_without_room():
    """An idle slot is left alone; a row that is full already takes nothing more."""
    controls = make_controls([Row(Sampling(max_new_tokens=3), 5)] * 2, 3, VOCAB)
    tokens = jnp.full((3, 4), -1)
    ended = cut(tokens, jnp.array([4, 0, 0]), jnp.array([9, 6, 0]), controls)
    assert ended.n.tolist() == [0, 0, 0]
    assert ended.reason.tolist() == [LENGTH, NONE, NONE]
    assert ended.finished.tolist() == [True, False, False]


@given(
    tokens=st.lists(st.integers(0, 5), min_size=5, max_size=5),
    n=st.integers(0, 5),
    new=st.integers(1, 8),
    least=st.integers(0, 8),
    done=st.integers(0, 7),
)
@settings(max_examples=100)
def test_cut_equals_a_loop_over_the_tokens(
    tokens: list[int], n: int, new: int, least: int, done: int
):
    row = Row(Sampling(max_new_tokens=new, min_new_tokens=min(least, new), stop_ids=(0,)), 4)
    like = make_controls([Row(Sampling(min_new_tokens=1), 4)], 1, VOCAB)
    kept, reason = 0, NONE
    for count, token in enumerate(tokens[:n], start=done):
        if count >= new:
            reason = LENGTH
            break
        kept += 1
        if token == 0 and count >= min(least, new):
            reason = STOP
            break
        if count + 1 == new:
            reason = LENGTH
            break
    assert end_of(tokens, n, 4 + done, row, like=like) == (tokens[:kept], reason)


def test_finish_reasons_have_public_names():
    names = [None, "stop", "length", "error", "cancelled"]
    assert [reason.public for reason in FinishReason] == names


def feed_all(stops: list[str], pieces: list[str]) -> tuple[str, StopStrings]:
    matcher = StopStrings(stops)
    released = [matcher.feed(piece) for piece in pieces]
    return "".join(released) + matcher.finish(), matcher


def first_stop(stops: list[str], text: str) -> tuple[int, str] | None:
    """(cut, stop string) by str.find over growing prefixes."""
    for end in range(len(text) + 1):
        found = [(text[:end].find(stop), stop) for stop in stops if stop in text[:end]]
        if found:
            return min(found)
    return None


LETTERS = st.sampled_from("abé\N{GRINNING FACE}\n")
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=5), max_size=4)


@given(stops=STOPS, pieces=st.lists(st.text(LETTERS, max_size=4), max_size=12))
@example(stops=["abcd", "bc"], pieces=["xab", "", "cd"])
@example(stops=["aab"], pieces=["aa", "a", "ab"])
@example(stops=["bc", "abc"], pieces=["abc"])
@example(stops=["ab" * 500 + "c"], pieces=["ab" * 501, "abc", "x"])
@example(stops=["\N{GRINNING FACE}é"], pieces=["a\N{GRINNING FACE}", "é", "b"])
@settings(max_examples=500)
def test_stop_strings_equal_str_find(stops: list[str], pieces: list[str]):
    text = "".join(pieces)
    released, matcher = feed_all(stops, pieces)
    wanted = first_stop(stops, text)
    if wanted is None:
        assert (released, matcher.found, matcher.cut) == (text, None, None)
    else:
        assert (matcher.cut, matcher.found) == wanted
        assert released == text[: wanted[0]]
    # no more is held back than a stop string may still need
    matcher = StopStrings(stops)
    seen = out = ""
    for piece in pieces:
        seen, out = seen + piece, out + matcher.feed(piece)
        if matcher.found is None:
            held = seen[len(out) :]
            assert seen.startswith(out)
            assert not held or any(stop.startswith(held) for stop in stops)
    assert matcher.feed("more") == "" or matcher.found is None


@pytest.mark.parametrize("stops", ["ab", ["a", ""], [""]])
def test_bad_stop_strings_are_refused(stops: Any):
    with pytest.raises(ValueError, match="stop must be"):
        StopStrings(stops)
