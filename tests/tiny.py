"""Small models with random weights, their states, and calls compiled once for all tests."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qwen4jax.config import LINEAR, SPARSE, Config, RopeParameters
from qwen4jax.decode.prefill import decode_token, feed
from qwen4jax.forward_pass import forward
from qwen4jax.model import head
from qwen4jax.params import Params, declare
from qwen4jax.state import AttentionCache, DecodeState, init_state
from tests.oracle import Oracle

# the model of the case list: budget 8 of blocks of 4, 3 rows of convolution, 9 of n-grams
T0 = Config(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=4,
    layer_types=(LINEAR, LINEAR, LINEAR, SPARSE),
    max_position_embeddings=4096,
    eos_token_id=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rope_parameters=RopeParameters(rope_theta=10000.0, mrope_section=(1, 1, 0)),
    indexer_n_heads=2,
    indexer_head_dim=16,
    indexer_budget=8,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    hc_lowrank=8,
    ple_embed_dim=32,
    heads_per_ngram=2,
    ngram_vocab_size_base=11,
    make_ngram_vocab_size_divisible_by=4,
    split_ngram_parts=3,
    dtype="float32",
)
T0_BF16 = T0.replace(dtype="bfloat16")

# Few shapes, since compiling dominates: chunks run in `WIDTH` places, whole prompts in `LONG`.
ROWS, WIDTH, LONG = 4, 16, 48
SIZES: dict[str, Any] = dict(slots=ROWS, max_length=64, page_size=8, drafts=3)


def random_params(config: Config, seed: int = 0, scale: float = 1.5) -> Any:
    """Weights at which gates, selections and experts differ from token to token.

    Norms and n-gram convolutions, which `init_params` leaves at nothing, have values too.
    """
    rng = np.random.default_rng(seed)

    def fill(path, t):
        name = jax.tree_util.keystr(path)
        values = rng.standard_normal(t.shape)
        if "A_log" in name:
            values = np.log(rng.uniform(0.3, 4.0, t.shape))
        elif "dt_bias" in name:
            values = 0.5 * values - 1
        elif name.endswith(".linear_attn.norm"):
            values = 1 + 0.2 * values
        elif len(t.shape) == 1:
            values = 0.2 * values
        elif "conv1d" in name:
            values = values / math.sqrt(t.shape[-1])
        elif t.axes[0] not in ("vocab", "ngram_rows") or "lm_head" in name:
            values = values * scale / math.sqrt(t.shape[-1])
        return jnp.asarray(values, jnp.float32).astype(t.dtype)

    return jax.tree_util.tree_map_with_path(fill, declare(config))


@functools.cache
def t0() -> Any:
    """The weights most tests use."""
    return random_params(T0)


def prompt(length: int, seed: int = 0, vocab: int = 64, eos: int = 1) -> Any:
    """Random ids, one in ten of them the end of a document."""
    rng = np.random.default_rng([seed, length])
    ids = rng.integers(2, vocab, length)
    return np.where(rng.random(length) < 0.1, eos, ids).astype(np.int32)


def new_state(config: Config = T0, **sizes: Any) -> Any:
    """An empty state of `SIZES`, changed by `sizes`."""
    return init_state(config, **(SIZES | sizes))


@jax.jit
def run(
    params: Params, state: DecodeState, tokens: Any, count: Any, rope_positions: Any = None
) -> tuple[Any, jax.Array]:
    """`feed` with the logits of every place."""
    state, hidden = feed(params, state, tokens, count, rope_positions=rope_positions)
    return state, head(params, hidden)


def feed_rows(
    params: Params, state: DecodeState, rows: Sequence[Sequence[int]], width: int = WIDTH
) -> tuple[Any, list[np.ndarray]]:
    """Feeds row `i` to slot `i` in one step of `width` places; logits of each row's tokens."""
    tokens = np.zeros((state.slots, width), np.int32)
    count = np.zeros(state.slots, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
        count[i] = len(row)
    state, logits = run(params, state, tokens, count)
    return state, [np.asarray(logits[i, : len(row)]) for i, row in enumerate(rows)]


def feed_pieces(
    params: Params, state: DecodeState, rows: Sequence[Sequence[Sequence[int]]], width: int = WIDTH
) -> tuple[Any, list[np.ndarray]]:
    """Feeds the pieces of each row one after the other; logits of each row's tokens."""
    found: list[list[np.ndarray]] = [[] for _ in rows]
    for step in range(max(len(pieces) for pieces in rows)):
        now = [pieces[step] if step < len(pieces) else () for pieces in rows]
        state, logits = feed_rows(params, state, now, width)
        for row, values in zip(found, logits, strict=True):
            row.append(values)
    return state, [np.concatenate(row) for row in found]


def split(ids: Sequence[int], sizes: Sequence[int]) -> list[Any]:
    """`ids` in pieces of `sizes`, the last one taking what is left."""
    ends = [*np.cumsum(sizes)[: len(sizes)], len(ids)]
    return [ids[a:b] for a, b in zip([0, *ends], ends, strict=False) if b > a]


def plain(params: Params, ids: Sequence[int], width: int = LONG) -> np.ndarray:
    """PLAIN of the case list: logits of one prompt alone, in one step, from an empty state."""
    tokens, mask = np.zeros((2, 1, width), np.int32)
    tokens[0, : len(ids)], mask[0, : len(ids)] = ids, 1
    return np.asarray(forward(params, tokens, mask=mask))[0, : len(ids)]


def exact(params: Params, ids: Sequence[int]) -> np.ndarray:
    """PLAIN once more: the float64 oracle's logits."""
    return Oracle(params).logits(ids)


def greedy(
    params: Params, state: DecodeState, prompts: Sequence[Sequence[int]], steps: int
) -> tuple[Any, list[list[int]], list[np.ndarray]]:
    """Prompt `i` into slot `i`, then `steps` tokens; ids, and the logits that chose them."""
    state, found = feed_pieces(
        params, state, [split(ids, [WIDTH] * (len(ids) // WIDTH)) for ids in prompts]
    )
    last = [logits[-1] for logits in found]
    tokens: list[list[int]] = [[] for _ in prompts]
    chosen: list[list[np.ndarray]] = [[] for _ in prompts]
    active = jnp.arange(state.slots) < len(prompts)
    for step in range(steps):
        now = np.zeros(state.slots, np.int32)
        for row, logits in enumerate(last):
            now[row] = logits.argmax()
            tokens[row].append(int(now[row]))
            chosen[row].append(logits)
        if step + 1 < steps:
            state, logits = decode_token(params, state, jnp.asarray(now), active)
            last = list(np.asarray(logits)[: len(prompts)])
    return state, tokens, [np.stack(row) for row in chosen]


def assert_plain(
    params: Params, ids: Sequence[int], tokens: Sequence[int], logits: Any, tolerance: float = 1e-5
) -> None:
    """Greedy `tokens` after `ids`, chosen by `logits`, are those of the prompt alone.

    Ids are compared where the best two logits are further apart than rounding can move them.
    """
    want = exact(params, [*ids, *tokens[:-1]])[len(ids) - 1 :]
    assert_close(logits, want, tolerance)
    for step, row in enumerate(want):
        second, best = np.sort(row)[-2:]
        if best - second > 1e-4:
            assert tokens[step] == row.argmax(), f"token {step}"


def assert_close(got: Any, want: Any, tolerance: float = 1e-5, what: str = "") -> None:
    """Largest difference within `tolerance` of the largest value (or of 1)."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape, f"{what}: {got.shape} is not {want.shape}"
    if want.size:
        scale = max(1.0, float(np.max(np.abs(want))))
        worst = float(np.max(np.abs(got - want)))
        assert worst <= tolerance * scale, f"{what}: off by {worst} of {scale}"


def live(state: DecodeState, slot: int) -> dict[str, np.ndarray]:
    """What one slot's live tokens have left in every cache, in the order of the tokens."""
    get: Any = jax.tree.map(np.asarray, state)
    length, size = int(get.length[slot]), state.page_size
    pages = get.page_table[slot]
    found: dict[str, np.ndarray] = {
        name: getattr(get, name)[slot]
        for name in ("length", "rope_delta", "ngram_ids", "residual", "token", "drafts")
    }

    def last(ring: np.ndarray, end: int) -> np.ndarray:
        kept = np.arange(max(0, end - ring.shape[1]), end)
        return ring[slot, kept % ring.shape[1]]

    def attention(name: str, cache: Any, end: int) -> None:
        token = np.arange(end)
        blocks = cache.index_key.shape[1]
        block = np.arange(end // (size // blocks))
        found[f"{name}.key"] = cache.key[pages[token // size], token % size]
        found[f"{name}.value"] = cache.value[pages[token // size], token % size]
        found[f"{name}.index_key"] = cache.index_key[pages[block // blocks], block % blocks]
        found[f"{name}.ring"] = last(cache.ring, end)

    found["rope_ring"] = last(get.rope_ring, length)
    for i, cache in enumerate(get.layers):
        if isinstance(cache, AttentionCache):
            attention(f"layer{i}", cache, length)
        else:
            found[f"layer{i}.conv"] = cache.conv[slot]
            found[f"layer{i}.recurrent"] = cache.recurrent[slot]
    for i, history in enumerate(get.ple):
        found[f"ple{i}"] = history[slot]
    if get.mtp is not None:
        attention("mtp", get.mtp, max(length - 1, 0))
    return found


def assert_same_live(
    got: dict[str, np.ndarray], want: dict[str, np.ndarray], tolerance: float = 1e-5
) -> None:
    """Integers exactly, floats within `tolerance`."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        if np.issubdtype(value.dtype, np.integer):
            np.testing.assert_array_equal(got[name], value, err_msg=name)
        else:
            assert_close(got[name], value, tolerance, name)


def poison(state: DecodeState, value: float) -> Any:
    """Every float of every cache replaced by `value`: what a slot may find of earlier tenants."""
    return jax.tree.map(
        lambda x: jnp.full_like(x, value) if jnp.issubdtype(x.dtype, jnp.floating) else x, state
    )
