"""What `load` does besides checking: dtypes, memory, progress, transfer in parts, the report."""

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

from qwen4jax.config import Config
from qwen4jax.pallas import registry
from qwen4jax.params import Params, tensors
from qwen4jax.weights.checkpoint import survey
from qwen4jax.weights.load import Stage, host_bytes, load, load_and_report
from qwen4jax.weights.names import leaves
from qwen4jax.weights.progress import Meter
from qwen4jax.weights.reader import Reader
from qwen4jax.weights.save import save
from tests.weights.edit import GOLDEN, assert_same, random_params

T0 = GOLDEN / "t0" / "checkpoint"
NVFP4 = GOLDEN / "nvfp4" / "checkpoint"


@pytest.mark.parametrize("case", ["t0", "base", "variant", "nvfp4", "fp8"])
def test_two_loads_are_alike_and_usable_together(case: str):
    first, second = (load(GOLDEN / case / "checkpoint") for _ in range(2))
    assert_same(first, second)
    total = jax.tree.map(
        lambda a, b: (a.astype("float32") + b.astype("float32")).sum(), first, second
    )
    assert total.config == first.config


@pytest.mark.parametrize(("case", "dtype"), [("t0", "bfloat16"), ("nvfp4", "float32")])
def test_dtype_casts_plain_tensors(case: str, dtype: str):
    kept = load(GOLDEN / case / "checkpoint")
    cast = load(GOLDEN / case / "checkpoint", dtype=dtype)
    assert cast.config == kept.config.replace(dtype=dtype)
    for (path, a), (_, b) in zip(leaves(cast), leaves(kept), strict=True):
        plain = b.dtype == kept.config.dtype and not path.endswith(".weight_scale")
        assert a.dtype == (dtype if plain else b.dtype)
        assert np.array_equal(a, np.asarray(b).astype(a.dtype))


@pytest.mark.parametrize("dtype", ["float16", "int8", "float8_e4m3fn"])
def test_another_dtype_is_refused(dtype: str):
    with pytest.raises(ValueError, match="dtype"):
        load(T0, dtype=dtype)


def test_a_budget_below_the_parameters_is_refused_early_with_the_arithmetic():
    size = load_and_report(T0)[1].parameter_bytes
    read: list[int] = []
    with pytest.raises(MemoryError, match=f"{size - 1:,} bytes: .* take {size:,} bytes"):
        load(T0, host_budget=size - 1, progress=lambda done, total: read.append(done))
    assert not read
    load(T0, host_budget=size)


@pytest.mark.parametrize("budget", ["1GiB", "1 GB", "0.5gib", "1073741824", 1 << 30])
def test_budgets_in_words(budget: Any):
    load(T0, host_budget=budget)


@pytest.mark.parametrize("budget", ["much", "1XB", "", 0, -1, True, "-1GB"])
def test_budgets_that_are_none(budget: Any):
    with pytest.raises(ValueError, match="host_budget"):
        load(T0, host_budget=budget)


@pytest.mark.parametrize("budget", ["256KiB", "64KiB", "16384"])
def test_leaves_arrive_in_parts_within_the_budget(budget: str):
    """As on an accelerator: rows of every stored form, the last part smaller than the others."""
    found = survey(NVFP4)
    size = host_bytes(budget)
    assert size is not None
    stage = Stage(tensors(found.declared), size, resident=False)
    reader = Reader(found)
    with Meter(False, 0) as meter:
        arrays = [
            stage.transfer(reader, where, leaf, meter) for where, leaf in leaves(found.declared)
        ]
    params = jax.tree.structure(found.declared).unflatten(arrays)
    assert_same(params, load(NVFP4))
    assert 0 < stage.peak <= size
    reader.require_nothing_unread()
    assert meter.done == load_and_report(NVFP4)[1].bytes_read - 8 * (3 + 8 + 8)


def test_a_budget_below_one_row_is_refused_with_the_arithmetic():
    found = survey(NVFP4)
    with pytest.raises(
        MemoryError, match=r"needs 2 x [0-9,]+ bytes for one row of \[16, 2, 32, 64\]"
    ):
        Stage(tensors(found.declared), 1000, resident=False)


def test_progress_counts_every_byte():
    steps: list[tuple[int, int]] = []
    report = load_and_report(T0, progress=lambda done, total: steps.append((done, total)))[1]
    done, totals = zip(*steps, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]} == {report.bytes_read}


def test_a_bar_is_shown_when_asked_for(capsys: pytest.CaptureFixture[str]):
    load(T0, progress=True)
    assert "100%" in capsys.readouterr().err
    load(T0)
    assert not capsys.readouterr().err


def test_the_report():
    params, report = load_and_report(NVFP4)
    assert report.path == NVFP4
    assert report.parameter_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert report.vision_tensors_skipped == 0
    assert report.converted == {}
    assert report.notes == ()
    assert report.seconds > 0
    with registry.using(device="NVIDIA GB300"):
        (note,) = load_and_report(NVFP4)[1].notes
    assert "no kernel was run on NVIDIA GB300 yet" in note


def test_stored_experts_take_their_stored_bytes(tmp_path: Path):
    """4.5 bits for each parameter of an NVFP4 expert, and the scales of its matrices."""
    experts = load(NVFP4).layers[0].mlp.experts
    parameters = 16 * 3 * 64 * 32
    assert sum(x.nbytes for x in jax.tree.leaves(experts)) == parameters * 4.5 / 8 + 16 * 3 * 8


def test_parameters_do_not_hang_on_the_files(tmp_path: Path):
    """On the CPU an array may be the very memory it was made of: never the mapped file."""
    params = random_params(Config.tiny())
    save(params, tmp_path / "x")
    loaded: Params = load(tmp_path / "x")
    file = tmp_path / "x" / "model.safetensors"
    with file.open("r+b") as out:
        out.seek(file.stat().st_size // 2)
        out.write(b"\xff" * (file.stat().st_size // 2))
    assert_same(loaded, params)


def test_the_overflow_of_a_cast_is_silent(tmp_path: Path):
    params = random_params(Config.tiny())
    save(params, tmp_path / "x")
    head = np.asarray(params.lm_head).copy()
    head[0, 0] = np.finfo(np.float32).max
    save(params.__class__(**{**vars(params), "lm_head": jax.device_put(head)}), tmp_path / "y")
    cast = load(tmp_path / "y", dtype="bfloat16")
    assert np.asarray(cast.lm_head)[0, 0] == ml_dtypes.bfloat16(np.inf)
