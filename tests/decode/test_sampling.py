"""Sampling against enumerated probabilities."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.sampling import sample
from qwen4jax.decode.stopping import accept, count_tokens

VOCAB = 16
DRAWS = 131072
LOGITS = np.random.default_rng(7).normal(size=VOCAB).astype(np.float32) * 1.5
GREEDY = Sampling(temperature=0)

run = jax.jit(sample, static_argnames=("logprobs", "top"))


def expected(
    logits: np.ndarray, s: Sampling, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()
) -> np.ndarray:
    """The target's probabilities in float64, id by id in plain Python."""
    x = logits.astype(np.float64)
    for token, value in dict(s.logit_bias).items():
        x[token] += value
    for token in set(prompt) | set(output):
        x[token] *= 1 / s.repetition_penalty if x[token] > 0 else s.repetition_penalty
    for token in output:
        x[token] -= s.frequency_penalty
    for token in set(output):
        x[token] -= s.presence_penalty
    p = np.exp((x - x.max()) / s.temperature)
    p[p < s.min_p * p.max()] = 0
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))
    for token in order[s.top_k or len(p) :]:
        p[token] = 0
    p /= p.sum()
    mass = 0.0
    for token in order:
        mass, p[token] = mass + p[token], p[token] if mass < s.top_p else 0
    return p / p.sum()


def p_value(ids: np.ndarray, p: np.ndarray) -> float:
    """Of the chi-square test; an id that cannot occur makes it 0."""
    counts = np.bincount(ids.ravel(), minlength=len(p))
    if counts[p == 0].any():
        return 0.0
    n, p = counts[p > 0], p[p > 0]
    statistic = ((n - n.sum() * p) ** 2 / (n.sum() * p)).sum()
    freedom = len(p) - 1
    return float(jax.scipy.special.gammaincc(freedom / 2, statistic / 2)) if freedom else 1.0


def tile(logits: np.ndarray, *shape: int) -> jax.Array:
    return jnp.broadcast_to(jnp.asarray(logits), (*shape, logits.shape[-1]))


def draw(s: Sampling, logits: np.ndarray) -> np.ndarray:
    """DRAWS ids over 8 seeds and many positions, in one call."""
    rows = [Row(Sampling(**{**vars(s), "seed": i}), 1) for i in range(8)]
    controls = make_controls(rows, 8, logits.shape[-1])
    positions = jnp.broadcast_to(jnp.arange(1, DRAWS // 8 + 1), (8, DRAWS // 8))
    fed = jnp.zeros_like(positions)
    return np.asarray(run(tile(logits, *positions.shape), fed, positions, controls).ids)


EACH = [{}, dict(temperature=2.5), dict(top_k=5), dict(top_p=0.8), dict(min_p=0.1)]
MIXED = dict(temperature=1.3, top_k=9, top_p=0.9, min_p=0.02)
BIASED = dict(temperature=0.8, top_p=0.95, logit_bias={3: 2.0, 4: -100, 5: -math.inf})


@pytest.mark.parametrize("options", [*EACH, MIXED, BIASED])
def test_draws_have_the_enumerated_distribution(options: dict[str, Any]):
    s = Sampling(**options)
    assert p_value(draw(s, LOGITS), expected(LOGITS, s)) > 1e-3


def test_chi_square_can_fail():
    """The test above would see an error of 2% in the temperature."""
    ids = draw(Sampling(temperature=1.02), LOGITS)
    assert p_value(ids, expected(LOGITS, Sampling())) < 1e-3


@pytest.mark.parametrize(
    "options",
    [
        dict(presence_penalty=2.0),
        dict(frequency_penalty=0.7),
        dict(repetition_penalty=1.8),
        dict(temperature=0.9, top_p=0.9, top_k=12, frequency_penalty=0.25, repetition_penalty=1.3),
    ],
)
def test_smp_07_draws_with_penalties_count_inside_the_burst(options: dict[str, Any]):
    """SMP-07: row t has the distribution of the history with the first t drafts."""
    prompt, output, drafts = (5, 5, 9), (2, 7), (2, 11, 5)
    slots = DRAWS
    one = make_controls([Row(Sampling(**options), 3, prompt, output)], 1, VOCAB)
    controls = jax.tree.map(lambda a: jnp.repeat(a, slots, axis=0), one)
    seeds = jnp.stack([jnp.zeros(slots), jnp.arange(slots)], axis=1).astype(jnp.uint32)
    controls = controls.__class__(**{**vars(controls), "seed": seeds})
    fed = jnp.broadcast_to(jnp.array([output[-1], *drafts]), (slots, 4))
    positions = jnp.broadcast_to(jnp.arange(5, 9), (slots, 4))
    ids = np.asarray(run(tile(LOGITS, slots, 4), fed, positions, controls).ids)
    for t in range(4):
        p = expected(LOGITS, Sampling(**options), prompt, output + drafts[:t])
        assert p_value(ids[:, t], p) > 1e-3, t


def generate(
    logits: jax.Array, row: Row, steps: int, burst: int, drafts_of: Any
) -> tuple[list[int], set[int]]:
    """Ids where `logits` are of positions, with `burst` drafts per round; counts accepted."""
    controls = make_controls([row], 1, VOCAB)
    last, position, output, accepted = row.prompt_ids[-1], row.prompt_length, [], set()
    while len(output) < steps:
        drafts = jnp.array([drafts_of(position)[:burst]], jnp.int32).reshape(1, burst)
        fed = jnp.concatenate([jnp.array([[last]]), drafts], axis=1)
        places = position + jnp.arange(burst + 1)[None]
        ids = run(logits[places], fed, places, controls).ids
        n = accept(ids, drafts) + 1
        controls = count_tokens(controls, ids, n)
        output += ids[0, : int(n[0])].tolist()
        accepted.add(int(n[0]) - 1)
        last, position = output[-1], position + int(n[0])
    return output[:steps], accepted


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_smp_07_presence_penalty_with_drafts_equals_plain(temperature: float):
    """SMP-07: prompt [5,5,5], presence penalty 2; drafts right, wrong at an index, or repeated."""
    s = Sampling(
        temperature=temperature, presence_penalty=2, frequency_penalty=0.1, repetition_penalty=1.2
    )
    row = Row(s, 3, [5, 5, 5])
    logits = jax.random.normal(jax.random.key(3), (64, VOCAB))
    plain, _ = generate(logits, row, 24, 0, lambda position: [])
    free = Row(Sampling(temperature=temperature), 3, [5])
    assert generate(logits, free, 24, 0, lambda position: [])[0] != plain
    padded = [*plain, *plain]

    def planted(position: int) -> list[int]:
        wrong = np.random.default_rng(position).integers(4)
        right = padded[position - 3 : position]
        return [(token + (i == wrong)) % VOCAB for i, token in enumerate(right)]

    ids, accepted = generate(logits, row, 24, 3, planted)
    assert ids == plain
    assert accepted == {0, 1, 2, 3}
    repeated, _ = generate(logits, row, 24, 3, lambda position: [padded[position - 3]] * 3)
    assert repeated == plain


def test_smp_01_ties_at_temperature_0_take_the_lowest_id():
    """SMP-01: ids 7 and 9 are equal and largest; at temperature 0 every seed gives 7."""
    logits = LOGITS.copy()
    logits[[7, 9]] = 9.0
    rows = [Row(Sampling(temperature=0, seed=i, top_k=3, top_p=0.5), 1) for i in range(20)]
    hot = [Row(Sampling(top_k=1, seed=i), 1) for i in range(20)]
    # top_k 1 keeps exactly one id: of a tie the lowest
    for batch in (rows, [*rows, *hot]):
        controls = make_controls(batch, len(batch), VOCAB)
        positions = jnp.ones((len(batch), 1), jnp.int32)
        assert (run(tile(logits, len(batch), 1), positions, positions, controls).ids == 7).all()


def test_smp_01_top_k_keeps_exactly_k_of_a_tie():
    """SMP-01: of tied ids the lower ones are kept, and evenly drawn."""
    logits = np.zeros(VOCAB, np.float32)
    logits[11] = 1
    for s, kept in (
        (Sampling(top_k=4), [0, 1, 2, 11]),
        (Sampling(top_p=0.3), [0, 1, 2, 11]),
        (Sampling(top_k=12, top_p=0.25), [0, 11]),
    ):
        p = expected(logits, s)
        assert np.flatnonzero(p).tolist() == kept
        assert p_value(draw(s, logits), p) > 1e-3


def test_smp_02_greedy_is_repeatable_with_near_ties():
    """SMP-02: 64 rows whose margin is one float32 step; 5 runs, rows alone and as a burst."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(64, VOCAB)).astype(np.float32)
    best = logits.argmax(axis=-1)
    close = (best + 5) % VOCAB
    rows = np.arange(64)
    logits[rows, close] = np.nextafter(logits[rows, best], -np.inf, dtype=np.float32)
    for slots, burst in ((64, 1), (16, 4), (1, 64)) * 5:
        controls = make_controls([Row(GREEDY, 1)] * slots, slots, VOCAB)
        positions = jnp.ones((slots, burst), jnp.int32)
        shaped = jnp.asarray(logits).reshape(slots, burst, VOCAB)
        ids = run(shaped, positions, positions, controls).ids
        assert ids.ravel().tolist() == best.tolist()


@pytest.mark.parametrize(
    "options",
    [
        dict(logit_bias={3: -100}, temperature=0),
        dict(logit_bias={3: -100}),
        dict(logit_bias={3: -math.inf}, temperature=1e9),
        dict(logit_bias={3: -100}, top_k=1),
        dict(logit_bias={3: -100}, top_p=1e-6),
        dict(logit_bias={3: -100}, min_p=0.9),
    ],
)
def test_smp_05_processors_reach_every_row_of_a_burst(options: dict[str, Any]):
    """SMP-05: a banned id that would win everywhere appears at no place of a burst of 4."""
    logits = LOGITS.copy()
    logits[3] = 12
    slots = 64
    rows = [Row(Sampling(**options, seed=i), 1) for i in range(slots)]
    controls = make_controls(rows, slots, VOCAB)
    positions = jnp.broadcast_to(jnp.arange(1, 5), (slots, 4))
    ids = run(tile(logits, slots, 4), positions, positions, controls).ids
    assert not (ids == 3).any()
    if options.keys() & {"top_k", "top_p"} or not options.get("temperature", 1):
        second = np.delete(logits, 3).max()
        assert (logits[np.asarray(ids)] == second).all()


EDGES = dict(
    temperature=st.sampled_from([0, 1e-45, 1e-9, 1.0, 1e9, 1e30]),
    top_k=st.sampled_from([None, 1, VOCAB - 1, VOCAB, VOCAB + 1]),
    top_p=st.sampled_from([1e-30, 1e-6, 0.5, 1 - 1e-9, 1]),
    min_p=st.sampled_from([0, 1e-45, 0.5, 1]),
    repetition_penalty=st.sampled_from([1e-4, 1, 1e4]),
    presence_penalty=st.sampled_from([-1e4, 0, 1e4]),
    frequency_penalty=st.sampled_from([-1e4, 0, 1e4]),
    logit_bias=st.sampled_from([{}, {3: -math.inf}, {3: 1e4, 4: -1e4}]),
    min_new_tokens=st.sampled_from([0, 5]),
)
WIDE = st.sampled_from([0.0, -0.0, 1.0, -1e30, 1e30, 3e38, -3e38, 1e-45])


@given(
    options=st.fixed_dictionaries(EDGES),
    logits=st.lists(WIDE, min_size=VOCAB, max_size=VOCAB),
    wrong=st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_smp_08_srv_11_never_nan_and_always_an_id(
    options: dict[str, Any], logits: list[float], wrong: float
):
    """SMP-08, SRV-11: any options on any logits; a row that is not finite says so, alone."""
    modes = [Sampling(temperature=0.5, top_p=0.9, min_p=0.1, presence_penalty=1, min_new_tokens=1)]
    modes.append(Sampling(logit_bias={0: 1.0}))
    like = make_controls([Row(s, 1) for s in modes], 2, VOCAB)
    row = Row(Sampling(**options, stop_ids=(1,)), 3, (3, 5, 6), (3, 3, 7))
    controls = make_controls([row, row, row], 3, VOCAB, like=like)
    batch = np.tile(np.array(logits, np.float32), (3, 2, 1))
    batch[0, 0, 4] = wrong
    batch[2, 0] = wrong
    positions = jnp.broadcast_to(jnp.array([6, 7]), (3, 2))
    out = run(jnp.asarray(batch), positions, positions, controls)
    assert out.finite.tolist() == [[False, True], [True, True], [False, True]]
    assert out.logprobs is not None
    assert not jnp.isnan(out.logprobs).any()
    assert ((out.ids >= 0) & (out.ids < VOCAB)).all()
    assert (out.ids[:, 1] == out.ids[1, 1]).all()


def test_temperatures_at_the_edge_mean_what_they_say():
    """SMP-08: 1e-9 draws among exact ties, 1e9 draws evenly."""
    logits = LOGITS.copy()
    logits[[2, 6]] = 9
    tied = np.zeros(VOCAB)
    tied[[2, 6]] = 0.5
    assert p_value(draw(Sampling(temperature=1e-9), logits), tied) > 1e-3
    even = np.full(VOCAB, 1 / VOCAB)
    assert p_value(draw(Sampling(temperature=1e9), logits), even) > 1e-3


def test_logprobs_are_of_the_raw_logits():
    controls = make_controls([Row(Sampling(temperature=0.5, top_k=2, seed=3), 1)], 1, VOCAB)
    positions = jnp.arange(1, 9)[None]
    out = run(tile(LOGITS, 1, 8), positions, positions, controls)
    raw = np.log(expected(LOGITS, Sampling()))
    np.testing.assert_allclose(out.logprobs, raw[np.asarray(out.ids)], rtol=1e-5)
    assert run(tile(LOGITS, 1, 8), positions, positions, controls, logprobs=False).logprobs is None
    assert out.top_ids is out.top_logprobs is None
    # the alternatives are the model's too, of a tie the lower id first
    tied = np.where(np.arange(VOCAB) == 3, LOGITS.max(), LOGITS)
    best = run(tile(tied, 1, 8), positions, positions, controls, top=3)
    order = np.lexsort((np.arange(VOCAB), -tied))[:3]
    raw = np.log(expected(tied, Sampling()))
    assert (np.asarray(best.top_ids) == order).all()
    np.testing.assert_allclose(best.top_logprobs, tile(raw[order], 1, 8), rtol=1e-5)


OPTIONS: dict[str, Any] = dict(
    temperature=0.8, top_k=12, top_p=0.95, min_p=0.01, presence_penalty=0.5
)


@given(
    slot=st.integers(0, 4),
    slots=st.just(5),
    burst=st.sampled_from([1, 4]),
    seed=st.integers(0, 2**64 - 1),
    index=st.integers(0, 3),
    position=st.integers(1, 2**30),
)
def test_a_draw_is_a_function_of_seed_sample_and_position(
    slot: int, slots: int, burst: int, seed: int, index: int, position: int
):
    rng = np.random.default_rng(position)
    logits = rng.normal(size=(1, 1, VOCAB)).astype(np.float32)
    row = Row(Sampling(**OPTIONS, n=4, seed=seed), 1, sample=index)
    alone = make_controls([row], 1, VOCAB)
    at = jnp.full((1, 1), position)
    plain = run(jnp.asarray(logits), at, at, alone)

    others = [Row(Sampling(**OPTIONS, seed=i), 1) for i in range(slots)]
    others[slot] = row
    company = rng.normal(size=(slots, burst, VOCAB)).astype(np.float32)
    company[slot, burst - 1] = logits[0, 0]
    positions = np.full((slots, burst), 1)
    positions[slot] = position - burst + 1 + np.arange(burst)
    # drafts outside the vocabulary count for nothing
    fed = jnp.full((slots, burst), VOCAB)
    together = run(
        jnp.asarray(company), fed, jnp.asarray(positions), make_controls(others, slots, VOCAB)
    )
    assert together.ids[slot, burst - 1] == plain.ids[0, 0]


def test_samples_seeds_and_positions_draw_apart():
    """Samples of one request, both halves of a seed, and positions have unrelated numbers."""
    rows = [Row(Sampling(seed=5, n=4), 1, sample=i) for i in range(4)]
    rows += [Row(Sampling(seed=seed), 1) for seed in (6, 5 << 32, (5 << 32) + 5)]
    rows.append(rows[0])
    controls = make_controls(rows, len(rows), VOCAB)
    positions = jnp.broadcast_to(jnp.arange(1, 513), (len(rows), 512))
    flat = np.zeros(VOCAB, np.float32)
    ids = np.asarray(run(tile(flat, *positions.shape), positions, positions, controls).ids)
    assert (ids[0] == ids[-1]).all()
    for i in range(len(rows) - 1):
        # 512 draws of 16 ids: 32 +- 5.5 agree by chance
        assert 5 < (ids[i, 1:] == ids[i, :-1]).sum() < 65
        for j in range(i):
            assert 5 < (ids[i] == ids[j]).sum() < 65
