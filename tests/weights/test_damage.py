"""Damaged directories load to identical parameters or give one clear error, and nothing else.

`QWEN4JAX_DAMAGE=500 pytest tests/weights/test_damage.py` tries as many.
"""

import contextlib
import itertools
import json
import os
import warnings
from pathlib import Path

import pytest

from qwen4jax.config import Config
from qwen4jax.hf_fields import ConfigError
from qwen4jax.params import Params
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.load import load
from tests.weights.damage import spoil
from tests.weights.edit import GOLDEN, assert_same, copy_of

COUNT = int(os.environ.get("QWEN4JAX_DAMAGE", "60"))
CASES = ("t0", "nvfp4")


@pytest.fixture(scope="module")
def references() -> dict[str, Params]:
    return {case: load(GOLDEN / case / "checkpoint") for case in CASES}


def outcome(path: Path) -> Params | ValueError:
    with warnings.catch_warnings():
        # an unknown field, an absent draft head: said, and then the parameters are compared
        warnings.simplefilter("ignore")
        try:
            return load(path)
        except (CheckpointError, ConfigError) as e:
            return e


@pytest.mark.parametrize("seed", range(COUNT))
def test_damage(seed: int, tmp_path: Path, references: dict[str, Params]):
    case = CASES[seed % len(CASES)]
    path = copy_of(case, tmp_path)
    print(what := spoil(path, seed))
    result = outcome(path)
    if isinstance(result, ValueError):
        print(result)
        assert str(path) in str(result), what
    else:
        assert_same(result, references[case])


ODD = [-1, 0, 1, 7, 10**30, "x", None, 2.5, float("nan"), [], [1], ["x"], {}, True, [[1]]]


def test_settings_of_a_wrong_kind_are_refused_by_name():
    """Every field of `config.json` with every odd value: a model or a `ConfigError`."""
    good = json.loads((GOLDEN / "t0" / "checkpoint" / "config.json").read_text())
    fields = [*good, "rope_theta", "text_config", "full_attention_interval", "torch_dtype"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for field, value in itertools.product(fields, ODD):
            with contextlib.suppress(ConfigError):
                Config.from_dict({**good, field: value})
        for field, value in itertools.product(good["rope_parameters"], ODD):
            rope = {**good["rope_parameters"], field: value}
            with contextlib.suppress(ConfigError):
                Config.from_dict({**good, "rope_parameters": rope})
