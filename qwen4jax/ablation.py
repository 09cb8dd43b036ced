"""Ablations: named variants of one mechanism, as values of a `Config`."""

import dataclasses
from typing import Literal, get_args

IndexShare = Literal["fresh", "share", "share_frozen"]


@dataclasses.dataclass(frozen=True)
class Ablation:
    """Which variant of each studied mechanism runs; part of every compilation key.

    Attributes:
        index_share: how the chained draft steps of a speculative round select tokens. `fresh` runs
            the indexer in every step; `share` freezes the selection of the last accepted row and
            appends the positions drafted since; `share_frozen` freezes it and appends nothing.
    """

    index_share: IndexShare = "fresh"

    def __post_init__(self):
        if self.index_share not in get_args(IndexShare):
            known = ", ".join(get_args(IndexShare))
            raise ValueError(f"index_share: {self.index_share!r} is not one of {known}")
