"""Every tensor against the declaration: names, shapes, dtypes, spellings of the configuration."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qwen4jax.hf_fields import ConfigError
from qwen4jax.params import Params
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.load import load, load_and_report
from qwen4jax.weights.names import leaves
from tests.weights.edit import (
    GOLDEN,
    REMOVED,
    assert_same,
    change,
    copy_of,
    edit_config,
    part,
    tensors_of,
    write_tensors,
)

INJECT = "model.layers.0.attn_hyper_connection.block_inject_weight"
MIXER_NORM = "model.hyper_connection_mixer.hc_norm.weight"


@pytest.fixture
def t0(tmp_path: Path) -> Path:
    return copy_of("t0", tmp_path)


@pytest.fixture(scope="module")
def reference() -> Params:
    return load(GOLDEN / "t0" / "checkpoint")


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    return caught.value


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda a: a.T, id="transposed"),
        pytest.param(lambda a: a[:-1], id="one row cut"),
        pytest.param(lambda a: a[None], id="one axis more"),
    ],
)
def test_every_wrong_shape_is_listed_LOD_04(t0: Path, spoil: Callable[[np.ndarray], np.ndarray]):
    """LOD-04: all tensors of T0 at once, in one message with expected and found shape."""
    tensors = tensors_of(t0)
    spoiled = {name: np.ascontiguousarray(spoil(array)) for name, array in tensors.items()}
    write_tensors(t0, spoiled)
    problems = refusal(t0).problems
    expected = 0
    for name, array in tensors.items():
        if spoiled[name].shape != array.shape:
            expected += 1
            (line,) = [p for p in problems if p.startswith(f"{name} ")]
            assert f"shape {list(spoiled[name].shape)}, expected {list(array.shape)}" in line
            assert ".safetensors" in line
    assert expected == len(problems) > 90


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_plain_tensors_are_cast_LOD_05(t0: Path, reference: Params, dtype: Any):
    """LOD-05: all tensors of the gated residual in another float format."""
    tensors = tensors_of(t0)
    some = [name for name in tensors if "hyper_connection" in name]
    write_tensors(t0, tensors | {name: tensors[name].astype(dtype) for name in some})
    params, report = load_and_report(t0)
    converted = {} if dtype is np.float32 else {np.dtype(dtype).name: len(some)}
    assert report.converted == converted
    epsilon = float(ml_dtypes.finfo(dtype).eps)
    for (path, a), (_, b) in zip(leaves(params), leaves(reference), strict=True):
        assert a.dtype == np.float32
        tolerance = epsilon if "hyper_connection" in path else 0.0
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("dtype", [np.float64, np.int8, np.int32])
def test_other_formats_are_refused_LOD_05(t0: Path, dtype: Any):
    """LOD-05: double precision and integers hold no weights."""
    tensors = tensors_of(t0)
    some = [name for name in tensors if "hyper_connection" in name]
    write_tensors(t0, tensors | {name: tensors[name].astype(dtype) for name in some})
    problems = refusal(t0).problems
    assert len(problems) == len(some)
    assert all(any(p.startswith(f"{name} ") for p in problems) for name in some)


@pytest.mark.parametrize(
    ("stated", "stored"), [("bfloat16", np.float16), ("float16", ml_dtypes.bfloat16)]
)
def test_the_other_16_bit_format_contradicts_the_configuration(t0: Path, stated: str, stored: Any):
    """The same bytes under the other label would load as other weights."""
    edit_config(t0, dtype=stated)
    change(t0, **{MIXER_NORM.replace(".", "__"): np.zeros(128, stored)})
    assert f"{MIXER_NORM} " in str(refusal(t0))


def test_float16_is_held_as_float32(t0: Path, reference: Params):
    edit_config(t0, dtype="float16")
    tensors = tensors_of(t0)
    halved = {n: a.astype(np.float16) if a.dtype == np.float32 else a for n, a in tensors.items()}
    write_tensors(t0, halved)
    params, report = load_and_report(t0)
    assert params.config.dtype == "float32"
    assert "dtype float16 is held as float32" in report.notes
    stored = halved["lm_head.weight"].astype(np.float32)
    assert np.array_equal(part(params, "lm_head"), stored)
    assert params.config == reference.config


@pytest.mark.parametrize("wide", [True, False])
def test_without_a_stated_dtype_the_tensors_decide(t0: Path, wide: bool):
    edit_config(t0, dtype=REMOVED)
    if not wide:
        tensors = tensors_of(t0)
        narrow = {
            n: a.astype(ml_dtypes.bfloat16) if a.dtype == np.float32 else a
            for n, a in tensors.items()
        }
        write_tensors(t0, narrow)
    params = load(t0)
    assert params.config.dtype == ("float32" if wide else "bfloat16")
    assert params.embed_tokens.dtype == params.config.dtype


def test_an_unknown_dtype_is_refused(t0: Path):
    edit_config(t0, dtype="int4")
    with pytest.raises(ConfigError, match="dtype: 'int4'"):
        load(t0)


@pytest.mark.parametrize(
    "name", ["mtp.fc_hidden.weight", "mtp.layers.0.mlp.experts.down_proj", MIXER_NORM]
)
def test_one_missing_tensor_is_an_error_LOD_14(t0: Path, name: str):
    """LOD-14: of the draft head as of the main model."""
    change(t0, **{name.replace(".", "__"): REMOVED})
    (problem,) = refusal(t0).problems
    assert problem.startswith(f"{name}: missing, expected [")


def test_without_a_draft_head_it_is_off_and_said_so_LOD_14(t0: Path, reference: Params):
    """LOD-14: all mtp.* tensors missing."""
    tensors = tensors_of(t0)
    write_tensors(t0, {n: a for n, a in tensors.items() if not n.startswith("mtp.")})
    with pytest.warns(UserWarning, match="the draft head is off"):
        params, report = load_and_report(t0)
    assert params.mtp is None
    assert params.config == reference.config.replace(mtp_num_hidden_layers=0)
    assert any("draft head is off" in note for note in report.notes)
    assert_same(params.layers, reference.layers)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.self_attn.k_proj.k_scale",
        "model.layers.3.self_attn.attn.v_scale",
        "model.layers.3.self_attn.k_scale",
    ],
)
def test_scales_of_a_kv_cache_are_refused_LOD_16(t0: Path, name: str):
    """LOD-16: never skipped, under whatever name."""
    change(t0, **{name.replace(".", "__"): np.array(0.5, np.float32)})
    (problem,) = refusal(t0).problems
    assert problem.startswith(f"{name} (")
    assert "scales of a quantised KV cache are not supported" in problem


def test_unexpected_tensors_are_listed(t0: Path):
    change(t0, model__layers__0__input_layernorm__weight=np.zeros(32, np.float32))
    (problem,) = refusal(t0).problems
    assert "model.layers.0.input_layernorm.weight (model-0000" in problem
    assert "unexpected" in problem


SPELLINGS = {
    "full_attention": {"layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "indexed_attention": {"layer_types": [*["linear_attention"] * 3, "indexed_attention"]},
    "interval only": {"layer_types": REMOVED, "full_attention_interval": 4},
    "interval as well": {"full_attention_interval": 4},
    "top-level model type": {"model_type": "qwen4_exp"},
    "vision": {"vision_config": {"model_type": "qwen4_exp", "depth": 27}},
    "torch_dtype": {"dtype": REMOVED, "torch_dtype": "float32"},
    "flat rope": {
        "rope_parameters": {"mrope_section": [1, 1, 0]},
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings_of_the_configuration_LOD_17(t0: Path, reference: Params, spelling: str):
    """LOD-17: the same model in other words."""
    edit_config(t0, **SPELLINGS[spelling])
    assert_same(load(t0), reference)


def test_nested_configuration_and_names_LOD_17(t0: Path, reference: Params):
    """LOD-17: as released: text_config, model.language_model, vision tensors beside them."""
    text = json.loads((t0 / "config.json").read_text())
    nested = {
        "architectures": ["Qwen4ExpForConditionalGeneration"],
        "model_type": "qwen4_exp",
        "tie_word_embeddings": False,
        "text_config": text,
        "vision_config": {"model_type": "qwen4_exp"},
    }
    (t0 / "config.json").write_text(json.dumps(nested))
    tensors = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in tensors_of(t0).items()
    }
    vision = {
        "model.visual.pos_embed.weight": np.zeros((9, 4), ml_dtypes.bfloat16),
        "model.visual.blocks.0.attn.qkv.bias": np.zeros(12, np.float32),
    }
    write_tensors(t0, tensors | vision)
    params, report = load_and_report(t0)
    assert_same(params, reference)
    assert report.vision_tensors_skipped == 2
    assert report.vision_bytes_skipped == 9 * 4 * 2 + 12 * 4
    assert report.tensors_read == len(tensors)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", [*["linear_attention"] * 3, "deepseek_sparse_attention"]),
        ("ple_layer_ids", [0]),
        ("ple_layer_ids", [5]),
        ("ple_layer_ids", [2, 2]),
        ("indexer_head_dim", REMOVED),
        ("indexer_budget", 9),
        ("indexer_kv_heads", 2),
        ("indexer_head_dim", 2),
        ("hc_count", 1),
        ("eos_token_id", None),
    ],
)
def test_a_bad_configuration_names_its_field_LOD_17(t0: Path, field: str, value: Any):
    """LOD-17: refused before a tensor is looked at."""
    edit_config(t0, **{field: value})
    with pytest.raises(ConfigError, match=field):
        load(t0)


@pytest.mark.parametrize("count", [4, 99, -1, "1", True])
def test_a_bad_number_of_draft_layers_LOD_19(t0: Path, count: Any):
    """LOD-19: a clean error."""
    edit_config(t0, mtp_num_hidden_layers=count)
    with pytest.raises(ConfigError, match="mtp_num_hidden_layers"):
        load(t0)


def test_draft_tensors_that_the_configuration_denies_LOD_19(t0: Path, reference: Params):
    """LOD-19: with 0 layers configured the tensors must not be there."""
    edit_config(t0, mtp_num_hidden_layers=0)
    (problem,) = refusal(t0).problems
    assert "mtp_num_hidden_layers is 0" in problem
    tensors = tensors_of(t0)
    write_tensors(t0, {n: a for n, a in tensors.items() if not n.startswith("mtp.")})
    assert load(t0).mtp is None
    edit_config(t0, mtp_num_hidden_layers=1)
    write_tensors(t0, tensors)
    assert_same(load(t0), reference)


@pytest.mark.parametrize("name", [MIXER_NORM, "mtp.pre_fc_norm_hidden.weight"])
def test_norms_per_stream_LOD_19(t0: Path, reference: Params, name: str):
    """LOD-19: [128] and [4, 32] are the same values in the same order; [32, 4] is another."""
    values = np.arange(128, dtype=np.float32)
    change(t0, **{name.replace(".", "__"): values.reshape(4, 32)})
    params = load(t0)
    changed = {
        MIXER_NORM: params.hyper_connection_mixer.hc_norm,
        "mtp.pre_fc_norm_hidden.weight": part(params, "mtp.pre_fc_norm_hidden"),
    }
    assert np.array_equal(changed[name], values)
    change(t0, **{name.replace(".", "__"): values.reshape(32, 4)})
    assert "shape [32, 4], expected [128]" in str(refusal(t0))


def test_a_quantised_backbone_is_refused_NUM_19(t0: Path):
    """NUM-19: injection weights do not survive 4 bits; one line says so, scales included."""
    tensors = tensors_of(t0)
    tensors[f"{INJECT}.weight"] = np.zeros((4, 64), np.uint8)
    tensors[f"{INJECT}.weight_scale"] = np.ones((4, 8), ml_dtypes.float8_e4m3fn)
    tensors[f"{INJECT}.weight_scale_2"] = np.array(1, np.float32)
    write_tensors(t0, tensors)
    (problem,) = refusal(t0).problems
    assert problem.startswith(f"{INJECT}.weight (")
    assert "stored quantised, as U8 [4, 64]" in problem


def test_no_tensor_goes_unread_NUM_20(t0: Path, reference: Params):
    """NUM-20: the report counts every tensor, and the indexer's arrive in the tree."""
    tensors = tensors_of(t0)
    some = {name: array * 2 + 1 for name, array in tensors.items() if ".indexer." in name}
    write_tensors(t0, tensors | some)
    params, report = load_and_report(t0)
    assert report.tensors_read == len(tensors)
    assert report.bytes_read == sum(array.nbytes for array in tensors.values())
    assert len(some) == 6
    for (path, a), (_, b) in zip(leaves(params), leaves(reference), strict=True):
        assert np.array_equal(a, np.asarray(b) * 2 + 1 if ".indexer." in path else b)


@pytest.mark.parametrize("constant", ["layer_multipliers", "ngram_heads_offsets"])
def test_hash_constants_must_be_those_of_the_configuration(t0: Path, constant: str):
    name = f"model.layers.1.ple.ple_embedding.{constant}"
    values = tensors_of(t0)[name]
    values[-1] += 2
    change(t0, **{name.replace(".", "__"): values})
    error = refusal(t0)
    assert f"{name} (" in str(error)
    assert str(values.tolist()) in str(error)
