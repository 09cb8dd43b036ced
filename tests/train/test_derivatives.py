"""What training computes its own way, against the plain way, values and derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qwen4jax.pallas.gated_delta import reference
from qwen4jax.train.attention import best_blocks, masked_attention
from qwen4jax.train.delta_net import delta_rule, inverse_unit_lower
from qwen4jax.train.head import draft_nats, token_nats


def random(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def assert_same(ours, plain, arguments, weights, atol=2e-5):
    """Values and derivatives of two functions of several arrays with several results."""

    def weighted(f):
        def total(*x):
            return sum(jnp.sum(w * y) for w, y in zip(weights, f(*x), strict=True))

        return jax.jit(jax.value_and_grad(total, argnums=tuple(range(len(arguments)))))

    (value, got), (expected, wanted) = (weighted(f)(*arguments) for f in (ours, plain))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=atol * float(jnp.abs(b).max()))
        assert float(jnp.abs(b).max()) > 0


def test_masked_attention():
    q, k, v, w, s = random(0, (2, 7, 6, 8), (2, 11, 2, 8), (2, 11, 2, 8), (2, 7, 6, 8), (2, 7, 6))
    mask = jax.random.bernoulli(jax.random.key(9), 0.5, (2, 7, 11)).at[:, :, 3].set(True)

    def plain(q, k, v):
        k, v = (jnp.repeat(x, 3, axis=2) for x in (k, v))
        scores = jnp.einsum("bthc,bshc->bths", q, k, precision="highest") * 8**-0.5
        scores = jnp.where(mask[:, :, None], scores, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bths,bshc->bthc", weights, v, precision="highest")
        return out, jax.nn.logsumexp(scores, axis=-1)

    assert_same(lambda *x: masked_attention(*x, mask), plain, (q, k, v), (w, s))


def test_a_query_that_sees_nothing_has_no_derivative():
    q, k, v = random(1, (1, 3, 2, 4), (1, 5, 1, 4), (1, 5, 1, 4))
    mask = jnp.zeros((1, 3, 5), bool).at[0, 1:].set(True)
    own = jnp.float32(0.5)

    def loss(q, k, v):
        out, size = masked_attention(q, k, v, mask)
        # as a chained row joins it with its own keys
        return jnp.sum(out * jnp.exp(size - jnp.logaddexp(size, own))[..., None])

    for gradient in jax.grad(loss, argnums=(0, 1, 2))(q, k, v):
        assert np.isfinite(gradient).all()
    assert not np.any(jax.grad(loss)(q, k, v)[0, 0])


@pytest.mark.parametrize("teacher", [False, True])
def test_output_head(teacher: bool):
    hidden, weight, aim, a, b = random(2, (2, 5, 8), (13, 8), (2, 5, 8), (2, 5), (2, 5))
    targets = jax.random.randint(jax.random.key(3), (2, 5), 0, 13)
    logits = lambda h, w: jnp.einsum("btd,vd->btv", h, w, precision="highest")  # noqa: E731

    def plain(hidden, weight):
        own = jax.nn.log_softmax(logits(hidden, weight))
        nats = -jnp.take_along_axis(own, targets[..., None], -1)[..., 0]
        other = jax.lax.stop_gradient(jax.nn.log_softmax(logits(aim, weight)))
        divergence = jnp.sum(jnp.exp(other) * (other - own), axis=-1)
        return (nats, divergence) if teacher else (nats,)

    def ours(hidden, weight):
        if teacher:
            return draft_nats(hidden, weight, targets, aim)[:2]
        return token_nats(hidden, weight, targets)[:1]

    assert_same(ours, plain, (hidden, weight), (a, b)[: 1 + teacher])
    best = token_nats(hidden, weight, targets)[1]
    np.testing.assert_array_equal(best, jnp.argmax(logits(hidden, weight), -1))


@pytest.mark.parametrize("size", [1, 6, 64])
def test_inverse_of_unit_lower(size: int):
    (x,) = random(4, (3, size, size))
    # equal keys and full steps: the powers of this matrix grow as binomials do
    lower = jnp.tril(jnp.stack([x[0], x[1] / 8, jnp.ones((size, size))]), -1)
    lower = lower.at[0].multiply(0.3)
    exact = np.linalg.inv(np.eye(size) + np.asarray(lower, np.float64))
    scale = np.abs(exact).max((1, 2), keepdims=True)
    assert np.max(np.abs(inverse_unit_lower(lower) - exact) / scale) < 1e-5
    if size > 1:
        (w,) = random(5, (3, size, size))
        plain = lambda a: (jnp.linalg.inv(jnp.eye(size) + jnp.tril(a, -1)),)  # noqa: E731
        ours = lambda a: (inverse_unit_lower(jnp.tril(a, -1)),)  # noqa: E731
        assert_same(ours, plain, (lower[1:2],), (w[1:2],), atol=1e-4)


def test_delta_rule_over_chunks():
    shape = (2, 192, 3)
    q, k, v, a, b, w = random(6, *[(*shape, 8)] * 3, shape, shape, (*shape, 8))
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    arguments = (unit(q), unit(k), v, -jnp.exp(a), jax.nn.sigmoid(b))

    def plain(*x):
        return (reference.recurrent(*x, jnp.zeros((2, 3, 8, 8)))[0],)

    def ours(*x):
        return (delta_rule(*x, precision=jax.lax.Precision.HIGHEST),)

    assert_same(ours, plain, arguments, (w,), atol=1e-4)


@pytest.mark.parametrize("count", [5, 40])
def test_best_blocks_are_those_of_top_k(count: int):
    scores = jnp.maximum(random(7, (6, 37))[0], 0)
    # many equal scores, zeros of both signs, rows with few or no blocks
    scores = jnp.round(scores * 3) / 3
    scores = scores.at[0, 5].set(-0.0)
    seen = jnp.asarray([37, 37, 20, 6, 1, 0])[:, None]
    scores = jnp.where(jnp.arange(37) < seen, scores, -1.0)
    _, best = jax.lax.top_k(jnp.where(scores == 0, 0.0, scores), min(count, 37))
    expected = jnp.zeros(scores.shape, bool).at[jnp.arange(6)[:, None], best].set(True)
    expected &= jnp.arange(37) < seen
    found = best_blocks(scores, count) & (jnp.arange(37) < seen)
    np.testing.assert_array_equal(found, expected)
