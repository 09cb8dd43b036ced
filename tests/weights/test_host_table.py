"""The n-gram table in its files: rows by a call back, nothing else of it in memory."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from qwen4jax import generate, quant
from qwen4jax.config import LINEAR
from qwen4jax.data import _fingerprint
from qwen4jax.decode.options import Sampling
from qwen4jax.host_table import HostTable
from qwen4jax.linen import to_variables
from qwen4jax.pallas import registry
from qwen4jax.pallas.ple import embed, gather
from qwen4jax.pallas.ple.cases import CASES
from qwen4jax.serve.model import load_served
from qwen4jax.serve.options import parse
from qwen4jax.weights import store
from qwen4jax.weights.load import load, load_and_report
from qwen4jax.weights.placement import pinned_array
from qwen4jax.weights.save import save
from tests.decode.small import MODEL
from tests.pallas.calls import runs_here
from tests.tiny import random_params
from tests.weights.edit import GOLDEN, assert_same

FP8 = GOLDEN / "fp8" / "checkpoint"
PLAIN = GOLDEN / "base" / "checkpoint"


def of(values: Any, at: int = 0) -> tuple[np.ndarray, np.dtype]:
    """A part that begins `at` bytes into its memory."""
    raw = np.frombuffer(b"\0" * at + values.tobytes(), np.uint8)[at:]
    return raw.reshape(len(values), -1), values.dtype


def tables(params: Any) -> list[Any]:
    return [layer.ple.ngram_embedding for layer in params.layers if layer.ple is not None]


def test_rows_come_from_the_part_that_holds_them():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(20, 6)).astype(np.float32)
    # not aligned, and a part in another dtype
    halves = values[7:12].astype(ml_dtypes.bfloat16)
    table = HostTable([of(values[:7], at=3), of(halves, at=1), of(values[12:])], np.float32)
    want = np.concatenate([values[:7], halves.astype(np.float32), values[12:]])
    assert (table.shape, table.ndim, table.nbytes) == ((20, 6), 2, 480)
    ids = rng.integers(0, 20, (3, 2, 5))
    np.testing.assert_array_equal(table.rows(ids), want[ids])
    np.testing.assert_array_equal(jax.jit(table.take)(jnp.asarray(ids)), want[ids])
    np.testing.assert_array_equal(np.asarray(table), want)
    np.testing.assert_array_equal(table[5:14], want[5:14])
    assert table.rows(np.zeros((0, 2), int)).shape == (0, 2, 6)
    for wrong in (-1, 20):
        with pytest.raises(IndexError, match="of 20"):
            table.rows(np.array([0, wrong]))


@pytest.mark.parametrize("name", ["fp8", "many_ends", "fourgrams_bfloat16"])
def test_the_embedding_is_the_same_wherever_the_table_is(name: str):
    """On the device by XLA's gather, in its files, and pinned, where a kernel reads it."""
    inputs = next(c for c in CASES if c.function == "embed" and c.name == name).inputs()
    table = inputs.pop("table")
    weight = np.asarray(getattr(table, "weight", table))

    def with_table(there: Any) -> np.ndarray:
        given = table.replace(weight=there) if hasattr(table, "weight") else there
        return np.asarray(embed(table=given, **inputs).astype(jnp.float32))

    array, memory = pinned_array(weight.shape, weight.dtype, jax.devices()[0])
    memory[...] = weight
    want = with_table(jnp.asarray(weight))
    np.testing.assert_array_equal(with_table(HostTable([of(weight)], weight.dtype)), want)
    with runs_here("triton"):
        np.testing.assert_array_equal(with_table(array), want)


def test_a_kernel_named_for_it_refuses():
    table = HostTable([of(np.zeros((4, 8), np.float32))], np.float32)
    rows = jax.ShapeDtypeStruct((1, 2, 2), jnp.int32)
    for given in (table, quant.ScaledTable(table, jnp.ones((), jnp.bfloat16))):
        call = lambda r, t=given: gather(t, r, jnp.float32, implementation="triton")  # noqa: E731
        with (
            registry.using(device="NVIDIA H200"),
            pytest.raises(NotImplementedError, match="not a HostTable"),
        ):
            jax.eval_shape(call, rows)


@pytest.mark.parametrize("checkpoint", [FP8, PLAIN], ids=["fp8", "plain"])
def test_nothing_of_the_table_is_read_or_copied(checkpoint: Path):
    usual, everything = load_and_report(checkpoint, progress=False)
    params, report = load_and_report(checkpoint, table="host", progress=False)
    size = 0
    for there, table in zip(tables(usual), tables(params), strict=True):
        weight, kept = getattr(there, "weight", there), getattr(table, "weight", table)
        assert isinstance(kept, HostTable)
        size += weight.nbytes
        np.testing.assert_array_equal(
            np.asarray(kept).view(np.uint8), np.asarray(weight).view(np.uint8)
        )
        for stored, _ in kept._parts:
            # memory of the mapped file, which cannot be written to
            assert not stored.flags.writeable
            assert not stored.flags.owndata
    assert size
    assert everything.bytes_read - report.bytes_read == size
    assert everything.parameter_bytes - report.parameter_bytes == size
    assert everything.tensors_read == report.tensors_read
    # on the CPU parameters count as host memory, a table in its files does not
    load(checkpoint, table="host", host_budget=report.parameter_bytes, progress=False)
    with pytest.raises(MemoryError, match="host_budget"):
        load(checkpoint, host_budget=report.parameter_bytes, progress=False)


def test_ids_and_log_probabilities_are_the_same():
    """Of the smallest model with a table: what compiles twice takes the time."""
    config = MODEL.replace(num_hidden_layers=1, layer_types=(LINEAR,), mtp_num_hidden_layers=0)
    usual = random_params(config)
    (layer,) = usual.layers
    table = np.asarray(layer.ple.ngram_embedding)
    there = layer.ple.replace(ngram_embedding=HostTable([of(table)], table.dtype))
    kept = usual.replace(layers=(layer.replace(ple=there),))
    sampling = Sampling(temperature=0, max_new_tokens=12)
    one, other = (
        generate(params, [5, 6, 7, 8, 9], sampling=sampling, logprobs=True)
        for params in (usual, kept)
    )
    assert one.token_ids == other.token_ids
    assert one.logprobs == other.logprobs


def test_what_needs_arrays_refuses_it():
    params = load(GOLDEN / "nvfp4" / "checkpoint", table="host")
    for use in (to_variables, _fingerprint):
        with pytest.raises(ValueError, match="n-gram table is not an array"):
            use(params)


def test_it_is_saved_and_stored_like_any_other(tmp_path: Path):
    kept = load(FP8, table="host", progress=False)
    usual = load(FP8, progress=False)
    save(kept, tmp_path / "saved")
    assert_same(load(tmp_path / "saved", progress=False), usual)
    store.store(kept, tmp_path / "stored")
    assert_same(store.restore(tmp_path / "stored"), usual)


def test_the_server_takes_it():
    options = parse(["--model", str(FP8), "--table", "host"])
    params = load_served(options, lambda done, total: None).params
    assert isinstance(tables(params)[0].weight, HostTable)
