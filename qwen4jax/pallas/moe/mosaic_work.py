"""How the Mosaic kernel of the experts divides its work among CTAs that stay."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax

PROCESSORS = 132


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the weights are cut.

    Attributes:
        columns: of a stage.
        stages: under way at a time.
        ctas: per multiprocessor.
        consumers: warpgroups of a CTA that multiply, each 64 rows of two blocks.
    """

    columns: int
    stages: int
    ctas: int = 1
    consumers: int = 1


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of the kernel's work.

    A tile is an expert with up to 8 columns, a unit the rows of two blocks of its weights that one
    CTA reads: of gate and of up, or of both halves of down.

    Attributes:
        tiles: the most that there can be.
        hidden: size of a token.
        width: of the experts.
        form: in which they are stored.
        gathered: whether each tile has columns of its own, and not the tokens.
        cut: of the weights.
    """

    tiles: int
    hidden: int
    width: int
    form: str
    gathered: bool
    cut: Tiles

    @property
    def lanes(self) -> int:
        """CTAs, all of which run at once, as they wait for each other."""
        return PROCESSORS * self.cut.ctas

    @property
    def tokens(self) -> Any:
        """Dtype of right operands: e4m3 is decoded to float16 in one instruction a pair."""
        return jnp.float16 if self.form == "fp8" else jnp.bfloat16

    @property
    def blocks(self) -> tuple[int, int]:
        """Units of a tile in both products."""
        rows = 64 * self.cut.consumers
        return self.width // rows, self.hidden // 2 // rows

    @property
    def steps(self) -> tuple[int, int]:
        """Stages of a unit of both products."""
        return self.hidden // self.cut.columns, self.width // self.cut.columns

    def shares(self, count: Any) -> tuple[Any, Any, Any]:
        """This CTA's units of the first product, its units of down, and which a number of them is.

        Some CTAs have a unit more of the first, and fewer of down. The last tiles' hidden values
        are ready when they are: those CTAs begin with these tiles, the others end with them.
        """
        lane, lanes = lax.axis_index("lane"), self.lanes
        units, others = (count * n for n in self.blocks)
        each, more = units // lanes, lax.rem(units, lanes)
        rest = lanes - more
        # what a unit of the first reads, in those of the second
        ratio = self.hidden // self.width
        fair = _ceil(ratio * units + others, lanes)
        own = jnp.minimum(jnp.maximum(fair - ratio * (each + 1), 0), others // jnp.maximum(more, 1))
        taken = own * more
        early = each * lanes // self.blocks[0] * self.blocks[1]
        late = others - early
        late_left = jnp.maximum(late - taken, 0)
        early_left = others - taken - late_left
        first, last = _ceil(early_left, rest), _ceil(late_left, rest)
        behind = lane - more
        # in the order in which units are given away, the late ones first
        begin = jnp.where(behind < 0, lane * own, jnp.maximum(late, taken) + behind * first)
        end = taken + behind * last
        number = jnp.where(behind < 0, own, jnp.clip(early_left - behind * first, 0, first))
        then = jnp.where(behind < 0, 0, jnp.clip(late_left - behind * last, 0, last))

        def unit(i):
            at = jnp.where(i < number, begin + i, end + i - number)
            return jnp.where(at < late, early + at, at - late)

        return each + (behind < 0).astype(jnp.int32), number + then, unit


def _ceil(a: Any, b: Any) -> Any:
    return (a + b - 1) // b
