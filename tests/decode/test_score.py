"""Scores of texts, held against the float64 oracle."""

import functools
import math
from typing import Any

import jax
import numpy as np
import pytest

from qwen4jax.config import LINEAR, SPARSE
from qwen4jax.decode import score as score_module
from qwen4jax.decode.score import Score, score
from qwen4jax.params import Params
from tests.decode.sample_tokenizers import PARAGRAPH, HubObject, byte_level, qwen_style
from tests.tiny import T0, assert_close, exact, prompt, random_params

# every mechanism in half the layers, and room for a tokenizer's ids
MODEL = T0.replace(
    vocab_size=512, num_hidden_layers=2, layer_types=(LINEAR, SPARSE), ple_layer_ids=(1,)
)
NAMED = (5, 0, 511, 5)
# one bucket for what fits the first page, 64 tokens, and one for up to twice that
LENGTHS = (17, 1, 48, 2, 70, 16, 33, 15)


@functools.cache
def params() -> Params:
    return random_params(MODEL)


def ids_of(length: int) -> list[int]:
    return prompt(length, vocab=512).tolist()


def scored(texts: Any, **arguments: Any) -> Any:
    given: dict[str, Any] = dict(chunk=16, batch=3, token_ids=NAMED, top=4) | arguments
    return score(params(), texts, **given)


@functools.cache
def together() -> list[Score]:
    return scored([ids_of(n) for n in LENGTHS])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def assert_same(got: Score, want: Score, tolerance: float) -> None:
    np.testing.assert_array_equal(got.token_ids, want.token_ids)
    for name in ("logprobs", "named", "top_logprobs"):
        assert_close(getattr(got, name), getattr(want, name), tolerance, name)


@pytest.mark.parametrize("row", range(len(LENGTHS)))
def test_scores_are_those_of_the_text_alone(row: int):
    """Rows of different lengths over several chunks, in the order in which they were given."""
    length, got = LENGTHS[row], together()[row]
    ids = ids_of(length)
    want = log_softmax(exact(params(), ids))
    np.testing.assert_array_equal(got.token_ids, ids)
    assert got.logprobs.shape == (length - 1,)
    assert got.logprobs.dtype == np.float32
    assert_close(got.logprobs, want[np.arange(length - 1), ids[1:]])
    assert got.tokens == length - 1
    assert got.total == pytest.approx(want[np.arange(length - 1), ids[1:]].sum(), rel=1e-5)
    # of every position, that after the last token too
    assert_close(got.named, want[:, NAMED])
    assert got.top_ids is not None
    assert_close(got.top_logprobs, -np.sort(-want, axis=-1)[:, :4])
    assert_close(got.top_logprobs, np.take_along_axis(want, got.top_ids, axis=-1))
    assert (got.bytes, got.bits_per_byte) == (None, None)


def test_company_does_not_matter():
    """Alone, in other company and in another order: the same to float32 rounding."""
    for row in (0, 4):
        alone = scored(ids_of(LENGTHS[row]))
        assert_same(alone, together()[row], 1e-6)
    turned = scored([ids_of(n) for n in (*LENGTHS[::-1], 40, 31)])
    for got, want in zip(turned, together()[::-1], strict=False):
        assert_same(got, want, 1e-6)


def test_new_lengths_compile_nothing():
    """The shapes are those of the bucket: rows, chunk and room."""
    # now, not `together()`: what an earlier test of the process had compiled may be dropped
    scored([ids_of(n) for n in LENGTHS])
    compiled: Any = score_module._score_chunk
    before = compiled._cache_size()
    scored([ids_of(n) for n in (3, 64, 20, 9, 10)])
    scored([ids_of(128), [1], [2]])
    assert compiled._cache_size() == before


def test_the_answer_has_the_shape_of_the_question():
    ids = ids_of(17)
    want = together()[0]
    for single in (ids, tuple(ids), np.asarray(ids)):
        assert_same(scored(single), want, 1e-6)
    for many in ([ids], (tuple(ids),), np.asarray([ids] * 3)):
        found = scored(many)
        assert isinstance(found, list)
        assert len(found) == len(many)
        assert_same(found[-1], want, 1e-6)


def test_a_text_of_one_token():
    got = together()[1]
    assert got.logprobs.size == 0
    assert (got.total, got.tokens) == (0.0, 0)
    assert got.named is not None
    assert got.named.shape == (1, 4)


def test_what_is_not_asked_for_is_none():
    got = scored(ids_of(17), token_ids=None, top=0)
    assert (got.named, got.top_ids, got.top_logprobs) == (None, None, None)
    assert_close(got.logprobs, together()[0].logprobs, 1e-6)


def test_strings():
    """Bytes are those of UTF-8; special tokens count as bytes of the text too."""
    texts = [PARAGRAPH[:30], "你好 👩‍👩‍👧", "<|im_start|>user\n", "a"]
    found = scored(texts, tokenizer=qwen_style())
    for text, got in zip(texts, found, strict=True):
        ids = qwen_style().encode(text)
        assert_same(got, scored(ids), 1e-6)
        assert got.bytes == len(text.encode())
        if got.tokens:
            assert got.bits_per_byte == pytest.approx(-got.total / math.log(2) / got.bytes)
    assert (found[3].tokens, found[3].bits_per_byte) == (0, None)
    for tokenizer in (byte_level(), HubObject()):
        assert_same(scored(texts[0], tokenizer=tokenizer), found[0], 1e-6)
    mixed = scored([texts[0], qwen_style().encode(texts[0]), texts[3]], tokenizer=qwen_style())
    assert [m.bytes for m in mixed] == [len(texts[0].encode()), None, 1]


def test_logits_of_a_chunk_never_exist_at_once(monkeypatch: pytest.MonkeyPatch):
    """In parts of 4 places, of a chunk that they do not divide."""
    monkeypatch.setattr(score_module, "_MOST_LOGITS", 3 * 512 * 7)
    # no other test has this chunk, so that it is compiled with the smaller limit
    got = scored(ids_of(33), chunk=13)
    assert_same(got, together()[6], 1e-6)
    state = jax.eval_shape(lambda: score_module.init_state(MODEL, slots=3, max_length=64, drafts=0))
    tokens, count = np.zeros((3, 13), np.int32), np.zeros(3, np.int32)
    step = functools.partial(score_module._score_chunk, top=4)
    program = str(jax.make_jaxpr(step)(params(), state, tokens, tokens, count, np.zeros(2, int)))
    assert "f32[3,4,512]" in program
    assert "f32[3,13,512]" not in program


def test_as_long_as_the_model_reaches():
    """The last position counts, and one more is refused before anything runs."""
    short = params().replace(config=MODEL.replace(max_position_embeddings=20))
    ids = ids_of(20)
    got = score(short, ids, chunk=16, batch=3, token_ids=NAMED, top=4)
    assert isinstance(got, Score)
    want = log_softmax(exact(params(), ids))
    assert_close(got.logprobs, want[np.arange(19), ids[1:]])
    with pytest.raises(ValueError, match=r"texts\[1\]: 21 tokens are over max_position_embed"):
        score(short, [ids, ids_of(21)])


@pytest.mark.parametrize(
    ("texts", "arguments", "message"),
    [
        ("", dict(tokenizer=byte_level()), "texts: is empty"),
        (["a", "b\ud800"], dict(tokenizer=byte_level()), r"texts\[1\]: .*surrogate"),
        ([], {}, "texts: is empty"),
        (np.zeros((0, 3), int), {}, "texts: is empty"),
        ([[1], []], {}, r"texts\[1\]: is empty"),
        (["a", ""], dict(tokenizer=byte_level()), r"texts\[1\]: is empty"),
        ([[1], [2], [3, 999]], {}, r"texts\[2\]\[1\]: id 999 is not in \[0, 512\)"),
        ([-1], {}, r"texts\[0\]: id -1 is not in"),
        ([2**40], {}, r"texts\[0\]: id 1099511627776 is not in"),
        ([[1], [2, 1.5]], {}, r"texts\[1\]\[1\]: an id is expected, found 1.5"),
        ([[1], [True]], {}, r"texts\[1\]\[0\]: an id is expected, found True"),
        ([[1], None], {}, r"texts\[1\]: a string, ids"),
        (7, {}, "texts: a string, ids, .* found int"),
        (None, {}, "texts: .* found NoneType"),
        ("abc", {}, "texts: is text, which needs a tokenizer; pass tokenizer="),
        ([[1], "abc"], {}, r"texts\[1\]: is text, which needs a tokenizer"),
        ("abc", dict(tokenizer=7), "tokenizer: int has no method encode"),
        ([1, 2], dict(token_ids=[3, 512]), r"token_ids\[1\]: id 512 is not in"),
        ([1, 2], dict(token_ids=3), "token_ids: .* found int"),
        ([1, 2], dict(token_ids=[]), "token_ids: is empty"),
        ([1, 2], dict(top=-1), r"top: -1 is not in 1\.\.512"),
        ([1, 2], dict(top=513), "top: 513 is not in"),
        ([1, 2], dict(chunk=0), "chunk: 0 is not at least 1"),
        ([1, 2], dict(batch=0), "batch: 0 is not at least 1"),
    ],
)
def test_what_is_wrong_is_named(texts: Any, arguments: dict[str, Any], message: str):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        scored(texts, **arguments)
