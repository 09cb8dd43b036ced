"""Capture of named internals while the model is traced."""

import fnmatch
from collections.abc import Sequence

from jaxtyping import Array

# what a layer offers, below its own name `layerNN` (or `mtp`)
NAMES = (
    "residual",
    "attn.inject",
    "attn.read_gate",
    "mlp.inject",
    "mlp.read_gate",
    "indexer.selected",
    "router.ids",
    "router.weights",
)


class Capture:
    """Keeps the values whose names match, `layer07.indexer.selected` or `layer*.residual`.

    It lives only while a function is traced; the values are returned from there as a dict.
    """

    def __init__(self, patterns: Sequence[str] = (), prefix: str = ""):
        """Keeps names that match one of `patterns`, as `fnmatch` understands them."""
        self.patterns = tuple(patterns)
        self.values: dict[str, Array] = {}
        self._prefix = prefix

    def scope(self, name: str) -> "Capture":
        """The same capture with `name.` before every name."""
        inner = Capture(self.patterns, f"{self._prefix}{name}.")
        inner.values = self.values
        return inner

    def wants(self, name: str) -> bool:
        """Whether a value of that name would be kept; some are worth forming only then."""
        return any(fnmatch.fnmatchcase(self._prefix + name, p) for p in self.patterns)

    def __call__(self, name: str, value: Array) -> None:
        """Keeps `value` if its full name matches."""
        if self.wants(name):
            self.values[self._prefix + name] = value


def known_names(layer_types: Sequence[str], sparse: str, mtp: bool) -> list[str]:
    """Every name a model of these layers can capture."""
    scopes = [(f"layer{i:02d}", kind == sparse) for i, kind in enumerate(layer_types)]
    if mtp:
        scopes.append(("mtp", True))
    return [f"{s}.{n}" for s, has in scopes for n in NAMES if has or n != "indexer.selected"]
