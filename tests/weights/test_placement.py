"""The n-gram table in pinned host memory."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwen4jax.pallas.ple import embed
from qwen4jax.pallas.ple.cases import CASES
from qwen4jax.params import Tensor
from qwen4jax.weights import load as loading
from qwen4jax.weights import placement
from qwen4jax.weights.load import load
from qwen4jax.weights.placement import check_pinned, pinned_array
from tests.pallas.calls import runs_here

GOLDEN = Path(__file__).parents[1] / "golden"
FP8 = GOLDEN / "fp8" / "checkpoint"
RELEASED = Tensor((320_001_536, 160), "float8_e4m3fn", ("ngram_rows", "ngram_width"), "", 0.0, 0)


def test_what_is_filled_in_is_read():
    values = np.random.default_rng(0).standard_normal((50, 160)).astype(ml_dtypes.float8_e4m3fn)
    array, memory = pinned_array(values.shape, values.dtype, jax.devices()[0])
    assert not np.asarray(array).view(np.uint8).any()
    memory[...] = values
    assert array.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(np.asarray(array).view(np.uint8), values.view(np.uint8))


def test_a_pinned_table_holds_the_same_values(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(loading, "check_pinned", lambda tables, platform: None)
    monkeypatch.setattr(loading, "_LARGEST_PART", 1000)
    pinned, usual = load(FP8, table="pinned"), load(FP8)
    for one, other in zip(jax.tree.leaves(pinned), jax.tree.leaves(usual), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
    kinds = [x.sharding.memory_kind for x in jax.tree.leaves(pinned)]
    assert kinds.count("pinned_host") == 1


@pytest.mark.parametrize("table", ["pinned", "disk"])
def test_other_placements_are_refused(table):
    with pytest.raises(ValueError, match="table"):
        load(FP8, table=table)


def test_a_table_past_the_pool_is_refused_with_the_arithmetic(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "free_host_bytes", lambda: None)
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "40")
    with pytest.raises(MemoryError, match=r"51,200,245,760 bytes \(47.7 GiB\).*40 GiB.*=52 "):
        check_pinned([RELEASED], "gpu")
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    check_pinned([RELEASED], "gpu")
    with pytest.raises(MemoryError, match="64 GiB"):
        check_pinned([RELEASED, RELEASED], "gpu")


def test_a_table_past_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(placement, "free_host_bytes", lambda: 10**9)
    with pytest.raises(MemoryError, match="1,000,000,000 bytes of host memory are free"):
        check_pinned([RELEASED], "gpu")


def test_a_pinned_table_is_read_by_the_kernel():
    """Without an implementation named: the reference could not."""
    inputs = next(c for c in CASES if c.function == "embed" and c.name == "fp8").inputs()
    want = embed(**inputs)
    table = inputs["table"]
    array, memory = pinned_array(table.weight.shape, table.weight.dtype, jax.devices()[0])
    memory[...] = np.asarray(table.weight)
    inputs["table"] = table.replace(weight=array)
    with pytest.raises(NotImplementedError, match="triton"):
        embed(**inputs)
    with runs_here("triton"):
        got = embed(**inputs)
    np.testing.assert_array_equal(*(np.asarray(x.astype(jnp.float32)) for x in (got, want)))
