"""Gated DeltaNet over whole sequences: all chunks at once, a scan only over their states.

Equal to `gated_delta.chunks` from an empty state. That form solves one chunk after the other,
which a GPU spends waiting; here the triangular systems of all chunks are inverted together and the
scan holds two products per chunk (the WY form of Yang et al., arXiv 2412.06464, section 3.3).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from qwen4jax.config import Config
from qwen4jax.numerics import EXACT, l2_norm
from qwen4jax.pallas.skinny_matmul import skinny_matmul
from qwen4jax.params import GatedDeltaNet

CHUNK = 64
# strictly lower blocks this small are inverted by the powers of a nilpotent matrix
_SMALLEST = 8


def delta_net(
    params: GatedDeltaNet, config: Config, x: Float[Array, "B T D"]
) -> Float[Array, "B T D"]:
    """One linear-attention sublayer over sequences from their first token.

    Args:
        params: of the sublayer.
        config: of the model.
        x: sublayer input; T is a multiple of the chunk, or below it.
    """
    rows, places = x.shape[:2]
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    matmul = lambda a, w: skinny_matmul(a, w, implementation="reference")  # noqa: E731
    projections = (params.in_proj_qkv, params.in_proj_z, params.in_proj_a, params.in_proj_b)
    qkv, z, a, b = (matmul(x, w) for w in projections)

    taps = params.conv1d.astype(jnp.float32)
    window = jnp.pad(qkv, ((0, 0), (taps.shape[1] - 1, 0), (0, 0)))
    mixed = sum(
        window[:, j : j + places].astype(jnp.float32) * taps[:, j] for j in range(taps.shape[1])
    )
    mixed = jax.nn.silu(mixed).astype(x.dtype).astype(jnp.float32)
    width = key_heads * config.linear_key_head_dim
    q, k, v = jnp.split(mixed, [width, 2 * width], axis=-1)
    q = l2_norm(q.reshape(rows, places, key_heads, -1)) * config.linear_key_head_dim**-0.5
    k = l2_norm(k.reshape(rows, places, key_heads, -1))
    q, k = (jnp.repeat(y, value_heads // key_heads, axis=2) for y in (q, k))
    v = v.reshape(rows, places, value_heads, -1)
    softplus = jax.nn.softplus(a.astype(jnp.float32) + params.dt_bias.astype(jnp.float32))
    decay = -jnp.exp(params.A_log.astype(jnp.float32)) * softplus
    beta = jax.nn.sigmoid(b.astype(jnp.float32))

    # in bfloat16 the inputs have 8 bits: TF32 keeps all of them
    precision = EXACT if x.dtype == jnp.float32 else None
    out = delta_rule(q, k, v, decay, beta, precision=precision)
    scale = jax.lax.rsqrt(jnp.mean(out * out, axis=-1, keepdims=True) + config.rms_norm_eps)
    normed = out * scale * params.norm.astype(jnp.float32)
    gate = z.astype(jnp.float32).reshape(out.shape)
    gate = jax.nn.sigmoid(gate) if config.gate_activation == "sigmoid" else jax.nn.silu(gate)
    out = (normed * gate).astype(x.dtype).reshape(rows, places, -1)
    return matmul(out, params.out_proj)


def delta_rule(
    q: Float[Array, "B T V K"],
    k: Float[Array, "B T V K"],
    v: Float[Array, "B T V E"],
    decay: Float[Array, "B T V"],
    beta: Float[Array, "B T V"],
    *,
    precision: jax.lax.Precision | None,
) -> Float[Array, "B T V E"]:
    """Outputs of the gated delta rule from an empty state, float32.

    Args:
        q: queries, normed and scaled.
        k: keys, normed.
        v: values.
        decay: log decay, at most 0.
        beta: step sizes.
        precision: of the products, but for the inverse, which is exact.
    """
    rows, places, heads, key_width = q.shape
    size = min(CHUNK, places)
    if places % size:
        raise ValueError(f"{places} tokens are no multiple of the chunk of {size}")
    dot = lambda eq, *xs: jnp.einsum(eq, *xs, precision=precision)  # noqa: E731

    def chunks(x):
        """[B, T, V, ...] as [N, B, V, C, ...]."""
        x = x.reshape(rows, places // size, size, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2))

    q, k, v, decay, beta = (chunks(x) for x in (q, k, v, decay, beta))
    through = jnp.cumsum(decay, axis=-1)
    total = through[..., -1:]
    lower = jnp.tril(jnp.ones((size, size), bool))
    between = jnp.where(lower, through[..., :, None] - through[..., None, :], 0.0)
    weight = jnp.where(lower, jnp.exp(between), 0.0)
    strict = jnp.where(jnp.tril(lower, -1), weight, 0.0)

    system = beta[..., None] * strict * dot("...ik,...jk->...ij", k, k)
    inverse = inverse_unit_lower(system)
    since = jnp.exp(through)[..., None]
    # delta = of_values - of_state @ S, and the state adds (q exp(since)) @ S to the output
    of_values = dot("...ij,...je->...ie", inverse, beta[..., None] * v)
    of_state = dot("...ij,...jk->...ik", inverse, beta[..., None] * since * k)
    both = jnp.concatenate([of_state, q * since], axis=-2)
    pushed = k * jnp.exp(total - through)[..., None]

    def body(state, chunk):
        of_values, both, pushed, kept = chunk
        read = dot("...ck,...ke->...ce", both, state)
        delta = of_values - read[..., :size, :]
        state = state * kept + dot("...ck,...ce->...ke", pushed, delta)
        return state, (delta, read[..., size:, :])

    empty = jnp.zeros((rows, heads, key_width, v.shape[-1]), jnp.float32)
    _, (delta, out) = jax.lax.scan(
        body, empty, (of_values, both, pushed, jnp.exp(total)[..., None]), unroll=2
    )
    out = out + dot("...ij,...je->...ie", weight * dot("...ik,...jk->...ij", q, k), delta)
    return jnp.moveaxis(out, (0, 2), (1, 3)).reshape(rows, places, heads, -1)


@jax.custom_vjp
def inverse_unit_lower(lower: Float[Array, "*batch C C"]) -> Float[Array, "*batch C C"]:
    """`(I + lower)^-1` of strictly lower triangular matrices; C is a power of two times under 8.

    By halves: the inverse of `[[A, 0], [X, B]]` is `[[A', 0], [-B' X A', B']]`.
    """
    size = lower.shape[-1]
    if size <= _SMALLEST or size % 2:
        # powers of a small strictly lower matrix vanish before they can grow
        identity = jnp.eye(size, dtype=lower.dtype)
        inverse, power, reach = identity - lower, lower, 2
        while reach < size:
            power = _dot(power, power)
            inverse = _dot(inverse, identity + power)
            reach *= 2
        return inverse
    half = size // 2
    first = lower[..., :half, :half]
    last = lower[..., half:, half:]
    # both halves in one call: fewer and larger products
    both = inverse_unit_lower(jnp.stack([first, last]))
    corner = -_dot(_dot(both[1], lower[..., half:, :half]), both[0])
    top = jnp.concatenate([both[0], jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, both[1]], axis=-1)], axis=-2)


def _forward(lower):
    inverse = inverse_unit_lower(lower)
    return inverse, inverse


def _backward(inverse, cotangent):
    turned = jnp.swapaxes(inverse, -1, -2)
    return (jnp.tril(-_dot(_dot(turned, cotangent), turned), -1),)


inverse_unit_lower.defvjp(_forward, _backward)


def _dot(x, y):
    return jnp.matmul(x, y, precision=EXACT)
