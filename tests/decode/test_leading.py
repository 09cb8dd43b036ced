"""The leading ids without a sort of the vocabulary, against a sort of it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4jax.decode import leading, sampling
from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.pallas import registry
from tests.pallas.triton_interpreter import interpreted

CANDIDATES, GROUP = 16, 4
# ids that are chosen among at once, and in groups, of which the last has a part
MIDDLE, LARGE = 60, 150


@pytest.fixture(autouse=True, scope="module")
def small_numbers():
    """Candidates and groups so few that every path is walked in small vocabularies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leading, "CANDIDATES", CANDIDATES)
        patch.setattr(leading, "_GROUP", GROUP)
        yield


def by_sorting(scores: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    """All but the leading ids masked, by a sort of all."""
    ordered = -jnp.sort(-scores, axis=-1)
    limit = jnp.where(top_k > 0, top_k, scores.shape[-1])[:, None, None]
    in_top_k = jnp.arange(scores.shape[-1]) < limit
    mass = jnp.cumsum(jnp.where(in_top_k, jnp.exp(ordered), 0.0), axis=-1)
    before = jnp.pad(mass[..., :-1], ((0, 0), (0, 0), (1, 0)))
    share = top_p[:, None, None]
    in_top_p = (before < share * mass[..., -1:]) | (share >= 1)
    kept = (in_top_k & in_top_p).sum(axis=-1, keepdims=True)
    edge = jnp.take_along_axis(ordered, kept - 1, axis=-1)
    above, ties = scores > edge, scores == edge
    room = kept - above.sum(axis=-1, keepdims=True)
    return jnp.where(above | (ties & (jnp.cumsum(ties, axis=-1) <= room)), scores, -jnp.inf)


oracle = jax.jit(by_sorting)


def assert_truncates(got: Any, scores: np.ndarray, top_k: np.ndarray, top_p: np.ndarray):
    """What the oracle keeps; where a mass is within rounding of top-p, of either side."""
    kept = np.asarray(got) > -np.inf
    np.testing.assert_array_equal(np.asarray(got)[kept], scores[kept])
    slack = np.where(top_p < 1, 2e-6, 0).astype(np.float32)
    fewest, most = (np.asarray(oracle(scores, top_k, top_p * (1 + s))) for s in (-slack, slack))
    assert (kept >= (fewest > -np.inf)).all()
    assert (kept <= (most > -np.inf)).all()


def rows_of(vocab: int, ks: list[int], ps: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Every pair of a top-k and a top-p."""
    pairs = [(k if k < vocab else 0, p) for k in ks for p in ps]
    return np.array([k for k, _ in pairs], np.int32), np.array([p for _, p in pairs], np.float32)


def made(
    seed: int, shape: tuple[int, ...], spread: float, step: float, banned: float, apart: bool
) -> np.ndarray:
    """Scores of normal logits: rounded to a step, so that there are ties, and some masked.

    Apart: the leading ids are in as many groups as they can be.
    """
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=shape) * spread
    # zeros of either sign are among them
    scores = np.round(scores / step) * step if step else scores
    scores = np.where(rng.random(shape) < banned, -np.inf, scores).astype(np.float32)
    scores[..., rng.integers(shape[-1])] = 0
    if apart:
        ids = np.arange(shape[-1])
        by_place = np.lexsort((ids // GROUP, ids % GROUP))
        scores[..., by_place] = np.sort(scores, axis=-1)[..., ::-1]
    return scores - scores.max(axis=-1, keepdims=True)


SHAPES = dict(
    seed=st.integers(0, 2**32 - 1),
    spread=st.sampled_from([0.0, 0.01, 1.0, 5.0, 1e30]),
    step=st.sampled_from([0.0, 0.5, 2.0]),
    banned=st.sampled_from([0.0, 0.2, 0.95]),
    apart=st.booleans(),
)
KS = [1, 2, CANDIDATES - 1, CANDIDATES, CANDIDATES + 1, 0, LARGE - 1]
PS = [1e-30, 0.1, 0.5, 0.95, 0.999, 1 - 2.0**-24, 1.0]
truncate = jax.jit(lambda *given: leading.truncate(*given))


@given(vocab=st.sampled_from([CANDIDATES, MIDDLE, LARGE]), **SHAPES)
def test_truncates_as_a_sort_does(vocab: int, **options: Any):
    """Ties, bans, flat rows that have to be sorted, and rows of all kinds side by side."""
    top_k, top_p = rows_of(vocab, KS, PS)
    scores = made(shape=(len(top_k), 2, vocab), **options)
    assert_truncates(truncate(scores, top_k, top_p), scores, top_k, top_p)


# (ids, how many of them): members that are few, or chosen among; ids chosen among at once; few ids
BEST = [(LARGE, CANDIDATES // GROUP), (LARGE, 5), (MIDDLE, CANDIDATES), (CANDIDATES, 3)]
best = jax.jit(lambda *given: leading.best(*given), static_argnums=1)


@given(sizes=st.sampled_from(BEST), **SHAPES)
def test_the_best_are_those_of_a_sort(sizes: tuple[int, int], **options: Any):
    vocab, count = sizes
    scores = np.maximum(made(shape=(3, 2, vocab), **options), np.float32(-1e30))
    values, ids = best(scores, count)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :count]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(values, np.take_along_axis(scores, order, axis=-1))


def test_truncates_by_the_kernel_of_the_selection():
    """In Triton what lies beyond a row is -inf too, as most ids here are."""
    top_k, top_p = rows_of(LARGE, [CANDIDATES, 0], [0.9])
    scores = made(2, (len(top_k), 1, LARGE), 1.0, 0.0, 0.95, apart=False)
    with registry.using("triton"), interpreted():
        got = jax.jit(lambda *given: leading.truncate(*given))(scores, top_k, top_p)
    assert_truncates(got, scores, top_k, top_p)


def sort_wrongly(monkeypatch: pytest.MonkeyPatch):
    """Makes the sort keep nothing, so that what comes of it is seen."""

    def nothing(scores: jax.Array, *_: Any) -> leading._Edge:
        shape = scores.shape[:2]
        return leading._Edge(jnp.full(shape, jnp.inf), jnp.zeros(shape, jnp.int32))

    monkeypatch.setattr(leading, "_edge_by_sorting", nothing)


def test_only_rows_beyond_their_candidates_are_sorted(monkeypatch):
    sort_wrongly(monkeypatch)
    top_k, top_p = rows_of(LARGE, KS, PS)
    scores = made(5, (len(top_k), 2, LARGE), 1.0, 0.0, 0.0, apart=False)
    got = np.asarray(jax.jit(lambda *given: leading.truncate(*given))(scores, top_k, top_p))
    probable = np.sort(np.exp(scores), axis=-1)[..., ::-1]
    reached = probable[..., :CANDIDATES].sum(-1) >= top_p[:, None] * probable.sum(-1)
    off = top_k[:, None] == 0
    settled = np.where(off, reached | (top_p[:, None] == 1), top_k[:, None] <= CANDIDATES)
    assert 0 < settled[~off[:, 0]].sum() < settled[~off[:, 0]].size
    assert 0 < settled[off[:, 0]].sum() < settled[off[:, 0]].size
    right = np.asarray(oracle(scores, top_k, top_p))
    assert ((got == right).all(axis=-1) == settled).all()


def test_a_row_does_not_depend_on_whether_another_is_sorted(monkeypatch):
    """However the sort rounds: rows beside one that is sorted, and beside one that is not."""
    sort_wrongly(monkeypatch)
    top_k, top_p = rows_of(LARGE, [1, 5, CANDIDATES], PS)
    scores = made(3, (len(top_k), 1, LARGE), 2.0, 0.5, 0.1, apart=False)
    run = jax.jit(lambda *given: leading.truncate(*given))

    def beside(company: np.ndarray) -> np.ndarray:
        both = np.concatenate([scores, company[None, None].astype(np.float32)])
        return np.asarray(run(both, np.append(top_k, 0), np.append(top_p, np.float32(0.9))))

    flat, peaked = beside(np.zeros(LARGE)), beside(np.where(np.arange(LARGE) == 7, 0, -50))
    assert not (flat[-1] > -np.inf).any()
    assert (peaked[-1] > -np.inf).any()
    np.testing.assert_array_equal(flat[:-1], peaked[:-1])
    assert (flat[:-1] > -np.inf).any(axis=-1).all()


def test_ids_are_those_of_a_sampler_that_sorts(monkeypatch):
    """Each option mix in rows side by side: bias and bans, penalties, min-p, top-k and top-p."""
    rng = np.random.default_rng(0)
    mixes: list[dict[str, Any]] = [
        {},
        dict(temperature=0),
        dict(top_k=1),
        dict(top_k=CANDIDATES, top_p=0.9),
        dict(top_k=CANDIDATES + 1, top_p=0.9),
        dict(top_p=0.1, temperature=3.0),
        dict(top_p=0.999, temperature=1e9),
        dict(top_p=0.9, logit_bias={3: -np.inf, 9: 5.0}, temperature=0.3),
        dict(top_k=20, top_p=0.95, min_p=0.05, presence_penalty=1.5, repetition_penalty=1.2),
        dict(top_k=8, frequency_penalty=0.5, min_new_tokens=9, stop_ids=(1, 2)),
    ]
    output = rng.integers(LARGE, size=30).tolist()
    rows = [Row(Sampling(**mix, seed=i), 2, (4, 5), output) for i, mix in enumerate(mixes)]
    controls = make_controls(rows, len(rows), LARGE)
    logits = np.round(rng.normal(size=(len(rows), 8, LARGE)) * 3, 1).astype(np.float32)
    positions = np.broadcast_to(np.arange(5, 13), logits.shape[:2])
    fed = rng.integers(LARGE, size=positions.shape)

    def sampled() -> sampling.Sampled:
        run = jax.jit(lambda *given: sampling.sample(*given, top=5))
        return run(jnp.asarray(logits), jnp.asarray(fed), jnp.asarray(positions), controls)

    got = sampled()
    monkeypatch.setattr(sampling, "truncate", by_sorting)
    monkeypatch.setattr(sampling, "best", jax.lax.top_k)
    for mine, sorting in zip(got, sampled(), strict=True):
        np.testing.assert_array_equal(mine, sorting)


def test_the_numbers_that_are_compiled(monkeypatch):
    """With 512 candidates of two selections, around the ends of what they settle."""
    monkeypatch.setattr(leading, "CANDIDATES", 512)
    monkeypatch.setattr(leading, "_GROUP", 32)
    top_k = np.array([1, 511, 512, 513, 0, 0, 0, 20], np.int32)
    top_p = np.array([1, 0.9, 1, 1, 0.1, 0.999, 1, 0.95], np.float32)
    run = jax.jit(lambda *given: leading.truncate(*given))
    for spread, step in ((1.0, 0.0), (3.0, 0.5), (0.0, 0.0)):
        scores = made(1, (len(top_k), 1, 16500), spread, step, 0.02, apart=False)
        assert_truncates(run(scores, top_k, top_p), scores, top_k, top_p)
