"""A state as a value between calls: kept, continued, shared by several prompts, in a file."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.decode import batching
from qwen4jax.decode.generate import generate, prefill, stream
from qwen4jax.decode.options import Sampling
from qwen4jax.decode.portable import fork, restore_state, save_state
from qwen4jax.decode.requests import Completion
from tests.decode.small import (
    GREEDY,
    LONGEST,
    MODEL,
    ids,
    one_bucket,
    params,
    plain,
    tokenizer,
    until_string,
)
from tests.tiny import live

PROMPT = ids(70)
WHOLE = dataclasses.replace(GREEDY, ignore_eos=True, max_new_tokens=20)
DRAWN = dataclasses.replace(WHOLE, temperature=0.8, seed=5)
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _one_bucket(monkeypatch):
    one_bucket(monkeypatch)


def run(prompts: Any, options: Any, **arguments: Any) -> Any:
    given = dict(tokenizer=tokenizer(), logprobs=True) | arguments
    return generate(params(), prompts, sampling=options, **given)


def rest(options: Sampling, done: int) -> Sampling:
    """What is left of a request after `done` tokens, without stops."""
    left = options.max_new_tokens - done
    return dataclasses.replace(options, max_new_tokens=left, stop_ids=(), stop=())


def check_continued(first: Completion, options: Sampling, whole: list[int]):
    """A completion that is a beginning of `whole`, and its state, which gives the rest."""
    done = len(first.token_ids)
    assert first.token_ids == whole[:done]
    kept = first.state
    assert int(kept.length[0]) == len(PROMPT) + done - 1
    assert int(kept.token[0]) == whole[done - 1]
    second = run([], rest(options, done), state=kept, keep_state=True)
    assert first.token_ids + second.token_ids == whole
    assert second.usage.prompt_tokens == len(PROMPT) + done
    assert second.usage.cached_tokens == len(PROMPT) + done - 1
    np.testing.assert_array_equal(kept.token, whole[done - 1])


@pytest.mark.parametrize("options", [WHOLE, DRAWN], ids=["greedy", "drawn"])
def test_a_kept_state_goes_on_as_if_never_interrupted(options: Sampling):
    """After length, after a stop id, after a stop string that was seen late."""
    whole = plain([PROMPT], [options])[0].ids
    stop_id = next(token for token in whole[4:] if token not in whole[:4])
    ends = [
        dataclasses.replace(options, max_new_tokens=1),
        dataclasses.replace(options, max_new_tokens=7),
        dataclasses.replace(options, stop_ids=[stop_id]),
    ]
    # texts of pairs of ids, wherever the first of them stands
    pairs = [tokenizer().decode(whole[i : i + 2]) for i in (0, 3, 6, 9)]
    ends += [dataclasses.replace(options, stop=p) for p in pairs if "\ufffd" not in p]
    found = run([PROMPT] * len(ends), ends, keep_state=True)
    assert {one.finish_reason for one in found} == {"length", "stop"}
    for end, one in zip(ends, found, strict=True):
        if end.stop:
            cut = until_string(whole, end.stop)
            assert cut is not None
            assert (one.token_ids, one.text) == cut
        check_continued(one, options, whole)


def test_a_late_stop_string_leaves_the_state_of_what_was_kept():
    """The round in flight has gone on; the state is rolled back, as a run that ends there."""
    whole = plain([PROMPT], [WHOLE])[0].ids
    stop = next(c for c in tokenizer().decode(whole[4:]) if c != "\ufffd")
    cut = until_string(whole, [stop])
    assert cut is not None
    by_text = run(PROMPT, dataclasses.replace(WHOLE, stop=stop), keep_state=True)
    by_length = run(PROMPT, dataclasses.replace(WHOLE, max_new_tokens=len(cut[0])), keep_state=True)
    assert by_text.token_ids == by_length.token_ids
    got, want = live(by_text.state, 0), live(by_length.state, 0)
    for name, value in want.items():
        # rings keep more than is live, and the draft head's rows came of other spans
        if name != "drafts" and not name.startswith("mtp") and not name.endswith("ring"):
            np.testing.assert_allclose(got[name], value, atol=1e-4, err_msg=name)


def test_a_shared_prompt_is_processed_once(monkeypatch):
    """`prefill`, then several prompts from its state; each as if it had been given whole."""
    fed = []
    feed = batching._prefill_and_begin

    def counted(params, state, controls, active, slots, tokens, count, complete, **rest):
        fed.append(int(count.sum()))
        return feed(params, state, controls, active, slots, tokens, count, complete, **rest)

    monkeypatch.setattr(batching, "_prefill_and_begin", counted)
    system, tails = ids(130, 1), [ids(n, 2) for n in (1, 3, 64, 66, 2)]
    state = prefill(params(), system)
    assert int(state.length[0]) == 130
    before = live(state, 0)
    options = [dataclasses.replace(WHOLE, max_new_tokens=4 + i) for i in range(5)]
    found = run(tails, options, state=state)
    assert sum(fed) == sum(map(len, tails))
    want = plain([[*system, *tail] for tail in tails], options)
    assert [one.token_ids for one in found] == [one.ids for one in want]
    assert [one.usage.cached_tokens for one in found] == [130] * 5
    # the state is a value: nothing of it has changed, and it serves again
    after = live(state, 0)
    assert all(np.array_equal(after[name], value) for name, value in before.items())
    for nothing in ([], (), ""):
        alone = run(nothing, options[0], state=state)
        assert alone.token_ids == plain([system], options[:1])[0].ids
    pair = run([[], tails[1]], options[:2], state=state)
    assert [one.token_ids for one in pair] == [alone.token_ids, found[1].token_ids]


def test_several_turns_are_one_conversation():
    turns = [ids(20, n) for n in range(3)]
    state, sequence, options = None, [], dataclasses.replace(WHOLE, max_new_tokens=5)
    for turn in turns:
        one = run(turn, options, state=state, keep_state=True)
        sequence += turn
        assert one.token_ids == plain([sequence], [options])[0].ids
        sequence += one.token_ids
        assert one.usage.prompt_tokens + one.usage.completion_tokens == len(sequence)
        state = one.state


def test_one_of_several_forks_goes_on():
    state = prefill(params(), PROMPT, max_length=200)
    many = fork(state, 2)
    with pytest.raises(ValueError, match=r"^state: has 2 slots"):
        run([], WHOLE, state=many)


def test_samples_of_one_state_are_those_of_the_whole_prompt():
    options = dataclasses.replace(DRAWN, n=3, max_new_tokens=6)
    found = run([], options, state=prefill(params(), PROMPT))
    want = plain([PROMPT] * 3, [options] * 3, samples=range(3))
    assert [one.token_ids for one in found] == [one.ids for one in want]


def test_a_stream_goes_on_from_a_state():
    state = prefill(params(), PROMPT)
    deltas = list(stream(params(), [], sampling=WHOLE, state=state, logprobs=True))
    got = [token for delta in deltas for token in delta.token_ids]
    assert got == plain([PROMPT], [WHOLE])[0].ids


def test_a_state_may_end_at_the_last_position():
    state = prefill(params(), ids(LONGEST - 2))
    one = run([], WHOLE, state=state, keep_state=True)
    assert (len(one.token_ids), one.finish_reason) == (2, "length")
    with pytest.raises(ValueError, match=r"^prompts: 1024 tokens leave no room below 1024"):
        run([], WHOLE, state=one.state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.replace(length=jnp.zeros(1, jnp.int32)), "state: holds no tokens"),
        (lambda s: s.replace(length=jnp.full(1, 5000)), "state: holds 5000 tokens"),
        (lambda s: s.replace(token=jnp.full(1, 408)), "state: its pending id 408 is not in"),
        (lambda s: s.replace(layers=s.layers[:1]), "state: is of a model of 1 layers"),
        (lambda s: s.replace(mtp=None), "state: was made without a draft head"),
        (lambda s: s.replace(residual=s.residual[:, :-1]), "state: residual has"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(change: Any, message: str):
    state = prefill(params(), [5, 6])
    with pytest.raises(ValueError, match=f"^{message}"):
        run([], WHOLE, state=change(state))
    assert run([], WHOLE, state=state).token_ids == plain([[5, 6]], [WHOLE])[0].ids


def test_a_state_of_other_keys_is_refused():
    state = prefill(params(), [5, 6], kv_dtype="bfloat16")
    with pytest.raises(ValueError, match=r"^state: .*key has bfloat16"):
        run([], WHOLE, state=state, kv_dtype="float32")


IN_ANOTHER_PROCESS = """
import json, sys
import pytest
from qwen4jax.decode.generate import generate
from qwen4jax.decode.portable import restore_state
from tests.decode.small import MODEL, one_bucket, params
from tests.decode.test_generate_state import DRAWN, WHOLE, rest
one_bucket(pytest.MonkeyPatch())
state = restore_state(sys.argv[1], MODEL)
given = [rest(o, int(sys.argv[2])) for o in (WHOLE, DRAWN)]
found = generate(params(), [[], []], sampling=given, state=state, logprobs=True)
print(json.dumps([[one.token_ids, one.logprobs] for one in found]))
"""


def test_a_saved_state_goes_on_bit_for_bit_in_another_process(tmp_path: Path):
    whole = plain([PROMPT], [WHOLE])[0].ids
    first = run(PROMPT, dataclasses.replace(WHOLE, max_new_tokens=6), keep_state=True)
    path = tmp_path / "state.safetensors"
    save_state(first.state, path, MODEL)
    here = run([[], []], [rest(o, 6) for o in (WHOLE, DRAWN)], state=restore_state(path, MODEL))
    assert first.token_ids + here[0].token_ids == whole
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", IN_ANOTHER_PROCESS, str(path), "6"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[one.token_ids, one.logprobs] for one in here]
