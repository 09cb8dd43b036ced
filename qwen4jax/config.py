"""The model's configuration: what a `qwen4_exp` checkpoint directory says of itself, checked.

Field names are those of the Hugging Face configuration `qwen4_exp_text`. A `Config` is frozen and
hashable: it is a static argument of every compiled function.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any, Literal, Self

from qwen4jax.ablation import Ablation
from qwen4jax.hf_fields import LINEAR, SPARSE, ConfigError, number, positive_int, read_fields
from qwen4jax.ngram import NgramHash, ngram_hash

ExpertFormat = Literal["bf16", "fp8", "nvfp4"]
TableFormat = Literal["bf16", "fp8"]


@dataclasses.dataclass(frozen=True)
class RopeParameters:
    """Rotary position embedding, Hugging Face's `rope_parameters`.

    Attributes:
        rope_theta: base of the frequencies.
        partial_rotary_factor: share of `head_dim` that is rotated.
        mrope_section: frequency pairs driven by the temporal, height and width position.
    """

    rope_theta: float = 1e7
    partial_rotary_factor: float = 0.25
    mrope_section: tuple[int, int, int] = (11, 11, 10)


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The stored form of the tensors that released checkpoints quantise; the rest is `dtype`.

    Attributes:
        experts: routed experts of the main model.
        mtp_experts: routed experts of the draft head.
        ngram_embedding: rows of the n-gram tables; `fp8` has one scale for a whole table.
        draft: projections of the draft head and the copy of the output head that its drafts are
            read with; `bf16` has no copy. No checkpoint has another: see `weights/draft.py`.
        draft_vocab: ids that drafts are chosen among, the lowest; None is all of them. With fewer
            there is always a copy.
    """

    experts: ExpertFormat = "bf16"
    mtp_experts: ExpertFormat = "bf16"
    ngram_embedding: TableFormat = "bf16"
    draft: ExpertFormat = "bf16"
    draft_vocab: int | None = None

    @property
    def draft_copy(self) -> bool:
        """Whether drafts are read with a copy of the output head."""
        return self.draft != "bf16" or self.draft_vocab is not None


@dataclasses.dataclass(frozen=True)
class Config:
    """A `qwen4_exp` text model. Defaults are the released Qwen3.8-Flash-Next.

    Sizes are counts of elements; ids in `ple_layer_ids` count layers from 1, as in the files.
    """

    vocab_size: int = 248320
    hidden_size: int = 2560
    num_hidden_layers: int = 48
    layer_types: tuple[str, ...] = (LINEAR, LINEAR, LINEAR, SPARSE) * 12
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 262144
    tie_word_embeddings: bool = False
    eos_token_id: int | tuple[int, ...] = 248044

    num_attention_heads: int = 24
    num_key_value_heads: int = 2
    head_dim: int = 256
    attention_bias: bool = False
    rope_parameters: RopeParameters = RopeParameters()

    indexer_n_heads: int = 4
    indexer_kv_heads: int = 1
    indexer_head_dim: int = 128
    indexer_budget: int = 2048
    indexer_compress_ratio: int = 4

    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 48
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    output_gate_type: str | None = "sigmoid"
    mamba_ssm_dtype: str = "float32"

    num_experts: int = 512
    num_experts_per_tok: int = 10
    moe_intermediate_size: int = 640
    shared_expert_intermediate_size: int = 640
    norm_topk_prob: bool = True

    hc_count: int = 4
    hc_lowrank: int = 320

    ple_layer_ids: tuple[int, ...] = (2,)
    ple_embed_dim: int = 2560
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    split_ngram_parts: int = 128
    seed: int = 1234

    mtp_num_hidden_layers: int = 1

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    quantization: Quantization = Quantization()
    ablation: Ablation = Ablation()

    def __post_init__(self):
        _validate(self)

    def replace(self, **changes: Any) -> Self:
        """A copy with `changes`, checked like a new one."""
        return dataclasses.replace(self, **changes)

    @classmethod
    def flash_next(cls, **changes: Any) -> Self:
        """The released Qwen3.8-Flash-Next (125B-A6B and a 51B n-gram table)."""
        return cls(**changes)

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """A model of every mechanism small enough for a CPU test."""
        small: dict[str, Any] = dict(
            vocab_size=384,
            hidden_size=64,
            num_hidden_layers=4,
            layer_types=(LINEAR, LINEAR, LINEAR, SPARSE),
            max_position_embeddings=4096,
            eos_token_id=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rope_parameters=RopeParameters(mrope_section=(2, 1, 1)),
            indexer_n_heads=4,
            indexer_head_dim=16,
            indexer_budget=16,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
            num_experts=16,
            num_experts_per_tok=4,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
            hc_lowrank=16,
            ple_embed_dim=64,
            heads_per_ngram=4,
            ngram_vocab_size_base=1000,
            split_ngram_parts=4,
            dtype="float32",
        )
        return cls(**(small | changes))

    @classmethod
    def from_hf(cls, path: str | Path) -> Self:
        """Reads `config.json` of a Hugging Face checkpoint directory.

        Text settings may stand at the top or under `text_config`. Unknown fields are reported in
        one warning.

        Raises:
            ConfigError: the file is missing, is no JSON object, or contradicts itself.
        """
        file = Path(path) / "config.json"
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError as e:
            raise ConfigError(f"{file}: no such file; a checkpoint directory has one") from e
        except (json.JSONDecodeError, UnicodeDecodeError, OSError) as e:
            raise ConfigError(f"{file}: cannot be read as JSON: {e}") from e
        try:
            return cls.from_dict(raw)
        except ConfigError as e:
            raise ConfigError(f"{file}: {e}") from e

    @classmethod
    def from_dict(cls, raw: Any) -> Self:
        """As `from_hf`, from the parsed contents of `config.json`."""
        values = read_fields(raw, {f.name for f in dataclasses.fields(cls)})
        rope = values.pop("rope_parameters")
        if "mrope_section" in rope:
            rope["mrope_section"] = tuple(rope["mrope_section"])
        return cls(rope_parameters=RopeParameters(**rope), **values)

    @property
    def hash_eos_token_id(self) -> int:
        """The id that ends a document for the n-gram hash: the first where there are several."""
        eos = self.eos_token_id
        return eos if isinstance(eos, int) else eos[0]

    @property
    def rotary_dim(self) -> int:
        """Leading channels of a head that RoPE rotates."""
        return int(self.head_dim * self.rope_parameters.partial_rotary_factor)

    @property
    def gate_activation(self) -> str:
        """Activation of the GDN output gate."""
        return self.output_gate_type or self.hidden_act

    @property
    def index_blocks(self) -> int:
        """Compressed blocks a query may select."""
        return self.indexer_budget // self.indexer_compress_ratio

    @property
    def selected_tokens(self) -> int:
        """Most tokens one query attends to: whole blocks and the open block's tail."""
        return self.indexer_budget + self.indexer_compress_ratio - 1

    def ple_index(self, layer: int) -> int | None:
        """Which PLE layer `layer` (from 0) is, or None."""
        return self.ple_layer_ids.index(layer + 1) if layer + 1 in self.ple_layer_ids else None

    def ngram_hash(self, ple_index: int) -> NgramHash:
        """The hash of one PLE layer."""
        return _ngram_hash(
            self.vocab_size,
            self.ngram_size,
            self.heads_per_ngram,
            self.ngram_vocab_size_base,
            self.make_ngram_vocab_size_divisible_by,
            self.seed,
            ple_index,
        )


@functools.cache
def _ngram_hash(vocab, size, heads, base, divisible_by, seed, ple_index) -> NgramHash:
    return ngram_hash(
        vocab_size=vocab,
        ngram_size=size,
        heads_per_ngram=heads,
        ngram_vocab_size_base=base,
        divisible_by=divisible_by,
        seed=seed,
        ple_index=ple_index,
    )


_POSITIVE = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings indexer_n_heads indexer_kv_heads indexer_head_dim indexer_budget "
    "indexer_compress_ratio linear_num_key_heads linear_num_value_heads linear_key_head_dim "
    "linear_value_head_dim linear_conv_kernel_dim num_experts num_experts_per_tok "
    "moe_intermediate_size shared_expert_intermediate_size hc_count hc_lowrank ple_embed_dim "
    "ple_conv_kernel_size heads_per_ngram ngram_vocab_size_base "
    "make_ngram_vocab_size_divisible_by split_ngram_parts"
).split()


def _validate(c: Config) -> None:
    def need(ok: bool, field: str, why: str) -> None:
        if not ok:
            raise ConfigError(f"{field}: {getattr(c, field.split('.')[0])!r} {why}")

    for name in _POSITIVE:
        fits = positive_int(getattr(c, name)) and getattr(c, name) < 2**31
        need(fits, name, "is not a positive integer below 2**31")
    for name in ("tie_word_embeddings", "attention_bias", "norm_topk_prob"):
        need(isinstance(getattr(c, name), bool), name, "is not true or false")
    for name in ("rope_theta", "partial_rotary_factor"):
        need(number(getattr(c.rope_parameters, name)), f"rope_parameters.{name}", "has no number")
    need(
        len(c.layer_types) == c.num_hidden_layers,
        "layer_types",
        f"does not name num_hidden_layers={c.num_hidden_layers} layers",
    )
    need(set(c.layer_types) <= {LINEAR, SPARSE}, "layer_types", "has an unknown type")
    need(c.hidden_act == "silu", "hidden_act", "is not supported, only 'silu'")
    need(c.gate_activation in ("sigmoid", "silu"), "output_gate_type", "is not 'sigmoid' or 'silu'")
    need(c.mamba_ssm_dtype == "float32", "mamba_ssm_dtype", "is not supported, only 'float32'")
    need(c.dtype in ("bfloat16", "float32"), "dtype", "is not 'bfloat16' or 'float32'")
    drafted = c.quantization.draft_vocab
    need(
        drafted is None or (positive_int(drafted) and drafted <= c.vocab_size),
        "quantization.draft_vocab",
        f"has no number of ids in 1..{c.vocab_size}",
    )
    need(
        number(c.rms_norm_eps) and 0 < c.rms_norm_eps < 1,
        "rms_norm_eps",
        "is not a small positive number",
    )
    need(
        c.num_attention_heads % c.num_key_value_heads == 0,
        "num_key_value_heads",
        f"does not divide num_attention_heads={c.num_attention_heads}",
    )
    need(
        c.linear_num_value_heads % c.linear_num_key_heads == 0,
        "linear_num_key_heads",
        f"does not divide linear_num_value_heads={c.linear_num_value_heads}",
    )
    need(
        c.num_experts_per_tok <= c.num_experts,
        "num_experts_per_tok",
        f"is over num_experts={c.num_experts}",
    )
    need(c.hc_count > 1, "hc_count", "is not over 1: the gated residual has several streams")
    need(
        c.mtp_num_hidden_layers in (0, 1) and not isinstance(c.mtp_num_hidden_layers, bool),
        "mtp_num_hidden_layers",
        "is not 0 or 1",
    )
    need(c.indexer_kv_heads == 1, "indexer_kv_heads", "is not 1")
    need(
        c.indexer_budget % c.indexer_compress_ratio == 0,
        "indexer_budget",
        f"is not a multiple of indexer_compress_ratio={c.indexer_compress_ratio}",
    )
    need(
        0 < c.rope_parameters.rope_theta < float("inf"),
        "rope_parameters.rope_theta",
        "is not a positive number",
    )
    need(
        0 < c.rope_parameters.partial_rotary_factor <= 1,
        "rope_parameters.partial_rotary_factor",
        "is not in (0, 1]",
    )
    need(
        c.rotary_dim > 0 and c.rotary_dim % 2 == 0,
        "rope_parameters.partial_rotary_factor",
        f"gives {c.rotary_dim} rotated channels of head_dim={c.head_dim}, not an even number",
    )
    need(
        c.rotary_dim <= c.indexer_head_dim,
        "indexer_head_dim",
        f"is under the {c.rotary_dim} rotated channels",
    )
    section = c.rope_parameters.mrope_section
    need(
        len(section) == 3 and all(isinstance(n, int) and n >= 0 for n in section),
        "rope_parameters.mrope_section",
        "is not three counts",
    )
    _validate_ple(c, need)


def _validate_ple(c: Config, need) -> None:
    need(
        isinstance(c.ngram_size, int) and c.ngram_size >= 2,
        "ngram_size",
        "is not an integer over 1",
    )
    need(
        isinstance(c.seed, int) and not isinstance(c.seed, bool) and abs(c.seed) < 2**63,
        "seed",
        "is not a 64-bit integer",
    )
    ids = c.ple_layer_ids
    need(isinstance(ids, tuple), "ple_layer_ids", "is no list")
    need(
        all(positive_int(i) and i <= c.num_hidden_layers for i in ids),
        "ple_layer_ids",
        f"has an id outside 1..{c.num_hidden_layers} (ids count from 1)",
    )
    need(
        len(set(ids)) == len(ids) and tuple(sorted(ids)) == ids,
        "ple_layer_ids",
        "is not in increasing order without repeats",
    )
    need(
        all(c.layer_types[i - 1] == LINEAR for i in ids),
        "ple_layer_ids",
        "names a layer that is not linear_attention",
    )
    heads = (c.ngram_size - 1) * c.heads_per_ngram
    need(
        not ids or c.ple_embed_dim % heads == 0,
        "ple_embed_dim",
        f"is not a multiple of {heads} n-gram heads",
    )
    eos = c.eos_token_id if isinstance(c.eos_token_id, tuple) else (c.eos_token_id,)
    valid = bool(eos) and all(isinstance(e, int) and 0 <= e < c.vocab_size for e in eos)
    need(valid, "eos_token_id", f"is not one or more ids in [0, {c.vocab_size})")
    rows = [c.ngram_hash(i).rows for i in range(len(ids))] if valid else []
    need(
        all(n % c.split_ngram_parts == 0 for n in rows),
        "split_ngram_parts",
        f"does not divide the tables' rows {rows}",
    )
