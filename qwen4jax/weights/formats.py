"""What a checkpoint says of its quantisation: `quantization_config`, `hf_quant_config.json`.

The stored tensors decide how they are read; these texts must agree with them. Dialects: block FP8
(`quant_method: fp8`), NVIDIA modelopt (`NVFP4`, block FP8, and `MIXED_PRECISION` with an algorithm
for each module), and the field `ple_embedding_dtype`.
"""

import dataclasses
import fnmatch
from collections.abc import Iterable
from typing import Any

from qwen4jax.config import Quantization
from qwen4jax.quant import FP8_BLOCK, NVFP4_GROUP
from qwen4jax.weights.names import PREFIXES, Naming

# what a checkpoint states; what drafts are read with is chosen when it is loaded
GROUPS = tuple(f.name for f in dataclasses.fields(Quantization) if not f.name.startswith("draft"))
_TABLE = "ngram_embedding"

# modelopt's algorithm -> stored form of a matrix
_ALGORITHMS = {
    "NVFP4": "nvfp4",
    "W4A16_NVFP4": "nvfp4",
    "FP8_BLOCK_SCALES": "fp8",
    "FP8_PB_WO": "fp8",
}
# one scale for a whole tensor: how n-gram tables are stored, and nothing else that is read here
_TABLE_ALGORITHM = "FP8"
_TABLE_DTYPES = {"float8_e4m3fn": "fp8", "bfloat16": "bf16", "float32": "bf16", "float16": "bf16"}

Forms = dict[str, frozenset[str]]


class _Refused(Exception):
    """Why a text is refused."""


def declared_forms(raw: dict[str, Any], sidecar: Any, naming: Naming) -> tuple[Forms, list[str]]:
    """(group -> stored forms that the texts allow, problems).

    Args:
        raw: the parsed `config.json`.
        sidecar: the parsed `hf_quant_config.json`, or None.
        naming: knows the model's expert blocks and tables.
    """
    modules = _modules(naming)
    allowed: Forms = {
        "experts": frozenset({"bf16", "fp8", "nvfp4"}),
        "mtp_experts": frozenset({"bf16", "fp8", "nvfp4"}),
        _TABLE: frozenset({"bf16", "fp8"}),
    }
    problems = []
    for where, text in _texts(raw, sidecar):
        try:
            said = _read(text, modules)
        except _Refused as e:
            problems.append(f"{where}: {e}")
            continue
        for group in GROUPS:
            both = allowed[group] & said.get(group, allowed[group])
            if not both:
                problems.append(
                    f"{where}: stores {group} as {' or '.join(sorted(said[group]))}, "
                    f"another field says {' or '.join(sorted(allowed[group]))}"
                )
            allowed[group] = both or allowed[group]
    return allowed, problems


def _texts(raw: dict[str, Any], sidecar: Any) -> Iterable[tuple[str, dict[str, Any]]]:
    """Each text that says something of quantisation; none at all is a text, too."""
    merged = {**raw, **raw.get("text_config", {})}
    found = {
        "config.json: quantization_config": merged.get("quantization_config"),
        "hf_quant_config.json": sidecar,
    }
    if all(text is None for text in found.values()):
        yield "config.json without quantization_config", {"quant_method": None}
    for where, text in found.items():
        if text is not None:
            yield where, text
    if (dtype := merged.get("ple_embedding_dtype")) is not None:
        yield "config.json: ple_embedding_dtype", {"quant_method": _TABLE, "dtype": dtype}


def _modules(naming: Naming) -> dict[str, list[str]]:
    """Group -> the names below the main model's prefix of the modules it consists of."""
    bare = dataclasses.replace(naming, prefix="")
    blocks = bare.expert_blocks()
    return {
        "experts": [b for b in blocks if not b.startswith("mtp.")],
        "mtp_experts": [b for b in blocks if b.startswith("mtp.")],
        _TABLE: [bare.module(path) for path in bare.tables()],
    }


def _read(text: Any, modules: dict[str, list[str]]) -> Forms:
    if not isinstance(text, dict):
        raise _Refused(f"a JSON object is expected, found {type(text).__name__}")
    # hf_quant_config.json has the same fields one level deeper, without a method
    text = {**text, **_object(text, "quantization")}
    method = text.get("quant_method", "modelopt")
    if method is None:
        return {"experts": frozenset({"bf16"}), "mtp_experts": frozenset({"bf16"})}
    if method == _TABLE:
        if text["dtype"] not in _TABLE_DTYPES:
            raise _Refused(f"{text['dtype']!r} is not one of {', '.join(_TABLE_DTYPES)}")
        return {_TABLE: frozenset({_TABLE_DTYPES[text["dtype"]]})}
    if method == "fp8":
        return _read_block_fp8(text, modules)
    if method == "modelopt":
        return _read_modelopt(text, modules)
    raise _Refused(f"quant_method {method!r} is not supported, only 'fp8' and 'modelopt'")


def _read_block_fp8(text: dict[str, Any], modules: dict[str, list[str]]) -> Forms:
    _expect(text, "fmt", "e4m3")
    _expect(text, "activation_scheme", "dynamic")
    block = [FP8_BLOCK, FP8_BLOCK]
    if text.get("weight_block_size") != block:
        raise _Refused(f"weight_block_size {text.get('weight_block_size')!r}: only {block} is read")
    forms = _one_algorithm("fp8", _strings(text, "modules_to_not_convert"), modules)
    if _any_named(modules[_TABLE], _strings(text, "modules_to_convert")):
        forms[_TABLE] = frozenset({"fp8"})
    return forms


def _read_modelopt(text: dict[str, Any], modules: dict[str, list[str]]) -> Forms:
    algorithm = _algorithm(text)
    ignored = _strings(text, "ignore") + _strings(text, "exclude_modules")
    if algorithm == "MIXED_PRECISION":
        return _read_mixed(_object(text, "quantized_layers"), modules)
    if algorithm not in _ALGORITHMS:
        raise _unsupported(algorithm, "quant_algo")
    form = _ALGORITHMS[algorithm]
    _expect_group(text, form, "group_size")
    for name, group in _object(text, "config_groups").items():
        weights = _object(group, "weights") if isinstance(group, dict) else {}
        _expect_group(weights, form, f"config_groups.{name}.weights.group_size")
        _expect(weights, "num_bits", {"nvfp4": 4, "fp8": 8}[form])
        _expect(weights, "type", "float")
    return _one_algorithm(form, ignored, modules)


def _read_mixed(layers: dict[str, Any], modules: dict[str, list[str]]) -> Forms:
    """One algorithm for each module; a group of modules must have one in common."""
    unread = dict(layers)
    found: dict[str, dict[str, str]] = {group: {} for group in modules}
    for group, members in modules.items():
        known = {_TABLE_ALGORITHM: "fp8"} if group == _TABLE else _ALGORITHMS
        for pattern, settings in layers.items():
            named = [member for member in members if _names(pattern, member)]
            if not named:
                continue
            unread.pop(pattern, None)
            algorithm = _algorithm(settings if isinstance(settings, dict) else {})
            if algorithm not in known:
                raise _unsupported(algorithm, f"quantized_layers.{pattern}", known)
            _expect_group(settings, known[algorithm], f"quantized_layers.{pattern}.group_size")
            found[group].update(dict.fromkeys(named, known[algorithm]))
    if unread:
        pattern, settings = next(iter(unread.items()))
        algorithm = _algorithm(settings if isinstance(settings, dict) else {})
        if algorithm not in (*_ALGORITHMS, _TABLE_ALGORITHM):
            raise _unsupported(algorithm, f"quantized_layers.{pattern}")
        raise _Refused(
            f"quantized_layers names {len(unread)} modules that are not read in a quantised form, "
            f"as {pattern!r} ({algorithm})"
        )
    forms: Forms = {}
    for group, members in modules.items():
        kinds = {found[group].get(member, "bf16") for member in members}
        if len(kinds) > 1:
            raise _Refused(
                f"quantized_layers stores {group} as {' and '.join(sorted(kinds))} in different "
                "layers; only one form for all is read"
            )
        if kinds:
            forms[group] = frozenset(kinds)
    return forms


def _one_algorithm(form: str, ignored: list[str], modules: dict[str, list[str]]) -> Forms:
    """A single algorithm for all linear modules but the ignored ones.

    Exporters leave the draft head as it was without saying so: both forms are allowed there.
    """
    plain = frozenset({"bf16"})
    return {
        "experts": plain if _any_named(modules["experts"], ignored) else frozenset({form}),
        "mtp_experts": plain if _any_named(modules["mtp_experts"], ignored) else plain | {form},
    }


def _any_named(members: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(_names(pattern, member) for member in members for pattern in patterns)


def _names(pattern: str, module: str) -> bool:
    """Whether `pattern` names the module, what it is part of, or a part of it.

    Patterns are globs, full names with or without the main model's prefix, or their last parts.
    """
    spellings = [module, *(prefix + module for prefix in PREFIXES)]
    if any(c in pattern for c in "*?["):
        parts = ("", ".0.gate_proj") if module.endswith(".experts") else ("",)
        return any(
            fnmatch.fnmatchcase(name + part, pattern) for name in spellings for part in parts
        )
    return any(
        f"{name}.".startswith(f"{pattern}.")
        or f"{pattern}.".startswith(f"{name}.")
        or name.endswith(f".{pattern}")
        for name in spellings
    )


def _algorithm(text: dict[str, Any]) -> str:
    algorithm = text.get("quant_algo")
    return algorithm.upper() if isinstance(algorithm, str) else repr(algorithm)


def _unsupported(algorithm: str, where: str, known: Iterable[str] = _ALGORITHMS) -> _Refused:
    return _Refused(f"{where}: {algorithm} is not supported here, only {', '.join(known)}")


def _expect(text: dict[str, Any], field: str, value: Any) -> None:
    if text.get(field, value) != value:
        raise _Refused(f"{field} {text[field]!r}: only {value!r} is read")


def _expect_group(text: dict[str, Any], form: str, where: str) -> None:
    size = NVFP4_GROUP if form == "nvfp4" else FP8_BLOCK
    if text.get("group_size", size) not in (size, None):
        raise _Refused(f"{where}: {text['group_size']!r}, only {size} is read")


def _object(text: dict[str, Any], field: str) -> dict[str, Any]:
    value = text.get(field) or {}
    if not isinstance(value, dict):
        raise _Refused(f"{field}: a JSON object is expected, found {type(value).__name__}")
    return value


def _strings(text: dict[str, Any], field: str) -> list[str]:
    value = text.get(field) or []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise _Refused(f"{field}: a list of module names is expected")
    return value


def quantization_config(quantization: Quantization, naming: Naming) -> dict[str, Any]:
    """The fields of `config.json` that describe `quantization` as released checkpoints do.

    Returns:
        `quantization_config` and `ple_embedding_dtype`, those that are needed.
    """
    q = quantization
    fields: dict[str, Any] = {}
    if q.ngram_embedding == "fp8":
        fields["ple_embedding_dtype"] = "float8_e4m3fn"
    if q.experts == q.mtp_experts == "bf16":
        return fields
    modules = {
        group: [_prefixed(name, naming.prefix) for name in names]
        for group, names in _modules(naming).items()
    }
    if q.experts == "nvfp4" and q.mtp_experts == "bf16":
        fields["quantization_config"] = _write_nvfp4()
    elif q.experts == "fp8" and q.mtp_experts != "nvfp4":
        fields["quantization_config"] = _write_block_fp8(q, modules)
    else:
        fields["quantization_config"] = _write_mixed(q, modules)
    return fields


# every module of the model but the routed experts
_BACKBONE = [
    "lm_head",
    "mtp.*",
    "mtp.fc_embedding",
    "mtp.fc_hidden",
    "*.self_attn.*",
    "*.linear_attn.*",
    "*.mlp.gate*",
    "*.mlp.shared_expert.*",
    "*.mlp.shared_expert_gate*",
    "*hyper_connection*",
    "*.ple.*",
    "model.visual.*",
    "*embed_tokens",
]


def _prefixed(name: str, prefix: str) -> str:
    return name if name.startswith("mtp.") else prefix + name


def _write_nvfp4() -> dict[str, Any]:
    weights = {"num_bits": 4, "type": "float", "group_size": NVFP4_GROUP, "dynamic": False}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": _BACKBONE,
    }


def _write_block_fp8(q: Quantization, modules: dict[str, list[str]]) -> dict[str, Any]:
    text: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": [
            name for name in _BACKBONE if name != "mtp.*" or q.mtp_experts == "bf16"
        ],
    }
    if q.ngram_embedding == "fp8":
        text["modules_to_convert"] = modules[_TABLE]
    return text


def _write_mixed(q: Quantization, modules: dict[str, list[str]]) -> dict[str, Any]:
    nvfp4 = {"quant_algo": "NVFP4", "group_size": NVFP4_GROUP}
    settings = {"nvfp4": nvfp4, "fp8": {"quant_algo": "FP8_BLOCK_SCALES", "group_size": FP8_BLOCK}}
    layers: dict[str, Any] = {}
    for group in ("experts", "mtp_experts"):
        if (form := getattr(q, group)) != "bf16":
            layers |= dict.fromkeys(modules[group], settings[form])
    if q.ngram_embedding == "fp8":
        layers |= {name: {"quant_algo": _TABLE_ALGORITHM} for name in modules[_TABLE]}
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": layers,
        "ignore": [name for name in _BACKBONE if name != "mtp.*"],
    }
