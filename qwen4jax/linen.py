"""The model as a Flax module: `init` and `apply` over the functions that everything else uses.

For those who compose with Flax; nothing in the package depends on it. A variable dict holds the
leaves of `Params` under their place in the tree: `variables["params"]["layers"]["3"]["self_attn"]
["q_proj"]`, a quantised tensor's components one level deeper.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import linen as nn
from jaxtyping import Array, Int

from qwen4jax.config import Config
from qwen4jax.forward_pass import forward
from qwen4jax.host_table import require_arrays
from qwen4jax.params import Params, declare, init_params
from qwen4jax.quant import Nvfp4, TiledNvfp4

Variables = Mapping[str, Any]


class Qwen4Exp(nn.Module):
    """A `qwen4_exp` model.

        model = Qwen4Exp(Config.tiny())
        variables = model.init(jax.random.key(0), tokens)
        logits = model.apply(variables, tokens)

    Loaded parameters: `Qwen4Exp(params.config).apply(to_variables(params), tokens)`.

    Attributes:
        config: of the model.
    """

    config: Config

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        *,
        mask: Any = None,
        rope_positions: Int[Array, "B T 3"] | None = None,
        capture: Sequence[str] = (),
    ) -> Any:
        """Logits of every position; arguments and results are those of `qwen4jax.forward_pass`."""
        if self.is_initializing():
            seed: Any = jax.random.bits(self.make_rng("params"))
            fresh = to_variables(init_params(self.config, seed))["params"]
            for name, value in fresh.items():
                self.put_variable("params", name, value)
        params = from_variables(self.config, self.variables)
        return forward(params, tokens, mask=mask, rope_positions=rope_positions, capture=capture)


def to_variables(params: Params) -> dict[str, dict[str, Any]]:
    """The variable dict with the very leaves of `params`, which have to be arrays."""
    require_arrays(params, "params")
    tree: dict[str, Any] = {}
    for path, leaf in jax.tree.leaves_with_path(params):
        *outer, last = _names(path)
        node = tree
        for name in outer:
            node = node.setdefault(name, {})
        node[last] = leaf
    return {"params": tree}


def from_variables(config: Config, variables: Variables) -> Params:
    """The parameters with the very leaves of a variable dict.

    Args:
        config: of the model.
        variables: from `to_variables` or `Qwen4Exp.init`; collections besides `params` are not
            looked at.

    Raises:
        ValueError: a leaf is missing, has another shape, or belongs to no such model; it is named.
    """
    given = _flat(variables["params"])

    def as_given(path: Any, node: Any) -> Any:
        if not isinstance(node, Nvfp4):
            return node
        name = ".".join(_names(path))
        # a checkpoint for 4-bit weights alone has no input scales
        if f"{name}.input_scale" not in given:
            node = dataclasses.replace(node, input_scale=None)
        # `load` has put experts in tiles on a GPU
        codes = given.get(f"{name}.weight")
        if codes is not None and len(codes.shape) == len(node.shape) + 2:
            node = jax.eval_shape(TiledNvfp4.of, _shapes(node))
        return node

    declared = jax.tree.map_with_path(
        as_given, declare(config), is_leaf=lambda node: isinstance(node, Nvfp4)
    )
    leaves = []
    for path, tensor in jax.tree.leaves_with_path(declared):
        name = ".".join(_names(path))
        if name not in given:
            raise ValueError(f"variables: {name} is missing")
        leaf = given.pop(name)
        if leaf.shape != tensor.shape:
            raise ValueError(
                f"variables: {name} has shape {list(leaf.shape)}, the configuration declares "
                f"{list(tensor.shape)}"
            )
        leaves.append(leaf)
    if given:
        raise ValueError(f"variables: the configuration declares no {', '.join(given)}")
    return jax.tree.structure(declared).unflatten(leaves)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, node in tree.items():
        inner = _flat(node, f"{prefix}{name}.") if isinstance(node, Mapping) else None
        found |= {prefix + name: node} if inner is None else inner
    return found


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _names(path: Any) -> list[str]:
    return jax.tree_util.keystr(path, simple=True, separator=".").split(".")
