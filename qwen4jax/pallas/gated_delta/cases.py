"""Cases of Gated DeltaNet."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from qwen4jax.pallas.cases import BF16, F32, Case, integers, normal
from qwen4jax.pallas.gated_delta import Factors, Weights
from qwen4jax.state import DeltaNetState

_TAPS = 4
# key heads, value heads, key channels, value channels
_SMALL = (2, 4, 8, 8)
_UNEVEN = (1, 3, 8, 16)
# the least that tensor cores take
_TENSOR = (1, 2, 16, 32)
# of the released width
_ONE, _TWO = (1, 1, 128, 128), (1, 2, 128, 128)
_RELEASED = (16, 48, 128, 128)
# of a rank of four
_QUARTER = (4, 12, 128, 128)


def _arguments(rng, rows, places, heads, dtype, strength=1.0) -> dict[str, Any]:
    key_heads, value_heads, key, value = heads
    width = 2 * key_heads * key + value_heads * value
    weights = Weights(
        conv1d=normal(rng, (width, _TAPS), dtype, _TAPS**-0.5),
        A_log=jnp.asarray(np.log(rng.uniform(0.3, 4, value_heads)), dtype),
        dt_bias=normal(rng, (value_heads,), dtype, 0.5) - 1,
        norm=1 + normal(rng, (value,), dtype, 0.2),
    )
    state = DeltaNetState(
        conv=normal(rng, (rows, _TAPS - 1, width), dtype),
        recurrent=normal(rng, (rows, value_heads, key, value), F32),
    )
    return dict(
        qkv=normal(rng, (rows, places, width), dtype),
        z=normal(rng, (rows, places, value_heads * value), dtype),
        a=normal(rng, (rows, places, value_heads), dtype, strength),
        b=normal(rng, (rows, places, value_heads), dtype),
        weights=weights,
        state=state,
        key_heads=key_heads,
        activation="sigmoid",
        eps=1e-6,
    )


def _step(name, rows, places, heads=_SMALL, dtype=F32, *, device_only=False, **changes):
    def build(rng):
        return _arguments(rng, rows, places, heads, dtype) | changes

    return Case("step", name, build, device_only)


def _chunks(name, count, places, heads=_SMALL, dtype=F32, *, change=None, **more):
    """Rows of `count` tokens; what stands behind them is NaN."""

    def build(rng):
        inputs = _arguments(rng, len(count), places, heads, dtype)
        there = jnp.arange(places) < jnp.asarray(count)[:, None]
        for name in ("qkv", "z", "a", "b"):
            inputs[name] = jnp.where(there[..., None], inputs[name], jnp.nan)
        inputs["count"] = integers(count)
        return change(inputs) if change else inputs

    return Case("chunks", name, build, **more)


def _commit(name, count, places, heads=_SMALL, dtype=F32, *, layers=1, device_only=False):
    def build(rng):
        drawn = [_layer(rng, count, places, heads, dtype) for _ in range(layers)]
        states, factors = zip(*drawn, strict=True)
        return dict(states=states, factors=factors, count=integers(count))

    return Case("commit", name, build, device_only)


def _layer(rng, count, places, heads, dtype) -> tuple[DeltaNetState, Factors]:
    """State and factors of one layer; rejected tokens may have gone wrong altogether."""
    key_heads, value_heads, key, value = heads
    rows = len(count)
    state = _arguments(rng, rows, 1, heads, dtype)["state"]
    width = state.conv.shape[-1]
    keys = rng.standard_normal((rows, places, key_heads, key))
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    there = jnp.arange(places) < jnp.asarray(count)[:, None]

    def given(x):
        return jnp.where(there.reshape(there.shape + (1,) * (x.ndim - 2)), x, jnp.nan)

    tokens = given(normal(rng, (rows, places, width), dtype))
    factors = Factors(
        window=jnp.concatenate([state.conv, tokens], axis=1),
        key=given(jnp.asarray(keys, F32)),
        delta=given(normal(rng, (rows, places, value_heads, value))),
        decay=given(jnp.asarray(-rng.exponential(1.0, (rows, places, value_heads)), F32)),
    )
    return state, factors


def _plain_decay(inputs):
    """Decay logits that are the log decay itself: softplus is the identity on large numbers."""
    weights = inputs["weights"]
    plain = Weights(
        conv1d=weights.conv1d,
        A_log=jnp.zeros_like(weights.A_log),
        dt_bias=jnp.zeros_like(weights.dt_bias),
        norm=weights.norm,
    )
    return inputs | {"weights": plain}


def _strong_decay(inputs):
    """NUM-14: a sum of -128 in a chunk, then a reset by -inf, then nearly no decay."""
    inputs = _plain_decay(inputs)
    a = np.full(inputs["a"].shape, np.log(np.expm1(2.0)), np.float32)
    a[:, 60] = 1e38
    a[:, 61:] = np.log(1e-11)
    big = jnp.asarray(np.full(inputs["weights"].A_log.shape, 2.0), F32)
    return inputs | {
        "a": jnp.asarray(a),
        "weights": Weights(
            inputs["weights"].conv1d,
            jnp.where(jnp.arange(len(big)) % 2 == 0, big, 0.0),
            inputs["weights"].dt_bias,
            inputs["weights"].norm,
        ),
    }


def _no_decay(inputs):
    inputs = _plain_decay(inputs)
    return inputs | {"a": jnp.full_like(inputs["a"], -40.0)}


def _one_key(inputs):
    """All keys nearly one, full steps, no decay: each token overwrites what the last one wrote."""
    inputs = _no_decay(inputs)
    qkv = inputs["qkv"]
    return inputs | {
        "qkv": (qkv[:, :1] + 0.05 * qkv).astype(qkv.dtype),
        "b": jnp.full_like(inputs["b"], 8.0),
    }


CASES = (
    _step("one_token", 2, 1),
    _step("four_rows_of_a_round", 3, 4),
    _step("eight_rows", 1, 8),
    _step("nine_rows", 1, 9),
    _step("silu_gate", 2, 4, activation="silu"),
    _step("uneven_heads", 2, 4, _UNEVEN),
    _step("bfloat16", 2, 4, dtype=BF16),
    _step("wide_heads_of_a_round", 1, 4, _TWO, BF16, activation="silu"),
    _step("wide_heads_eight_rows", 1, 8, _ONE),
    _step("wide_heads_of_three_tokens", 2, 3, (2, 6, 128, 128), BF16),
    _step("wide_heads_of_one_token", 1, 1, _TWO, BF16),
    _step("wide_heads_of_six_tokens", 1, 6, _TWO, BF16),
    _commit("every_count", (0, 1, 2, 3, 4), 4),
    _commit("uneven_heads", (2, 0, 3), 3, _UNEVEN),
    _commit("bfloat16", (0, 2, 4), 4, dtype=BF16),
    _commit("three_layers", (2, 0, 4), 4, layers=3),
    _chunks("one_token", (1, 0), 1),
    _chunks("every_count", (0, 1, 2, 3, 4, 5), 5),
    _chunks("length_63", (63, 7), 63),
    _chunks("length_64", (64, 0), 64),
    _chunks("length_65", (65, 64), 65),
    _chunks("length_130_odd_heads", (130, 1), 130, _UNEVEN),
    _chunks("length_1000", (1000,), 1000),
    _chunks("strong_decay_and_reset", (64,), 64, change=_strong_decay),
    _chunks("no_decay", (64,), 64, change=_no_decay),
    _chunks("bfloat16", (70, 33), 70, dtype=BF16),
    _chunks("tensor_every_count", (0, 1, 64, 65, 128, 150), 150, _TENSOR, BF16),
    _chunks("wide_every_count", (0, 1, 64, 150), 150, _TWO, BF16),
    _chunks("wide_few_places", (3, 0), 5, _ONE, BF16),
    _chunks("wide_three_groups", (70,), 70, (1, 3, 128, 128), BF16),
    _chunks("wide_no_decay", (128,), 128, _TWO, BF16, change=_no_decay),
    _chunks("wide_strong_decay_and_reset", (64,), 64, _TWO, BF16, change=_strong_decay),
    _chunks("wide_one_key", (128,), 128, _ONE, BF16, change=_one_key),
    _chunks("tensor_few_places", (3, 0, 5), 5, _TENSOR, BF16),
    _chunks("tensor_three_groups", (70,), 70, (1, 3, 32, 16), BF16),
    _chunks("tensor_no_decay", (128,), 128, _TENSOR, BF16, change=_no_decay),
    _chunks("tensor_strong_decay_and_reset", (64,), 64, _TENSOR, BF16, change=_strong_decay),
    _chunks("tensor_one_key", (128,), 128, _TENSOR, BF16, change=_one_key),
    *(_step(f"released_{rows}", rows, 4, _RELEASED, BF16, device_only=True) for rows in (1, 8, 32)),
    *(
        _commit(
            f"released_{rows}",
            (4, 1, 2, 0) * (rows // 4) or (3,),
            4,
            _RELEASED,
            BF16,
            device_only=True,
        )
        for rows in (1, 8, 32)
    ),
    *(
        _commit(
            f"released_{rows}_layers_{layers}",
            (4, 1, 2, 3) * (rows // 4) or (3,),
            4,
            _RELEASED,
            BF16,
            layers=layers,
            device_only=True,
        )
        for rows, layers in ((1, 36), (32, 4))
    ),
    *(
        _chunks(f"released_{length}", (length,), length, _RELEASED, BF16, device_only=True)
        for length in (512, 2048, 4096, 8192)
    ),
    _chunks(
        "released_8_rows_of_1024",
        (1024, 1000, 700, 513, 512, 64, 1, 0),
        1024,
        _RELEASED,
        BF16,
        device_only=True,
    ),
    *(
        _step(f"released_decode_{rows}", rows, 1, _RELEASED, BF16, device_only=True)
        for rows in (1, 4, 16, 32)
    ),
    *(_step(f"released_{rows}", rows, 4, _RELEASED, BF16, device_only=True) for rows in (4, 16)),
    *(
        _step(f"released_rank_of_4_decode_{rows}", rows, 1, _QUARTER, BF16, device_only=True)
        for rows in (1, 4, 16, 32)
    ),
    *(
        _step(f"released_rank_of_4_{rows}", rows, 4, _QUARTER, BF16, device_only=True)
        for rows in (1, 4, 16, 32)
    ),
    *(
        _commit(
            f"released_{name}{rows}_layers_36",
            (3,) * rows,
            4,
            heads,
            BF16,
            layers=36,
            device_only=True,
        )
        for name, heads, rows in (
            ("", _RELEASED, 4),
            ("rank_of_4_", _QUARTER, 1),
            ("rank_of_4_", _QUARTER, 4),
        )
    ),
    _chunks("released_rank_of_4_8192", (8192,), 8192, _QUARTER, BF16, device_only=True),
)
