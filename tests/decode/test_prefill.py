"""Prompts and single tokens: plain decoding and the draft head, held against the reference."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.decode.prefill import feed, prefill
from qwen4jax.decode.round import run_round
from qwen4jax.layers.capture import Capture
from qwen4jax.layers.gated_residual import Residual, read_final
from qwen4jax.model import head
from qwen4jax.params import Params
from qwen4jax.state import DecodeState
from tests.decode.planted import (
    CAPACITY,
    CHUNK,
    GREEDY,
    SLOTS,
    Play,
    Request,
    controls_of,
    decoded,
    golden,
    golden_prompts,
    most_probable,
    new_state,
    t0,
)
from tests.golden.cases import broken_ties

PROMPTS = golden_prompts()


def test_plain_decoding_gives_the_references_ids():
    """Every golden prompt in one batch; the round is held against this."""
    ids = decoded(PROMPTS, 16, most_probable)
    assert ids == [golden()[f"p{i}.greedy"].tolist() for i in range(len(PROMPTS))]


@jax.jit
def feed_captured(params: Params, state: DecodeState, tokens: Any, count: Any) -> Any:
    """A chunk; of the draft head's rows residuals and logits; where block scores tie.

    Of ties first those of the main model, which stand one place further on.
    """
    capture = Capture(["mtp.residual"])
    with broken_ties(()) as tied:
        state, _ = feed(params, state, tokens, count, capture=capture)
    residual = capture.values["mtp.residual"]
    assert params.mtp is not None
    mixer = params.mtp.hyper_connection_mixer
    hidden, _ = read_final(mixer, params.config, Residual(residual))
    return state, residual.reshape(*tokens.shape, -1), head(params, hidden), *tied


def test_the_draft_heads_rows_are_those_of_the_reference():
    """Teacher forced, in chunks whose first row is that of the token before them."""
    state = new_state(t0(), 3)
    found: list[list[np.ndarray]] = []
    for start in range(0, max(map(len, PROMPTS)), CHUNK):
        tokens, count = np.zeros((SLOTS, CHUNK), np.int32), np.zeros(SLOTS, np.int32)
        for i, prompt in enumerate(PROMPTS):
            piece = prompt[start : start + CHUNK]
            tokens[i, : len(piece)], count[i] = piece, len(piece)
        state, *chunk = feed_captured(t0(), state, tokens, count)
        found.append([np.asarray(x) for x in chunk])
    residual, logits, main_tied, own_tied = (
        np.concatenate(x, axis=1) for x in zip(*found, strict=True)
    )
    equal = 0
    for i, prompt in enumerate(PROMPTS):
        for row in range(len(prompt) - 1):
            same = True
            for name, got in (("residual", residual), ("logits", logits)):
                want = golden()[f"p{i}.mtp.{name}"]
                error = np.abs(got[i, row + 1] - want[row]).max()
                same &= bool(error <= 1e-5 * np.abs(want).max())
            # of tied blocks the reference takes any; all later rows attend to this one
            assert same or main_tied[i, : row + 1].any() or own_tied[i, row + 1], (i, row)
            equal += same
    assert equal > 0.9 * sum(len(prompt) - 1 for prompt in PROMPTS)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1], []], r"prompts\[1\]: is empty"),
        ([[1], [2] * CAPACITY], rf"prompts\[1\]: {CAPACITY} tokens after 3 do not fit a slot"),
    ],
)
def test_a_prompt_that_does_not_fit_is_named_before_any_is_fed(prompts: Any, message: str):
    state: Any = new_state(t0(), 3)
    state = state.replace(length=state.length.at[1].set(3))
    with pytest.raises(ValueError, match=message):
        prefill(t0(), state, prompts, [0, 1])
    # nothing was donated either
    assert np.asarray(state.length).sum() == 3


@pytest.mark.parametrize("slots", [[0, 0], [0, -1], [0, 99]])
def test_a_slot_that_is_not_there_or_stands_twice_is_named(slots: list[int]):
    with pytest.raises(ValueError, match=rf"slots\[1\]: {slots[1]} is not in 0\.\.\d+ or stands"):
        prefill(t0(), new_state(t0(), 3), [[5], [6]], slots)


SAVED = (Request(PROMPTS[9], GREEDY), Request(PROMPTS[12][:13], GREEDY))


def to_bytes(tree: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, *jax.tree.leaves(tree))
    return file.getvalue()


def from_bytes(data: bytes) -> Any:
    """State, controls and active rows; only their structure is known beforehand."""
    like = new_state(t0(), 1), controls_of(SAVED), 0
    with np.load(io.BytesIO(data)) as leaves:
        arrays = [jnp.asarray(leaves[name]) for name in leaves.files]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def eight_rounds(carry: Any) -> bytes:
    """State, controls, active rows and all bursts after eight rounds."""
    bursts = []
    for _ in range(8):
        *carry, burst = run_round(t0(), *carry)
        bursts.append(burst)
    return to_bytes((carry, bursts))


def go_on(folder: Path) -> None:
    """What the new process of the next test does."""
    (folder / "later").write_bytes(eight_rounds(from_bytes((folder / "saved").read_bytes())))


def test_a_state_saved_to_bytes_goes_on_in_a_new_process(tmp_path: Path):
    """CHK-11: after 13 ids, drafts included: every leaf bit-equal, and eight rounds later too."""
    play = Play(t0(), 1, SAVED)
    assert np.asarray(play.state.length)[:2].tolist() == [13, 13]
    carry = play.state, play.controls, play.active
    saved = to_bytes(carry)
    restored = from_bytes(saved)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), carry) == jax.tree.map(
        lambda x: (x.shape, x.dtype), restored
    )
    assert to_bytes(restored) == saved
    (tmp_path / "saved").write_bytes(saved)
    script = (
        "import pathlib, sys; from tests.decode.test_prefill import go_on; "
        "go_on(pathlib.Path(sys.argv[1]))"
    )
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=True)
    assert (tmp_path / "later").read_bytes() == eight_rounds(carry)
