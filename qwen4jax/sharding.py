"""Logical axes to mesh axes: where parameters and states of several devices lie.

The axes are those of the declarations in `params.py` and `state.py`. With a tree of placements,
`jax.device_put(params, shardings(params, mesh))` spreads the parameters, and every function of the
package runs on them as it is: the references run, and XLA partitions them. Kernels are not for
parameters that are spread: XLA would gather each one's operands on every device at every call, so
they refuse such operands (`pallas.registry`), and nothing on several GPUs was measured. To run the
kernels, keep a model on one GPU.
"""

import dataclasses
import functools
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from qwen4jax.config import Config
from qwen4jax.params import Params, declare
from qwen4jax.state import DecodeState, state_axis_sizes

Rules = Mapping[str, str | tuple[str, ...] | None]
"""Logical axis -> mesh axis, or several, or None. An axis without a rule is not split."""

EXPERT_AND_HEAD_PARALLEL: Rules = MappingProxyType(
    {
        # whole experts, heads of both kinds of attention, rows of the large tables
        "experts": "model",
        "shared_hidden": "model",
        "query_gate": "model",
        "query": "model",
        "linear_qkv": "model",
        "linear_value": "model",
        "linear_value_heads": "model",
        "vocab": "model",
        "draft_vocab": "model",
        "ngram_rows": "model",
    }
)
"""The default, over one mesh axis `model`.

Every device holds a part of the routed experts, of the query heads and of the linear attention's
heads, and of the embedding, output and n-gram tables. Keys and values are on every device, for
there are two kv heads; so are the gated residuals, the indexer and the norms, which are small. The
released model divides among 2, 4 and 8 devices.
"""


def partition_spec(axes: Sequence[str], rules: Rules = EXPERT_AND_HEAD_PARALLEL) -> PartitionSpec:
    """The placement of a tensor with these logical axes.

    Raises:
        ValueError: there is no such logical axis, in `axes` or in the rules, or two axes of the
            tensor go to the same mesh axis.
    """
    for axis in (*rules, *axes):
        if axis not in _logical_axes():
            raise ValueError(f"{axis!r} is no logical axis of parameters or states")
    spec = [rules.get(axis) for axis in axes]
    used = [name for part in spec for name in _mesh_axes(part)]
    twice = sorted({name for name in used if used.count(name) > 1})
    if twice:
        raise ValueError(f"mesh axis {twice[0]!r} is given to two of the axes {' '.join(axes)}")
    return PartitionSpec(*spec)


def shardings(
    model: Config | Params,
    mesh: Mesh | AbstractMesh,
    rules: Rules = EXPERT_AND_HEAD_PARALLEL,
) -> Any:
    """A tree congruent with a model's parameters, whose leaves are their placements.

    Args:
        model: the configuration; or parameters or their declarations, which may lack what a
            checkpoint may lack.
        mesh: devices.
        rules: logical axis -> mesh axis.

    Raises:
        ValueError: an axis is unknown, or the size of a tensor's axis does not divide among the
            devices; the tensor is named.
    """
    tree = declare(model) if isinstance(model, Config) else model
    declared = jax.tree.leaves_with_path(declare(tree.config))
    axes = {jax.tree_util.keystr(path): tensor.axes for path, tensor in declared}

    def place(path: Any, leaf: Any) -> NamedSharding:
        own = axes[jax.tree_util.keystr(path)]
        # `quant.TiledNvfp4`: tiles stand at the place of rows and columns, each whole on a device
        return _placement(_name(path), own, leaf.shape[: len(own)], mesh, rules)

    return jax.tree.map_with_path(place, tree)


def state_shardings(
    state: DecodeState,
    mesh: Mesh | AbstractMesh,
    rules: Rules = EXPERT_AND_HEAD_PARALLEL,
) -> Any:
    """As `shardings`, for a state or for what `abstract_state` gives."""
    axes = iter(_state_axes(DecodeState, state))
    return jax.tree.map_with_path(
        lambda path, leaf: _placement(_name(path), next(axes), leaf.shape, mesh, rules), state
    )


def _placement(
    name: str,
    axes: Sequence[str],
    shape: Sequence[int],
    mesh: Mesh | AbstractMesh,
    rules: Rules,
) -> NamedSharding:
    try:
        spec = partition_spec(axes, rules)
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e
    for axis, size, part in zip(axes, shape, spec, strict=True):
        for mesh_axis in _mesh_axes(part):
            if mesh_axis not in mesh.axis_names:
                known = ", ".join(map(str, mesh.axis_names))
                raise ValueError(f"{name}: the mesh has no axis {mesh_axis!r}, only {known}")
        devices = math.prod(mesh.shape[mesh_axis] for mesh_axis in _mesh_axes(part))
        if size % devices:
            raise ValueError(
                f"{name}: axis {axis!r} of size {size} does not divide among {devices} devices "
                f"of mesh axis {part!r}"
            )
    # whatever the mesh is for elsewhere: here XLA decides how intermediate values lie
    types = (AxisType.Auto,) * len(mesh.axis_names)
    return NamedSharding(mesh.update(axis_types=types), spec)


def _mesh_axes(part: Any) -> tuple[str, ...]:
    if part is None:
        return ()
    return (part,) if isinstance(part, str) else tuple(part)


def _state_axes(kind: type, block: Any) -> Iterator[tuple[str, ...]]:
    """Logical axes of each array of a state, in tree order."""
    for field in dataclasses.fields(kind):
        value, declared = getattr(block, field.name), field.type
        if isinstance(value, tuple):
            for item in value:
                if dataclasses.is_dataclass(item):
                    yield from _state_axes(type(item), item)
                else:
                    yield tuple(typing.get_args(declared)[0].dim_str.split())
        elif dataclasses.is_dataclass(value):
            yield from _state_axes(type(value), value)
        elif value is not None:
            yield tuple(declared.dim_str.split())  # pyright: ignore[reportAttributeAccessIssue]


@functools.cache
def _logical_axes() -> frozenset[str]:
    """Every name in a declaration; all configurations have the same."""
    counts = dict(slots=1, pages=1, pages_per_slot=1, page_size=4, drafts=1)
    return frozenset(state_axis_sizes(Config.tiny(), **counts))


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
