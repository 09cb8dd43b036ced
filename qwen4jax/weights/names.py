"""Hugging Face's tensor names, derived from the place in the parameter tree.

A field of the tree is named as its module in the checkpoint, so a name is the path plus `.weight`.
What does not follow that rule stands in this file and nowhere else: parameters without a module,
biases, the experts (one tensor for all or one for each), the n-gram table in shards, the hash
constants, the prefix of the main model.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

from qwen4jax.config import Config
from qwen4jax.host_table import HostTable
from qwen4jax.params import Tensor

PREFIXES = ("model.", "model.language_model.")
VISION = "model.visual."
MTP = "mtp."
# the top-level parts of the tree that the main model's prefix does not cover
_UNPREFIXED = ("lm_head", "mtp")
# parameters that belong to no module of their own: no `.weight` follows
_BARE = ("A_log", "dt_bias")
_BIAS = "_bias"
_EXPERTS = ".mlp.experts."
_TABLE = ".ple.ngram_embedding"
_TABLE_ON_DISK = ".ple.ple_embedding.ngram_embedding"
_HALVES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of a checkpoint and the part of a leaf that it fills.

    `leaf[where] = stored.reshape(leaf[where].shape)`; elements keep their order.

    Attributes:
        name: the tensor's name in the checkpoint.
        shape: its shape there.
        where: the part of the leaf: indices of leading axes, or a slice of the first one.
        also: other shapes in use for the same elements in the same order.
    """

    name: str
    shape: tuple[int, ...]
    where: tuple[int | slice, ...] = ()
    also: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True)
class Naming:
    """The choices in which checkpoints of one configuration differ.

    Attributes:
        config: the model.
        prefix: what the main model's names begin with, one of `PREFIXES`.
        stacked: paths in the tree of the experts that are stored as one tensor for all experts.
        shard_rows: path of an n-gram table -> rows of each of its shards; equal ones if absent.
    """

    config: Config
    prefix: str = PREFIXES[0]
    stacked: frozenset[str] = frozenset()
    shard_rows: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def module(self, path: str) -> str:
        """The checkpoint's name of what stands at `path` in the tree, without `.weight`."""
        prefix = "" if path.split(".")[0] in _UNPREFIXED else self.prefix
        return prefix + path.replace(_TABLE, _TABLE_ON_DISK)

    def pieces(self, path: str, leaf: Tensor) -> Iterator[Piece]:
        """The checkpoint's tensors that make up the leaf at `path`."""
        if _EXPERTS in path:
            yield from self._expert_pieces(path, leaf)
        elif _TABLE in path:
            yield from self._table_pieces(path, leaf)
        else:
            yield self._plain_piece(path, leaf)

    def _plain_piece(self, path: str, leaf: Tensor) -> Piece:
        module, field = self.module(path), path.rpartition(".")[2]
        if field in _BARE:
            return Piece(module, leaf.shape)
        if field.endswith(_BIAS):
            return Piece(f"{module.removesuffix(_BIAS)}.bias", leaf.shape)
        name = f"{module}.weight"
        if field == "conv1d":
            channels, taps = leaf.shape
            return Piece(name, (channels, 1, taps))
        if leaf.axes == ("stream_hidden",):
            return Piece(name, leaf.shape, also=((self.config.hc_count, self.config.hidden_size),))
        return Piece(name, leaf.shape)

    def _expert_pieces(self, path: str, leaf: Tensor) -> Iterator[Piece]:
        block, _, rest = path.partition(_EXPERTS)
        block = self.module(block) + _EXPERTS
        projection, _, component = rest.partition(".")
        halves = _HALVES[projection]
        if path.rpartition(f".{projection}")[0] in self.stacked and not component:
            experts, *inner = leaf.shape
            shape = (experts, len(halves) * inner[-2], inner[-1])
            yield Piece(block + projection, shape)
            return
        lead = 1 + (len(halves) > 1)
        shape = leaf.shape[lead:]
        for expert in range(leaf.shape[0]):
            for index, half in enumerate(halves):
                yield Piece(
                    f"{block}{expert}.{half}.{component or 'weight'}",
                    shape,
                    (expert, index)[:lead],
                    also=() if shape else ((1,),),
                )

    def _table_pieces(self, path: str, leaf: Tensor) -> Iterator[Piece]:
        table, _, component = path.partition(_TABLE)
        module = self.module(table + _TABLE)
        if component == ".weight_scale":
            yield Piece(f"{module}.weight_scale", (1,), also=((),))
            return
        parts = self.config.split_ngram_parts
        rows = self.shard_rows.get(table + _TABLE, (leaf.shape[0] // parts,) * parts)
        start = 0
        for shard, count in enumerate(rows):
            shape = (count, *leaf.shape[1:])
            yield Piece(shard_name(module, shard), shape, (slice(start, start + count),))
            start += count

    def hash_buffers(self) -> Iterator[tuple[str, np.ndarray]]:
        """Names and int64 values of the n-gram hash constants that a checkpoint repeats."""
        for index, layer in enumerate(self.config.ple_layer_ids):
            constants = self.config.ngram_hash(index)
            module = self.module(f"layers.{layer - 1}{_TABLE}").rpartition(".")[0]
            for name, values in (
                ("layer_multipliers", constants.multipliers),
                ("ngram_heads_vocab_sizes", constants.head_sizes),
                ("ngram_heads_offsets", constants.head_offsets),
            ):
                yield f"{module}.{name}", np.array(values, np.int64)

    def expert_blocks(self) -> list[str]:
        """Paths in the tree of every layer's routed experts, the draft head's last."""
        layers = [f"layers.{i}" for i in range(self.config.num_hidden_layers)]
        layers += [f"mtp.layers.{i}" for i in range(self.config.mtp_num_hidden_layers)]
        return [layer + _EXPERTS.rstrip(".") for layer in layers]

    def tables(self) -> list[str]:
        """Paths in the tree of the n-gram tables."""
        return [f"layers.{i - 1}{_TABLE}" for i in self.config.ple_layer_ids]


def shard_name(module: str, shard: int) -> str:
    """The name of one shard of the n-gram table `module`."""
    return f"{module}.shard_{shard}.weight"


def leaves(tree: Any) -> list[tuple[str, Any]]:
    """(dotted path, leaf) for each leaf of a parameter tree, in tree order, a `HostTable` too."""
    found, _ = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: isinstance(x, HostTable)
    )
    return [(".".join(_key(k) for k in path), leaf) for path, leaf in found]


def _key(key: Any) -> str:
    match key:
        case jax.tree_util.GetAttrKey(name=name):
            return name
        case jax.tree_util.SequenceKey(idx=index):
            return str(index)
    raise TypeError(f"{key!r}: parameter trees are dataclasses and tuples")
