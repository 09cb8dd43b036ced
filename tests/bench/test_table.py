"""The benchmark of the full n-gram table, over a small one on the CPU."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from bench import table
from qwen4jax.config import Config
from qwen4jax.quant import ScaledTable

CONFIG = Config.tiny()


@pytest.fixture
def filled() -> tuple[np.ndarray, np.ndarray]:
    """(stored rows, the block that repeats in them, seven times and a part)."""
    rows = CONFIG.ngram_hash(0).rows
    width = CONFIG.ple_embed_dim // len(CONFIG.ngram_hash(0).head_sizes)
    block = table.pattern_block(rows // 7 - 1, width)
    memory = np.zeros((rows, width), ml_dtypes.float8_e4m3fn)
    table.fill(memory, block)
    return memory, block


def test_no_two_rows_are_alike_and_none_has_a_nan(filled):
    memory, _ = filled
    assert len(np.unique(memory.view(np.uint8), axis=0)) == len(memory)
    assert np.isfinite(memory.astype(np.float32)).all()


def test_a_long_filling_says_how_far_it_is(filled, monkeypatch, capsys):
    memory, block = filled
    monkeypatch.setattr(table, "SAY_EVERY", 0.0)
    table.fill(memory, block)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 8
    assert all(line.startswith("# 0.0 GB filled in ") for line in said)


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    monkeypatch.setattr(table, "CALLS", 4)


def test_a_gather_is_timed_where_its_rows_are_right(filled):
    memory, block = filled
    stored = ScaledTable(jnp.asarray(memory), jnp.asarray(table.SCALE, jnp.bfloat16))
    found = table.measure(stored, 4, CONFIG, block)
    assert found["tokens"] == 4
    assert found["bytes"] == 4 * CONFIG.ple_embed_dim
    assert found["us"] > 0


def test_no_time_for_wrong_rows(filled):
    memory, block = filled
    shifted = ScaledTable(jnp.asarray(np.roll(memory, 1, axis=0)), jnp.asarray(table.SCALE))
    with pytest.raises(SystemExit, match="rows differ"):
        table.measure(shifted, 4, CONFIG, block)
