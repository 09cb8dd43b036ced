"""Rows of the case list on numerics and selection, where the whole model has a part in them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.config import Quantization
from qwen4jax.layers import gated_residual
from qwen4jax.layers.capture import Capture
from qwen4jax.layers.gated_residual import Residual, read
from qwen4jax.layers.ple import per_layer_embedding
from qwen4jax.model import draft_step, head, read_out, step
from qwen4jax.numerics import rms_norm
from qwen4jax.pallas.cases import normal
from qwen4jax.pallas.gated_residual import reference, update
from qwen4jax.pallas.index_topk import index_topk
from qwen4jax.params import declare
from qwen4jax.quant import Quantized
from qwen4jax.state import abstract_state, reset_slots, take_slots
from tests import tiny
from tests.oracle import Oracle
from tests.pallas.calls import f64
from tests.planted_index import (
    plant,
    planted_queries,
    select,
    tokens_of,
    with_indexer,
)
from tests.tiny import (
    ROWS,
    T0,
    assert_close,
    assert_plain,
    exact,
    feed_pieces,
    greedy,
    new_state,
    plain,
    poison,
    prompt,
    random_params,
    split,
    t0,
)


def fed(params, rows):
    """A state that has been fed these rows."""
    return feed_pieces(params, new_state(), [split(ids, [16] * 4) for ids in rows])[0]


def test_ties_at_the_edge_of_the_budget():
    """NUM-02: 9 of 10 blocks score exactly 0; ten repeats, batch 1 and 4."""
    params = planted_queries(t0())
    ids = prompt(40)
    state = plant(fed(params, [ids[:39]] * ROWS), {row: [7] for row in range(ROWS)})
    # token 39 completes block 9; its key is across the queries like all but block 7's
    want = [*range(4), *range(28, 32)]
    last = jnp.full(ROWS, ids[39])
    _, logits, selected = select(params, state, last)
    for row in range(ROWS):
        assert tokens_of(selected[row]) == want
        np.testing.assert_array_equal(logits[row], logits[0])
    for _ in range(9):
        _, again, chosen = select(params, state, last)
        np.testing.assert_array_equal(again, logits)
        np.testing.assert_array_equal(chosen, selected)
    _, alone, chosen = select(params, take_slots(state, jnp.asarray([2])), last[:1])
    assert tokens_of(chosen[0]) == want
    assert alone[0].argmax() == logits[0].argmax()


def test_ties_without_jit():
    """NUM-02: the operations one by one choose what the compiled program chooses."""
    rng = np.random.default_rng(2)
    scores = np.zeros((ROWS, 1, 10), np.float32)
    scores[:, 0, 7] = 1
    scores *= np.where(rng.random(scores.shape) < 0.5, -1, 1) ** (scores == 0)
    scores, index = jnp.asarray(scores), jnp.full((ROWS, 1), 39)
    choose = lambda s, i: index_topk(s, i, blocks=2, ratio=4)  # noqa: E731
    with jax.disable_jit():
        eager = choose(scores, index)
    np.testing.assert_array_equal(eager, jax.jit(choose)(scores, index))
    for row in eager:
        assert tokens_of(row[0]) == [*range(4), *range(28, 32)]


@pytest.mark.parametrize("length", [1, 2, 3, 4, 7, 8, 10, 11, 12, 13, 15, 16])
def test_sparse_equals_dense_up_to_the_budget(length):
    """NUM-03: every token up to 11; then 8 and the open block, which dense attention is not."""
    ids = prompt(length, seed=3)
    sparse, dense = Oracle(t0()), Oracle(t0(), dense=True)
    got = plain(t0(), ids)
    assert_close(got, sparse.logits(ids))
    far = np.abs(got - dense.logits(ids)).max(axis=1)
    for index in range(length):
        chosen = sparse.selected["layer03"][index]
        if index + 1 <= 11:
            assert chosen == list(range(index + 1))
            assert far[index] < 2e-5
        else:
            assert len(chosen) == 8 + (index + 1) % 4
    if length > 11:
        assert far[11:].max() > 1e-3


def test_sparse_equals_dense_at_the_released_budget():
    """NUM-03: all of 2051 tokens; 2048 of 2052, 2051 of 2055."""
    lengths = np.array([2047, 2048, 2050, 2051, 2052, 2055])
    scores = np.random.default_rng(0).standard_normal((1, len(lengths), 520))
    seen = np.arange(520) < (lengths // 4)[:, None]
    scores = jnp.asarray(np.where(seen, scores, -np.inf), jnp.float32)
    got = index_topk(scores, jnp.asarray(lengths - 1)[None], blocks=512, ratio=4)
    assert got.shape[-1] == 2051
    counts = [len(tokens_of(row)) for row in got[0]]
    assert counts == [2047, 2048, 2050, 2051, 2048, 2051]
    for row, length in zip(got[0, :4], lengths, strict=False):
        assert tokens_of(row) == list(range(length))


def test_a_query_may_lose_its_own_block():
    """NUM-04: at length 12 nothing is forced, not even the query; at 13 the tail is token 12."""
    params = planted_queries(t0())
    ids = prompt(12, seed=4)
    state = plant(fed(params, [ids[:11]]), {0: [0, 1]})
    state, _, selected = select(params, state, jnp.full(ROWS, ids[11]))
    assert tokens_of(selected[0]) == list(range(8))
    _, _, selected = select(params, state, jnp.full(ROWS, 9))
    assert tokens_of(selected[0]) == [*range(8), 12]


def test_rows_without_a_complete_block():
    """NUM-08: a row of 3 beside one of 40, whose token 0 stands where an index of 0 points."""
    short, long = prompt(3, seed=8), prompt(40, seed=8)
    for rows in ([short, long], [long, short]):
        at = 0 if len(rows[0]) == 3 else 1
        changed = list(rows)
        changed[1 - at] = np.concatenate([[(long[0] + 20) % 64], long[1:]])
        results = []
        for both in (rows, changed):
            pieces = [split(ids, [16] * 4) for ids in both]
            _, found = feed_pieces(t0(), new_state(), pieces)
            assert_close(found[at], exact(t0(), short))
            results.append(found[at])
        np.testing.assert_array_equal(results[0], results[1])


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("length", [9, 30])
def test_a_pool_of_nan(value, length):
    """NUM-09: 64 places of NaN or infinities before the run; finite and equal to a zeroed pool."""
    ids = prompt(length, seed=9)
    filled = reset_slots(T0, poison(new_state(), value), jnp.arange(ROWS))
    _, tokens, logits = greedy(t0(), filled, [ids], 8)
    _, want_tokens, want = greedy(t0(), new_state(), [ids], 8)
    assert np.isfinite(logits[0]).all()
    np.testing.assert_array_equal(logits[0], want[0])
    assert tokens == want_tokens


@pytest.mark.parametrize("page_size", [16, 64])
def test_eighty_tokens_across_pages(page_size):
    """NUM-10: prompts of 17, 40 and 70; positions 63 to 67 and 127 to 130 are among them."""
    ids = [prompt(n, seed=10) for n in (17, 40, 70)]
    state = new_state(max_length=192, page_size=page_size)
    _, tokens, logits = greedy(t0(), state, ids, 80)
    for row in range(3):
        assert len(tokens[row]) == 80
        assert_plain(t0(), ids[row], tokens[row], logits[row], tolerance=5e-5)


def bf16_params():
    return random_params(tiny.T0_BF16, seed=16)


def test_the_stream_keeps_its_dtype(monkeypatch):
    """NUM-16: bfloat16 after each of the eight sublayers, and in what is kept between steps."""
    seen = []

    def noted(streams, inject, y):
        out = unchanged(streams, inject, y)
        seen.append((streams.dtype, out.dtype, y.dtype, inject.dtype))
        return out

    unchanged = reference.update
    # once by itself (before the n-gram embedding, at the end), once with the next read
    monkeypatch.setattr(gated_residual, "update", noted)
    monkeypatch.setattr(reference, "update", noted)
    config = tiny.T0_BF16
    state = abstract_state(config, **tiny.SIZES)
    shape = jax.ShapeDtypeStruct((ROWS, 4), jnp.int32)
    count = jax.ShapeDtypeStruct((ROWS,), jnp.int32)

    def shapes(*args):
        after, pending = step(*args, final=True)
        return after, pending.residual

    after, residual = jax.eval_shape(shapes, bf16_params(), state, shape, count)
    bfloat16, float32 = jnp.bfloat16, jnp.float32
    assert seen == [(bfloat16, bfloat16, bfloat16, float32)] * 8
    assert residual.dtype == bfloat16
    for got, want in zip(jax.tree.leaves(after), jax.tree.leaves(state), strict=True):
        assert got.dtype == want.dtype


# XLA may otherwise drop a rounding between operations that it fuses
AS_WRITTEN = {"xla_allow_excess_precision": False}


def test_a_program_rounds_as_it_is_written():
    """NUM-16: the norm reads the rounded stream, fused or not; top-1 equal on 64 prompts.

    Four in five values of the last residual differed before, and the top-1 of three prompts.
    """
    params, rows = bf16_params(), 64
    state = new_state(tiny.T0_BF16, slots=rows, max_length=8)
    tokens = jnp.asarray(np.stack([prompt(6, seed=200 + row) for row in range(rows)]))
    count = jnp.full(rows, 6)

    def last(params, state):
        _, pending = step(params, state, tokens, count, final=True)
        return pending.residual, head(params, read_out(params, pending.residual))[:, -1]

    fused = [np.asarray(x, np.float32) for x in jax.jit(last)(params, state)]
    written = jax.jit(last, compiler_options=AS_WRITTEN)(params, state)
    written = [np.asarray(x, np.float32) for x in written]
    # float32 sums of other orders may still fall on either side of a rounding
    assert np.mean(fused[0] != written[0]) < 0.02
    np.testing.assert_array_equal(fused[1].argmax(-1), written[1].argmax(-1))


def test_a_layer_rounds_with_and_without_jit():
    """NUM-16: the n-gram embedding into the stream and the norm that reads it."""
    params, config = bf16_params().layers[1], tiny.T0_BF16
    rng = np.random.default_rng(16)
    streams = normal(rng, (8, 6, 4, 32), jnp.bfloat16)
    ids = jnp.asarray(rng.integers(2, 64, (8, 8)), jnp.int32)
    history = jnp.zeros((8, 9, 128), jnp.bfloat16)

    def into_the_stream(streams):
        added, window = per_layer_embedding(params.ple, config, 0, streams, ids, history)
        streams = update(streams, jnp.ones(streams.shape[:3]), added[:, :, 0])
        x, inject, _ = read(
            params.attn_hyper_connection, config, Residual(streams), capture=Capture()
        )
        return added, window, streams, x, inject

    with jax.disable_jit():
        eager = into_the_stream(streams)
    for got, want in zip(jax.jit(into_the_stream)(streams), eager, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(f64(got), f64(want), rtol=1e-6, atol=1e-6)


def test_the_draft_heads_norm_spans_all_streams():
    """NUM-17: joint rms 1 and the streams keep their ratios; the backbone's norm is per stream."""
    rows = np.random.default_rng(17).standard_normal((1, 8, 4, 32))
    rows *= np.array([1.0, 10.0, 100.0, 1000.0])[:, None]
    flat = jnp.asarray(rows.reshape(1, 8, 128), jnp.float32)
    joint = np.asarray(rms_norm(flat, jnp.zeros(128), 1e-6)).reshape(rows.shape)
    np.testing.assert_allclose(np.sqrt((joint**2).mean((2, 3))), 1, rtol=1e-5)
    np.testing.assert_allclose(
        joint[..., 3, :] / rows[..., 3, :], joint[..., 0, :] / rows[..., 0, :], rtol=1e-4
    )
    alone = np.asarray(rms_norm(jnp.asarray(rows, jnp.float32), jnp.zeros(128), 1e-6))
    np.testing.assert_allclose(np.sqrt((alone**2).mean(3)), 1, rtol=1e-5)

    ids = prompt(9, seed=17)
    oracle = Oracle(t0())
    oracle.residual = [np.concatenate([rows[0], rows[0, -1:]])]
    want = oracle.mtp_logits(ids)
    start, count = jnp.zeros(ROWS, jnp.int32), jnp.full(ROWS, 8)
    repeat = lambda x: jnp.repeat(jnp.asarray(x), ROWS, axis=0)  # noqa: E731

    @jax.jit
    def draft(state, tokens, residual):
        _, found = draft_step(t0(), state, tokens, residual, start, count)
        return head(t0(), found.hidden)

    got = draft(new_state(), repeat(ids[None, 1:]), repeat(rows.astype(np.float32)))
    assert_close(got[0], want)


SENSITIVE = ("block_inject_weight", "conv1d", "self_attn", "fc_hidden", "fc_embedding", "index_qk")


def test_only_experts_and_tables_have_a_stored_form():
    """NUM-19: what does not survive 4 bits is declared plain in every format."""
    for experts in ("nvfp4", "fp8"):
        form = Quantization(experts, experts, "fp8")
        config = T0.replace(quantization=form, dtype="bfloat16")
        stored = jax.tree_util.tree_flatten_with_path(
            declare(config), is_leaf=lambda x: isinstance(x, Quantized)
        )[0]
        names = {jax.tree_util.keystr(path): leaf for path, leaf in stored}
        quantised = {name for name, leaf in names.items() if isinstance(leaf, Quantized)}
        assert all(".experts." in n or n.endswith("ngram_embedding") for n in quantised)
        assert len(quantised) == 2 * 4 + 2 + 1
        for part in SENSITIVE:
            found = [leaf for name, leaf in names.items() if part in name]
            assert found
            assert all(leaf.dtype == "bfloat16" for leaf in found)


def test_the_prompt_is_not_ignored():
    """NUM-19: other first 8 ids give other logits behind the same ending."""
    ending = prompt(8, seed=19)
    logits = [plain(t0(), [*prompt(8, seed=s), *ending])[-1] for s in (1, 2)]
    assert np.abs(logits[0] - logits[1]).max() > 1e-2


def test_the_indexer_is_read():
    """NUM-20: another indexer gives other logits at length 40, and the same up to 11."""
    other = random_params(T0, seed=20).layers[3].self_attn.indexer.index_qk_proj
    ids = prompt(40)
    moved = np.abs(plain(with_indexer(t0(), other), ids) - plain(t0(), ids)).max(axis=1)
    assert moved[11:].max() > 1e-2
    # the order of a sum may differ, its terms do not
    assert moved[:11].max() < 1e-5
