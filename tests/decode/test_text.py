"""Text to ids and back, tokenizer objects, and text from a stream of ids."""

import functools
import threading
import types

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import processors

from qwen4jax.decode.chat import TokenizerError
from qwen4jax.decode.text import StreamDecoder, Tokenizer
from tests.decode.sample_tokenizers import (
    HELLO,
    PARAGRAPH,
    WORDS,
    HubObject,
    byte_level,
    decoders_by_name,
    qwen_style,
)


class TestEncode:
    def test_special_tokens_in_a_text(self):
        text = "a<|im_end|>b<think>"
        assert 402 in qwen_style().encode(text)
        plain = qwen_style().encode(text, parse_special=False)
        assert 402 not in plain
        assert 403 in plain  # added, but not special
        assert qwen_style().decode(plain) == text
        assert 402 in qwen_style().encode(text)  # the option belongs to the call

    def test_what_the_tokenizer_adds_is_an_option(self):
        backend = tokenizers.Tokenizer.from_str(byte_level().to_str())
        backend.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 400)]
        )
        tokenizer = Tokenizer.from_object(backend)
        assert tokenizer.encode("a")[0] == 400
        assert tokenizer.encode("a", add_special=False) == byte_level().encode("a").ids

    def test_empty(self):
        assert qwen_style().encode("") == []
        assert qwen_style().decode([]) == ""

    def test_bad_text(self):
        with pytest.raises(TypeError, match="text"):
            qwen_style().encode(b"bytes")  # pyright: ignore[reportArgumentType]
        with pytest.raises(ValueError, match="text: a lone surrogate at character 2"):
            qwen_style().encode("ab\ud800")

    @given(st.text())
    def test_round_trip(self, text: str):
        tokenizer = decoders_by_name()["byte level"]
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.decode(tokenizer.encode(text, parse_special=False)) == text


class TestDecode:
    def test_special_tokens_are_left_out_on_request(self):
        ids = qwen_style().encode("a<|im_end|>b<think>")
        assert qwen_style().decode(ids, skip_special=True) == "ab<think>"

    def test_rows_beyond_the_vocabulary_have_no_text(self):
        assert qwen_style().decode([405, 2**40, *qwen_style().encode("a")]) == "a"

    def test_ids_in_a_gap_of_the_vocabulary_have_no_text(self):
        class WithGap(HubObject):
            def get_vocab(self):
                return {**super().get_vocab(), "": 405, "last": 500}

        tokenizer = Tokenizer.from_object(WithGap())
        first, second, third = byte_ids("你".encode())
        ids = [first, *[450] * 40, second, *[405] * 40, third]
        assert tokenizer.vocab_size == 501
        check_stream(tokenizer, ids, [1], skip=False)
        assert tokenizer.decode(ids) == "你"

    def test_arrays(self):
        assert qwen_style().decode(np.asarray(qwen_style().encode("héllo"), np.uint32)) == "héllo"

    @pytest.mark.parametrize(
        ("ids", "error", "message"),
        [
            ([1, -1], ValueError, r"ids\[1\]: -1 is negative"),
            ([1, 2, 1.5], TypeError, r"ids\[2\]: 1\.5 is not an integer"),
            (["a"], TypeError, r"ids\[0\]: 'a' is not an integer"),
            ([[1, 2]], TypeError, r"ids\[0\]: \[1, 2\] is not an integer"),
        ],
    )
    def test_a_bad_id_is_named(self, ids, error, message):
        with pytest.raises(error, match=message):
            qwen_style().decode(ids)
        stream = StreamDecoder(qwen_style())
        with pytest.raises(error, match=message):
            stream.feed(ids)
        assert stream.feed(qwen_style().encode("next")) + stream.flush() == "next"


class TestObject:
    def test_hugging_face_like(self):
        tokenizer = Tokenizer.from_object(HubObject())
        assert tokenizer.encode(PARAGRAPH) == byte_level().encode(PARAGRAPH).ids
        assert 402 not in tokenizer.encode("a<|im_end|>", parse_special=False)
        assert (tokenizer.vocab_size, tokenizer.eos_ids) == (405, (402,))
        assert tokenizer.special_tokens == {"eos_token": "<|im_end|>"}
        assert tokenizer.special_ids == {400, 401, 402}
        assert tokenizer.decode(tokenizer.encode("a .<|im_end|>"), skip_special=True) == "a ."
        assert tokenizer.chat(HELLO, tone="!") == "Hello>!"
        assert tokenizer.chat(HELLO, template="{{ tone }}", tone="!") == "!"
        with pytest.raises(ValueError, match=r"messages\[0\]\.role"):
            tokenizer.chat([{"content": "a"}])
        assert Tokenizer.from_object(tokenizer) is tokenizer

    def test_its_errors_are_reported(self):
        tokenizer = Tokenizer.from_object(HubObject())
        with pytest.raises(TokenizerError, match=r"HubObject: apply_chat_template: .*nothing"):
            tokenizer.chat(HELLO, template="{{ nothing.at.all }}")

    def test_what_it_lacks_is_named(self):
        with pytest.raises(TypeError, match="tokenizer: int has no method encode"):
            Tokenizer.from_object(3)
        methods = {name: getattr(HubObject(), name) for name in ("encode", "decode", "get_vocab")}
        without_chat = Tokenizer.from_object(types.SimpleNamespace(**methods, eos_token_id=[1, 2]))
        assert without_chat.eos_ids == (1, 2)
        with pytest.raises(TokenizerError, match="has no method apply_chat_template; pass the pr"):
            without_chat.chat(HELLO)


def bursts(ids: list[int], sizes: list[int]) -> list[list[int]]:
    """`ids` in pieces of these sizes, used over and over."""
    pieces, start, turn = [], 0, 0
    while start < len(ids):
        pieces.append(ids[start : start + sizes[turn % len(sizes)]])
        start += sizes[turn % len(sizes)]
        turn += 1
    return pieces


@functools.cache
def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in kept]
    return [chr(byte if byte in kept else 256 + others.index(byte)) for byte in range(256)]


def byte_ids(data: bytes) -> list[int]:
    """One id a byte."""
    vocabulary = byte_level().get_vocab()
    return [vocabulary[byte_characters()[byte]] for byte in data]


class TestStream:
    @pytest.mark.parametrize("name", ["byte level", "metaspace", "byte fallback", "word pieces"])
    @given(data=st.data())
    def test_pieces_joined_are_the_whole(self, name: str, data: st.DataObject):
        tokenizer = decoders_by_name()[name]
        # a few ids past the end, which have no text
        ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), max_size=60))
        sizes = data.draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
        skip = data.draw(st.booleans())
        check_stream(tokenizer, ids, sizes, skip)

    # whole characters, parts of them, and bytes that belong to none
    @given(
        st.lists(
            st.sampled_from([*"a é你😀\ufffd"]).map(str.encode)
            | st.sampled_from(b"\x80 \xe4 \xe4\xbd \xf0\x9f \xf0\x9f\x98 \xff \xed\xa0".split()),
            max_size=40,
        ),
        st.lists(st.integers(1, 8), min_size=1, max_size=4),
    )
    @example([b"\x80"] * 40, [1])
    @example(["\ufffd".encode()] * 20, [1])
    @example([b"\xf0\x9f\x98"] * 20, [1])
    @example(["😀".encode()] * 20, [1])
    def test_bytes_of_any_kind(self, fragments: list[bytes], sizes: list[int]):
        data = b"".join(fragments)
        tokenizer = decoders_by_name()["byte level"]
        assert tokenizer.decode(byte_ids(data)) == data.decode(errors="replace")
        check_stream(tokenizer, byte_ids(data), sizes, skip=False)

    @pytest.mark.parametrize("size", range(1, 9))
    def test_a_text_comes_in_whole_characters(self, size: int):
        text = PARAGRAPH * 3
        for ids in (qwen_style().encode(text), byte_ids(text.encode())):
            stream, seen = StreamDecoder(qwen_style()), ""
            for burst in bursts(ids, [size]):
                piece = stream.feed(burst)
                assert "\ufffd" not in piece
                seen += piece
                assert text.startswith(seen)
            assert seen == text  # the last character is complete: nothing waits for the flush
            assert stream.flush() == ""

    def test_a_character_waits_for_its_last_byte(self):
        stream = StreamDecoder(qwen_style())
        assert [stream.feed([i]) for i in byte_ids("a😀b".encode())] == ["a", "", "", "", "😀", "b"]

    def test_bytes_that_never_complete(self):
        stream = StreamDecoder(qwen_style())
        assert stream.feed(byte_ids(b"a\xf0\x9f")) == "a"
        assert stream.flush() == "\ufffd"
        assert stream.flush() == ""
        # a character cut short by the next one
        assert stream.feed(byte_ids(b"\xe4\xbdx")) == "\ufffdx"

    def test_special_tokens_between_the_bytes_of_a_character(self):
        first, *rest = byte_ids("你".encode())
        skipping = StreamDecoder(qwen_style(), skip_special=True)
        showing = StreamDecoder(qwen_style())
        assert skipping.feed([first, 402]) + skipping.feed([400, *rest, 401]) == "你"
        assert showing.feed([first, 402]) == "\ufffd<|im_end|>"

    def test_leading_spaces(self):
        metaspace = decoders_by_name()["metaspace"]
        hello, start = WORDS.index("▁Hello"), metaspace.vocab_size - 1
        stream = StreamDecoder(metaspace, skip_special=True)
        pieces = [stream.feed([i]) for i in [start, hello, start, *[hello] * 40]]
        assert pieces == ["", "Hello", "", *[" Hello"] * 40]
        stream.flush()
        assert stream.feed([hello]) == "Hello"  # a new text
        byte_stream = StreamDecoder(decoders_by_name()["byte level"])
        ids = byte_level().encode(" Hello").ids
        assert "".join(byte_stream.feed([i]) for i in ids) == " Hello"

    def test_a_run_of_byte_tokens_waits_for_its_end(self):
        # one bad byte makes U+FFFD of every byte of the run
        tokenizer = decoders_by_name()["byte fallback"]
        run = [len(WORDS) + byte for byte in "你".encode()]
        hello = WORDS.index("▁Hello")
        stream = StreamDecoder(tokenizer)
        assert [stream.feed([i]) for i in [*run, hello]] == ["", "", "", "你 Hello"]
        assert [stream.feed([i]) for i in [*run, run[0], hello]] == [
            *[""] * 4,
            "\ufffd" * 4 + " Hello",
        ]

    @pytest.mark.parametrize(
        ("unit", "skip"),
        [
            (b"\x80", False),
            (b"\xf0\x9f\x98", False),
            ("😀".encode(), False),
            ("\ufffd".encode(), False),
            (b"text ", False),
            (None, True),
        ],
        ids=["bad", "cut", "emoji", "replacement", "text", "special"],
    )
    def test_the_cost_does_not_grow_with_the_stream(self, unit: bytes | None, skip: bool):
        """Counts the ids that are decoded, whatever the stream is made of."""
        object_ = HubObject()
        decoded = 0

        def counting(ids, **options):
            nonlocal decoded
            decoded += len(ids)
            return HubObject.decode(object_, ids, **options)

        object_.decode = counting  # pyright: ignore[reportAttributeAccessIssue]
        stream = StreamDecoder(Tokenizer.from_object(object_), skip_special=skip)
        ids = [400] * 2000 if unit is None else byte_ids(unit * 2000)[:2000]
        for i in ids:
            stream.feed([i])
        assert decoded <= 16 * len(ids)

    def test_streams_of_one_tokenizer_do_not_meet(self):
        text, results = PARAGRAPH * 4, {}

        def run(size: int):
            stream = StreamDecoder(qwen_style())
            pieces = [stream.feed(burst) for burst in bursts(qwen_style().encode(text), [size])]
            results[size] = "".join(pieces) + stream.flush()

        threads = [threading.Thread(target=run, args=(size,)) for size in (1, 2, 3, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == dict.fromkeys((1, 2, 3, 5), text)


def check_stream(tokenizer: Tokenizer, ids: list[int], sizes: list[int], skip: bool) -> None:
    stream, seen = StreamDecoder(tokenizer, skip_special=skip), ""
    whole = tokenizer.decode(ids, skip_special=skip)
    for burst in bursts(ids, sizes):
        piece = stream.feed(burst)
        seen += piece
        assert whole.startswith(seen)
    assert seen + stream.flush() == whole
    # what the flush held back: at most one character, but for runs of byte tokens
    if not tokenizer.byte_fallback_ids:
        assert len(whole) - len(seen) <= 1
