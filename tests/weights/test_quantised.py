"""Stored forms: what the files hold, what the configuration says, and scales that are none."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from qwen4jax import quant
from qwen4jax.config import Config, Quantization
from qwen4jax.params import Tensor
from qwen4jax.quant import BlockFp8, Nvfp4, ScaledTable
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.load import load
from qwen4jax.weights.names import Naming
from qwen4jax.weights.save import save
from tests.weights.edit import (
    GOLDEN,
    REMOVED,
    assert_same,
    change,
    copy_of,
    edit_config,
    part,
    random_params,
    tensors_of,
    write_tensors,
)

E4M3 = ml_dtypes.float8_e4m3fn
BF16 = ml_dtypes.bfloat16
TABLE = "model.layers.1.ple.ple_embedding.ngram_embedding"
ROWS = np.array([[2, 3], [8, 12], [0.5, -1]], np.float32)


@pytest.fixture
def nvfp4(tmp_path: Path) -> Path:
    return copy_of("nvfp4", tmp_path)


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    """A checkpoint with FP8 everywhere, partial blocks at the edges."""
    config = Config.tiny(
        hidden_size=160,
        moe_intermediate_size=144,
        num_experts=4,
        dtype="bfloat16",
        quantization=Quantization("fp8", "fp8", "fp8"),
    )
    save(random_params(config), tmp_path / "fp8")
    return tmp_path / "fp8"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """T0 with its n-gram table in FP8; the first rows are `ROWS`, the scale is missing."""
    path = copy_of("t0", tmp_path)
    tensors = tensors_of(path)
    for name in [n for n in tensors if n.startswith(TABLE)]:
        tensors[name] = tensors[name].astype(E4M3)
    tensors[f"{TABLE}.shard_0.weight"][:3, :2] = ROWS.astype(E4M3)
    write_tensors(path, tensors)
    return path


def refusal(path: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load(path)
    return caught.value


def values_of(path: Path) -> np.ndarray:
    table = part(load(path), "layers.1.ple.ngram_embedding")
    assert isinstance(table, ScaledTable)
    return np.asarray(quant.dequantize(table))


def test_stored_forms_stay_as_on_disk(nvfp4: Path):
    tensors = tensors_of(nvfp4)
    params = load(nvfp4)
    assert params.config.quantization == Quantization("nvfp4", "bf16", "fp8")
    experts = part(params, "layers.2.mlp.experts")
    name = "model.layers.2.mlp.experts.5.{}_proj.{}".format
    for i, half in enumerate(("gate", "up")):
        for kind in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
            held = np.asarray(part(experts.gate_up_proj, kind))[5, i]
            assert held.tobytes() == tensors[name(half, kind)].tobytes()
            assert held.dtype == tensors[name(half, kind)].dtype
    assert experts.gate_up_proj.weight_scale_2.shape == (16, 2)
    assert experts.down_proj.input_scale.shape == (16,)
    assert load(nvfp4, dtype="float32").config.quantization == params.config.quantization
    wide = part(load(nvfp4, dtype="float32"), "layers.2.mlp.experts.gate_up_proj.weight")
    assert wide.dtype == np.uint8


def test_fp8_loads_for_both_models(fp8: Path):
    params = load(fp8)
    assert isinstance(part(params, "mtp.layers.0.mlp.experts.down_proj"), BlockFp8)
    assert_same(params, random_params(params.config))


def test_float32_block_scales_are_kept(fp8: Path):
    tensors = tensors_of(fp8)
    wide = {n: a.astype(np.float32) for n, a in tensors.items() if n.endswith("_scale_inv")}
    main = {n: a for n, a in wide.items() if not n.startswith("mtp.")}
    main = {n: a * np.float32(1 + 2**-20) for n, a in main.items()}
    write_tensors(fp8, tensors | main)
    params = load(fp8)
    scale = part(params, "layers.0.mlp.experts.down_proj.weight_scale_inv")
    expected = main["model.layers.0.mlp.experts.1.down_proj.weight_scale_inv"]
    assert np.asarray(scale)[1].tobytes() == expected.tobytes()
    assert part(params, "mtp.layers.0.mlp.experts.down_proj.weight_scale_inv").dtype == BF16


def test_an_fp8_table_without_its_scale_is_refused_LOD_07(table: Path):
    """LOD-07: the scale is absent."""
    (problem,) = refusal(table).problems
    assert problem.startswith(f"{TABLE}.weight_scale: missing")


@pytest.mark.parametrize("shape", [(1,), ()])
def test_the_scale_of_an_fp8_table_LOD_07(table: Path, shape: tuple[int, ...]):
    """LOD-07: one element or none, in the last of the shards."""
    tensors = tensors_of(table)
    write_tensors(table, tensors | {f"{TABLE}.weight_scale": np.full(shape, 0.5, BF16)})
    assert np.array_equal(values_of(table)[:3, :2], ROWS * 0.5)


@pytest.mark.parametrize("scale", [0.0, -0.5, np.nan, np.inf])
def test_a_table_scale_that_is_none_LOD_07(table: Path, scale: float):
    """LOD-07: what was never written is zero, or anything."""
    tensors = tensors_of(table)
    write_tensors(table, tensors | {f"{TABLE}.weight_scale": np.array([scale], np.float32)})
    assert f"{TABLE}.weight_scale (model-00003" in str(refusal(table))


def test_a_table_row_is_its_code_times_the_scale_PLE_11(table: Path):
    """PLE-11: scale 0.25; a second scale on another name does not go unnoticed."""
    tensors = tensors_of(table)
    write_tensors(table, tensors | {f"{TABLE}.weight_scale": np.array([0.25], BF16)})
    codes = [tensors[f"{TABLE}.shard_{i}.weight"].astype(np.float32) for i in range(3)]
    assert np.array_equal(values_of(table), np.concatenate(codes) * 0.25)
    other = f"{TABLE}.shard_0.weight_scale"
    write_tensors(table, tensors_of(table) | {other: np.array([1.0], BF16)})
    assert f"{other} (" in str(refusal(table))


def test_shards_of_9_and_4_rows_PLE_13():
    """PLE-13: row ids 8, 9, 12 and 0 of two shards of unequal size."""
    path = "layers.1.ple.ngram_embedding"
    naming = Naming(Config.tiny(), shard_rows={path: (9, 4)})
    leaf = Tensor((13, 2), "float32", ("ngram_rows", "ngram_width"), "normal", 1.0, 26)
    parts = {f"{TABLE}.shard_0.weight": 0, f"{TABLE}.shard_1.weight": 9}
    out = np.zeros((13, 2), np.float32)
    for piece in naming.pieces(path, leaf):
        first = parts[piece.name]
        out[piece.where] = np.arange(first, first + piece.shape[0])[:, None]
    assert np.array_equal(out[:, 0], np.arange(13))


@pytest.mark.parametrize("parts", [4, 128])
def test_shards_of_unequal_size_PLE_13(tmp_path: Path, parts: int):
    """PLE-13: equal to the concatenated table, in numeric order, wherever they lie in the file."""
    params = random_params(Config.tiny(split_ngram_parts=parts))
    save(params, tmp_path / "x")
    tensors = tensors_of(tmp_path / "x")
    whole = np.asarray(part(params, "layers.1.ple.ngram_embedding"))
    cuts = np.sort(np.random.default_rng(0).permutation(len(whole))[: parts - 1])
    for i, shard in enumerate(np.split(whole, cuts)):
        tensors[f"{TABLE}.shard_{i}.weight"] = shard
    write_tensors(tmp_path / "x", tensors)
    assert_same(load(tmp_path / "x"), params)
    tensors[f"{TABLE}.shard_1.weight"] = tensors[f"{TABLE}.shard_1.weight"][:-1]
    write_tensors(tmp_path / "x", tensors)
    assert f"{TABLE}.shard_1.weight (" in str(refusal(tmp_path / "x"))


def layers_of_three_algorithms() -> dict[str, Any]:
    """As in NVIDIA's checkpoint: the algorithm of each module, no word on the table's dtype."""
    prefix = "model.language_model.layers"
    return {
        **{
            f"{prefix}.{i}.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16} for i in range(4)
        },
        f"{prefix}.1.ple.ple_embedding.ngram_embedding": {"quant_algo": "FP8"},
        "mtp.layers.0.mlp.experts": {"quant_algo": "FP8_BLOCK_SCALES", "group_size": 128},
    }


MIXED = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": layers_of_three_algorithms(),
    "ignore": ["lm_head", "*.self_attn.*", "model.language_model.layers.*.mlp.gate"],
}


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    config = Config.tiny(dtype="bfloat16", quantization=Quantization("nvfp4", "fp8", "fp8"))
    save(random_params(config), tmp_path / "mixed")
    path = tmp_path / "mixed"
    edit_config(path, quantization_config=MIXED, ple_embedding_dtype=REMOVED)
    return path


def test_an_algorithm_for_each_module_LOD_08(mixed: Path):
    """LOD-08: NVFP4 experts, an FP8 table, block FP8 in the draft head, globs to be ignored."""
    params = load(mixed)
    assert isinstance(part(params, "layers.0.mlp.experts.gate_up_proj"), Nvfp4)
    assert isinstance(part(params, "layers.1.ple.ngram_embedding"), ScaledTable)
    assert isinstance(part(params, "mtp.layers.0.mlp.experts.gate_up_proj"), BlockFp8)


def test_the_same_in_hf_quant_config_LOD_08(mixed: Path):
    """LOD-08: the older file says it one level deeper; alone or beside the other it counts."""
    said = {"producer": {"name": "modelopt"}, "quantization": {**MIXED, "exclude_modules": []}}
    (mixed / "hf_quant_config.json").write_text(json.dumps(said))
    load(mixed)
    edit_config(mixed, quantization_config=REMOVED)
    load(mixed)
    said["quantization"] = {"quant_algo": "FP8_BLOCK_SCALES"}
    (mixed / "hf_quant_config.json").write_text(json.dumps(said))
    assert "experts: stored as nvfp4, the configuration declares fp8" in str(refusal(mixed))


@pytest.mark.parametrize(
    ("module", "algorithm", "why"),
    [
        ("mtp.layers.0.mlp.experts", "INT4_AWQ", "INT4_AWQ is not supported"),
        ("mtp.layers.0.mlp.experts", "FP8", "FP8 is not supported"),
        ("model.layers.3.self_attn.q_proj", "MXFP8", "MXFP8 is not supported"),
        ("model.layers.3.self_attn.q_proj", "NVFP4", "not read in a quantised form"),
        ("mtp.layers.0.mlp.experts", "NVFP4", "mtp_experts: stored as fp8"),
        ("model.language_model.layers.2.mlp.experts", "FP8_PB_WO", "in different layers"),
    ],
)
def test_an_unknown_algorithm_is_refused_LOD_08(mixed: Path, module: str, algorithm: str, why: str):
    """LOD-08: by its name, and with the module's."""
    layers = layers_of_three_algorithms() | {module: {"quant_algo": algorithm}}
    edit_config(mixed, quantization_config={**MIXED, "quantized_layers": layers})
    assert why in str(refusal(mixed))


CONTRADICTIONS = [
    ({"quant_method": "awq"}, "quant_method 'awq' is not supported"),
    ({"quant_algo": "MXFP4"}, "quant_algo: MXFP4 is not supported"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "stored as nvfp4"),
    ({"quant_algo": "NVFP4", "group_size": 32}, "group_size: 32, only 16 is read"),
    (
        {"quant_algo": "NVFP4", "config_groups": {"g": {"weights": {"num_bits": 8}}}},
        "num_bits 8: only 4 is read",
    ),
    ({"quant_algo": "NVFP4", "ignore": ["*.experts.*"]}, "the configuration declares bf16"),
    ({"quant_algo": "NVFP4", "ignore": "lm_head"}, "ignore: a list of module names"),
    ("nvfp4", "a JSON object is expected"),
    (REMOVED, "the configuration declares bf16"),
]


@pytest.mark.parametrize(("said", "why"), CONTRADICTIONS, ids=[w for _, w in CONTRADICTIONS])
def test_a_configuration_that_contradicts_the_files(nvfp4: Path, said: Any, why: str):
    edit_config(nvfp4, quantization_config=said)
    assert why in str(refusal(nvfp4))


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"weight_block_size": None}, "weight_block_size None"),
        ({"weight_block_size": [64, 64]}, "weight_block_size [64, 64]"),
        ({"fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"modules_to_not_convert": ["mtp"]}, "mtp_experts: stored as fp8"),
    ],
)
def test_a_block_fp8_configuration_that_is_not_read(fp8: Path, said: dict[str, Any], why: str):
    text = json.loads((fp8 / "config.json").read_text())["quantization_config"]
    edit_config(fp8, quantization_config={**text, **said})
    assert why in str(refusal(fp8))


@pytest.mark.parametrize(("dtype", "why"), [("bfloat16", "stored as fp8"), ("int4", "'int4'")])
def test_the_stated_dtype_of_the_table(nvfp4: Path, dtype: str, why: str):
    edit_config(nvfp4, ple_embedding_dtype=dtype)
    assert why in str(refusal(nvfp4))


def test_one_expert_of_another_form_is_named(nvfp4: Path):
    name = "model.layers.2.mlp.experts.3.up_proj.weight"
    change(nvfp4, **{name.replace(".", "__"): np.zeros((32, 64), BF16)})
    assert f"{name} (" in str(refusal(nvfp4))
    assert "dtype BF16, expected U8" in str(refusal(nvfp4))


def test_input_scales_of_one_expert_are_missing_LOD_10(nvfp4: Path):
    """LOD-10: the message names the experts."""
    tensors = tensors_of(nvfp4)
    gone = [n for n in tensors if ".experts.3." in n and n.endswith("input_scale")]
    write_tensors(nvfp4, {n: a for n, a in tensors.items() if n not in gone})
    assert refusal(nvfp4).problems == tuple(
        f"model.layers.{layer}.mlp.experts: input_scale is missing for expert 3 "
        "(gate_proj, up_proj, down_proj); either all experts have one or none"
        for layer in range(4)
    )


def test_without_input_scales_weights_load_alone_LOD_10(nvfp4: Path):
    """LOD-10: weight-only on purpose: None, nothing invented, values unchanged."""
    before = load(nvfp4)
    tensors = tensors_of(nvfp4)
    write_tensors(nvfp4, {n: a for n, a in tensors.items() if not n.endswith("input_scale")})
    params = load(nvfp4)
    for layer, old in zip(params.layers, before.layers, strict=True):
        experts, others = (part(x, "mlp.experts.gate_up_proj") for x in (layer, old))
        assert experts.input_scale is None
        assert np.array_equal(experts.dequantize(), others.dequantize())


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf])
@pytest.mark.parametrize("kind", ["weight_scale_2", "input_scale"])
def test_a_scale_that_is_none_LOD_10(nvfp4: Path, kind: str, scale: float):
    """LOD-10: zero, negative or not finite; the tensor is named."""
    name = f"model.layers.1.mlp.experts.3.up_proj.{kind}"
    change(nvfp4, **{name.replace(".", "__"): np.array(scale, np.float32)})
    (problem,) = refusal(nvfp4).problems
    assert problem.startswith(f"{name} (")
    assert "is not a positive number" in problem


@pytest.mark.parametrize("code", [0x7F, 0xFF, 0x81])
def test_group_scales_that_are_none(nvfp4: Path, code: int):
    name = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    scales = tensors_of(nvfp4)[name]
    scales.view(np.uint8)[2, 1] = code
    change(nvfp4, **{name.replace(".", "__"): scales})
    assert f"{name} (" in str(refusal(nvfp4))
    assert "1 of 128 scales are negative or not finite" in str(refusal(nvfp4))


def test_block_scales_that_are_none(fp8: Path):
    name = "mtp.layers.0.mlp.experts.3.up_proj.weight_scale_inv"
    change(fp8, **{name.replace(".", "__"): np.array([[1, np.nan], [-1, 2]], BF16)})
    assert "2 of 4 scales are negative or not finite" in str(refusal(fp8))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_gate_and_up_keep_their_own_scales_LOD_11(nvfp4: Path, shape: tuple[int, ...]):
    """LOD-11: 0.5 and 2.0: exact for each half, the ratio of 4 is not lost."""
    name = "model.layers.0.mlp.experts.7.{}_proj.weight_scale_2".format
    tensors = tensors_of(nvfp4)
    ones = {name("gate"): np.ones(shape, np.float32), name("up"): np.ones(shape, np.float32)}
    write_tensors(nvfp4, tensors | ones)
    before = np.asarray(part(load(nvfp4), "layers.0.mlp.experts.gate_up_proj").dequantize())[7]
    halves = {
        name("gate"): np.full(shape, 0.5, np.float32),
        name("up"): np.full(shape, 2.0, np.float32),
    }
    write_tensors(nvfp4, tensors | halves)
    after = np.asarray(part(load(nvfp4), "layers.0.mlp.experts.gate_up_proj").dequantize())[7]
    assert np.array_equal(after[0], before[0] * 0.5)
    assert np.array_equal(after[1], before[1] * 2.0)


def test_golden_nvfp4_values_are_those_of_the_formula():
    """An independent reading of one expert, by the table of E2M1 values."""
    path = GOLDEN / "nvfp4" / "checkpoint"
    name = "model.layers.3.mlp.experts.9.down_proj.{}".format
    tensors = tensors_of(path)
    packed = tensors[name("weight")]
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    values = np.where(codes >= 8, -1, 1) * magnitudes[codes % 8]
    scale = tensors[name("weight_scale")].astype(np.float32).repeat(16, 1)
    expected = values.astype(np.float32) * scale * tensors[name("weight_scale_2")]
    found = part(load(path), "layers.3.mlp.experts.down_proj").dequantize()[9]
    assert np.array_equal(found, expected)
