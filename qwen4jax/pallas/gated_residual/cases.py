"""Cases of the gated residual."""

from typing import Any

import jax.numpy as jnp

from qwen4jax.pallas import counters
from qwen4jax.pallas.cases import BF16, F32, Case, normal, weight


def _mix(
    name,
    rows,
    streams,
    hidden,
    rank,
    dtype=F32,
    *,
    inject=True,
    scale: Any = 1.0,
    device_only=False,
):
    def build(rng):
        width = streams * hidden
        x = normal(rng, (*rows, streams, hidden), F32)
        return dict(
            streams=(x * jnp.asarray(scale)).astype(dtype),
            norm=normal(rng, (width,), dtype, 0.2),
            down=weight(rng, (rank, width), dtype),
            up=weight(rng, (width, rank), dtype),
            inject=weight(rng, (streams, width), dtype) if inject else None,
            eps=1e-6,
        )

    return Case("mix", name, build, device_only)


def _boundary(
    name, rows, dtype=F32, *, streams=4, hidden=32, rank=8, pending=True, inject=True, **more
):
    """The update of the sublayer before (or none), and the mix after it."""

    def build(rng):
        first = _update("", rows, streams, hidden, dtype).build(rng)
        second = _mix("", rows, streams, hidden, rank, dtype, inject=inject).build(rng)
        second["streams"] = first["streams"]
        second["pending"] = (first["inject"], first["y"]) if pending else None
        return second | {"counter": counters.fresh()}

    return Case("boundary", name, build, **more)


def _update(name, rows, streams, hidden, dtype=F32, *, device_only=False):
    def build(rng):
        return dict(
            streams=normal(rng, (*rows, streams, hidden), dtype, 30.0),
            inject=normal(rng, (*rows, streams)),
            y=normal(rng, (*rows, hidden), dtype),
        )

    return Case("update", name, build, device_only)


_STREAM_SCALES = [[1.0], [10.0], [100.0], [1000.0]]

CASES = (
    _mix("one_token", (1, 1), 4, 32, 8),
    _mix("two_streams", (2, 3), 2, 16, 4),
    _mix("tokens_63", (1, 63), 4, 16, 4),
    _mix("streams_of_unequal_size", (1, 3), 4, 32, 8, scale=_STREAM_SCALES),
    _mix("zero_streams", (1, 3), 4, 32, 8, scale=0.0),
    _mix("final_mixer", (2, 3), 4, 32, 8, inject=False),
    _mix("bfloat16", (2, 3), 4, 32, 8, BF16),
    _mix("bfloat16_final_mixer", (1, 3), 4, 32, 8, BF16, inject=False),
    _update("float32", (2, 3), 4, 32),
    _update("two_streams", (1, 63), 2, 16),
    _update("bfloat16_rounds_once", (2, 3), 4, 32, BF16),
    *(
        _mix(f"released_{rows}", (rows, 1), 4, 2560, 320, BF16, device_only=True)
        for rows in (1, 4, 32, 128)
    ),
    _mix("released_final_mixer", (4, 1), 4, 2560, 320, BF16, inject=False, device_only=True),
    _mix("released_chunk", (1, 4096), 4, 2560, 320, BF16, device_only=True),
    _boundary("float32", (2, 3)),
    _boundary("bfloat16", (2, 3), BF16),
    _boundary("bfloat16_first", (1, 5), BF16, pending=False),
    _boundary("bfloat16_final_mixer", (5, 1), BF16, inject=False),
    _boundary("bfloat16_wide", (3, 1), BF16, hidden=256, rank=64),
    _boundary("bfloat16_sixteen", (4, 4), BF16, hidden=256, rank=128),
    _boundary("bfloat16_alone", (8, 1), BF16, hidden=1024, rank=64, pending=False, inject=False),
    _boundary("bfloat16_five", (5, 1), BF16, streams=2, hidden=192, rank=96),
    _boundary("bfloat16_eight_first", (8, 1), BF16, hidden=64, rank=32, pending=False),
    _boundary("bfloat16_wide_first", (1, 3), BF16, hidden=64, rank=16, pending=False),
    _boundary("bfloat16_wide_final_mixer", (1, 7), BF16, hidden=128, rank=48, inject=False),
    _boundary("bfloat16_two_streams", (2, 9), BF16, streams=2, hidden=512, rank=32),
    _boundary("bfloat16_odd_widths", (12, 1), BF16, hidden=320, rank=80),
    _boundary("bfloat16_30_alone", (3, 10), BF16, hidden=64, rank=32, pending=False, inject=False),
    _boundary("bfloat16_ragged", (1, 37), BF16, hidden=128, rank=32),
    _boundary("bfloat16_two_blocks", (131, 1), BF16, hidden=64, rank=16),
    # two powers of two in the rank, more channels than a step, several slices
    _boundary("bfloat16_chunk", (1, 131), BF16, hidden=128, rank=192),
    _boundary("bfloat16_chunk_alone", (2, 64), BF16, hidden=64, rank=64, pending=False),
    _boundary("bfloat16_chunk_final", (1, 257), BF16, streams=2, rank=64, hidden=64, inject=False),
    *(
        _boundary(f"released_{n}", (n, 1), BF16, hidden=2560, rank=320, device_only=True)
        for n in (1, 4, 16, 32, 128, 256, 512, 2048, 8192)
    ),
    _update("released_4", (1, 4), 4, 2560, BF16, device_only=True),
    _update("released_chunk", (1, 4096), 4, 2560, BF16, device_only=True),
)
