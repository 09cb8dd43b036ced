"""Reading Hugging Face's `config.json`: spellings, nesting, unknown fields, contradictions."""

import warnings
from typing import Any

LINEAR = "linear_attention"
SPARSE = "qwen_sparse_attention"
# transformers 5.17 and 5.24 and the released file name the same layer differently
_LAYER_TYPE_SPELLINGS = {
    "linear_attention": LINEAR,
    "full_attention": SPARSE,
    "qwen_sparse_attention": SPARSE,
    "indexed_attention": SPARSE,
}
# far over any model: a damaged count must not be counted up to
_MOST_LAYERS = 4096
_MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
# fields of a Hugging Face file that say nothing about the computation done here
_WITHOUT_EFFECT = frozenset(
    "architectures attention_dropout bos_token_id pad_token_id dtype torch_dtype image_token_id "
    "initializer_range language_model_only mlp_only_layers model_type mtp "
    "mtp_use_dedicated_embeddings number_of_conv_states output_router_logits quantization_config "
    "router_aux_loss_coef text_config transformers_version use_cache video_token_id vision_config "
    "vision_end_token_id vision_start_token_id full_attention_interval partial_rotary_factor "
    "rope_theta intermediate_size return_dict output_hidden_states output_attentions "
    "chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type _name_or_path "
    "attn_output_gate".split()
)

_REQUIRED = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "indexer_n_heads indexer_kv_heads indexer_head_dim indexer_budget indexer_compress_ratio"
).split()


_ROPE_FIELDS = frozenset(
    "rope_type rope_theta partial_rotary_factor mrope_section mrope_interleaved".split()
)


class ConfigError(ValueError):
    """A configuration that names no model this package can run; the message names the field."""


def read_fields(raw: Any, known: set[str]) -> dict[str, Any]:
    """Values for the fields `known` from the parsed contents of a `config.json`.

    Text settings may stand at the top or under `text_config`; `rope_parameters` comes back as a
    plain dict. Fields that are not `known` and not known to be without effect are reported in one
    warning.

    Raises:
        ConfigError: two settings contradict each other or one is of no supported kind.
    """
    if not isinstance(raw, dict):
        raise ConfigError(f"a JSON object is expected, found {type(raw).__name__}")
    text = raw.get("text_config", raw)
    if not isinstance(text, dict):
        raise ConfigError("text_config: a JSON object is expected")
    for settings in (raw, text):
        model_type = settings.get("model_type", "qwen4_exp_text")
        if model_type not in _MODEL_TYPES:
            raise ConfigError(f"model_type: {model_type!r} is not one of {', '.join(_MODEL_TYPES)}")
    for name in set(raw) & set(text) & known:
        if raw[name] != text[name]:
            raise ConfigError(
                f"{name}: {raw[name]!r} at the top contradicts {text[name]!r} in text_config"
            )
    merged = {**raw, **text}
    ignored = {"ple_embedding_dtype"} | _WITHOUT_EFFECT
    internal = {"rope_parameters", "layer_types", "quantization", "ablation", "dtype"}
    own = {"quantization", "ablation"}
    unknown = sorted(set(merged) - (known - own) - ignored)
    rope = merged.get("rope_parameters")
    if isinstance(rope, dict):
        unknown += sorted(f"rope_parameters.{name}" for name in set(rope) - _ROPE_FIELDS)
    if unknown:
        warnings.warn(
            f"config.json: unknown fields without effect: {', '.join(unknown)}", stacklevel=4
        )
    for name in _REQUIRED:
        if merged.get(name) is None:
            raise ConfigError(f"{name}: the field is missing")
    # what transformers' class assumes where a file is silent and the released file is not
    values: dict[str, Any] = {
        "output_gate_type": None,
        "ple_layer_ids": (),
        "split_ngram_parts": 512,
    }
    for name in known - internal:
        if name in merged:
            value = merged[name]
            values[name] = tuple(value) if isinstance(value, list) else value
    if values["ple_layer_ids"] is None:
        values["ple_layer_ids"] = ()
    if values.get("ple_embed_dim") is None:
        values["ple_embed_dim"] = values["hidden_size"]
    dtype = merged.get("dtype", merged.get("torch_dtype"))
    values["dtype"] = dtype if dtype in ("bfloat16", "float32") else "bfloat16"
    values["rope_parameters"] = _read_rope(merged)
    values["layer_types"] = _read_layer_types(merged)
    return values


def _read_rope(raw: dict[str, Any]) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"rope_parameters: {rope!r} is no JSON object")
    if not isinstance(rope.get("mrope_section", []), list):
        raise ConfigError(f"rope_parameters.mrope_section: {rope['mrope_section']!r} is no list")
    rope_type = rope.get("rope_type", "default")
    if rope_type != "default":
        raise ConfigError(
            f"rope_parameters.rope_type: {rope_type!r} is not supported, only 'default'"
        )
    if rope.get("mrope_interleaved", True) is not True:
        raise ConfigError("rope_parameters.mrope_interleaved: only true is supported")
    for name in ("partial_rotary_factor", "rope_theta"):
        if name in raw and rope.get(name, raw[name]) != raw[name]:
            raise ConfigError(
                f"{name}: {raw[name]!r} contradicts rope_parameters.{name}={rope[name]!r}"
            )
    values = {
        name: rope.get(name, raw.get(name))
        for name in ("rope_theta", "partial_rotary_factor", "mrope_section")
    }
    return {name: value for name, value in values.items() if value is not None}


def _read_layer_types(raw: dict[str, Any]) -> tuple[str, ...]:
    count: Any = raw.get("num_hidden_layers")
    if not positive_int(count) or count > _MOST_LAYERS:
        raise ConfigError(f"num_hidden_layers: {count!r} is not an integer in 1..{_MOST_LAYERS}")
    interval = raw.get("full_attention_interval")
    if interval is not None and not positive_int(interval):
        raise ConfigError(f"full_attention_interval: {interval!r} is not a positive integer")
    by_interval = tuple(SPARSE if (i + 1) % (interval or 4) == 0 else LINEAR for i in range(count))
    names = raw.get("layer_types")
    if names is None:
        return by_interval
    if not isinstance(names, list):
        raise ConfigError(f"layer_types: {names!r} is no list")
    for name in names:
        if not isinstance(name, str) or name not in _LAYER_TYPE_SPELLINGS:
            raise ConfigError(
                f"layer_types: {name!r} is not one of {', '.join(_LAYER_TYPE_SPELLINGS)}"
            )
    types = tuple(_LAYER_TYPE_SPELLINGS[name] for name in names)
    if interval is not None and types != by_interval:
        raise ConfigError(f"layer_types: contradicts full_attention_interval={interval}")
    return types


def positive_int(value: Any) -> bool:
    """Whether `value` is an integer over 0 (a bool is none)."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def number(value: Any) -> bool:
    """Whether `value` is an integer or a float (a bool is none)."""
    return isinstance(value, int | float) and not isinstance(value, bool)
