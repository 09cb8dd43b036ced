"""Least bytes that each operation must move: every input it needs read once, every result written.

By default all arrays in and all out. The others read only a part that the values of the inputs
name: chosen experts, selected tokens, complete blocks, tokens that are there.
"""

import collections
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def size(tree: Any) -> int:
    """Bytes of all arrays of a tree."""
    leaves = [x for x in jax.tree.leaves(tree) if hasattr(x, "shape") and hasattr(x, "dtype")]
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in leaves)


def everything(inputs: dict[str, Any], out: Any) -> float:
    """All arrays in and out."""
    return size(inputs) + size(out)


def _boundary(inputs: dict[str, Any], out: Any) -> float:
    given = {name: value for name, value in inputs.items() if name != "counter"}
    replaced, results = out
    # without an update the streams are only read
    written = results if inputs["pending"] is None else (replaced["streams"], results)
    return everything(given, written)


def _experts(inputs: dict[str, Any], out: Any) -> float:
    weights = inputs["gate_up"], inputs["down"]
    share = len(np.unique(np.asarray(inputs["ids"]))) / inputs["gate_up"].shape[0]
    rest = [inputs.get(name) for name in ("x", "ids", "weights", "shared")]
    return share * size(weights) + size(rest) + size(out)


def _sparse_attention(inputs: dict[str, Any], out: Any) -> float:
    slots = np.asarray(inputs["slots"])
    key, value = inputs["key"], inputs["value"]
    if inputs.get("page_table") is not None:
        table, page = np.asarray(inputs["page_table"]), key.shape[1]
        there = table[np.arange(len(slots))[:, None, None], slots // page]
        slots = np.where((slots >= 0) & (there >= 0), there * page + slots % page, -1)
    distinct = len(np.unique(slots[slots >= 0]))
    share = distinct / math.prod(key.shape[:2])
    rest = [inputs[name] for name in ("query", "gate", "slots")]
    return share * size([key, value]) + size(rest) + size(out)


def _index_score(inputs: dict[str, Any], out: Any) -> float:
    keys = inputs["index_key"]
    complete = np.asarray(inputs["complete"])
    blocks = complete.max(axis=1, initial=0).sum()
    share = float(blocks) / math.prod(keys.shape[:2])
    rest = [inputs[name] for name in ("query", "page_table", "complete")]
    return share * size(keys) + size(rest) + size(out)


def _index_topk(inputs: dict[str, Any], out: Any) -> float:
    seen = (np.asarray(inputs["index"]) + 1) // inputs["ratio"]
    return 4.0 * seen.sum() + size(inputs["index"]) + size(out)


def _prepare(inputs: dict[str, Any], out: Any) -> float:
    span = inputs["span"]
    return size([inputs["x"], inputs["norm"], span.cos, span.sin]) + size(out)


def _store(inputs: dict[str, Any], out: Any) -> float:
    cache, key, value = inputs["cache"], inputs["key"], inputs["value"]
    tokens = _tokens(inputs["span"])
    read = size([key, value]) * tokens / math.prod(key.shape[:2])
    written = size([cache.key, cache.value]) * tokens / math.prod(cache.key.shape[:2])
    return read + written + size(inputs["span"].slot)


def _compress(inputs: dict[str, Any], out: Any) -> float:
    cache, raw, span = inputs["cache"], inputs["raw_key"], inputs["span"]
    start = np.maximum(np.asarray(span.start), 0)
    tokens = np.asarray(span.count)
    ratio, rows = inputs["ratio"], len(start)
    read = size(raw) * _tokens(span) / math.prod(raw.shape[:2])
    blocks = ((start + tokens) // ratio - start // ratio).sum()
    block_bytes = size(cache.index_key) / math.prod(cache.index_key.shape[:2])
    # of the ring: the open block's members, and the newest tokens
    ring = (start % ratio * (blocks > 0) + np.minimum(tokens, cache.ring.shape[1])).sum()
    return read + blocks * block_bytes + ring * size(cache.ring) / (rows * cache.ring.shape[1])


def _prepare_and_store(inputs: dict[str, Any], out: Any) -> float:
    span, results = inputs["span"], out[1]
    there = _tokens(span) / math.prod(span.index.shape)
    tables = size([inputs["gains"], span.cos, span.sin])
    # shapes will do: of a long chunk the arrays are not kept
    cut = lambda x: (x[:, :, :-1], x[:, :, -1])  # noqa: E731
    index_query, raw_key = jax.eval_shape(cut, inputs["index_qk"])
    queries = size([inputs["query_gate"], index_query, results])
    pooled = inputs | dict(raw_key=raw_key)
    return there * queries + tables + _store(inputs, None) + _compress(pooled, None)


def _tokens(span: Any) -> int:
    return int(np.asarray(span.count).sum())


def _commit(inputs: dict[str, Any], out: Any) -> float:
    factors = inputs["factors"]
    count = np.asarray(inputs["count"])
    moved = 2.0 * size(inputs["states"]) * (count > 0).mean()
    pairs = size([(layer.key, layer.delta, layer.decay) for layer in factors])
    return moved + pairs * count.sum() / math.prod(factors[0].decay.shape[:2])


def _gather(inputs: dict[str, Any], out: Any) -> float:
    rows = inputs["rows"]
    table = max(jax.tree.leaves(inputs["table"]), key=lambda leaf: leaf.size)
    return size(rows) + rows.size * table.shape[1] * table.dtype.itemsize + size(out)


def _embed(inputs: dict[str, Any], out: Any) -> float:
    table = max(jax.tree.leaves(inputs["table"]), key=lambda leaf: leaf.size)
    _, rows = out
    return size(inputs["ids"]) + rows.size * table.dtype.itemsize + size(rows)


BYTES: dict[str, Callable[[dict[str, Any], Any], float]] = collections.defaultdict(
    lambda: everything,
    {
        "gated_residual.boundary": _boundary,
        "moe.experts": _experts,
        "sparse_attention": _sparse_attention,
        "index_score": _index_score,
        "index_topk": _index_topk,
        "compress_and_store.prepare": _prepare,
        "compress_and_store.store": _store,
        "compress_and_store.compress": _compress,
        "compress_and_store.prepare_and_store": _prepare_and_store,
        "gated_delta.commit": _commit,
        "ple.gather": _gather,
        "ple.embed": _embed,
    },
)
