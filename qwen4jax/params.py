"""The model's parameters: one dataclass per block, each tensor declared once.

A field's annotation is its declaration: the words in `Float[Array, "lowrank stream_hidden"]` are
its logical axes, in order. `axis_sizes` turns axes into a shape, `sharding.py` turns them into a
placement, `init_params` fills them, `weights/` reads and writes them under Hugging Face's names.
Field names are those of the checkpoint, so a tensor's place in the tree is its name there.

Blocks are pytrees. In a tree from `declare` each leaf is a `Tensor` instead of an array.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float

from qwen4jax import quant
from qwen4jax.config import LINEAR, Config


@dataclasses.dataclass(frozen=True)
class Tensor:
    """The declaration of one stored array.

    Attributes:
        shape: as stored.
        dtype: as stored.
        axes: logical name of each axis.
        init: how `init_params` fills it: `zeros`, `ones`, `normal` and `fill` (both with `spread`),
            `decay` (log of a decay rate) or `codes` (random bytes).
        spread: standard deviation, or the value to fill in.
        size: number of model parameters it holds (a packed byte holds two, a scale none).
    """

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    init: str
    spread: float
    size: int

    @property
    def nbytes(self) -> int:
        """Bytes of the stored array."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize


def _tensor(init: str = "normal", *, when: str | None = None, form: str | None = None) -> Any:
    """A field's extras: initialiser, the `Config` field that switches it, its stored form."""
    extras = {"init": init, "when": when, "form": form}
    return dataclasses.field(metadata=extras)


class GatedResidual(struct.PyTreeNode):
    """Reads of and injections into the residual streams (spec section 4)."""

    hc_norm: Float[Array, "stream_hidden"] = _tensor("zeros")
    input_mix_weight_down: Float[Array, "lowrank stream_hidden"] = _tensor()
    input_mix_weight_up: Float[Array, "stream_hidden lowrank"] = _tensor()
    block_inject_weight: Float[Array, "streams stream_hidden"] = _tensor()


class FinalMixer(struct.PyTreeNode):
    """The last read of the streams; injects nothing."""

    hc_norm: Float[Array, "stream_hidden"] = _tensor("zeros")
    input_mix_weight_down: Float[Array, "lowrank stream_hidden"] = _tensor()
    input_mix_weight_up: Float[Array, "stream_hidden lowrank"] = _tensor()


class GatedDeltaNet(struct.PyTreeNode):
    """Linear attention (spec section 6)."""

    in_proj_qkv: Float[Array, "linear_qkv hidden"] = _tensor()
    in_proj_z: Float[Array, "linear_value hidden"] = _tensor()
    in_proj_a: Float[Array, "linear_value_heads hidden"] = _tensor()
    in_proj_b: Float[Array, "linear_value_heads hidden"] = _tensor()
    conv1d: Float[Array, "linear_qkv linear_taps"] = _tensor()
    A_log: Float[Array, "linear_value_heads"] = _tensor("decay")
    dt_bias: Float[Array, "linear_value_heads"] = _tensor("ones")
    norm: Float[Array, "linear_value_head_dim"] = _tensor("ones")
    out_proj: Float[Array, "hidden linear_value"] = _tensor()


class Indexer(struct.PyTreeNode):
    """Ranks blocks of keys for the sparse attention (spec section 7.2)."""

    index_qk_proj: Float[Array, "index_qk hidden"] = _tensor()
    q_layernorm: Float[Array, "index_head_dim"] = _tensor("zeros")
    k_layernorm: Float[Array, "index_head_dim"] = _tensor("zeros")


class SparseAttention(struct.PyTreeNode, kw_only=True):
    """Qwen Sparse Attention (spec section 7); rows of `q_proj` are (query, gate) per head."""

    q_proj: Float[Array, "query_gate hidden"] = _tensor()
    k_proj: Float[Array, "key_value hidden"] = _tensor()
    v_proj: Float[Array, "key_value hidden"] = _tensor()
    o_proj: Float[Array, "hidden query"] = _tensor()
    q_norm: Float[Array, "head_dim"] = _tensor("zeros")
    k_norm: Float[Array, "head_dim"] = _tensor("zeros")
    indexer: Indexer
    q_proj_bias: Float[Array, "query_gate"] | None = _tensor("zeros", when="attention_bias")
    k_proj_bias: Float[Array, "key_value"] | None = _tensor("zeros", when="attention_bias")
    v_proj_bias: Float[Array, "key_value"] | None = _tensor("zeros", when="attention_bias")
    o_proj_bias: Float[Array, "hidden"] | None = _tensor("zeros", when="attention_bias")


class SharedExpert(struct.PyTreeNode):
    """The expert every token passes."""

    gate_proj: Float[Array, "shared_hidden hidden"] = _tensor()
    up_proj: Float[Array, "shared_hidden hidden"] = _tensor()
    down_proj: Float[Array, "hidden shared_hidden"] = _tensor()


class Experts(struct.PyTreeNode):
    """The routed experts, plain or in a stored form of `quant.py`; axis 1 is (gate, up)."""

    gate_up_proj: Float[Array, "experts gate_up expert_hidden hidden"] = _tensor(form="experts")
    down_proj: Float[Array, "experts hidden expert_hidden"] = _tensor(form="experts")


class MixtureOfExperts(struct.PyTreeNode, kw_only=True):
    """Router, routed experts and the gated shared expert (spec section 8)."""

    gate: Float[Array, "experts hidden"] = _tensor()
    experts: Experts
    shared_expert: SharedExpert
    shared_expert_gate: Float[Array, "one hidden"] = _tensor()


class PerLayerEmbedding(struct.PyTreeNode):
    """The n-gram embedding of one layer (spec section 5)."""

    ngram_embedding: Float[Array, "ngram_rows ngram_width"] = _tensor(form="ngram_embedding")
    key_proj: Float[Array, "stream_hidden ple_embed"] = _tensor()
    value_proj: Float[Array, "hidden ple_embed"] = _tensor()
    norm_key: Float[Array, "stream_hidden"] = _tensor("zeros")
    norm_query: Float[Array, "stream_hidden"] = _tensor("zeros")
    norm_conv: Float[Array, "stream_hidden"] = _tensor("zeros")
    conv1d: Float[Array, "stream_hidden ple_taps"] = _tensor()


class Layer(struct.PyTreeNode):
    """One decoder layer: either kind of attention, experts, and for some an n-gram embedding."""

    attn_hyper_connection: GatedResidual
    mlp_hyper_connection: GatedResidual
    mlp: MixtureOfExperts
    linear_attn: GatedDeltaNet | None
    self_attn: SparseAttention | None
    ple: PerLayerEmbedding | None


class MultiTokenPrediction(struct.PyTreeNode, kw_only=True):
    """The one-layer draft head (spec section 9); embedding and head are the main model's.

    `lm_head` is a copy of the head in a stored form, or of its first rows, where one was asked for.
    """

    fc_embedding: Float[Array, "hidden hidden_in"] = _tensor()
    fc_hidden: Float[Array, "hidden hidden_in"] = _tensor()
    pre_fc_norm_embedding: Float[Array, "hidden"] = _tensor("zeros")
    pre_fc_norm_hidden: Float[Array, "stream_hidden"] = _tensor("zeros")
    layers: tuple[Layer, ...]
    hyper_connection_mixer: FinalMixer
    lm_head: Float[Array, "draft_vocab hidden"] | None = None


class Params(struct.PyTreeNode):
    """All parameters, with the configuration they belong to as static data."""

    embed_tokens: Float[Array, "vocab hidden"]
    layers: tuple[Layer, ...]
    hyper_connection_mixer: FinalMixer
    lm_head: Float[Array, "vocab hidden"] | None
    mtp: MultiTokenPrediction | None
    config: Config = struct.field(pytree_node=False)


def axis_sizes(config: Config, ple_index: int = 0) -> dict[str, int]:
    """Size of every logical axis; `ple_index` says which n-gram table `ngram_rows` is of."""
    c = config
    heads = (c.ngram_size - 1) * c.heads_per_ngram
    key_width = c.linear_num_key_heads * c.linear_key_head_dim
    value_width = c.linear_num_value_heads * c.linear_value_head_dim
    return {
        "vocab": c.vocab_size,
        "draft_vocab": c.quantization.draft_vocab or c.vocab_size,
        "hidden": c.hidden_size,
        "hidden_in": c.hidden_size,
        "streams": c.hc_count,
        "stream_hidden": c.hc_count * c.hidden_size,
        "lowrank": c.hc_lowrank,
        "linear_qkv": 2 * key_width + value_width,
        "linear_value": value_width,
        "linear_value_heads": c.linear_num_value_heads,
        "linear_value_head_dim": c.linear_value_head_dim,
        "linear_taps": c.linear_conv_kernel_dim,
        "query_gate": 2 * c.num_attention_heads * c.head_dim,
        "query": c.num_attention_heads * c.head_dim,
        "key_value": c.num_key_value_heads * c.head_dim,
        "head_dim": c.head_dim,
        "index_qk": (c.indexer_n_heads + c.indexer_kv_heads) * c.indexer_head_dim,
        "index_head_dim": c.indexer_head_dim,
        "experts": c.num_experts,
        "gate_up": 2,
        "expert_hidden": c.moe_intermediate_size,
        "shared_hidden": c.shared_expert_intermediate_size,
        "one": 1,
        "ngram_rows": c.ngram_hash(ple_index).rows if c.ple_layer_ids else 0,
        "ngram_width": c.ple_embed_dim // heads,
        "ple_embed": c.ple_embed_dim,
        "ple_taps": c.ple_conv_kernel_size,
    }


def declare(config: Config) -> Params:
    """The declarations of every tensor of `config`'s model, without allocating anything."""
    q = config.quantization
    sizes = axis_sizes(config)
    # typed as what the trees hold later: a `Tensor` stands where an array will
    embedding: Any = _plain(config, sizes, "vocab hidden", "normal")
    mtp = None
    if config.mtp_num_hidden_layers:
        layer = _declare_layer(config, linear=False, ple_index=None, experts=q.mtp_experts)
        copy: Any = _plain(config, sizes, "draft_vocab hidden", "normal") if q.draft_copy else None
        mtp = _declare(MultiTokenPrediction, config, sizes, layers=(layer,), lm_head=copy)
        stored = lambda t: _stored(config, sizes, " ".join(t.axes), q.draft)  # noqa: E731
        mtp = mtp if q.draft == "bf16" else draft_projections(mtp, stored)
    return Params(
        embed_tokens=embedding,
        layers=tuple(
            _declare_layer(
                config, linear=kind == LINEAR, ple_index=config.ple_index(i), experts=q.experts
            )
            for i, kind in enumerate(config.layer_types)
        ),
        hyper_connection_mixer=_declare(FinalMixer, config, sizes),
        lm_head=None if config.tie_word_embeddings else embedding,
        mtp=mtp,
        config=config,
    )


def draft_projections(
    mtp: MultiTokenPrediction, change: Callable[[Any], Any]
) -> MultiTokenPrediction:
    """The draft head with its long projections, and its own output head, changed.

    The index projection stays: of its rows the keys' are read alone.
    """
    (layer,) = mtp.layers
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    attention: Any = layer.self_attn
    attention = attention.replace(**{name: change(getattr(attention, name)) for name in names})
    return mtp.replace(
        fc_embedding=change(mtp.fc_embedding),
        fc_hidden=change(mtp.fc_hidden),
        layers=(layer.replace(self_attn=attention),),
        lm_head=change(mtp.lm_head),
    )


def _declare_layer(config: Config, *, linear: bool, ple_index: int | None, experts: str) -> Layer:
    sizes = axis_sizes(config, ple_index or 0)
    skipped: dict[str, None] = {"self_attn" if linear else "linear_attn": None}
    if ple_index is None:
        skipped["ple"] = None
    return _declare(Layer, config, sizes, experts=experts, **skipped)


def _declare(cls: Any, config: Config, sizes: dict[str, int], experts: str = "bf16", **given: Any):
    """An instance of a block whose leaves are `Tensor`s; `given` fields are taken as they are."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        kind: Any = _without_none(field.type)
        if field.name in given:
            values[field.name] = given[field.name]
        elif dataclasses.is_dataclass(kind):
            values[field.name] = _declare(kind, config, sizes, experts)
        elif field.metadata["when"] and not getattr(config, field.metadata["when"]):
            values[field.name] = None
        elif kind_of := field.metadata["form"]:
            form = experts if kind_of == "experts" else config.quantization.ngram_embedding
            form = "fp8_table" if form == "fp8" and kind_of == "ngram_embedding" else form
            values[field.name] = _stored(config, sizes, kind.dim_str, form)
        else:
            values[field.name] = _plain(config, sizes, kind.dim_str, field.metadata["init"])
    return cls(**values)


def _without_none(kind: Any) -> Any:
    return next((a for a in typing.get_args(kind) if a is not type(None)), kind)


def _plain(config: Config, sizes: dict[str, int], axes: str, init: str) -> Tensor:
    names = tuple(axes.split())
    shape = tuple(sizes[n] for n in names)
    return Tensor(shape, config.dtype, names, init, _spread(names, shape), math.prod(shape))


def _stored(config: Config, sizes: dict[str, int], axes: str, form: str) -> Any:
    names = tuple(axes.split())
    shape = tuple(sizes[n] for n in names)
    spread = _spread(names, shape)
    # what the stored numbers of each component are, so that the values have the wanted spread
    filling = {
        "": ("normal", spread),
        "weight": ("codes", 0.0) if form == "nvfp4" else ("normal", 1.0),
        "weight_scale": ("ones", 0.0),
        "weight_scale_2": ("fill", spread / _E2M1_RMS),
        "weight_scale_inv": ("fill", spread),
        "input_scale": ("ones", 0.0),
    }
    parts = {
        name: Tensor(
            shape=part,
            dtype=dtype,
            axes=names[: len(part)],
            init=filling[name][0],
            spread=filling[name][1],
            size=0 if "scale" in name else math.prod(shape),
        )
        for name, (part, dtype) in quant.stored_form(form, shape, config.dtype).items()
    }
    return quant.FORMS[form](**parts) if form != "bf16" else parts[""]


# root mean square of the sixteen E2M1 values
_E2M1_RMS = 2.93


def _spread(axes: tuple[str, ...], shape: tuple[int, ...]) -> float:
    return 1.0 if axes[0] in ("vocab", "draft_vocab", "ngram_rows") else shape[-1] ** -0.5


def count_parameters(params: Params) -> int:
    """Model parameters held by a tree from `declare`; quantised tensors count their values."""
    return sum(leaf.size for leaf in tensors(params))


def tensors(params: Any) -> list[Tensor]:
    """The declarations in a tree from `declare`, in tree order."""
    return jax.tree.leaves(params)


def init_params(config: Config, seed: int = 0) -> Params:
    """Random parameters of `config`'s model in its stored forms, on the default device.

    Matrices are normal with a standard deviation of `1/sqrt(inputs)`, embeddings of 1, norms start
    at the identity; stored forms hold random codes under scales that give the same spread.
    """
    leaves, treedef = jax.tree.flatten(declare(config))
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return treedef.unflatten([_fill(key, t) for key, t in zip(keys, leaves, strict=True)])


@functools.partial(jax.jit, static_argnums=1)
def _fill(key: jax.Array, t: Tensor) -> jax.Array:
    dtype = jnp.dtype(t.dtype)
    if t.init == "codes":
        return jax.random.bits(key, t.shape, dtype)
    if t.init == "normal":
        return (jax.random.normal(key, t.shape, jnp.float32) * t.spread).astype(dtype)
    if t.init == "decay":
        return jnp.log(jax.random.uniform(key, t.shape, minval=0.3, maxval=4.0)).astype(dtype)
    value = {"zeros": 0.0, "ones": 1.0, "fill": t.spread}[t.init]
    return jnp.full(t.shape, value, dtype)
