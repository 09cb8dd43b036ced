"""A state as a value: kept in a file, forked, moved to other slots, pages and sizes."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen4jax.config import LINEAR, SPARSE
from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.portable import extract, fork, graft, restore_state, save_state
from qwen4jax.decode.round import begin_slots, run_round
from qwen4jax.model import read_out
from qwen4jax.params import Params
from qwen4jax.state import DecodeState, abstract_state, assign_pages, init_state, reset_slots
from qwen4jax.weights.errors import CheckpointError
from tests.tiny import (
    T0,
    T0_BF16,
    assert_close,
    assert_same_live,
    exact,
    feed_pieces,
    feed_rows,
    live,
    poison,
    prompt,
    random_params,
    split,
)
from tests.weights.edit import edit_header, write

# every kind of cache in half the layers: compiling dominates
MODEL = T0.replace(num_hidden_layers=2, layer_types=(LINEAR, SPARSE), ple_layer_ids=(1,))
ONLY_LINEAR = T0.replace(
    num_hidden_layers=1, layer_types=(LINEAR,), ple_layer_ids=(), mtp_num_hidden_layers=0
)
SLOTS, DRAFTS, CAPACITY = 3, 2, 64
GREEDY = Sampling(temperature=0, max_new_tokens=100, ignore_eos=True)


@functools.cache
def params() -> Params:
    return random_params(MODEL)


def empty(slots: int = SLOTS, **sizes: Any) -> DecodeState:
    given: dict[str, Any] = dict(max_length=CAPACITY, page_size=8, drafts=DRAFTS) | sizes
    return init_state(MODEL, slots=slots, **given)


def controls(slots: int):
    return make_controls([Row(GREEDY, 13)] * slots, slots, MODEL.vocab_size)


@functools.cache
def begun() -> DecodeState:
    """One slot after CHK-11's 13 ids: a token is pending, drafts are proposed."""
    state, _ = feed_rows(params(), empty(1), [prompt(13)])
    streams = state.residual.reshape(1, 1, MODEL.hc_count, -1)
    hidden = read_out(params(), streams)[:, 0]
    state, _, _ = begin_slots(params(), state, controls(1), hidden, jnp.arange(1))
    return state


def decode(state: DecodeState, rounds: int) -> tuple[DecodeState, list[list[int]]]:
    """Rounds of every slot; the tokens of each."""
    ids: list[list[int]] = [[] for _ in range(state.slots)]
    # the round donates what it is given
    state, now = jax.tree.map(jnp.copy, state), controls(state.slots)
    active = jnp.ones(state.slots, bool)
    for _ in range(rounds):
        state, now, active, burst = run_round(params(), state, now, active)
        for row, (tokens, count) in enumerate(zip(burst.tokens, burst.count, strict=True)):
            ids[row] += np.asarray(tokens)[: int(count)].tolist()
    return state, ids


@functools.cache
def uninterrupted() -> tuple[DecodeState, list[list[int]]]:
    return decode(begun(), 10)


def random_bits(seed: int = 0, config: Any = T0_BF16, **sizes: Any) -> DecodeState:
    """Leaves of any bits, NaN with payloads among them."""
    rng = np.random.default_rng(seed)
    given: dict[str, Any] = dict(slots=2, max_length=24, page_size=8, kv_dtype="float8_e4m3fn")
    shapes = abstract_state(config, **(given | sizes))

    def fill(s: Any) -> jax.Array:
        raw = rng.integers(0, 256, (*s.shape, s.dtype.itemsize), np.uint8)
        return jnp.asarray(raw.view(s.dtype).reshape(s.shape))

    return jax.tree.map(fill, shapes)


def assert_same_bits(got: DecodeState, want: DecodeState) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True)
    for (path, a), b in pairs:
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (T0_BF16, {}),
        (T0, dict(kv_dtype=None, pages=11, drafts=0, page_size=4)),
        (T0.replace(mtp_num_hidden_layers=0), dict(drafts=0, kv_dtype="bfloat16")),
        # a capacity past the last position
        (T0_BF16.replace(max_position_embeddings=20), dict(max_length=20)),
        # no pages at all
        (ONLY_LINEAR, dict(drafts=0)),
    ],
)
def test_a_file_keeps_every_bit(tmp_path: Path, config: Any, sizes: dict[str, Any]):
    """With and without the draft head's cache; and what is restored outlives the file."""
    state, path = random_bits(config=config, **sizes), tmp_path / "state"
    for kept in (state, state.replace(mtp=None)):
        save_state(kept, path, config)
        restored = restore_state(path, config)
        path.write_bytes(bytes(path.stat().st_size))
        assert_same_bits(restored, kept)
    assert [p.name for p in tmp_path.iterdir()] == ["state"]


def test_a_save_that_is_interrupted_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch):
    save_state(random_bits(1), tmp_path / "state", T0_BF16)

    def stop(_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", stop)
        with pytest.raises(KeyboardInterrupt):
            save_state(random_bits(2), tmp_path / "state", T0_BF16)
    assert_same_bits(restore_state(tmp_path / "state", T0_BF16), random_bits(1))


def refusal(path: Path, config: Any = T0_BF16) -> str:
    with pytest.raises(CheckpointError) as caught:
        restore_state(path, config)
    assert path.name in str(caught.value)
    return str(caught.value)


def change_manifest(path: Path, **changes: Any) -> None:
    def edit(header: dict[str, Any]) -> None:
        manifest = json.loads(header["__metadata__"]["manifest"]) | changes
        kept = {name: value for name, value in manifest.items() if value is not None}
        header["__metadata__"]["manifest"] = json.dumps(kept)

    edit_header(path, edit)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_state(random_bits(), tmp_path / "kept.state", T0_BF16)
    return tmp_path / "kept.state"


def test_the_state_of_another_model_is_refused(file: Path):
    other = T0_BF16.replace(num_experts=8, rms_norm_eps=1e-5)
    message = refusal(file, other)
    assert "config: num_experts is 4 in the file, 8 in the model" in message
    assert "config: rms_norm_eps is 1e-06 in the file, 1e-05 in the model" in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(format=2), "format 2, this version reads 1"),
        (dict(slots=3), r"length: I32 \[2\], the manifest's sizes give I32 \[3\]"),
        (dict(drafts=2), "drafts: I32"),
        (dict(pages=7), "layers.3.key: F8_E4M3"),
        (dict(kv_dtype="bfloat16"), "the manifest's sizes give BF16"),
        (dict(kv_dtype="float7"), "those of no state"),
        (dict(page_size=6), "page_size: 6 is not a multiple"),
        (dict(slots="2"), "those of no state"),
        (dict(draft_head=False), r"mtp.key: F8_E4M3 \[6, 8, 2, 16\], .* give nothing"),
        (dict(config={}), "the manifest's configuration was changed"),
        (dict(pages_per_slot=None), "the manifest lacks pages_per_slot"),
        (dict(crc32={}), r"length: is not what was saved \(checksum\)"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(file: Path, changes: dict[str, Any], message: str):
    change_manifest(file, **changes)
    with pytest.raises(CheckpointError, match=message):
        restore_state(file, T0_BF16)


def test_what_is_no_state_is_refused(tmp_path: Path):
    write(tmp_path / "weights", {"length": np.zeros(2, np.int32)})
    assert "is no decode state" in refusal(tmp_path / "weights")
    assert "No such file" in refusal(tmp_path / "nothing")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes, DecodeState]:
    path = tmp_path_factory.mktemp("damage") / "some.state"
    state = random_bits(slots=1, max_length=8)
    save_state(state, path, T0_BF16)
    return path, path.read_bytes(), state


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_file_is_refused_or_the_same(small: Any, data: st.DataObject):
    """Any byte changed, or any end cut off: never another state."""
    path, whole, state = small
    header = int.from_bytes(whole[:8], "little") + 8
    place = data.draw(st.one_of(st.integers(0, header), st.integers(0, len(whole) - 1)))
    damaged = bytearray(whole)
    if data.draw(st.booleans()):
        damaged[place] ^= data.draw(st.integers(1, 255))
    else:
        del damaged[place:]
    path.write_bytes(damaged)
    try:
        restored = restore_state(path, T0_BF16)
    except CheckpointError:
        return
    # the package's version is for people
    assert b"qwen4jax" in whole[place - 40 : place + 40]
    assert_same_bits(restored, state)


def go_on(folder: Path) -> None:
    """What the new process of the next test does."""
    state = restore_state(folder / "state", MODEL)
    state, ids = decode(state, 8)
    save_state(state, folder / "later", MODEL)
    (folder / "ids").write_text(json.dumps(ids))


def test_a_restored_state_goes_on_in_a_new_process(tmp_path: Path):
    """CHK-11: 13 ids and two rounds, drafts included; the rest equals no save bit for bit."""
    want, want_ids = uninterrupted()
    state, ids = decode(begun(), 2)
    save_state(state, tmp_path / "state", MODEL)
    script = (
        "import pathlib, sys; from tests.decode.test_portable import go_on; "
        "go_on(pathlib.Path(sys.argv[1]))"
    )
    root = Path(__file__).parent.parent.parent
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=root, check=True)
    assert [ids[0] + json.loads((tmp_path / "ids").read_text())[0]] == want_ids
    assert_same_bits(restore_state(tmp_path / "later", MODEL), want)


def test_forks_go_on_as_their_source_and_apart():
    """Each on pages of its own: equal to the source alone, then different tokens do not mix."""
    want, want_ids = uninterrupted()
    forked = fork(begun(), SLOTS)
    np.testing.assert_array_equal(forked.page_table, np.arange(24).reshape(3, 8))
    state, ids = decode(forked, 10)
    assert ids == want_ids * SLOTS
    for slot in range(SLOTS):
        assert_same_live(live(state, slot), live(want, 0))
    # different tokens in each, in the middle of a page
    ahead = [prompt(5, seed) for seed in range(SLOTS)]
    forked, logits = feed_rows(params(), fork(begun(), SLOTS), ahead)
    for slot, ids in enumerate(ahead):
        want = exact(params(), [*prompt(13), *ids])
        assert_close(logits[slot], want[13:])


def scattered(seed: int = 3) -> DecodeState:
    """Three empty slots whose pages lie in any order, in a pool of NaN."""
    order = np.random.default_rng(seed).permutation(24).reshape(SLOTS, 8)
    state = poison(empty(), np.nan).replace(page_table=jnp.asarray(order, jnp.int32))
    return reset_slots(MODEL, state, jnp.arange(SLOTS))


def test_a_grafted_state_goes_on_as_its_source():
    """Into any slot of a larger state, on scattered pages that held NaN; nobody else changes."""
    want, want_ids = uninterrupted()
    mates, _ = feed_pieces(params(), scattered(), [split(prompt(n), [16]) for n in (21, 30, 7)])
    together = jax.jit(graft)(mates, jnp.int32(1), begun())
    for slot in (0, 2):
        assert_same_live(live(together, slot), live(mates, slot), tolerance=0)
    np.testing.assert_array_equal(together.page_table, mates.page_table)
    assert_same_live(live(together, 1), live(begun(), 0), tolerance=0)
    state, ids = decode(together, 10)
    assert ids[1] == want_ids[0]
    assert_same_live(live(state, 1), live(want, 0))


def test_an_extracted_and_grafted_slot_goes_on_bit_for_bit():
    """With the same shapes: through a file, to other pages, in other company."""
    state, _ = decode(fork(begun(), SLOTS), 3)
    want, want_ids = decode(state, 5)
    alone = extract(state, 2)
    assert (alone.slots, alone.capacity) == (1, CAPACITY)
    moved = graft(scattered(), 2, alone)
    moved = graft(moved, 0, extract(begun(), 0, pages=2))
    got, ids = decode(moved, 5)
    assert ids[2] == want_ids[2]
    assert_same_live(live(got, 2), live(want, 2), tolerance=0)


def test_extracted_pages_are_in_order_and_hold_nothing_else():
    mates, _ = feed_pieces(params(), scattered(), [split(prompt(n), [16]) for n in (21, 30, 7)])
    alone = extract(mates, jnp.int32(1), pages=5)
    assert_same_live(live(alone, 0), live(mates, 1), tolerance=0)
    np.testing.assert_array_equal(alone.page_table, [np.arange(5)])
    cache: Any = alone.layers[1]
    assert cache.key.shape[0] == 5
    # page 3 has the last two of 30 tokens, page 4 none
    assert not np.asarray(cache.key[4]).any()
    assert np.isfinite(np.asarray(cache.key[3, :6])).all()
    assert extract(mates, 1, pages=4).capacity == 32
    with pytest.raises(ValueError, match="pages: 3 of 8 do not hold 30 tokens"):
        extract(mates, 1, pages=3)


@pytest.mark.parametrize("length", [1, 4, 13, 16, 19, 20, 30])
def test_a_stored_prefix_joins_at_every_phase_with_more_drafts(length: int):
    """CHK-10: 20 ids kept, then 8 more in a wider ring and a longer table; as PLAIN.

    At other lengths too, since the ring's places move with the open block.
    """
    ids, more = prompt(length), prompt(8, seed=1)
    kept, _ = feed_pieces(params(), scattered(), [[], split(ids, [16])])
    wider = empty(drafts=5, max_length=96)
    assert wider.rope_ring.shape[1] > kept.rope_ring.shape[1]
    joined = graft(wider, 0, extract(kept, 1, pages=4))
    joined, logits = feed_rows(params(), joined, [more])
    assert_close(logits[0], exact(params(), [*ids, *more])[length:])


@pytest.mark.parametrize("slot", [SLOTS, SLOTS + 7, -1])
def test_a_slot_that_is_not_there_is_dropped(slot: int):
    """In a compiled function, which cannot say so; no page of the last slot changes either."""
    state = scattered()
    assert_same_bits(jax.jit(graft)(state, jnp.int32(slot), begun()), state)


def test_tokens_without_a_page_are_dropped():
    """In a compiled function, as `store` does it; no page changes but those of the slot."""
    state = scattered()
    table = state.page_table.at[1, 1:].set(-1)
    state = state.replace(page_table=table)
    grafted = jax.jit(graft)(state, jnp.int32(1), begun())
    caches: Any = state.layers[1], grafted.layers[1]
    before, after = (np.asarray(cache.key) for cache in caches)
    changed = [page for page in range(24) if before[page].tobytes() != after[page].tobytes()]
    assert changed == [int(table[1, 0])]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: fork(begun(), 0), "copies: 0 is under 1"),
        (lambda: fork(empty(), 2), "state: has 3 slots"),
        (lambda: extract(empty(), 3), r"slot: 3 is not in \[0, 3\)"),
        (lambda: extract(empty(), 0, pages=9), r"pages: 9 is not in 1..8"),
        (lambda: graft(empty(), -1, begun()), r"slot: -1 is not in \[0, 3\)"),
        (lambda: graft(empty(), 0, empty()), "source: has 3 slots"),
        (lambda: graft(empty(page_size=4), 0, begun()), "source: pages of 8 tokens, not of 4"),
        (lambda: graft(empty(max_length=32), 0, begun()), "source: 8 pages, a slot .* has 4"),
        (lambda: graft(empty(), 0, begun().replace(mtp=None)), "source: has no draft head's cache"),
        (
            lambda: graft(empty(kv_dtype="bfloat16"), 0, begun()),
            r"source: layers.1.key has float32 \[8, 2, 16\] .* state bfloat16",
        ),
        (
            lambda: graft(empty(contiguous=False), 0, begun()),
            "slot: 0 has no page for token 0 of the 13 of the source",
        ),
        (
            lambda: graft(
                assign_pages(empty(), 1, jnp.asarray([5, -1] + [-1] * 6, jnp.int32)), 1, begun()
            ),
            "slot: 1 has no page for token 8 of the 13",
        ),
    ],
)
def test_what_does_not_fit_is_named(call: Any, message: str):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_state_without_draft_head_takes_a_source_that_has_one():
    state = empty(drafts=0).replace(mtp=None)
    grafted = graft(state, 1, begun())
    assert grafted.mtp is None
    assert grafted.drafts.shape == (SLOTS, 0)
    assert int(grafted.token[1]) == int(begun().token[0])
