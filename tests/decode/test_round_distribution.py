"""What rounds draw, against enumerated probabilities, with good, bad and adversarial drafts.

A model of 16 ids and 512 slots with the same context: one round draws once per slot.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.config import LINEAR, SPARSE, Config, RopeParameters
from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.prefill import logits_of, prefill, prefill_chunk
from qwen4jax.decode.round import run_round
from qwen4jax.state import init_state
from tests.decode.test_sampling import expected, p_value
from tests.tiny import random_params

SMALL = Config(
    vocab_size=16,
    hidden_size=16,
    num_hidden_layers=2,
    layer_types=(LINEAR, SPARSE),
    max_position_embeddings=64,
    eos_token_id=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rope_parameters=RopeParameters(rope_theta=10000.0, mrope_section=(1, 0, 0)),
    indexer_n_heads=1,
    indexer_head_dim=8,
    indexer_budget=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
    hc_count=2,
    hc_lowrank=4,
    ple_layer_ids=(1,),
    ple_embed_dim=16,
    heads_per_ngram=2,
    ngram_vocab_size_base=11,
    make_ngram_vocab_size_divisible_by=4,
    split_ngram_parts=1,
    dtype="float32",
)
SLOTS, VOCAB, DRAFTS = 512, 16, 3
PROMPT, PENDING = (3, 4, 5, 6, 7, 8, 9, 2, 2), 5
MODE = Sampling(temperature=0.9, top_p=0.9, min_p=0.01, presence_penalty=0.5, logit_bias={3: 0.1})
OPTIONS = {
    "temperature": Sampling(temperature=1.2),
    "penalties and top-p": Sampling(
        temperature=0.9,
        top_p=0.85,
        min_p=0.01,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
    ),
}


@functools.cache
def params() -> Any:
    # flat enough that most ids are drawn
    return random_params(SMALL, scale=1.0)


@functools.cache
def start() -> Any:
    """The prompt in every slot, and the same pending token."""
    state: Any = init_state(SMALL, slots=SLOTS, max_length=16, page_size=16, drafts=DRAFTS)
    state, _ = prefill(params(), state, [PROMPT] * SLOTS, range(SLOTS), chunk=16)
    return state.replace(token=jnp.full(SLOTS, PENDING, jnp.int32))


@functools.cache
def next_logits() -> tuple[np.ndarray, np.ndarray]:
    """After the pending token [V], and after each id that may follow it [V, V]."""
    state = init_state(SMALL, slots=SLOTS, max_length=16, page_size=16, drafts=DRAFTS)
    rows = [(*PROMPT, PENDING, i % VOCAB)[: len(PROMPT) + 1 + (i > 0)] for i in range(SLOTS)]
    _, hidden = prefill(params(), state, rows, range(SLOTS), chunk=16)
    logits = np.asarray(logits_of(params(), hidden))
    # row 0 ends at the pending token, rows 1 to 16 with one id more
    return logits[0], np.roll(logits[1 : VOCAB + 1], 1, axis=0)


def controls_of(s: Sampling) -> Any:
    row = Row(s, len(PROMPT), PROMPT, (PENDING,))
    like = make_controls([Row(MODE, 1)], SLOTS, VOCAB)
    return make_controls([row] * SLOTS, SLOTS, VOCAB, like=like)


def run(controls: Any, state: Any, drafts: np.ndarray) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """A round with planted drafts: state, controls, tokens and how many of them."""
    state = state.replace(drafts=jnp.asarray(drafts, jnp.int32))
    state, controls, _, burst = run_round(params(), state, controls, jnp.ones(SLOTS, bool))
    return state, controls, np.asarray(burst.tokens), np.asarray(burst.count)


def two_tokens(controls: Any, seed: int, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The next two tokens of every slot [S, 2], and how many came at once; one seed per slot."""
    seeds = np.stack([np.full(SLOTS, seed), np.arange(SLOTS)], axis=1).astype(np.uint32)
    controls = dataclasses.replace(jax.tree.map(jnp.copy, controls), seed=jnp.asarray(seeds))
    state = jax.tree.map(jnp.copy, start())
    state, controls, tokens, count = run(controls, state, drafts)
    # the later rounds' drafts are never what follows, or always: that of the first round's draft
    _, _, later, _ = run(controls, state, drafts)
    return np.stack([tokens[:, 0], np.where(count > 1, tokens[:, 1], later[:, 0])], axis=1), count


@functools.cache
def targets(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Enumerated probabilities of the next token [V], and of the one after each [V, V]."""
    s, (first, second) = OPTIONS[name], next_logits()
    return expected(first, s, PROMPT, (PENDING,)), np.stack(
        [expected(second[i], s, PROMPT, (PENDING, i)) for i in range(VOCAB)]
    )


def chain(pick: Any, name: str) -> np.ndarray:
    """The same drafts in every slot, each picked from the target's probabilities."""
    first, second = targets(name)
    one = int(pick(first))
    two = int(pick(second[one]))
    return np.tile([one, two, two], (SLOTS, 1))


def least(p: np.ndarray) -> int:
    return int(np.argmin(np.where(p > 0, p, 2)))


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("kind", ["good", "bad", "adversarial"])
def test_two_tokens_have_the_targets_distribution(name: str, kind: str):
    """At least 20,000 draws each; the adversary knows what will be drawn.

    It drafts the true tokens where their sum is even and false ones elsewhere, so that what is
    accepted depends on what is drawn as much as it can. Ids do not move by it.
    """
    first, second = targets(name)
    joint = first[:, None] * second
    pick = np.argmax if kind == "good" else least
    drafts, controls, drawn, accepted = chain(pick, name), controls_of(OPTIONS[name]), [], []
    base = 1000 * (1 + ["good", "bad", "adversarial"].index(kind))
    for trial in range(40):
        tokens, count = two_tokens(controls, base + trial, drafts)
        if kind == "adversarial":
            truth = np.concatenate([tokens, tokens[:, :1]], axis=1)
            false = (truth + 1 + truth % 3) % VOCAB
            known = np.where(tokens.sum(axis=1, keepdims=True) % 2 == 0, truth, false)
            again, count = two_tokens(controls, base + trial, known)
            np.testing.assert_array_equal(again, tokens)
        drawn.append(tokens)
        accepted.append(np.minimum(count - 1, 1))
    ids = np.concatenate(drawn)
    assert len(ids) >= 20_000
    rate = np.concatenate(accepted).mean()
    if kind == "adversarial":
        even = np.add.outer(np.arange(VOCAB), np.arange(VOCAB)) % 2 == 0
        likelihood = joint[even].sum()
    else:
        # a deterministic draft stands with the target's probability of it
        likelihood = first[drafts[0, 0]]
    assert abs(rate - likelihood) < 4 * np.sqrt(likelihood * (1 - likelihood) / len(ids)) + 1e-9
    assert p_value(ids[:, 0], first) > 1e-3
    # rare pairs together, for the test's approximation
    flat = joint.ravel()
    common = flat * len(ids) >= 5
    merged = np.append(flat[common], flat[~common].sum())
    cells = np.where(common, np.cumsum(common) - 1, common.sum())[ids[:, 0] * VOCAB + ids[:, 1]]
    assert not (flat[ids[:, 0] * VOCAB + ids[:, 1]] == 0).any()
    assert p_value(cells, merged) > 1e-3


def test_drafts_from_another_distribution_do_not_bias():
    """SMP-04: target .5 .3 .2, drafts drawn from .2 .3 .5: .5 .3 .2 come out, within .005."""
    target, proposal, ids = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5]), (4, 9, 14)
    first, _ = next_logits()
    bias: dict[int, float] = dict.fromkeys(range(VOCAB), -np.inf)
    # float32 of a bias and a logit: to 1e-6
    for token, p in zip(ids, target, strict=True):
        bias[token] = float(np.log(p) - first[token])
    controls = controls_of(Sampling(temperature=1, logit_bias=bias))
    rng, given, accepted = np.random.default_rng(0), [], []
    for trial in range(200):
        seeds = np.stack([np.full(SLOTS, trial), np.arange(SLOTS)], axis=1).astype(np.uint32)
        seeded = dataclasses.replace(jax.tree.map(jnp.copy, controls), seed=jnp.asarray(seeds))
        drafts = rng.choice(ids, (SLOTS, DRAFTS), p=proposal)
        _, _, tokens, count = run(seeded, jax.tree.map(jnp.copy, start()), drafts)
        given.append(tokens[:, 0])
        accepted.append(count > 1)
    counts = np.bincount(np.concatenate(given), minlength=VOCAB)
    assert counts.sum() == counts[list(ids)].sum() > 100_000
    assert np.abs(counts[list(ids)] / counts.sum() - target).max() < 0.005
    assert abs(np.concatenate(accepted).mean() - (target * proposal).sum()) < 0.005


def test_the_small_models_targets_are_worth_testing():
    """Many ids are likely, and what follows depends on what came before."""
    first, second = targets("temperature")
    assert np.sum(first > 0.01) >= 8
    assert np.abs(second - second.mean(axis=0)).max() > 0.1
    assert np.sum(targets("penalties and top-p")[0] == 0) >= 2


def test_programs_are_compiled_once_per_bucket_drafts_and_mode():
    """Other lengths, prompts, seeds, drafts and options of the same mode compile nothing.

    The greedy ones draw and sort nothing; with the most drafts they give what they give without.
    """
    config = SMALL.replace(num_hidden_layers=1, layer_types=(SPARSE,), ple_layer_ids=())
    model = random_params(config)
    greedy, seeded = Sampling(temperature=0), Sampling(temperature=0.7, seed=1)
    jitted: Any = run_round, prefill_chunk
    programs, chunks = (function._cache_size() for function in jitted)
    cases = (
        (2, 0, (greedy, dataclasses.replace(greedy, max_new_tokens=3, stop_ids=(4, 5)))),
        (2, 0, (seeded, dataclasses.replace(seeded, temperature=1.5, seed=2**40))),
        (2, 7, (greedy, dataclasses.replace(greedy, max_new_tokens=2, ignore_eos=True))),
        (3, 0, (greedy, dataclasses.replace(greedy, stop_ids=(7,)))),
    )
    ids: list[list[list[int]]] = []
    for compiled, (slots, drafts, options) in enumerate(cases, start=1):
        ids.append([[], []])
        for number, sampling in enumerate(options):
            state: Any = init_state(config, slots=slots, max_length=48, page_size=16, drafts=drafts)
            prompts = [PROMPT[number:], PROMPT[: 4 + number]]
            state, _ = prefill(model, state, prompts, [0, 1], chunk=16)
            state = state.replace(
                token=jnp.full(slots, number, jnp.int32),
                drafts=jnp.full((slots, drafts), 3 + number, jnp.int32),
            )
            rows = [Row(sampling, len(prompt)) for prompt in prompts]
            controls = make_controls(rows, slots, VOCAB, eos_ids=(1,))
            active = jnp.arange(slots) < 2 - number
            for _ in range(6):
                state, controls, active, burst = run_round(model, state, controls, active)
                for row in range(2 if number == 0 else 0):
                    ids[-1][row] += np.asarray(burst.tokens)[row, : burst.count[row]].tolist()
            assert jitted[0]._cache_size() - programs == compiled
    # a bucket and a number of drafts each; the mode takes no part
    assert jitted[1]._cache_size() - chunks == 3
    plain, drawn, drafted, wider = ids
    assert plain == wider != drawn
    for few, more in zip(plain, drafted, strict=True):
        assert len(few) > 1
        assert few == more[: len(few)]
