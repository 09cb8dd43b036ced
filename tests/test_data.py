"""Windows over documents, and scores of data sets that survive being killed."""

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen4jax import data
from qwen4jax.config import LINEAR, SPARSE
from qwen4jax.data import TextFiles, Totals, score_dataset, scoring_batches
from qwen4jax.decode.score import score
from qwen4jax.params import Params
from tests.decode.sample_tokenizers import PARAGRAPH, byte_level
from tests.tiny import T0, prompt, random_params

MODEL = T0.replace(
    vocab_size=512, num_hidden_layers=2, layer_types=(LINEAR, SPARSE), ple_layer_ids=(1,)
)
LENGTH, BATCH, STRIDE = 16, 3, 10
# 0 and 1 tokens, whole windows, one more, several windows
DOCUMENTS = [prompt(n, vocab=512).tolist() for n in (40, 5, 1, 16, 17)] + [[]]
DOCUMENTS += [prompt(n, vocab=512).tolist() for n in (36, 2, 26)]
TEXTS = [PARAGRAPH, "", "你好", PARAGRAPH[:20], "a"]


@functools.cache
def params() -> Params:
    return random_params(MODEL)


def batches(source: Any = DOCUMENTS, tokenizer: Any = None, **sizes: Any) -> Any:
    given: dict[str, Any] = dict(length=LENGTH, batch=BATCH, stride=STRIDE) | sizes
    return scoring_batches(source, tokenizer, **given)


def run(out: Path, source: Any = DOCUMENTS, tokenizer: Any = None, **changes: Any) -> Totals:
    given: dict[str, Any] = dict(length=LENGTH, batch=BATCH, stride=STRIDE) | changes
    return score_dataset(given.pop("params", params()), source, tokenizer, out=out, **given)


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.read_text().splitlines()]


@settings(max_examples=60)
@given(st.data())
def test_every_token_counts_once_with_its_context(data: st.DataObject):
    length = data.draw(st.integers(2, 9))
    stride = data.draw(st.none() | st.integers(1, length - 1))
    batch = data.draw(st.integers(1, 4))
    sizes = data.draw(st.lists(st.integers(0, 25), max_size=6))
    documents = [list(range(100 * i + 1, 100 * i + 1 + n)) for i, n in enumerate(sizes)]
    counted: list[list[int]] = [[] for _ in documents]
    order = []
    for found in batches(documents, length=length, batch=batch, stride=stride):
        assert found["ids"].shape == (batch, length)
        for row in range(batch):
            ids, valid, counts = (found[name][row] for name in ("ids", "valid", "counted"))
            if not found["present"][row]:
                assert not valid.any()
                continue
            number, window = int(found["document"][row]), int(found["window"][row])
            order.append((number, window))
            start = window * (stride or length - 1)
            np.testing.assert_array_equal(ids[valid], documents[number][start : start + length])
            assert valid.tolist() == sorted(valid, reverse=True)
            assert not ids[~valid].any()
            # a later window's tokens have all the context there is room for
            assert not counts[: 1 if window == 0 else length - (stride or length - 1)].any()
            counted[number] += ids[counts].tolist()
            assert found["windows"][row] >= window + 1
            last = window + 1 == found["windows"][row]
            assert last == (start + length >= sizes[number])
    assert order == sorted(set(order))
    assert {number for number, _ in order} == set(range(len(documents)))
    assert counted == [document[1:] for document in documents]


def same_batches(got: list[Any], want: list[Any]) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.keys() == b.keys()
        for name in b:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)
            assert a[name].dtype == b[name].dtype


def test_an_iterator_goes_on_from_its_state():
    """After any number of batches, in a new iterator, through JSON; the same however often."""
    want = list(batches())
    assert len(want) == 6
    same_batches(list(batches()), want)
    for done in range(len(want) + 1):
        iterator = iter(batches())
        for _ in range(done):
            next(iterator)
        state = json.dumps(iterator.get_state())
        assert len(state) < 100
        other = iter(batches())
        other.set_state(json.loads(state))
        same_batches(list(other), want[done:])


def test_documents_of_every_kind(tmp_path: Path):
    """Strings, files, ids and grain's own sources; bytes are those of UTF-8."""
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text, encoding="utf-8")
    files = TextFiles(str(tmp_path / f"{n}.txt") for n in range(len(TEXTS)))
    want = list(batches(TEXTS, byte_level()))
    same_batches(list(batches(files, byte_level())), want)
    same_batches(list(batches(grain.MapDataset.source(TEXTS), byte_level())), want)
    rows = np.concatenate([found["document"][found["present"]] for found in want])
    sizes = np.concatenate([found["bytes"][found["present"]] for found in want])
    assert sizes.tolist() == [len(TEXTS[i].encode()) for i in rows]
    ids = [byte_level().encode(text).ids for text in TEXTS]
    for got, expected in zip(batches(ids), want, strict=True):
        np.testing.assert_array_equal(got["ids"], expected["ids"])
        assert (got["bytes"][got["present"]] == -1).all()
    assert len(list(batches(TEXTS, byte_level(), limit=2))) < len(want)


def test_line_ends_of_files_stay(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"a\r\nb\rc\n")
    assert TextFiles([tmp_path / "a"])[0] == "a\r\nb\rc\n"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Totals, bytes]:
    """The totals and the file of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "scores.jsonl"
    return run(out), out.read_bytes()


def test_documents_are_scored_in_windows(tmp_path: Path):
    """One line for each, in order; sums are those of windows scored one by one."""
    totals = run(tmp_path / "scores.jsonl")
    lines = lines_of(tmp_path / "scores.jsonl")
    assert [line["document"] for line in lines] == list(range(len(DOCUMENTS)))
    for ids, line in zip(DOCUMENTS, lines, strict=True):
        nats, tokens = 0.0, 0
        for start in range(0, max(len(ids) - LENGTH, 0) + STRIDE, STRIDE):
            window = ids[start : start + LENGTH]
            first = 0 if start == 0 else LENGTH - STRIDE - 1
            if start == 0 or start + LENGTH - STRIDE < len(ids):
                # in the same rows and places, so that nothing is compiled for it
                found = score(params(), [window or [0], [0], [0]], chunk=LENGTH, batch=BATCH)
                assert isinstance(found, list)
                counted = found[0].logprobs[first : max(0, len(window) - 1)]
                nats, tokens = nats - counted.sum(dtype=np.float64), tokens + len(counted)
        assert line["tokens"] == tokens == max(0, len(ids) - 1)
        assert line["nats"] == pytest.approx(nats, abs=1e-4)
        assert line["bytes"] is None
    assert totals.documents == len(DOCUMENTS)
    assert totals.tokens == sum(line["tokens"] for line in lines)
    assert totals.nats == pytest.approx(sum(line["nats"] for line in lines))
    assert (totals.bytes, totals.bits_per_byte) == (None, None)
    assert run(tmp_path / "scores.jsonl") == totals


def test_bits_per_byte_of_text(tmp_path: Path):
    totals = run(tmp_path / "scores.jsonl", TEXTS, byte_level())
    lines = lines_of(tmp_path / "scores.jsonl")
    assert [line["bytes"] for line in lines] == [len(text.encode()) for text in TEXTS]
    assert totals.bytes == sum(len(text.encode()) for text in TEXTS)
    assert totals.bits_per_byte == pytest.approx(totals.nats / np.log(2) / totals.bytes)
    found = score(params(), [TEXTS[2], "a", "a"], tokenizer=byte_level(), chunk=LENGTH, batch=BATCH)
    assert isinstance(found, list)
    assert lines[2]["nats"] == pytest.approx(-found[0].total, abs=1e-4)


class _Killed(BaseException):
    """A process that ends here."""


@given(st.data())
def test_a_killed_run_is_completed(
    whole: Any, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
):
    """Killed at any system call, as often as it likes, with any part of a write on the disk."""
    out = tmp_path_factory.mktemp("killed") / "scores.jsonl"
    totals, file = whole
    for _ in range(data.draw(st.integers(1, 4))):
        with pytest.MonkeyPatch.context() as patch:
            _die_after(patch, data.draw(st.integers(0, 14)))
            try:
                run(out)
            except _Killed:
                # what was being written may have reached the disk in part
                if out.exists() and data.draw(st.booleans()):
                    with out.open("ab") as torn:
                        torn.write(b'{"document": 3, "tok'[: data.draw(st.integers(1, 20))])
    assert run(out) == totals
    assert out.read_bytes() == file


def _die_after(patch: pytest.MonkeyPatch, calls: int) -> None:
    """Makes the process die at a call of those that put something onto the disk."""
    left = [calls]

    def dying(call: Any) -> Any:
        def wrapped(*args: Any) -> Any:
            if left[0] == 0:
                raise _Killed
            left[0] -= 1
            return call(*args)

        return wrapped

    patch.setattr(os, "fsync", dying(os.fsync))
    patch.setattr(Path, "replace", dying(Path.replace))


def die_in_the_middle(out: str) -> None:
    """What the process of the next test does: it writes half of a batch's lines and is gone."""
    append, seen = data._Record.append, []

    def torn(self: Any, lines: Any, iterator: Any) -> None:
        seen.append(None)
        if len(seen) == 4:
            self._file.write("".join(lines).encode()[:-20])
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        append(self, lines, iterator)

    data._Record.append = torn
    run(Path(out))


def test_a_run_killed_by_the_system_is_completed(whole: Any, tmp_path: Path):
    out, script = tmp_path / "scores.jsonl", "import sys; from tests.test_data import *; "
    root = Path(__file__).parent.parent
    command = [sys.executable, "-c", script + "die_in_the_middle(sys.argv[1])", str(out)]
    killed = subprocess.run(command, cwd=root, capture_output=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()
    totals, file = whole
    assert not out.read_bytes().endswith(b"\n")
    assert 0 < out.read_bytes().count(b"\n") < len(DOCUMENTS)
    assert run(out) == totals
    assert out.read_bytes() == file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(length=12), r"was begun with length 16, now it is 12"),
        (dict(batch=2), "was begun with batch 3, now it is 2"),
        (dict(stride=None), "was begun with stride 10, now it is 15"),
        (dict(limit=2), "was begun with documents 9, now it is 2"),
        (dict(tokenizer=byte_level()), "was begun with tokenizer None, now it is 405"),
        (dict(params="other weights"), "was begun with weights"),
        (dict(params="other model"), "was begun with config"),
    ],
)
def test_a_file_is_completed_with_what_it_was_begun_with_only(
    whole: Any, tmp_path: Path, changes: dict[str, Any], message: str
):
    out = tmp_path / "scores.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        _die_after(patch, 8)
        with pytest.raises(_Killed):
            run(out)
    others = {
        "other weights": params().replace(embed_tokens=params().embed_tokens.at[0, 0].add(1)),
        "other model": params().replace(config=MODEL.replace(rms_norm_eps=1e-5)),
    }
    if "params" in changes:
        changes = {"params": others[changes["params"]]}
    with pytest.raises(ValueError, match=f"scores.jsonl: {message}"):
        run(out, **changes)
    assert run(out) == whole[0]
    assert out.read_bytes() == whole[1]


def test_files_that_do_not_belong_together_are_refused(whole: Any, tmp_path: Path):
    out, state = tmp_path / "scores.jsonl", tmp_path / "scores.jsonl.state.json"
    out.write_text("somebody's\n")
    with pytest.raises(FileExistsError, match=r"scores.jsonl: is there, and no scores.jsonl.state"):
        run(out)
    assert out.read_text() == "somebody's\n"
    out.unlink()
    run(out)
    out.write_bytes(whole[1][:50])
    with pytest.raises(ValueError, match=r"has 50 bytes of the \d+ that were written"):
        run(out)
    for damaged, message in (("{", "cannot be read as JSON"), ("{}", "no state of format 1")):
        state.write_text(damaged)
        with pytest.raises(ValueError, match=message):
            run(out)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: batches(length=1), "length: 1 is under 2"),
        (lambda: batches(batch=0), "batch: 0 is not at least 1"),
        (lambda: batches(stride=0), r"stride: 0 is not in 1..15"),
        (lambda: batches(stride=16), r"stride: 16 is not in 1..15"),
        (lambda: batches(limit=0), "limit: 0 is not at least 1"),
        (lambda: batches("text"), "source: documents by number are expected, found str"),
        (lambda: batches(iter(DOCUMENTS)), "source: .* found list_iterator"),
        (lambda: batches(tokenizer=7), "tokenizer: int has no method"),
        (lambda: list(batches(["a", "b"])), r"source\[\d\]: is text, which needs a tokenizer"),
        (lambda: list(batches([[1], None])), r"source\[1\]: a string, ids"),
        (lambda: list(batches([[1], [2, -1]])), r"source\[1\]\[1\]: id -1"),
        (lambda: run(Path("never"), length=5000), "length: 5000 is over max_position_embeddings"),
        (lambda: run(Path("never"), params=7), "params: int is no Params"),
    ],
)
def test_what_is_wrong_is_named(call: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=f"^{message}"):
        call()


def test_a_bad_document_is_named_and_nothing_is_lost(tmp_path: Path):
    """What came before it is in the file; with the document mended the run is completed."""
    out, bad = tmp_path / "scores.jsonl", [*DOCUMENTS]
    bad[7] = [1, 512]
    with pytest.raises(ValueError, match=r"source\[7\]: id 512 is not in \[0, 512\)"):
        run(out, bad)
    assert len(lines_of(out)) == 6
    assert run(out).documents == len(DOCUMENTS)


def test_files_that_are_no_text_are_named(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    with pytest.raises(ValueError, match=r"a.txt: byte 2 is no UTF-8"):
        list(batches(TextFiles([tmp_path / "a.txt"]), byte_level()))
