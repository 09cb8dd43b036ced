"""Configurations: what a file may say, in which words, and what is refused by name."""

import copy
import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from qwen4jax.ablation import Ablation
from qwen4jax.config import LINEAR, SPARSE, Config, Quantization, RopeParameters
from qwen4jax.hf_fields import ConfigError
from qwen4jax.params import count_parameters, declare, tensors
from tests.tiny import T0

RAW: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "dtype": "float32",
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "layer_types": [LINEAR, LINEAR, LINEAR, SPARSE],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [1, 1, 0],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "hc_count": 4,
    "hc_lowrank": 8,
    "ple_layer_ids": [2],
    "ple_embed_dim": 32,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 11,
    "make_ngram_vocab_size_divisible_by": 4,
    "split_ngram_parts": 3,
    "seed": 1234,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "tie_word_embeddings": False,
}


def read(**changes: Any) -> Config:
    """T0's file with fields changed; `...` takes a field out."""
    raw = copy.deepcopy(RAW) | changes
    return Config.from_dict({k: v for k, v in raw.items() if v is not ...})


def refusal(**changes: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        read(**changes)
    return str(caught.value)


def test_the_file_of_t0():
    assert read() == T0
    assert hash(read()) == hash(T0)


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_types": [LINEAR] * 3 + ["full_attention"]},
        {"layer_types": [LINEAR] * 3 + ["indexed_attention"]},
        {"layer_types": ..., "full_attention_interval": 4},
        {"full_attention_interval": 4},
        {"layer_types": ...},
        {"model_type": "qwen4_exp"},
        {"model_type": ...},
        {"ple_embed_dim": None},
        {"eos_token_id": 1, "architectures": ["Qwen4ExpForCausalLM"]},
        {"partial_rotary_factor": 0.25},
        {"torch_dtype": "float32", "dtype": ...},
    ],
    ids=str,
)
def test_other_words_for_the_same(changes: dict[str, Any]):
    """LOD-17: spellings, an interval instead of a list, flat and nested rotary settings."""
    assert read(**changes) == T0


def test_settings_below_text_config():
    """LOD-17: as released, beside the settings of the vision tower."""
    outer = {"model_type": "qwen4_exp", "vision_config": {"model_type": "qwen4_exp", "depth": 27}}
    assert Config.from_dict(outer | {"text_config": RAW}) == T0
    repeated = outer | {"text_config": RAW, "vocab_size": 64, "tie_word_embeddings": False}
    assert Config.from_dict(repeated) == T0
    with pytest.raises(ConfigError, match=r"^vocab_size: 65 at the top contradicts 64"):
        Config.from_dict(outer | {"text_config": RAW, "vocab_size": 65})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layer_types", [LINEAR] * 3 + ["sliding_attention"]),
        ("layer_types", [LINEAR] * 4 + [SPARSE]),
        ("full_attention_interval", 3),
        ("full_attention_interval", 0),
        ("ple_layer_ids", [0]),
        ("ple_layer_ids", [5]),
        ("ple_layer_ids", [2, 2]),
        ("ple_layer_ids", [3, 2]),
        ("ple_layer_ids", [4]),
        ("ple_layer_ids", ["2"]),
        ("indexer_head_dim", ...),
        ("indexer_budget", ...),
        ("indexer_budget", 9),
        ("indexer_budget", 0),
        ("indexer_kv_heads", 2),
        ("indexer_head_dim", 2),
        ("hc_count", 1),
        ("eos_token_id", None),
        ("eos_token_id", []),
        ("eos_token_id", 64),
        ("eos_token_id", [1, -1]),
        ("num_key_value_heads", 3),
        ("linear_num_key_heads", 3),
        ("num_experts_per_tok", 5),
        ("mtp_num_hidden_layers", 2),
        ("mtp_num_hidden_layers", -1),
        ("mtp_num_hidden_layers", "1"),
        ("mtp_num_hidden_layers", 99),
        ("hidden_size", True),
        ("hidden_size", 2**40),
        ("hidden_act", "gelu"),
        ("output_gate_type", "tanh"),
        ("mamba_ssm_dtype", "bfloat16"),
        ("rms_norm_eps", 0),
        ("split_ngram_parts", 7),
        ("ngram_size", 1),
        ("ple_embed_dim", 34),
        ("model_type", "qwen3_next"),
        ("num_hidden_layers", 0),
        ("partial_rotary_factor", 0.5),
    ],
    ids=str,
)
def test_a_bad_field_is_named(field: str, value: Any):
    """LOD-17, LOD-19: before anything is allocated."""
    message = refusal(**{field: value})
    # a contradiction is told of the other of the two fields
    assert message.startswith(f"{field}:") or f"contradicts {field}={value!r}" in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rope_theta", 0),
        ("rope_theta", -1e4),
        ("rope_theta", float("nan")),
        ("rope_theta", float("inf")),
        ("rope_theta", "1e4"),
        ("partial_rotary_factor", 0),
        ("partial_rotary_factor", 1.5),
        ("partial_rotary_factor", 0.2),
        ("mrope_section", [1, 1]),
        ("mrope_section", [1, 1, -1]),
        ("rope_type", "yarn"),
        ("mrope_interleaved", False),
    ],
    ids=str,
)
def test_bad_rotary_settings_are_named(field: str, value: Any):
    rope = RAW["rope_parameters"] | {field: value}
    assert refusal(rope_parameters=rope).startswith(f"rope_parameters.{field}:")


def test_unknown_fields_inside_or_of_our_own_are_reported():
    rope = RAW["rope_parameters"] | {"factor": 2.0}
    with pytest.warns(UserWarning, match=r"effect: ablation, rope_parameters\.factor$"):
        assert read(rope_parameters=rope, ablation={"index_share": "share"}) == T0


def test_unknown_fields_are_reported_once():
    with pytest.warns(
        UserWarning, match="unknown fields without effect: another, surprise$"
    ) as seen:
        assert read(surprise=1, another=[2]) == T0
    assert len(seen) == 1


def test_fields_without_effect_are_silent():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(use_cache=False, initializer_range=0.02, transformers_version="5.17") == T0


def test_what_a_silent_file_means():
    """The defaults of the reference's class, which are not those of the released file."""
    config = read(
        output_gate_type=..., split_ngram_parts=..., ple_layer_ids=..., norm_topk_prob=...
    )
    assert config.gate_activation == "silu"
    assert config.ple_layer_ids == ()
    assert config.norm_topk_prob
    assert read(dtype=...).dtype == "bfloat16"


def test_from_hf_reads_a_directory(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(RAW))
    assert Config.from_hf(tmp_path) == T0
    for text, what in (("{", "cannot be read as JSON"), ("[]", "a JSON object is expected")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=what):
            Config.from_hf(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json: no such file"):
        Config.from_hf(tmp_path)


def test_the_released_model():
    """Every parameter but those of vision, counted from the declarations."""
    config = Config.flash_next()
    declared = declare(config)
    assert count_parameters(declared) == 179_551_050_368
    assert config.layer_types.count(SPARSE) == 12
    assert (config.rotary_dim, config.index_blocks, config.selected_tokens) == (64, 512, 2051)
    assert [i for i in range(48) if config.ple_index(i) is not None] == [1]
    bytes_held = sum(t.nbytes for t in tensors(declared))
    assert bytes_held == 2 * 179_551_050_368


def test_stored_forms_hold_the_same_parameters():
    plain = count_parameters(declare(Config.flash_next()))
    for experts in ("nvfp4", "fp8"):
        form = Quantization(experts, "fp8", "fp8")
        assert count_parameters(declare(Config.flash_next(quantization=form))) == plain


def test_a_changed_copy_is_checked():
    assert T0.replace(indexer_budget=16).index_blocks == 4
    with pytest.raises(ConfigError, match=r"^indexer_budget: 10"):
        T0.replace(indexer_budget=10)
    for drafted in (0, -1, True, 2.5, T0.vocab_size + 1):
        with pytest.raises(ConfigError, match=r"^quantization\.draft_vocab: "):
            T0.replace(quantization=Quantization(draft_vocab=drafted))  # pyright: ignore[reportArgumentType]
    with pytest.raises(dataclasses.FrozenInstanceError):
        T0.vocab_size = 3  # pyright: ignore[reportAttributeAccessIssue]


def test_configurations_are_keys():
    """Static arguments of compiled functions: equal ones are one key, other ones another."""
    assert len({T0, T0.replace(), read()}) == 1
    others = {
        T0.replace(rope_parameters=RopeParameters(mrope_section=(1, 1, 0))),
        T0.replace(ablation=Ablation("share")),
        T0.replace(quantization=Quantization(experts="fp8")),
        T0.replace(eos_token_id=(1, 2)),
    }
    assert len(others | {T0}) == 5


def test_ablations_are_named():
    with pytest.raises(ValueError, match="'shared' is not one of fresh, share, share_frozen"):
        Ablation(index_share="shared")  # pyright: ignore[reportArgumentType]
