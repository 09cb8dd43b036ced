"""Cases of the n-gram embedding."""

import jax.numpy as jnp
import numpy as np

from qwen4jax.config import Config
from qwen4jax.ngram import ngram_hash
from qwen4jax.pallas.cases import BF16, E4M3, F32, Case, integers, normal
from qwen4jax.quant import ScaledTable

RELEASED = Config.flash_next()
# what the case list calls T0
SMALL_HASH = ngram_hash(
    vocab_size=64,
    ngram_size=3,
    heads_per_ngram=2,
    ngram_vocab_size_base=11,
    divisible_by=4,
    seed=1234,
    ple_index=0,
)
# orders 2 to 4 of a second n-gram layer
FOURGRAM_HASH = ngram_hash(
    vocab_size=1000,
    ngram_size=4,
    heads_per_ngram=3,
    ngram_vocab_size_base=101,
    divisible_by=1,
    seed=7,
    ple_index=1,
)


def _rows(name, ids, hash, eos, *, device_only=False):
    def build(rng):
        return dict(ids=integers(ids(rng) if callable(ids) else ids), hash=hash, eos=eos)

    return Case("ngram_rows", name, build, device_only)


def _random_ids(rows, length, vocab, eos, share=0.2):
    def ids(rng):
        values = rng.integers(0, vocab, (rows, length))
        return np.where(rng.random((rows, length)) < share, eos, values)

    return ids


def _gather(name, shape, table, width, dtype=F32, *, form="plain", device_only=False):
    def build(rng):
        values = normal(rng, (table, width), dtype)
        if form == "fp8":
            values = ScaledTable(values.astype(E4M3), jnp.asarray(0.0123, BF16))
        rows = rng.integers(0, table, shape)
        rows.reshape(-1)[:2] = (0, table - 1)
        return dict(table=values, rows=integers(rows), dtype=dtype)

    return Case("gather", name, build, device_only)


def _embed(name, ids, hash, eos, width, dtype=F32, *, form="plain", device_only=False):
    def build(rng):
        values = normal(rng, (hash.rows, width), dtype)
        if form == "fp8":
            values = ScaledTable(values.astype(E4M3), jnp.asarray(0.0123, BF16))
        return dict(table=values, ids=integers(ids(rng)), hash=hash, dtype=dtype, eos=eos)

    return Case("embed", name, build, device_only)


def _mix(
    name, rows, streams, hidden, dtype=F32, *, dilation=3, taps=4, zero=False, device_only=False
):
    def build(rng):
        width = streams * hidden
        key = normal(rng, (*rows, streams, hidden), dtype)
        return dict(
            key=key * 0 if zero else key,
            value=normal(rng, (*rows, hidden), dtype),
            streams=normal(rng, (*rows, streams, hidden), dtype, 3.0),
            norm_key=normal(rng, (width,), dtype, 0.2),
            norm_query=normal(rng, (width,), dtype, 0.2),
            norm_conv=normal(rng, (width,), dtype, 0.2),
            conv1d=normal(rng, (width, taps), dtype, 0.5),
            history=normal(rng, (rows[0], (taps - 1) * dilation, width), dtype),
            dilation=dilation,
            eps=1e-6,
        )

    return Case("mix", name, build, device_only)


# the released table has 320,001,536 rows; a tenth lets other inputs fit beside it
TENTH_HASH = ngram_hash(
    vocab_size=248320,
    ngram_size=3,
    heads_per_ngram=8,
    ngram_vocab_size_base=2_000_000,
    divisible_by=128,
    seed=1234,
    ple_index=0,
)
_HASH, _EOS = RELEASED.ngram_hash(0), RELEASED.hash_eos_token_id

CASES = (
    _rows("one_token", [[1, 1, 5]], SMALL_HASH, 1),
    _rows("many_ends", _random_ids(2, 42, 64, 1, 0.4), SMALL_HASH, 1),
    _rows("only_ends", np.full((1, 7), 1), SMALL_HASH, 1),
    _rows("fourgrams", _random_ids(2, 66, 1000, 3), FOURGRAM_HASH, 3),
    _rows("released_constants", _random_ids(1, 65, 248320, _EOS), _HASH, _EOS),
    _rows("largest_ids", np.full((1, 5), 248319), _HASH, _EOS),
    _rows("places_1000", _random_ids(1, 1002, 248320, _EOS, 0.01), _HASH, _EOS),
    _gather("float32", (2, 3, 4), 60, 8),
    _gather("bfloat16", (2, 3, 4), 60, 8, BF16),
    _gather("fp8", (2, 3, 4), 60, 8, BF16, form="fp8"),
    _gather("fp8_to_float32", (1, 3, 4), 60, 8, form="fp8"),
    _gather("rows_63", (1, 63, 2), 60, 8),
    _embed("many_ends", _random_ids(2, 9, 64, 1, 0.4), SMALL_HASH, 1, 8),
    _embed("fourgrams_bfloat16", _random_ids(1, 7, 1000, 3), FOURGRAM_HASH, 3, 12, BF16),
    _embed("fp8", _random_ids(2, 5, 64, 1), SMALL_HASH, 1, 20, BF16, form="fp8"),
    _embed("fp8_to_float32", _random_ids(1, 3, 64, 1), SMALL_HASH, 1, 8, form="fp8"),
    _mix("one_token", (2, 1), 4, 32),
    _mix("longer_than_the_history", (2, 13), 4, 16),
    _mix("places_63", (1, 63), 4, 8),
    _mix("two_streams_fourgrams", (1, 5), 2, 16, dilation=4),
    _mix("no_score", (1, 3), 4, 16, zero=True),
    _mix("bfloat16", (2, 5), 4, 32, BF16),
    _rows("released_4", _random_ids(1, 6, 248320, _EOS), _HASH, _EOS, device_only=True),
    _rows("released_32_rows", _random_ids(32, 6, 248320, _EOS), _HASH, _EOS, device_only=True),
    _rows("released_chunk", _random_ids(1, 4098, 248320, _EOS), _HASH, _EOS, device_only=True),
    *(
        _gather(f"released_{t}", (1, t, 16), 32_000_000, 160, BF16, form="fp8", device_only=True)
        for t in (4, 128, 4096)
    ),
    *(
        _embed(
            f"released_{rows * t}",
            _random_ids(rows, t + 2, 248320, _EOS, 0.01),
            TENTH_HASH,
            _EOS,
            160,
            BF16,
            form="fp8",
            device_only=True,
        )
        for rows, t in ((1, 1), (1, 4), (32, 4), (1, 4096))
    ),
    _mix("released_4", (1, 4), 4, 2560, BF16, device_only=True),
    _mix("released_32_rows", (32, 4), 4, 2560, BF16, device_only=True),
    _mix("released_chunk", (1, 2048), 4, 2560, BF16, device_only=True),
)
