"""Where tokens stand: places in the caches, and three-axis rotary positions."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4jax.config import Config, RopeParameters
from qwen4jax.forward_pass import forward
from qwen4jax.span import make_span, physical, rope_table
from qwen4jax.state import abstract_state
from tests import oracle, tiny
from tests.tiny import ROWS, T0, assert_close, exact, feed_rows, live, new_state, prompt, run, t0

# every axis ends at another pair
UNEVEN = Config.tiny(head_dim=64, rope_parameters=RopeParameters(mrope_section=(4, 3, 1)))


@pytest.mark.parametrize(
    "config",
    [T0, Config.tiny(), UNEVEN, Config.flash_next()],
    ids=["t0", "tiny", "uneven", "released"],
)
def test_the_table_interleaves_three_axes(config):
    """Unequal positions, against Hugging Face's slices in float64."""
    positions = np.random.default_rng(0).integers(0, 900, (2, 50, 3))
    rope = config.rope_parameters
    cos, sin = rope_table(config, jnp.asarray(positions))
    pairs = config.rotary_dim // 2
    assert cos.shape == (2, 50, pairs)
    assert cos.dtype == jnp.float32
    for row in range(2):
        angles = oracle.rope_angles(positions[row], pairs, rope.rope_theta, rope.mrope_section)
        # the angle itself is a float32: 900 has steps of 6e-5
        np.testing.assert_allclose(cos[row], np.cos(angles), atol=1e-4)
        np.testing.assert_allclose(sin[row], np.sin(angles), atol=1e-4)
    # each axis drives some pair
    for axis in range(3 if rope.mrope_section[2] else 2):
        moved = positions.copy()
        moved[..., axis] += 90
        assert np.abs(np.asarray(rope_table(config, jnp.asarray(moved))[0] - cos)).max() > 1e-3


def test_equal_positions_are_ordinary_rope():
    positions = np.repeat(np.arange(40)[:, None], 3, axis=1)
    config = Config.flash_next()
    cos, _ = rope_table(config, jnp.asarray(positions))
    angles = positions[:, :1] * 1e7 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-5)


PLACES, PER_SLOT, PAGE = 11, 6, 8


@given(
    starts=st.lists(st.integers(-1, 30), min_size=2, max_size=2),
    counts=st.lists(st.integers(0, PLACES), min_size=2, max_size=2),
    seed=st.integers(0, 9),
)
def test_places_of_a_span(starts, counts, seed):
    """Index, pages, rings and blocks of every token, against the definitions one by one."""
    rng = np.random.default_rng(seed)
    state = abstract_state(T0, slots=2, max_length=PAGE * PER_SLOT, page_size=PAGE)
    pages = 2 * PER_SLOT
    table = rng.permutation(pages).reshape(2, PER_SLOT)
    table[1, 4:] = -1
    ring_positions = rng.integers(0, 99, state.rope_ring.shape)
    span = make_span(
        T0,
        state.replace(
            page_table=jnp.asarray(table, jnp.int32),
            rope_ring=jnp.asarray(ring_positions, jnp.int32),
            rope_delta=jnp.asarray([0, 5], jnp.int32),
        ),
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(counts, jnp.int32),
        PLACES,
    )
    got = {name: np.asarray(getattr(span, name)) for name in ("index", "slot", "ring", "complete")}
    ring = ring_positions.shape[1]
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        tokens = [i for i in range(start, start + count) if i >= 0]
        for t in range(PLACES):
            index = start + t
            there = index in tokens
            assert got["index"][row, t] == (index if there else -1)
            assert got["complete"][row, t] == ((index + 1) // 4 if there else 0)
            page = table[row, index // PAGE] if there and index // PAGE < PER_SLOT else -1
            place = page * PAGE + index % PAGE if page >= 0 else pages * PAGE
            assert got["slot"][row, t] == place
            kept = there and index >= start + count - ring
            assert got["ring"][row, t] == (index % ring if kept else ring)
        ends = {i // 4 for i in tokens if i % 4 == 3}
        found = {}
        for block, place in zip(
            span.block[row].tolist(), span.block_slot[row].tolist(), strict=True
        ):
            if place < pages * PAGE // 4:
                found[block] = place
        assigned = {b for b in ends if b * 4 // PAGE < PER_SLOT and table[row, b * 4 // PAGE] >= 0}
        assert set(found) == assigned
        for block, place in found.items():
            assert place == table[row, block // 2] * 2 + block % 2
            first = block * 4
            position = first + (0, 5)[row]
            want = [position] * 3 if first >= start else ring_positions[row, first % ring]
            angles = oracle.rope_angles(np.array([want]), 2, 10000.0, (1, 1, 0))[0]
            at = span.block[row].tolist().index(block)
            np.testing.assert_allclose(span.block_cos[row, at], np.cos(angles), atol=1e-5)


def test_physical_places():
    table = jnp.asarray([[3, 1, -1], [0, -1, 2]])
    index = jnp.asarray([[0, 7, 8, 15, 16, 24, -1], [0, 8, 16, 23, 24, 99, -5]])
    want = [[24, 31, 8, 15, -1, -1, -1], [0, -1, 16, 23, -1, -1, -1]]
    assert physical(table, index, 8).tolist() == want


def image_positions():
    """9 tokens of text, an image of 3 x 4, 8 of text: 29 tokens and where they stand."""
    text = [(i, i, i) for i in range(9)]
    image = [(9, 9 + h, 9 + w) for h in range(3) for w in range(4)]
    # text goes on behind the image's larger side
    behind = [(13 + i,) * 3 for i in range(8)]
    return np.array(text + image + behind, np.int32)


def batch(rows):
    return jnp.asarray(np.stack([rows] * ROWS))


def feed_with_positions(ids, positions, sizes):
    """Row 0 in pieces, each with its positions; states after each piece, all logits."""
    state, found, start = new_state(), [], 0
    for size in sizes:
        end = min(start + size, len(ids))
        tokens = np.zeros((ROWS, tiny.WIDTH), np.int32)
        three = np.zeros((ROWS, tiny.WIDTH, 3), np.int32)
        tokens[0, : end - start], three[0, : end - start] = ids[start:end], positions[start:end]
        count = jnp.zeros(ROWS, jnp.int32).at[0].set(end - start)
        state, logits = run(t0(), state, jnp.asarray(tokens), count, jnp.asarray(three))
        found.append(np.asarray(logits[0, : end - start]))
        start = end
    return state, np.concatenate(found)


@pytest.mark.parametrize("sizes", [[16, 13], [10, 3, 16], [1] * 13 + [16], [11, 2, 1, 15]], ids=str)
def test_three_axes_in_any_chunks(sizes):
    """A block's key turns by its first token, though that is in an earlier chunk."""
    ids, positions = prompt(29, seed=6), image_positions()
    whole = oracle.Oracle(t0())
    want = whole.logits(ids, positions)
    assert np.abs(want - exact(t0(), ids)).max() > 1e-3, "the positions have no effect"
    _, got = feed_with_positions(ids, positions, sizes)
    assert_close(got, want)


def test_text_goes_on_behind_an_image():
    """rope_delta: the next position is one more than the largest so far, of any axis."""
    ids, positions = prompt(29, seed=6), image_positions()
    state, _ = feed_with_positions(ids[:21], positions[:21], [16, 5])
    # 21 tokens, the image reaches to 12 in width
    assert live(state, 0)["rope_delta"] == 13 - 21
    whole = oracle.Oracle(t0())
    want = whole.logits(ids, positions)[21:]
    state, (logits,) = feed_rows(t0(), state, [ids[21:24]])
    assert_close(logits, want[:3])
    for at in range(24, 29):
        state, (logits,) = feed_rows(t0(), state, [[ids[at]]], width=1)
        assert_close(logits, want[at - 21][None])
    assert live(state, 0)["rope_delta"] == 13 - 21


def test_an_image_cut_by_a_chunk_keeps_its_largest_position():
    """The last chunk may hold less of the image's width than the one before it."""
    ids, positions = prompt(29, seed=6), image_positions()
    for cut in range(9, 21):
        state, _ = feed_with_positions(ids[:21], positions[:21], [min(cut, 16), 16, 16])
        assert live(state, 0)["rope_delta"] == 13 - 21


def test_the_draft_head_keeps_its_rows_positions():
    """Its rows stand one behind: any chunking leaves its cache as one chunk does."""
    ids, positions = prompt(16, seed=7), image_positions()[:16]
    want = live(feed_with_positions(ids, positions, [16])[0], 0)
    for sizes in ([9, 7], [10, 1, 5], [3, 13], [4] * 4):
        got = live(feed_with_positions(ids, positions, sizes)[0], 0)
        for part in ("key", "value", "index_key", "ring"):
            assert_close(got[f"mtp.{part}"], want[f"mtp.{part}"], what=f"{part} of {sizes}")


def test_positions_belong_to_the_padded_places():
    """`forward` with left padding: a token's position stands where the token does."""
    ids, positions = prompt(29, seed=6), image_positions()
    want = oracle.Oracle(t0()).logits(ids, positions)
    tokens, mask = np.zeros((2, 1, 40), int)
    three = np.full((1, 40, 3), 7)
    tokens[0, 11:], mask[0, 11:], three[0, 11:] = ids, 1, positions
    got = forward(t0(), tokens, mask=mask, rope_positions=jnp.asarray(three))
    assert_close(np.asarray(got)[0, 11:], want)
