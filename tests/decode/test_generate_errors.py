"""Every bad argument: one error that names it, nothing has run, and the next call works."""

import re
from typing import Any

import pytest

from qwen4jax.decode import call
from qwen4jax.decode.generate import generate, prefill, stream
from qwen4jax.decode.options import Sampling
from tests.decode.sample_tokenizers import HELLO
from tests.decode.small import GREEDY, MODEL, ids, one_bucket, params, plain, tokenizer, unchecked

ENGINE = call.Call.engine
TOO_LONG = [5] * 1024
GENERATE = [
    (dict(params=None), TypeError, "params: NoneType is no Params"),
    (dict(prompts=None), TypeError, "prompts: a string, ids, chat messages or a list"),
    (dict(prompts=[]), ValueError, "prompts: is empty"),
    (dict(prompts=[[5], []]), ValueError, "prompts[1]: is empty"),
    (dict(prompts=[[5], [5, 408]]), ValueError, "prompts[1][1]: id 408 is not in [0, 408)"),
    (dict(prompts=[5, -1]), ValueError, "prompts[1]: id -1 is not in [0, 408)"),
    (dict(prompts=[[5], "Hello"]), ValueError, "prompts[1]: is text, which needs a tokenizer"),
    (dict(prompts=HELLO), ValueError, "prompts: is chat messages, which needs a tokenizer"),
    (dict(prompts=[[5], [5, 2.0]]), TypeError, "prompts[1][1]: an id is expected, found 2.0"),
    (dict(prompts=[[5], TOO_LONG]), ValueError, "prompts[1]: 1024 tokens leave no room below"),
    (dict(sampling=None), TypeError, "sampling: a Sampling or a list of them is expected"),
    (dict(sampling=[GREEDY, GREEDY]), ValueError, "sampling: 2 for 1 prompts"),
    (dict(sampling=[{}]), TypeError, "sampling[0]: dict is no Sampling"),
    (dict(sampling=Sampling(stop="a")), ValueError, "sampling: stop strings need a tokenizer"),
    (dict(sampling=Sampling(stop_ids=[408])), ValueError, "sampling: stop_ids[0]: 408 is"),
    (dict(draft=-1), ValueError, "draft: -1 is not in 0..7"),
    (dict(draft=8), ValueError, "draft: 8 is not in 0..7"),
    (dict(draft="3"), TypeError, "draft: '3' is no integer"),
    (dict(draft=True), TypeError, "draft: True is no integer"),
    (dict(index_share="always"), ValueError, "index_share: 'always' is not one of fresh"),
    (dict(index_share=True), ValueError, "index_share: True is not one of fresh"),
    (dict(slots=0), ValueError, "slots: 0 is not at least 1"),
    (dict(slots=2.0), TypeError, "slots: 2.0 is no integer"),
    (dict(chunk=0), ValueError, "chunk: 0 is not at least 1"),
    (dict(chunk=None), TypeError, "chunk: None is no integer"),
    (dict(kv_dtype="int4"), ValueError, "kv_dtype: 'int4' is not one of bfloat16, float32"),
    (dict(kv_dtype=8), ValueError, "kv_dtype: 8 is not one of bfloat16"),
    (dict(tokenizer=5), TypeError, "tokenizer: int has no method encode"),
    (dict(state=5), TypeError, "state: int is no DecodeState"),
]
ONLY_GENERATE = [
    (dict(capture=["layer00.residual", "layer9*"]), ValueError, "capture[1]: 'layer9*' matches"),
    (dict(capture=["mtp.residual"]), ValueError, "capture[0]: 'mtp.residual' matches none"),
    (dict(capture=[3]), TypeError, "capture[0]: a name is expected, found 3"),
    (dict(capture="layer00.residual"), TypeError, "capture: a sequence of names is expected"),
]
PREFILL = [
    (dict(params=5), TypeError, "params: int is no Params"),
    (dict(prompt=[]), ValueError, "prompt: is empty"),
    (dict(prompt=None), TypeError, "prompt: a string, ids or chat messages are expected"),
    (dict(prompt=[5, 408]), ValueError, "prompt[1]: id 408 is not in [0, 408)"),
    (dict(prompt="Hello"), ValueError, "prompt: is text, which needs a tokenizer"),
    (dict(prompt=[5] * 1025), ValueError, "prompt: 1025 tokens, the model has 1024 positions"),
    (dict(max_length=0), ValueError, "max_length: 0 is not in 1..1024"),
    (dict(max_length=1025), ValueError, "max_length: 1025 is not in 1..1024"),
    (dict(max_length="9"), TypeError, "max_length: '9' is no integer"),
    (dict(chunk=0), ValueError, "chunk: 0 is not at least 1"),
    (dict(draft=9), ValueError, "draft: 9 is not in 0..7"),
    (dict(kv_dtype="int4"), ValueError, "kv_dtype: 'int4' is not one of"),
]


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch):
    """No engine may be made in a test that expects an error."""
    one_bucket(monkeypatch)
    monkeypatch.setattr(call.Call, "engine", lambda self: pytest.fail("an engine was made"))


def check(function: Any, given: dict[str, Any], kind: type[Exception], message: str):
    with pytest.raises(kind, match="^" + re.escape(message)) as caught:
        unchecked(function)(**given)
    # one line, of one error
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("changes", "kind", "message"), GENERATE + ONLY_GENERATE)
def test_generate_names_the_argument(changes: dict[str, Any], kind: Any, message: str):
    check(generate, dict(params=params(), prompts=[5]) | changes, kind, message)


@pytest.mark.parametrize(("changes", "kind", "message"), GENERATE)
def test_stream_names_the_argument_at_once(changes: dict[str, Any], kind: Any, message: str):
    check(stream, dict(params=params(), prompts=[5]) | changes, kind, message)


@pytest.mark.parametrize(("changes", "kind", "message"), PREFILL)
def test_prefill_names_the_argument(changes: dict[str, Any], kind: Any, message: str):
    check(prefill, dict(params=params(), prompt=[5]) | changes, kind, message)


def test_drafts_need_a_draft_head():
    without = MODEL.replace(mtp_num_hidden_layers=0)
    headless = params().replace(mtp=None, config=without)
    message = "draft: 2, but the model has no draft head (mtp)"
    check(generate, dict(params=headless, prompts=[5], draft=2), ValueError, message)


def test_a_template_that_is_not_there_is_named():
    bare = tokenizer().from_object(tokenizer().codec._backend)
    message = "prompts[1]: Tokenizer: has no chat template"
    given = dict(params=params(), prompts=[[5], HELLO], tokenizer=bare)
    check(generate, given, ValueError, message)


def test_ids_that_the_model_does_not_have_are_named():
    """A tokenizer of more ids than the model's table."""
    small = params().replace(config=MODEL.replace(vocab_size=300))
    given = dict(params=small, prompts="Hello<|im_end|>", tokenizer=tokenizer())
    (place,) = (i for i, t in enumerate(tokenizer().encode("Hello<|im_end|>")) if t == 402)
    with pytest.raises(ValueError, match=r"^prompts\[\d+\]: id \d+ is not in \[0, 300\)") as e:
        unchecked(generate)(**given)
    assert int(re.findall(r"\d+", str(e.value))[0]) <= place


def test_capture_of_a_continued_state_is_refused():
    given = dict(params=params(), prompts=[], state=prefill(params(), [5]), capture=["*.residual"])
    check(generate, given, ValueError, "capture: internals of a continued state are not kept")


def test_the_next_call_works(monkeypatch):
    """After all kinds of errors, and after one that came while requests ran."""
    monkeypatch.setattr(call.Call, "engine", ENGINE)
    want = plain([ids(9)], [GREEDY])[0].ids
    for changes, kind, _ in GENERATE:
        with pytest.raises(kind):
            unchecked(generate)(**(dict(params=params(), prompts=[5]) | changes))
    with monkeypatch.context() as failing:
        failing.setattr(call.Engine, "_read", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(params(), ids(9), sampling=GREEDY, logprobs=True)
    assert generate(params(), ids(9), sampling=GREEDY, logprobs=True).token_ids == want
