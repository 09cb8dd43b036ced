"""Which implementation of an operation runs."""

from collections.abc import Callable, Mapping
from typing import Any


def choose(
    op: str, implementation: str | None, implementations: Mapping[str, Callable[..., Any]]
) -> Callable[..., Any]:
    """The implementation named, or the one preferred: the last that is listed.

    Raises:
        ValueError: there is none of that name.
    """
    if implementation is None:
        return list(implementations.values())[-1]
    if implementation not in implementations:
        known = ", ".join(implementations)
        raise ValueError(f"{op}: no implementation {implementation!r}; there are: {known}")
    return implementations[implementation]
