"""Which arguments the kernels take, and how one launch cuts its work."""

from typing import Any, NamedTuple

import jax.numpy as jnp

# programs of a launch that meet: all run at once
PROGRAMS = 132
# GPUs with as many multiprocessors; a slice of one (MIG) has fewer
MEETING_DEVICES = r"^(?!.*MIG).*(H100 80GB HBM3|H200|B200|B300)"
MEETING_TEXT = f"a whole GPU with {PROGRAMS} multiprocessors or more (H100 SXM, H200, B200, B300)"
# columns of the sums beside the low-rank ones: room for the injection weights' logits
EXTRA = 16
# sums by slice are found by 32 bits
MOST_ROWS = 65536


def _refuses_dtype(*arrays: Any) -> str | None:
    if any(a is not None and a.dtype != jnp.bfloat16 for a in arrays):
        return "takes bfloat16 streams and weights"
    return None


def refuses(
    streams: Any, pending: Any, norm: Any, down: Any, up: Any, inject: Any, *_: Any, **__: Any
) -> str | None:
    """What keeps `triton` from these arguments."""
    batch, time, count, hidden = streams.shape
    if reason := _refuses_dtype(streams, norm, down, up, inject, *(pending or ())[1:]):
        return reason
    if not 1 <= batch * time <= MOST_ROWS:
        return f"takes 1 to {MOST_ROWS} rows, not {batch * time}"
    if count not in (2, 4, 8, 16) or hidden % 64 or down.shape[0] % 16:
        return "takes 2, 4, 8 or 16 streams, widths in multiples of 64 and ranks of 16"
    return None


def powers(rank: int) -> tuple[int, int]:
    """The largest power of two that a rank holds, and what is left."""
    most = 1 << rank.bit_length() - 1
    return most, rank - most


def refuses_many(
    streams: Any, pending: Any, norm: Any, down: Any, up: Any, inject: Any, *_: Any, **__: Any
) -> str | None:
    """What keeps `triton_many` from these arguments."""
    if reason := refuses(streams, pending, norm, down, up, inject):
        return reason
    most, rest = powers(down.shape[0])
    if most % 64 or rest % 64 or rest & rest - 1 or most + rest > 320:
        return "takes ranks up to 320 that are one or two powers of two from 64 on"
    return None


def refuses_few(
    streams: Any, pending: Any, norm: Any, down: Any, up: Any, inject: Any, *_: Any, **__: Any
) -> str | None:
    """What keeps `triton_few` from these arguments."""
    if reason := refuses(streams, pending, norm, down, up, inject):
        return reason
    if streams.shape[0] * streams.shape[1] > 8:
        return "takes up to 8 rows: the narrow side of one tensor-core product"
    if down.shape[0] % 32:
        return "takes ranks in multiples of 32"
    return None


def refuses_mosaic(
    streams: Any, pending: Any, norm: Any, down: Any, up: Any, inject: Any, *_: Any, **__: Any
) -> str | None:
    """What keeps `mosaic_hopper` from these arguments."""
    batch, time, count, hidden = streams.shape
    if reason := _refuses_dtype(streams, norm, down, up, inject, *(pending or ())[1:]):
        return reason
    if (rows := batch * time) not in (*range(1, 9), 16, 24, 32):
        return f"takes 1 to 8, 16, 24 or 32 rows, not {rows}"
    if count != 4 or hidden % 256 or down.shape[0] % 64:
        return "takes 4 streams, widths in multiples of 256 and ranks of 64"
    return None


class OneCut(NamedTuple):
    """How one launch is cut.

    Attributes:
        programs: of the launch.
        outputs: of `down` and a stream, of a program.
        tall: groups of 16 rows of `up` of a program.
        warps: of a program.
    """

    programs: int
    outputs: int
    tall: int
    warps: int


def one_cut(count: int, hidden: int, rank: int) -> OneCut | None:
    """The finest cut whose programs all run at once, if there is one.

    The injection weights are a tile more of `down` for each stream, and a program more of `up`.
    """
    # chunks of 32 columns go round the warps
    chunks = hidden // 32
    warps = min(8, chunks & -chunks)
    for outputs in range(8, 17):
        programs = count * (rank // outputs + 1)
        if rank % outputs or programs > PROGRAMS:
            continue
        for tall in range(1, warps + 1):
            channels = tall * 16 // count
            if hidden % channels == 0 and hidden // channels < programs:
                return OneCut(programs, outputs, tall, warps)
    return None


def refuses_one(
    streams: Any, pending: Any, norm: Any, down: Any, up: Any, inject: Any, *_: Any, **__: Any
) -> str | None:
    """What keeps `triton_one` from these arguments."""
    if reason := refuses_few(streams, pending, norm, down, up, inject):
        return reason
    if one_cut(streams.shape[2], streams.shape[3], down.shape[0]) is None:
        return f"takes sizes that can be cut into at most {PROGRAMS} programs"
    return None
