"""What the boundary kernel of `mosaic_hopper` is compiled for, and how its work is cut."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

SLICES = 4  # of each stream: the columns that one CTA multiplies


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a boundary kernel is compiled for.

    Attributes:
        rows: of activations.
        streams: residual streams.
        hidden: width of one.
        rank: of the gates' projection.
        pending: whether an update comes before.
        inject: whether injection weights are wanted.
        eps: of the norm.
    """

    rows: int
    streams: int
    hidden: int
    rank: int
    pending: bool
    inject: bool
    eps: float

    @property
    def tokens(self) -> int:
        """Rows, filled up to the width of a tile."""
        return -(-self.rows // 8) * 8

    @property
    def chunks(self) -> int:
        """Tiles side by side in a slice."""
        return self.hidden // SLICES // 64

    @property
    def together(self) -> int:
        """Tiles of the first product that are asked for at a time."""
        return 2 if self.chunks % 2 == 0 else 1

    @property
    def slices(self) -> int:
        """Of all streams."""
        return self.streams * SLICES

    @property
    def projects(self) -> int:
        """CTAs of the first stage."""
        return self.rank // 64 * self.slices

    @property
    def sums(self) -> int:
        """CTAs of the last stage that add up low-rank features for all, before."""
        return self.rank // 64 * (self.tokens // 8)

    @property
    def injects(self) -> int:
        """CTAs of the last stage that add up injection weights, after."""
        return self.tokens // 8 if self.inject else 0

    @property
    def mixes(self) -> int:
        """CTAs of the last stage."""
        return self.hidden // 64

    def outs(self) -> dict[str, Any]:
        """The results by name, and what the stages hand on."""
        shape, f32, bf16 = jax.ShapeDtypeStruct, jnp.float32, jnp.bfloat16
        wide = self.streams * self.hidden
        return {
            # what a slice of columns adds: to the features, then to the injection weights
            "partial": shape((self.slices, self.rank + 64 * self.inject, self.tokens), f32),
            "squares": shape((self.slices, self.tokens), f32),
            "low": shape((self.rank, self.tokens), bf16),
            "wanted": shape((self.rows, self.streams), f32) if self.inject else None,
            "settled": shape((self.rows, wide), bf16) if self.pending else None,
            "x": shape((self.rows, self.hidden), bf16),
        }
