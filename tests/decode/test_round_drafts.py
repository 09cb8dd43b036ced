"""The draft head in the round: which rows it runs, what they select, what they propose."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from qwen4jax.decode import round as round_module
from qwen4jax.decode.round import begin, run_round, speculative_round
from qwen4jax.model import draft_step, head
from tests.decode.planted import (
    GREEDY,
    PAGE,
    SLOTS,
    Play,
    Request,
    assert_same_live,
    controls_of,
    drawn,
    fed,
    golden,
    golden_prompts,
    new_state,
    plain,
    random_prompt,
    t0,
)

# long enough that two of their blocks are a choice
LONG = tuple(Request(random_prompt(40 + i % 4, seed=i), drawn(i)) for i in range(SLOTS))
GOLDEN = tuple(Request(prompt, GREEDY) for prompt in golden_prompts())
DRAFTED = [i for i, request in enumerate(GOLDEN) if f"p{i}.draft.share" in golden()]


@struct.dataclass
class Asked:
    """One call of the draft head: the selection it was given, and what came out."""

    given: Any
    selected: Any
    logits: Any


def spied(function: Any) -> Any:
    """`function` compiled, giving also the calls it makes of the draft head."""

    @jax.jit
    def run(*arguments: Any) -> tuple[Any, list[Asked]]:
        calls = []

        def spy(params, *rest, selected=None):
            state, rows = draft_step(params, *rest, selected=selected)
            calls.append(Asked(selected, rows.selected, head(params, rows.hidden)))
            return state, rows

        with mock.patch.object(round_module, "draft_step", spy):
            return function(*arguments), calls

    return run


spied_begin, spied_round = spied(begin), spied(speculative_round)


def begun(share: Any, requests: tuple[Request, ...], done: Any = None) -> tuple[Any, list[Asked]]:
    """The first drafts of requests whose prompts, and outputs so far, are fed."""
    done = done or [()] * len(requests)
    state, hidden = fed(t0(), 3, [(*r.prompt, *d) for r, d in zip(requests, done, strict=True)])
    controls, there = controls_of(requests, done), jnp.arange(SLOTS) < len(requests)
    (state, *_), calls = spied_begin(t0(share), state, controls, hidden, there)
    return state, jax.tree.map(np.asarray, calls)


@pytest.mark.parametrize("share", ["share", "fresh"])
def test_chained_drafts_are_those_of_the_reference(share: str):
    """Logits and ids of three chained steps; SPC-07: up to 11 tokens sharing changes nothing."""
    state, calls = begun(share, GOLDEN)
    logits = np.stack([call.logits[:, 0] for call in calls], axis=1)
    for i in DRAFTED:
        want = golden()[f"p{i}.draft.{share}.logits"]
        np.testing.assert_allclose(logits[i], want, atol=1e-5 * np.abs(want).max())
        assert np.asarray(state.drafts[i]).tolist() == golden()[f"p{i}.draft.{share}"].tolist()
        if len(GOLDEN[i].prompt) + 3 <= 11:
            other = golden()[f"p{i}.draft.fresh.logits"]
            np.testing.assert_allclose(logits[i], other, atol=1e-5 * np.abs(other).max())


def rounds_of(known: list[list[int]], accepted: list[int]) -> tuple[Play, Any, list[Asked]]:
    """A round of `LONG` with planted drafts, spied on."""
    play = Play(t0("share"), 3, LONG)
    play.plant_known(known, accepted)
    (state, _, _, burst), calls = spied_round(play.params, play.state, play.controls, play.active)
    for i, ids in enumerate(play.ids):
        ids += np.asarray(burst.tokens)[i, : burst.count[i]].tolist()
    return play, state, jax.tree.map(np.asarray, calls)


def blocks(selected: np.ndarray) -> set[int]:
    """Complete blocks of a selection of T0: two of them stand before the open block's tail."""
    return {int(i) // 4 for i in selected[:8] if i >= 0}


def test_later_drafts_reuse_each_rows_last_accepted_selection():
    """SPC-08, SPC-09, SPC-10: the draft head's own selection, of the row that was accepted last.

    Rows accept 0, 1, 2 and 3 drafts. What the later steps are given is what the draft head selects
    at the last accepted position in a run that never drafted, and the positions since.
    """
    accepted = [i % 4 for i in range(SLOTS)]
    play, state, calls = rounds_of(plain(LONG), accepted)
    assert [call.given is None for call in calls] == [True, False, False]
    _, reference = begun("share", LONG, [ids[:-1] for ids in play.ids])
    seeds = []
    for row, last in enumerate(accepted):
        own = calls[0].selected[row]
        length = len(LONG[row].prompt) + len(play.ids[row]) - 1
        assert int(state.length[row]) == length
        want = reference[0].selected[row, 0]
        np.testing.assert_array_equal(own[last], want)
        for step in (1, 2):
            given = calls[step].given[row, 0]
            np.testing.assert_array_equal(given, [*want, *range(length, length + step)])
        seeds.append((blocks(want), [blocks(own[j]) for j in range(4)], last))
    # the batch can tell: rows choose disjoint blocks, and rejected rows others than accepted ones
    disjoint = [
        (a, b, c)
        for a in range(SLOTS)
        for b in range(a)
        for c in range(b)
        if len(seeds[a][0] | seeds[b][0] | seeds[c][0]) == 6
    ]
    assert any({seeds[i][2] for i in three} == {0, 1, 3} for three in disjoint)
    assert sum(own[3] != seed for seed, own, last in seeds if last < 3) >= 3


def test_the_selection_is_the_draft_heads_own():
    """SPC-08: the set of the target's layer at the same position is another."""
    _, calls = begun("share", GOLDEN)
    other = 0
    for i, request in enumerate(GOLDEN):
        length = len(request.prompt)
        target = set(np.flatnonzero(golden()[f"p{i}.qsa.3"][-1]).tolist())
        own = {int(token) for token in calls[0].selected[i, 0] if token >= 0}
        assert len(own) == len(target)
        if length <= 11:
            assert own == target == set(range(length))
        other += own != target
    assert other


def equations(jaxpr: Any) -> Any:
    """Every equation, with those of inner programs."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


@pytest.mark.parametrize(("share", "selections"), [("fresh", 3), ("share", 1)])
def test_shared_steps_select_nothing_and_store_their_keys(share: str, selections: int):
    """SPC-07, SPC-11: counted in the program, traced and compiled."""
    play = Play(t0(share), 3, LONG)
    traced = run_round.trace(play.params, play.state, play.controls, play.active)
    found = {"top_k": 0, "scores": 0, "queries": 0, "keys": 0, "stored": 0}
    config = t0().config
    wide = (config.indexer_n_heads + 1) * config.indexer_head_dim
    index_key = play.state.layers[-1].index_key
    pooled = (index_key.shape[0] * index_key.shape[1], index_key.shape[2])
    for equation in equations(traced.jaxpr.jaxpr):
        scope, name = str(equation.source_info.name_stack), equation.primitive.name
        shapes = [v.aval.shape for v in equation.invars if hasattr(v.aval, "shape")]
        found["top_k"] += name == "top_k" and "index_topk" in scope
        found["scores"] += name == "dot_general" and "index_score" in scope
        if name == "dot_general" and "attention_projections" in scope:
            found["queries"] += (wide, config.hidden_size) in shapes
            found["keys"] += (config.indexer_head_dim, config.hidden_size) in shapes
        found["stored"] += name == "scatter" and shapes[0] == pooled
    # the sparse layer of the target selects once in any case
    assert found == {
        "top_k": 1 + selections,
        "scores": 1 + selections,
        "queries": 1 + selections,
        "keys": 3 - selections,
        "stored": 4,
    }
    compiled = str(traced.lower().compile().as_text())
    operations = [line for line in compiled.splitlines() if "index_topk" in line]
    steps = {name for name in ("draft_1", "draft_2") if any(name in op for op in operations)}
    assert any("draft_extend" in op for op in operations)
    assert steps == ({"draft_1", "draft_2"} if share == "fresh" else set())


def test_a_shared_step_stores_the_index_key_of_its_own_row():
    """SPC-11: raw, and pooled where it ends a block, as the first step of its own selection does.

    Both steps have the same residual and token, so that their keys are the same.
    """
    share, fresh = (begun(mode, LONG)[0].mtp for mode in ("share", "fresh"))
    table = np.asarray(new_state(t0(), 3).page_table)
    for slot, request in enumerate(LONG):
        row = len(request.prompt)
        place = slot, row % share.ring.shape[1]
        np.testing.assert_allclose(share.ring[place], fresh.ring[place], rtol=0, atol=1e-4)
        assert np.abs(share.ring[place]).max() > 0
        if row % 4 == 3:
            block = table[slot, row // PAGE], row % PAGE // 4
            pooled = share.index_key[block], fresh.index_key[block]
            np.testing.assert_allclose(*pooled, rtol=0, atol=1e-4)
            assert np.abs(pooled[0]).max() > 0


def test_shared_steps_leave_the_index_keys_of_fresh_ones():
    """SPC-11: three shared steps, a full accept, and then eight rounds that accept nothing."""
    known = plain(LONG)
    plays = [Play(t0(share), 3, LONG) for share in ("share", "fresh")]
    for play in plays:
        play.plant_known(known, [3] * SLOTS)
        assert play.round().accepted.tolist() == [3] * SLOTS
        for _ in range(8):
            play.plant_known(known, [0] * SLOTS)
            assert play.round().accepted.tolist() == [0] * SLOTS
    assert plays[0].ids == plays[1].ids
    assert_same_live(plays[0].state, plays[1].state, drafts=False)


PAIRED = (Request(random_prompt(9, seed=77), drawn(77)),)
POSITIONS = 20


@jax.jit
def values_of_pairs(params: Any, state: Any, residual: Any, tokens: Any) -> Any:
    """The draft head's value for each residual with each token; it depends on nothing else."""
    shape = (SLOTS, len(tokens))
    streams = residual.reshape(SLOTS, 1, params.config.hc_count, -1)
    streams = jnp.broadcast_to(streams, (*shape, *streams.shape[2:]))
    start, count = jnp.zeros(SLOTS, jnp.int32), jnp.full(SLOTS, len(tokens))
    every = jnp.broadcast_to(tokens, shape)
    state, _ = draft_step(params, state, every, streams, start, count)
    return rows_of(state)[:, : len(tokens)]


def rows_of(state: Any) -> Any:
    """Values of the draft head by slot and row."""
    values = state.mtp.value[state.page_table]
    return values.reshape(state.slots, state.capacity, -1)


def test_rows_pair_a_residual_with_the_token_that_followed_it():
    """SPC-14, SPC-23: (t, t + 1) after a prompt, and after accepting 0, 3, 1 drafts and all.

    The rows that are live are those of all committed tokens, the pending one the last token.
    """
    known = plain(PAIRED)
    ids = np.array([*PAIRED[0].prompt, *known[0]])
    of_positions, _ = fed(t0(), 3, [ids[: i + 1].tolist() for i in range(POSITIONS)])
    following = jnp.asarray(ids[1 : POSITIONS + 1])
    table = values_of_pairs(t0(), new_state(t0(), 3), of_positions.residual, following)
    table = np.asarray(table)[:POSITIONS]
    play = Play(t0("share"), 3, PAIRED)
    for accepted in (None, 0, 3, 1, 0, 1):
        if accepted is not None:
            play.plant_known(known, [accepted])
            assert play.round().accepted[0] == accepted
        length = int(play.state.length[0])
        assert length == len(PAIRED[0].prompt) + len(play.ids[0]) - 1 < POSITIONS
        for row, value in enumerate(np.asarray(rows_of(play.state))[0, :length]):
            fits = np.abs(table - value).max(axis=-1) < 1e-4
            # a token may occur more than once
            assert {(int(i), int(ids[j + 1])) for i, j in np.argwhere(fits)} == {
                (row, ids[row + 1])
            }
