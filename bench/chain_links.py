"""Chains of the gated residual and of Gated DeltaNet that `bench.chains` times."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from bench.traffic import size
from qwen4jax.config import Config
from qwen4jax.pallas import counters, gated_delta, gated_residual
from qwen4jax.pallas.registry import Operation
from qwen4jax.state import DeltaNetState

BF16 = jnp.bfloat16
PLACES = 4

Judge = Callable[[dict[str, Any], Any], list[tuple[jax.Array, jax.Array, jax.Array]]]


@dataclasses.dataclass(frozen=True)
class Chain:
    """Calls over arrays of their own, each after the one before.

    Attributes:
        name: as the operation of a result line.
        case: without what says the geometry.
        rows: tokens or queries of a call.
        links: calls with arrays of their own.
        passes: over all links in one graph.
        operations: that an implementation can be named for.
        draw: `(key, links, passes)` to `(carry, fixed)`.
        run: `(carry, fixed, passes)` to the carry after it.
        nbytes: `(carry, fixed)` to the least bytes of all links of a pass.
        checked: links that are checked as one.
        compared: the part of a carry that has to agree.
        judge: instead of a comparison with the reference.
    """

    name: str
    case: str
    rows: int
    links: int
    passes: int
    operations: tuple[Operation, ...]
    draw: Callable[[jax.Array, int, int], tuple[Any, Any]]
    run: Callable[[Any, Any, int], Any]
    nbytes: Callable[[Any, Any], float]
    checked: int = 1
    compared: Callable[[Any], Any] = lambda carry: carry
    judge: Judge | None = None


def normal(key: jax.Array, shape: tuple[int, ...], scale: float = 1.0) -> jax.Array:
    """Bfloat16 values of a normal distribution."""
    return (jax.random.normal(key, shape) * scale).astype(BF16)


def residual(config: Config, rows: int) -> Chain:
    """Update, norm and mix of one sublayer after the other, 32 sets of weights.

    The input of a sublayer stands for its output, so the chain is as serial as the model.
    """
    streams, hidden = config.hc_count, config.hidden_size
    width, rank = streams * hidden, config.hc_lowrank

    def draw(key: jax.Array, links: int, passes: int) -> tuple[Any, Any]:
        del passes
        a, b, c, *keys = jax.random.split(key, 3 + links)
        carry = (
            normal(a, (rows, 1, streams, hidden)),
            2 * jax.random.uniform(b, (rows, 1, streams)),
            normal(c, (rows, 1, hidden)),
            counters.fresh(),
        )
        return carry, tuple(map(weights, keys))

    @jax.jit
    def weights(key: jax.Array) -> dict[str, jax.Array]:
        a, b, c, d = jax.random.split(key, 4)
        return dict(
            down=normal(a, (rank, width), width**-0.5),
            up=normal(b, (width, rank), rank**-0.5),
            inject=normal(c, (streams, width), width**-0.5),
            norm=normal(d, (width,), 0.1),
        )

    @jax.jit
    def one(carry: Any, own: dict[str, Any]) -> Any:
        states, inject, y, counter = carry
        return gated_residual.boundary(states, (inject, y), **own, counter=counter, eps=1e-6)

    def run(carry: Any, fixed: Any, passes: int) -> Any:
        for own in fixed * passes:
            # a sublayer stands between the mixer and the update: they are not fused
            states, x, inject, counter = jax.lax.optimization_barrier(one(carry, own))
            carry = states, inject, x, counter
        return carry

    return Chain(
        name="gated_residual.chain",
        case=f"{rows}",
        rows=rows,
        links=32,
        passes=2,
        operations=(gated_residual.BOUNDARY,),
        draw=draw,
        run=run,
        # streams, injection weights and output are read and written, the weights read
        nbytes=lambda carry, fixed: size(fixed) + len(fixed) * 2 * size(carry[:3]),
        compared=lambda carry: carry[:3],
    )


def delta(config: Config, what: str, requests: int) -> Chain:
    """Gated DeltaNet with its convolution and norm, layer after layer.

    A layer's output is the next one's gate. "decode" is a step of one token and the commit of all
    layers, which writes the states; "verify" a step of four tokens, "verify_commit" with the
    commit of three of them. The states are the carry.
    """
    places = 1 if what == "decode" else PLACES
    kept = min(places, 3) if what != "verify" else 0
    key_heads, heads = config.linear_num_key_heads, config.linear_num_value_heads
    channels, values = config.linear_key_head_dim, config.linear_value_head_dim
    width, taps = 2 * key_heads * channels + heads * values, config.linear_conv_kernel_dim

    @jax.jit
    def layer(key: jax.Array) -> tuple[dict[str, Any], tuple[jax.Array, jax.Array]]:
        keys = iter(jax.random.split(key, 8))
        own = dict(
            qkv=normal(next(keys), (requests, places, width)),
            a=normal(next(keys), (requests, places, heads)),
            b=normal(next(keys), (requests, places, heads)),
            conv1d=normal(next(keys), (width, taps), taps**-0.5),
            A_log=jnp.log(jax.random.uniform(next(keys), (heads,), BF16, 0.3, 4)),
            dt_bias=jnp.full(heads, -1.0, BF16),
            norm=1 + normal(next(keys), (values,), 0.2),
        )
        state = (requests, heads, channels, values)
        first, second = jax.random.split(next(keys))
        history = normal(first, (requests, taps - 1, width))
        return own, (history, jax.random.normal(second, state))

    def draw(key: jax.Array, links: int, passes: int) -> tuple[Any, Any]:
        del passes
        first, *keys = jax.random.split(key, 1 + links)
        layers = [layer(own) for own in keys]
        z = normal(first, (requests, places, heads * values))
        count = jnp.full(requests, kept, jnp.int32)
        return (z, tuple(state for _, state in layers)), (count, tuple(own for own, _ in layers))

    @jax.jit
    def one(z: jax.Array, own: dict[str, Any], state: tuple[jax.Array, jax.Array]) -> Any:
        weights = gated_delta.Weights(*(own[n] for n in ("conv1d", "A_log", "dt_bias", "norm")))
        return gated_delta.step(
            own["qkv"],
            z,
            own["a"],
            own["b"],
            weights,
            DeltaNetState(*state),
            key_heads=key_heads,
            activation=config.gate_activation,
            eps=config.rms_norm_eps,
        )

    def run(carry: Any, fixed: Any, passes: int) -> Any:
        (z, states), (count, layers) = carry, fixed
        for _ in range(passes):
            factors = []
            for own, state in zip(layers, states, strict=True):
                own, z = jax.lax.optimization_barrier((own, z))
                z, given = one(z, own, state)
                factors.append(given)
            if kept:
                before = tuple(DeltaNetState(*state) for state in states)
                after = gated_delta.commit(before, tuple(factors), count)
                states = tuple((state.conv, state.recurrent) for state in after)
        return z, states

    def nbytes(carry: Any, fixed: Any) -> float:
        (z, states), (_, layers) = carry, fixed
        # a state is read, and written if tokens stay; the gates are read and the outputs written
        return size(layers) + (1 + bool(kept)) * size(states) + 2 * len(layers) * size(z)

    return Chain(
        name="gated_delta.chain",
        case=f"{what}_{requests}",
        rows=requests * places,
        # as many as the model has, for the commit is of all
        links=36,
        passes=2,
        operations=(gated_delta.STEP, gated_delta.COMMIT),
        draw=draw,
        run=run,
        nbytes=nbytes,
        checked=2,
    )
