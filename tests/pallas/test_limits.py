"""What the kernels of chunks and of the router do not take is refused in words."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from qwen4jax import quant
from qwen4jax.pallas import compress_and_store, registry
from qwen4jax.pallas.cases import Case
from qwen4jax.pallas.gated_delta import chunks, step
from qwen4jax.pallas.gated_delta.cases import CASES as GATED_DELTA
from qwen4jax.pallas.index_score import index_score
from qwen4jax.pallas.index_topk import index_topk
from qwen4jax.pallas.moe import Shared, experts, router
from qwen4jax.pallas.moe.cases import CASES as EXPERTS
from qwen4jax.pallas.sparse_attention import sparse_attention
from qwen4jax.pallas.sparse_attention.cases import CASES as SPARSE_ATTENTION

BF16, F32 = jnp.bfloat16, jnp.float32


def refused(reason: str, function: Any, *inputs: Any, implementation="triton", **more: Any) -> None:
    """Traces a call, for which no array has to be there."""

    def traced(*arrays: Any) -> Any:
        return function(*arrays, implementation=implementation, **more)

    with registry.using(device="NVIDIA H200"), pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(traced, *inputs)


def shape(*sizes: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def inputs_of(cases: tuple[Case, ...], name: str) -> dict[str, Any]:
    return next(c for c in cases if c.name == name).inputs()


@pytest.mark.parametrize(
    ("tokens", "choices", "hidden", "width", "reason"),
    [
        (129, 2, 192, 128, "hidden size in multiples of 128 for many tokens, not 192"),
        (129, 2, 128, 96, "width of the experts in multiples of 64 for many tokens, not 96"),
        (65536, 2, 128, 64, "for fewer tokens"),
        (65535, 10, 4096, 64, "for fewer tokens"),
        (129, 128, 128, 64, "up to 127 choices"),
        (63, 2, 128, 64, "for 64 tokens and more, these are 63"),
    ],
)
def test_sorted_experts(tokens: int, choices: int, hidden: int, width: int, reason: str):
    inputs = of_experts(tokens, choices, hidden, width)
    refused(reason, experts, *inputs, implementation="triton_sorted")


@pytest.mark.parametrize(
    ("tokens", "reason"), [(1, "hidden size in multiples of 64, not 96"), (129, "up to 128 tokens")]
)
def test_experts(tokens: int, reason: str):
    refused(reason, experts, *of_experts(tokens, 2, 96, 32))


@pytest.mark.parametrize(
    ("tokens", "choices", "hidden", "width", "reason"),
    [
        (129, 2, 256, 128, "for 1 to 128 tokens, these are 129"),
        (1, 2, 128, 128, "hidden size in multiples of 256, not 128"),
        (1, 2, 256, 64, "up to 640 wide, in multiples of 128, not 64"),
        (1, 2, 256, 768, "up to 640 wide, in multiples of 128, not 768"),
        (1, 17, 256, 128, "up to 16 choices"),
    ],
)
def test_experts_in_mosaic(tokens: int, choices: int, hidden: int, width: int, reason: str):
    inputs = of_experts(tokens, choices, hidden, width)
    refused(reason, experts, *inputs, implementation="mosaic_hopper")


@pytest.mark.parametrize(
    "device", ["NVIDIA H20", "NVIDIA H100 PCIe", "NVIDIA H100 CNX", "NVIDIA H200 MIG 1g.18gb"]
)
def test_experts_in_mosaic_need_all_processors(device: str):
    """Programs that wait for others that do not run would wait forever."""
    run = functools.partial(experts, implementation="mosaic_hopper")
    reason = "whole Hopper GPU with 132 multiprocessors"
    with registry.using(device=device), pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(run, *of_experts(1, 2, 256, 128))


def test_one_token_in_fp8_with_a_shared_expert_is_not_for_mosaic():
    chosen = shape(1, 2, dtype=jnp.int32), shape(1, 2, dtype=F32)
    weights = shape(4, 2, 128, 256, dtype=jnp.float8_e4m3fn), shape(4, 2, 1, 2)
    down = shape(4, 256, 128, dtype=jnp.float8_e4m3fn), shape(4, 2, 1)
    shared = Shared(shape(128, 256), shape(128, 256), shape(256, 128), shape(1, 1, dtype=F32))
    stored = quant.BlockFp8(*weights), quant.BlockFp8(*down)
    inputs = shape(1, 256), *chosen, *stored, shared
    refused(
        "one token in FP8 is faster in Triton", experts, *inputs, implementation="mosaic_hopper"
    )


def test_experts_in_mosaic_are_not_in_nvfp4():
    case = next(c for c in EXPERTS if c.name == "shared_nvfp4")
    inputs = case.inputs()
    run = functools.partial(experts, implementation="mosaic_hopper", out_dtype=BF16)
    names = "x", "ids", "weights", "gate_up", "down"
    with (
        registry.using(device="NVIDIA H200"),
        pytest.raises(NotImplementedError, match="experts in FP8 or bfloat16"),
    ):
        run(*(inputs[name] for name in names))


def of_experts(tokens: int, choices: int, hidden: int, width: int) -> tuple[Any, ...]:
    chosen = shape(tokens, choices, dtype=jnp.int32), shape(tokens, choices, dtype=F32)
    return shape(tokens, hidden), *chosen, shape(256, 2, width, hidden), shape(256, hidden, width)


@pytest.mark.parametrize(("tokens", "implementation"), [(8, "triton"), (129, "triton_sorted")])
def test_a_shared_expert_in_float32(tokens: int, implementation: str):
    up, down = shape(128, 128, dtype=F32), shape(128, 128, dtype=F32)
    shared = Shared(up, up, down, shape(tokens, 1, dtype=F32))
    chosen = shape(tokens, 2, dtype=jnp.int32), shape(tokens, 2, dtype=F32)
    matrices = shape(4, 2, 128, 128), shape(4, 128, 128)
    reason = "shared expert in bfloat16"
    inputs = shape(tokens, 128), *chosen, *matrices, shared
    refused(reason, experts, *inputs, implementation=implementation)


@pytest.mark.parametrize(
    ("tokens", "count", "hidden", "dtype", "reason"),
    [
        (4, 32, 64, F32, "in bfloat16"),
        (129, 32, 64, BF16, "up to 128 tokens, these are 129"),
        (33, 32, 96, BF16, "hidden size in multiples of 64, not 96"),
        (4, 24, 64, BF16, "in multiples of 16, not 24"),
        (4, 2064, 64, BF16, "up to 2048 experts in multiples of 16, not 2064"),
        (4, 32, 48, BF16, "hidden size in multiples of 32, not 48"),
        (4, 32, 5632, BF16, "up to 10 steps of a warp, 5632 columns are 11"),
    ],
)
def test_the_router(tokens: int, count: int, hidden: int, dtype: Any, reason: str):
    def three(x: Any, gate: Any, shared_gate: Any, **more: Any) -> Any:
        return router(x, gate, shared_gate, 2, renormalize=True, **more)

    sizes = (tokens, hidden), (count, hidden), (1, hidden)
    refused(reason, three, *(shape(*size, dtype=dtype) for size in sizes))


def test_chunks_of_gated_delta_net():
    inputs = inputs_of(GATED_DELTA, "tensor_few_places")
    arrays = [inputs[name] for name in ("qkv", "z", "a", "b", "weights", "state", "count")]
    static = {name: inputs[name] for name in ("key_heads", "activation", "eps")}
    qkv, weights, state = inputs["qkv"], inputs["weights"], inputs["state"]
    refused("bfloat16 projections", chunks, qkv.astype(F32), *arrays[1:], **static)
    taps = dataclasses.replace(weights, conv1d=weights.conv1d[:, :3])
    wide = dataclasses.replace(weights, conv1d=weights.conv1d.astype(F32))
    refused("bfloat16 taps", chunks, *arrays[:4], wide, *arrays[5:], **static)
    mosaic = static | {"implementation": "mosaic_hopper"}
    refused("heads of 128 channels, not 16 and 32", chunks, *arrays, **mosaic)
    refused("4 taps, not 3", chunks, *arrays[:4], taps, *arrays[5:], **static)
    small = dataclasses.replace(state, recurrent=state.recurrent[:, :, :8])
    refused("at least 16 channels", chunks, *arrays[:5], small, *arrays[6:], **static)
    odd = dataclasses.replace(state, recurrent=jnp.concatenate([state.recurrent] * 3, axis=2))
    refused("a power of two", chunks, *arrays[:5], odd, *arrays[6:], **static)


def test_a_step_of_gated_delta_net_in_mosaic():
    inputs = inputs_of(GATED_DELTA, "four_rows_of_a_round")
    arrays = [inputs[name] for name in ("qkv", "z", "a", "b", "weights", "state")]
    static = {name: inputs[name] for name in ("key_heads", "activation", "eps")}
    refused("128 channels, not 8 and 8", step, *arrays, implementation="mosaic", **static)


@pytest.mark.parametrize(
    ("width", "blocks", "ratio", "reason"),
    [
        (1000, 64, 4, "multiples of 64 blocks in rows of this length, not 1000"),
        (16448, 64, 4, "multiples of 128 blocks in rows of this length, not 16448"),
        (24704, 64, 4, "up to 24576 blocks a row, these are 24704"),
        (1024, 32, 4, "multiples of 64 blocks up to 512, not 32"),
        (1024, 64, 3, "blocks of 1, 2, 4 or 8 tokens, not 3"),
    ],
)
def test_a_selection_in_mosaic(width: int, blocks: int, ratio: int, reason: str):
    inputs = shape(1, 2, width, dtype=F32), shape(1, 2, dtype=jnp.int32)
    static = dict(blocks=blocks, ratio=ratio, implementation="mosaic_hopper")
    refused(reason, index_topk, *inputs, **static)


def test_keys_of_a_chunk():
    reason = compress_and_store.limits.refuses(
        None, shape(1, 65536, 8), *[None] * 5, ratio=4, eps=1e-6
    )
    assert reason == "is for up to 65535 tokens of a row, not 65536"


def test_queries_that_read_together():
    inputs = inputs_of(SPARSE_ATTENTION, "chunk_of_a_prompt")
    query, slots, table = (inputs[name] for name in ("query", "slots", "page_table"))

    def attend(reason: str, key: Any, *more: Any, heads: int = query.shape[2]) -> None:
        wide = shape(*query.shape[:2], heads, query.shape[3])
        given = (wide, wide, key, key, slots, *more)
        refused(reason, sparse_attention, *given, implementation="triton_together")

    key = inputs["key"]
    attend("with a page table", key)
    attend("up to 16 query heads of a kv head, not 17", key, table, heads=17 * key.shape[2])
    attend("not of 12", shape(4, 12, *key.shape[2:]), table)
    attend("up to 134217728 tokens", shape(1 << 22, 64, *key.shape[2:]), table)


def test_attention_in_mosaic():
    def attend(reason: str, heads: int, channels: int, *, dtype: Any = BF16, kept: Any = BF16):
        query, key = shape(1, 2, heads, channels, dtype=dtype), shape(4, 8, 1, channels, dtype=kept)
        given = (query, query, key, key, shape(1, 2, 9, dtype=jnp.int32))
        refused(reason, sparse_attention, *given, implementation="mosaic_hopper")

    attend("bfloat16 queries", 4, 64, dtype=F32)
    attend("not for keys of float32", 4, 64, kept=F32)
    attend("up to 16 query heads of a kv head, not 17", 17, 64)
    attend("up to 256 channels by 64 in bfloat16, not 320", 4, 320)
    attend("up to 256 channels by 128 in float8_e4m3fn, not 64", 4, 64, kept=jnp.float8_e4m3fn)


def test_scores_in_mosaic():
    def score(reason: str, heads: int, channels: int, page: int, dtype: Any = BF16):
        sizes = (1, 2, heads, channels), (4, page, channels)
        tables = shape(1, 3, dtype=jnp.int32), shape(1, 2, dtype=jnp.int32)
        given = (*(shape(*size, dtype=dtype) for size in sizes), *tables)
        refused(reason, index_score, *given, implementation="mosaic_hopper")

    score("for bfloat16, not float32 queries", 4, 64, 16, F32)
    score("up to 16 heads, these are 17", 17, 64, 16)
    score("channels by 64, not 48", 4, 48, 16)
    score("not of 12", 4, 64, 12)
