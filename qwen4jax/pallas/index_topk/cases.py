"""Cases of the selection."""

import jax.numpy as jnp
import numpy as np

from qwen4jax.pallas.cases import F32, Case, integers
from qwen4jax.pallas.index_topk.limits import group_of


def _case(name, index, width, blocks, *, ratio=4, scores=None, best=False, device_only=False):
    """Scores of `width` blocks, -inf beyond what each `index` (given [B, T]) has complete.

    With `best`, the best score of each group comes along, as `index_score` gives it.
    """
    index = np.asarray(index)

    def build(rng):
        shape = (*index.shape, width)
        values = rng.standard_normal(shape) if scores is None else scores(rng, shape)
        seen = np.arange(width) < ((index + 1) // ratio)[..., None]
        values = np.where(seen, values, -np.inf)
        given = dict(scores=jnp.asarray(values, F32), index=integers(index))
        if best:
            size = group_of(width)
            spare = [(0, 0), (0, 0), (0, -width % size)]
            groups = np.pad(values, spare, constant_values=-np.inf).reshape(*shape[:-1], -1, size)
            given["best"] = jnp.asarray(groups.max(-1), F32)
        return given | dict(blocks=blocks, ratio=ratio)

    return Case("index_topk", name, build, device_only)


def _many_zeros(rng, shape):
    """What ReLU leaves: most scores are exactly 0, of either sign."""
    zero = np.where(rng.random(shape) < 0.5, 0.0, -0.0)
    return np.where(rng.random(shape) < 0.9, zero, rng.random(shape))


def _quantised(rng, shape):
    return np.round(rng.random(shape), 2)


def _concentrated(rng, shape):
    """Distinct float32 values in [1, 1.245): one bin of a coarse histogram."""
    values = np.linspace(1, 1.245, shape[-1], endpoint=False, dtype=np.float32)
    assert len(np.unique(values)) == shape[-1]
    return np.stack([rng.permutation(values) for _ in range(np.prod(shape[:-1]))]).reshape(shape)


def _half_range(rng, shape):
    """Over all magnitudes of float32: an exponent each, half of them tiny."""
    return np.exp2(rng.uniform(-126, 127, shape)).astype(np.float32)


def _one_bin(inside):
    """`inside` values in the bin of the threshold, the others far below."""

    def scores(rng, shape):
        values = _concentrated(rng, (*shape[:-1], inside))
        rest = rng.random((*shape[:-1], shape[-1] - inside)) * 0.5
        both = np.concatenate([values, rest], axis=-1)
        return rng.permuted(both, axis=-1)

    return scores


def _in_a_run(rng, shape):
    """The best lie side by side, so that few groups hold them all."""
    return np.where(np.arange(shape[-1]) // 600 == 2, 2.0, 1.0) * rng.random(shape)


def _equal_rows(scores):
    return lambda rng, shape: np.broadcast_to(scores(rng, (1, 1, shape[-1])), shape)


def _at_end(width, *, rows=1):
    return np.full((rows, 1), 4 * width - 1)


CASES = (
    _case("first_tokens", [[0, 1, 2, 3, 4, 7, 8]], 6, 2),
    _case("edge_of_the_budget", [[9, 10, 11, 12, 14, 15]], 6, 2),
    _case("empty_places", [[-1, 5, -1], [22, -1, -1]], 6, 2),
    _case("fewer_blocks_than_budget", [[0, 3, 6, 11]], 3, 8),
    _case("budget_of_one", [[4, 9, 23]], 6, 1),
    _case("ratio_8", [[0, 7, 8, 40, 47]], 6, 2, ratio=8),
    _case("ratio_1", [[0, 1, 5]], 6, 2, ratio=1),
    _case("all_tie", [[23, 22, 21]], 6, 3, scores=lambda rng, shape: np.zeros(shape)),
    _case("signed_zeros_tie", np.full((3, 4), 160), 40, 8, scores=_many_zeros),
    _case("steps_of_a_hundredth", np.full((2, 4), 1999), 500, 64, scores=_quantised),
    _case("places_63", np.arange(63)[None] + 37, 25, 8),
    _case("blocks_1000", [[3999, 3998]], 1000, 64),
    # NUM-03: around the widest window that is all selected, and up to twice the budget
    _case("index_2046_to_2054", np.arange(2046, 2055)[None], 520, 512),
    _case("up_to_twice_the_budget", [[2400, 4090, 4095]], 1024, 512, scores=_quantised),
    _case("best_in_a_run", [[11999, 11000]], 3000, 512, scores=_in_a_run),
    _case("long_rows", [[79999, 65539, 65535]], 20001, 512),
    _case("long_rows_in_a_run", [[79999, 70002]], 20001, 512, scores=_in_a_run, best=True),
    _case("long_rows_of_ties", [[79999, 66000]], 20001, 512, scores=_quantised, best=True),
    _case("longest_rows_in_a_run", [[159999, 70002]], 40001, 512, scores=_in_a_run, best=True),
    _case("longest_rows_of_ties", [[159999, 66000]], 40001, 512, scores=_quantised, best=True),
    # ids: single blocks, and few of many
    _case("vocabulary_groups", [[7759]], 7760, 512, ratio=1, scores=_quantised),
    _case("vocabulary_few_groups", [[7759]], 7760, 5, ratio=1, scores=_quantised),
    # more than a tile of Mosaic's, and the last one overlaps
    _case("width_5120", [[20479, 256, -1]], 5120, 64, scores=_many_zeros),
    _case("width_16512", [[66047]], 16512, 512, scores=_quantised),
    # NUM-01: more candidates in one coarse bin than a fixed buffer holds
    _case("bin_of_16384", _at_end(20000), 20000, 512, scores=_one_bin(16384)),
    _case("bin_of_16385", _at_end(20000), 20000, 512, scores=_one_bin(16385)),
    _case(
        "concentrated_30938", _at_end(30938, rows=4), 30938, 512, scores=_equal_rows(_concentrated)
    ),
    _case(
        "concentrated_65504", _at_end(65504, rows=4), 65504, 512, scores=_equal_rows(_concentrated)
    ),
    _case("best_of_four", [[11999, 11000, 9998]], 3000, 512, best=True),
    _case("best_of_four_in_a_run", [[11999, 11000]], 3001, 512, scores=_in_a_run, best=True),
    _case("best_of_four_tie", [[11999, 2050, -1]], 3000, 512, scores=_quantised, best=True),
    *(
        _case(
            f"released_{rows}_rows_{blocks}",
            np.arange(4) + 4 * np.full((rows, 1), blocks) - 4,
            blocks,
            512,
            device_only=True,
        )
        for rows, blocks in (
            (1, 2048),
            (1, 14336),
            (1, 16384),
            (1, 65536),
            (8, 16384),
            (32, 16384),
        )
    ),
    # LNG-11: times of the others beside those of "best", whose scores are random
    *(
        _case(
            f"released_{name}_{blocks}",
            4 * blocks - 4 + np.arange(4)[None],
            blocks,
            512,
            scores=scores,
            best=True,
            device_only=True,
        )
        for blocks in (14336, 16384, 16640, 65536)
        for name, scores in (
            ("best", None),
            ("ties", _quantised),
            ("all_equal", lambda rng, shape: np.ones(shape)),
            ("one_bin", _concentrated),
            ("half_range", _half_range),
            ("run", _in_a_run),
        )
        if scores is None or blocks in (14336, 65536)
    ),
    *(
        _case(
            f"released_best_{rows}_rows_{blocks}",
            np.arange(4) + np.full((rows, 1), 4 * blocks - 4),
            blocks,
            512,
            best=True,
            device_only=True,
        )
        for rows, blocks in ((8, 16384), (32, 16384), (32, 14336))
    ),
    *(
        _case(
            f"released_{name}", np.full((1, 4), width - 1), width, blocks, ratio=1, device_only=True
        )
        for name, width, blocks in (
            ("vocabulary_groups", 7760, 512),
            ("vocabulary_few_groups", 7760, 5),
            ("vocabulary_members", 16384, 512),
        )
    ),
    _case("released_chunk", np.arange(512)[None] + 65024, 16384, 512, device_only=True),
    *(
        _case(f"released_best_chunk_{name}", index, 16384, 512, best=True, device_only=True)
        for name, index in (
            ("from_0", np.arange(512)[None]),
            ("at_64k", np.arange(512)[None] + 65024),
            ("of_2048_at_64k", np.arange(2048)[None] + 63488),
        )
    ),
)

# of four queries each, as a round verifies them
_EDGE = np.arange(2046, 2055)[:, None] + np.arange(4)
_RAGGED = np.array([[-1], [0], [2], [2046], [2050], [20000], [57335], [57340]]) + np.arange(4)

# checked on a device, not timed: NUM-03 around the widest window that is all selected, and NUM-08
# rows of very different lengths, idle ones among them
EDGES = tuple(
    _case(
        f"edge_{name}{suffix}",
        np.where(np.arange(len(index))[:, None] == idle, -1, index),
        width,
        512,
        scores=scores,
        best=best,
        device_only=True,
    )
    for name, index, width, idle in (
        ("2047_to_2055", _EDGE, 576, -1),
        ("ragged", _RAGGED, 14336, 0),
    )
    for suffix, scores, best in (
        ("", None, False),
        ("_best", None, True),
        ("_best_ties", _quantised, True),
        ("_best_concentrated", _concentrated, True),
    )
)
