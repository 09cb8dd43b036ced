"""The Flax adapter: the same leaves, the same function."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

from qwen4jax.config import LINEAR, SPARSE, Config, Quantization
from qwen4jax.forward_pass import forward
from qwen4jax.linen import Qwen4Exp, from_variables, to_variables
from qwen4jax.params import declare, init_params
from tests.golden.cases import read_case

# every stored form, two layers
SMALL = Config.tiny(
    num_hidden_layers=2,
    layer_types=(LINEAR, SPARSE),
    ple_layer_ids=(1,),
    quantization=Quantization("nvfp4", "fp8", "fp8"),
)
TOKENS = jnp.asarray(np.arange(3, 23)[None], jnp.int32)


def same_leaves(one: Any, other: Any) -> bool:
    """Whether two trees are of one kind and hold the very same arrays."""
    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(a is b for a, b in pairs)


@pytest.mark.parametrize("folder", ["t0", "nvfp4", "fp8", "variant"])
def test_conversion_keeps_every_leaf(folder: str):
    params = read_case(folder).params
    variables = to_variables(params)
    assert list(variables) == ["params"]
    back = from_variables(params.config, variables)
    assert same_leaves(back, params)
    assert same_leaves(from_variables(params.config, freeze(variables)), params)


def test_names_are_places_in_the_tree():
    params: Any = read_case("nvfp4").params
    tree = to_variables(params)["params"]
    assert tree["layers"]["3"]["self_attn"]["q_proj"] is params.layers[3].self_attn.q_proj
    experts = params.layers[1].mlp.experts
    assert tree["layers"]["1"]["mlp"]["experts"]["down_proj"] == {
        name: getattr(experts.down_proj, name)
        for name in ("weight", "weight_scale", "weight_scale_2", "input_scale")
    }
    assert set(tree["layers"]["1"]) & {"linear_attn", "self_attn", "ple"} == {"linear_attn", "ple"}


def test_apply_is_forward():
    """On a real checkpoint, with the arguments of `forward`."""
    case = read_case("t0")
    model, variables = Qwen4Exp(case.params.config), to_variables(case.params)
    tokens, mask = case.io["batch.ids"], case.io["batch.mask"]
    names = ("*.residual", "*.indexer.selected")
    want, wanted_taps = forward(case.params, tokens, mask=mask, capture=names)
    got, taps = model.apply(variables, tokens, mask=mask, capture=names)
    np.testing.assert_array_equal(got, want)
    assert taps.keys() == wanted_taps.keys()


def test_init_makes_parameters_that_apply_takes():
    model = Qwen4Exp(SMALL)
    logits, variables = model.init_with_output(jax.random.key(3), TOKENS)
    shapes: Any = jax.tree.map(lambda t: (t.shape, t.dtype), to_variables(declare(SMALL)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype.name), variables) == shapes
    assert np.isfinite(logits).all()
    np.testing.assert_array_equal(model.apply(variables, TOKENS), logits)
    again = model.init(jax.random.key(3), TOKENS)
    other = model.init(jax.random.key(4), TOKENS)
    equal = lambda a, b: jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))  # noqa: E731
    assert equal(variables, again)
    assert not equal(variables, other)


def test_abstract_init_and_gradient():
    """As Flax users do it: shapes without arrays, a loss differentiated by the variables."""
    config = SMALL.replace(quantization=Quantization())
    model: Any = Qwen4Exp(config)
    shapes: Any = jax.eval_shape(model.init, jax.random.key(0), TOKENS)
    declared: Any = to_variables(declare(config))
    assert jax.tree.map(lambda x: x.shape, shapes) == jax.tree.map(lambda t: t.shape, declared)
    loss = lambda variables: model.apply(variables, TOKENS).sum()  # noqa: E731
    gradients: Any = jax.eval_shape(jax.grad(loss), shapes)
    assert jax.tree.structure(gradients) == jax.tree.structure(shapes)


def test_weight_only_experts():
    """A checkpoint for 4-bit weights alone has no input scales: nor have the variables."""
    params: Any = read_case("nvfp4").params
    without = jax.tree.map(
        lambda w: w.replace(input_scale=None) if hasattr(w, "input_scale") else w,
        params,
        is_leaf=lambda w: hasattr(w, "input_scale"),
    )
    variables = to_variables(without)
    assert len(jax.tree.leaves(variables)) < len(jax.tree.leaves(params))
    assert same_leaves(from_variables(params.config, variables), without)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t["layers"]["1"].pop("mlp"), r"layers\.1\.mlp\.gate is missing"),
        (lambda t: t.pop("lm_head"), r"lm_head is missing"),
        (
            lambda t: t["mtp"].update(fc_hidden=jnp.zeros((3, 4))),
            r"mtp\.fc_hidden has shape \[3, 4\], the configuration declares \[64, 64\]",
        ),
        (lambda t: t["layers"].update({"2": {"x": jnp.zeros(1)}}), r"declares no layers\.2\.x"),
    ],
)
def test_wrong_variables_are_named(spoil: Any, message: str):
    variables = to_variables(init_params(SMALL))
    spoil(variables["params"])
    with pytest.raises(ValueError, match=message):
        Qwen4Exp(SMALL).apply(variables, TOKENS)
