"""The whole forward pass as one call: ids in, logits out, no state to carry."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from qwen4jax.config import SPARSE
from qwen4jax.layers.capture import Capture, known_names
from qwen4jax.model import head, read_out, step
from qwen4jax.params import Params
from qwen4jax.state import init_state


def forward(
    params: Params,
    tokens: Int[Array, "B T"] | np.ndarray | Sequence[Sequence[int]],
    *,
    mask: Any = None,
    rope_positions: Int[Array, "B T 3"] | None = None,
    capture: Sequence[str] = (),
) -> Any:
    """Logits of every position of a batch of sequences.

    Args:
        params: of the model.
        tokens: ids.
        mask: [B, T], 1 where a token is and 0 where there is padding, before or behind the tokens
            but not among them. Padding changes no other logits; its own are 0.
        rope_positions: (temporal, height, width) positions of the same places as `tokens`; by
            default those of text.
        capture: names or patterns of internals to return, see `qwen4jax.layers.capture.NAMES`;
            `layer03.indexer.selected`, `layer*.residual`.

    Returns:
        float32 logits [B, T, V]; with `capture`, a pair of them and a dict of the internals, whose
        rows are left-aligned.

    Raises:
        ValueError: an id is out of range, a mask has a hole, a name is unknown; it is named.
    """
    config = params.config
    # inside another transformation the ids are not known
    ids = tokens if isinstance(tokens, Tracer) else check_ids(tokens, config.vocab_size)
    rows, length = ids.shape
    if length > config.max_position_embeddings:
        raise ValueError(
            f"tokens: {length} positions are over max_position_embeddings="
            f"{config.max_position_embeddings}"
        )
    check_capture(params, capture)
    offset, count = jnp.zeros(rows, jnp.int32), jnp.full(rows, length, jnp.int32)
    if mask is not None:
        offset, count = (jnp.asarray(x, jnp.int32) for x in _bounds(mask, ids.shape))
    logits, captured = _forward(params, ids, offset, count, rope_positions, tuple(capture))
    return (logits, captured) if capture else logits


@functools.partial(jax.jit, static_argnames=("capture",))
def _forward(
    params: Params,
    tokens: Array,
    offset: Array,
    count: Array,
    rope_positions: Array | None,
    capture: tuple[str, ...],
) -> tuple[Float[Array, "B T V"], dict[str, Array]]:
    rows, length = tokens.shape
    place = jnp.arange(length)
    shifted = (place + offset[:, None]) % length
    aligned = jnp.take_along_axis(tokens, shifted, axis=1)
    if rope_positions is not None:
        rope_positions = jnp.take_along_axis(rope_positions, shifted[..., None], axis=1)
    state = init_state(params.config, slots=rows, max_length=length, drafts=0)
    taps = Capture(capture)
    _, pending = step(
        params, state, aligned, count, final=True, rope_positions=rope_positions, capture=taps
    )
    logits = head(params, read_out(params, pending.residual))
    logits = jnp.where((place < count[:, None])[..., None], logits, 0.0)
    back = (place - offset[:, None]) % length
    return jnp.take_along_axis(logits, back[..., None], axis=1), taps.values


def check_ids(tokens: Any, vocab_size: int) -> Array:
    """Token ids [B, T] as int32.

    Checked before they are narrowed: XLA would clamp or wrap them in silence.

    Raises:
        ValueError: names the row and place of the first id that is not in [0, vocab_size).
    """
    ids = np.asarray(tokens)
    if ids.ndim != 2 or ids.size == 0 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"tokens: integers [rows, positions] are expected, found {ids.dtype} {list(ids.shape)}"
        )
    bad = np.argwhere((ids < 0) | (ids >= vocab_size))
    if len(bad):
        row, place = bad[0]
        raise ValueError(
            f"tokens[{row}, {place}]: id {ids[row, place]} is not in [0, {vocab_size})"
        )
    return jnp.asarray(ids, jnp.int32)


def check_capture(params: Params, patterns: Sequence[str]) -> None:
    """Raises TypeError or ValueError for a pattern that names nothing of a forward pass."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise TypeError(f"capture: a sequence of names is expected, found {patterns!r}")
    # the draft head does not run in a forward pass
    names = known_names(params.config.layer_types, SPARSE, mtp=False)
    for index, pattern in enumerate(patterns):
        if not isinstance(pattern, str):
            raise TypeError(f"capture[{index}]: a name is expected, found {pattern!r}")
        probe = Capture((pattern,))
        for name in names:
            probe(name, jnp.zeros(()))
        if not probe.values:
            raise ValueError(
                f"capture[{index}]: {pattern!r} matches none of {names[0]}, {names[1]}, ..."
            )


def _bounds(mask: Any, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """First token and number of tokens of each row of a padding mask."""
    there = np.asarray(mask)
    if there.shape != tuple(shape):
        raise ValueError(f"mask: shape {list(there.shape)} is not that of tokens, {list(shape)}")
    if not np.isin(there, (0, 1)).all():
        raise ValueError("mask: values other than 0 and 1")
    there = there.astype(bool)
    first, count = there.argmax(axis=1), there.sum(axis=1)
    last = there.shape[1] - 1 - there[:, ::-1].argmax(axis=1)
    for row, (a, b, n) in enumerate(zip(first, last, count, strict=True)):
        if n and b - a + 1 != n:
            raise ValueError(f"mask[{row}]: padding stands among the tokens")
    return np.where(count > 0, first, 0), count
