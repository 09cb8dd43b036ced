"""The stages of the boundary kernel of `mosaic_hopper`, each the work of one CTA of 128 threads.

A tile is [64 features, tokens]: wgmma's accumulator with the weight's rows as its left operand.
Streams and outputs lie the other way round, [tokens, 64 features], where TMA puts and takes them;
the transposed view of shared memory turns one into the other. Loads from device memory are plain
where another CTA of the same launch has written, so that a semaphore orders them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from qwen4jax.pallas.gated_residual.mosaic_sizes import SLICES, Sizes
from qwen4jax.pallas.mosaic_layouts import SWIZZLED

_TILE = plgpu.Layout.WGMMA
_OVER_FEATURES = plgpu.Layout.WGMMA.reduce(1)
_OVER_TOKENS = plgpu.Layout.WGMMA.reduce(0)


def _lanes(*shape: int) -> Any:
    """The layout of a matrix of 32 numbers, one for each lane and the same in each warp."""
    tiling = plgpu.Tiling((shape, (1,)))
    warps = (plgpu.Replicated(4),)
    return plgpu.Layout.TILED(tiling, warp_dims=warps, lane_dims=(-3, -2), vector_dim=-1)


def project(
    z: Sizes,
    unit: Any,
    refs: dict[str, Any],
    done: Callable[[], None],
    injected: Callable[[], None],
) -> None:
    """64 low-rank features of one slice of columns, as far as that slice goes.

    Calls `done` when it has them and `injected` when it has its part of the injection weights,
    which the first CTA of a slice adds and nobody waits for before the end.

    The norm's scale is not known yet. It is a number for each token and stream, so the slice is
    multiplied without it, and `_scaled_sum` puts it in: bfloat16 loses as much of a number before
    scaling as after.
    """
    tile, part = lax.rem(unit, z.rank // 64), unit // (z.rank // 64)
    start = part * (z.hidden // SLICES)
    every = pl.ds(0, z.tokens)
    groups, wide = z.chunks // z.together, 64 * z.together

    def run(matrix, h, gains, y, weights, turned, read, loaded, injects):
        whole = pl.ds(start, groups * wide)
        # the memory's part is the longest: it begins first
        for k in range(groups):
            source = refs["down"].at[pl.ds(tile * 64, 64), pl.ds(start + k * wide, wide)]
            plgpu.copy_gmem_to_smem(source, matrix.at[k, pl.ds(8, 64)], loaded.at[k])
        plgpu.copy_gmem_to_smem(refs["streams"].at[every, whole], h, read)
        plgpu.copy_gmem_to_smem(refs["norm"].at[pl.ds(start // 64, z.chunks)], gains, read)
        if z.pending:
            plgpu.copy_gmem_to_smem(refs["weights"].at[every], weights, read)
            in_stream = pl.ds(lax.rem(start, z.hidden), groups * wide)
            plgpu.copy_gmem_to_smem(refs["y"].at[every, in_stream], y, read)
        if z.inject:

            @pl.when(tile == 0)
            def _():
                # above the features, so that a left operand of 64 rows begins with them
                for k in range(groups):
                    source = refs["inject"].at[pl.ds(0, 8), pl.ds(start + k * wide, wide)]
                    plgpu.copy_gmem_to_smem(source, matrix.at[k, pl.ds(0, 8)], injects)

        plgpu.barrier_wait(read)
        weight = None
        if z.pending:
            _turn(weights, turned)
            weight = _load(turned.at[part // SLICES], _OVER_TOKENS)

        def scale(k, total):
            columns = pl.ds(k * 64, 64)
            value = _updated(h.at[:, columns], y.at[:, columns] if z.pending else None, weight)
            gain = 1 + _load(gains.at[k], _OVER_FEATURES)
            scaled = value * _to_tile(gain, z.tokens, 0)
            h.at[:, columns].T[...] = plgpu.layout_cast(scaled.astype(jnp.bfloat16), _TILE)
            return total + value * value

        zeros = plgpu.layout_cast(jnp.zeros((64, z.tokens), jnp.float32), _TILE)
        total = lax.fori_loop(0, z.chunks, scale, zeros)
        plgpu.commit_smem()

        def product(top, wait):
            def accumulate(acc):
                def add(k, carry):
                    if wait:
                        plgpu.barrier_wait(loaded.at[k])
                    rows = matrix.at[k, pl.ds(top, 64)]
                    plgpu.wgmma(acc, rows, h.at[:, pl.ds(k * wide, wide)].T)
                    plgpu.wgmma_wait(0)
                    return carry

                lax.fori_loop(0, groups, add, ())
                return (acc[...],)

            return _accumulated(accumulate, z.tokens, 1)[0]

        @pl.when(tile == 0)
        def _():
            refs["squares"][part] = plgpu.layout_cast(jnp.sum(total, axis=0), _OVER_TOKENS)

        refs["partial"][part, pl.ds(tile * 64, 64)] = product(8, wait=True)
        done()
        if z.inject:

            @pl.when(tile == 0)
            def _():
                plgpu.barrier_wait(injects)
                refs["partial"][part, pl.ds(z.rank, 64)] = product(0, wait=False)
                injected()

    pl.run_scoped(
        run,
        _swizzled(groups, 72, wide),
        _swizzled(z.tokens, groups * wide),
        plgpu.SMEM((z.chunks, 64), jnp.bfloat16),
        _swizzled(z.tokens, groups * wide) if z.pending else None,
        *_weights(z),
        plgpu.Barrier(num_arrivals=4 if z.pending else 2),
        plgpu.Barrier(num_barriers=groups),
        plgpu.Barrier(num_arrivals=groups) if z.inject else None,
    )


def add_up(z: Sizes, unit: Any, refs: dict[str, Any]) -> None:
    """64 low-rank features of 8 tokens, from all slices."""
    tokens = pl.ds(unit // (z.rank // 64) * 8, 8)
    top = lax.rem(unit, z.rank // 64) * 64
    refs["low"][pl.ds(top, 64), tokens] = _low(z, top, tokens, _scales(z, tokens, refs), refs)


def add_up_inject(z: Sizes, group: Any, refs: dict[str, Any]) -> None:
    """The injection weights of 8 tokens."""
    tokens = pl.ds(group * 8, 8)

    def run(upright, turned):
        total = _scaled_sum(z, z.rank, tokens, _scales(z, tokens, refs), refs)
        upright[...] = plgpu.layout_cast(2 * jax.nn.sigmoid(total), _TILE)
        plgpu.commit_smem()
        weights = upright.at[pl.ds(0, z.streams)].T
        turned[...] = plgpu.load(weights, layout=_lanes(8, 4), optimized=False)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(turned, refs["wanted"].at[tokens])
        plgpu.wait_smem_to_gmem(0)

    turned = plgpu.SMEM((8, z.streams), jnp.float32)
    pl.run_scoped(run, plgpu.SMEM((64, 8), jnp.float32), turned)


def mix(z: Sizes, unit: Any, refs: dict[str, Any], wait: Callable[[], None]) -> None:
    """64 columns of the streams with the update, and of the sublayer's input.

    Everything that does not depend on the other stages is loaded and computed before `wait`.
    """
    start = unit * 64
    every = pl.ds(0, z.tokens)
    columns = [pl.ds(s * z.hidden + start, 64) for s in range(z.streams)]

    def run(matrix, h, gains, y, weights, turned, low, mean, read, loaded):
        for s, of in enumerate(columns):
            plgpu.copy_gmem_to_smem(refs["streams"].at[every, of], h.at[s], read)
            row = (s * z.hidden + start) // 64
            plgpu.copy_gmem_to_smem(refs["norm"].at[row], gains.at[s], read)
        if z.pending:
            plgpu.copy_gmem_to_smem(refs["y"].at[every, pl.ds(start, 64)], y, read)
            plgpu.copy_gmem_to_smem(refs["weights"].at[every], weights, read)

        def ask_weights(tile, carry):
            for s, of in enumerate(columns):
                source = refs["up"].at[of, pl.ds(tile * 64, 64)]
                plgpu.copy_gmem_to_smem(source, matrix.at[tile, s], loaded)
            return carry

        lax.fori_loop(0, z.rank // 64, ask_weights, ())
        plgpu.barrier_wait(read)
        if z.pending:
            _turn(weights, turned)
            for s in range(z.streams):
                value = _updated(h.at[s], y, _load(turned.at[s], _OVER_TOKENS))
                h.at[s].T[...] = plgpu.layout_cast(value.astype(jnp.bfloat16), _TILE)
            plgpu.commit_smem()
            for s, of in enumerate(columns):
                plgpu.copy_smem_to_gmem(h.at[s], refs["settled"].at[every, of])
        wait()
        scales = _scales(z, every, refs)

        def take(tile, carry):
            top = tile * 64
            rows = refs["low"].at[pl.ds(top, 64)]
            low.at[tile].T[...] = plgpu.load(rows, layout=_TILE, optimized=False)
            return carry

        lax.fori_loop(0, z.rank // 64, take, (), unroll=True)
        plgpu.commit_smem()
        plgpu.barrier_wait(loaded)

        def accumulate(*accs):
            def add(tile, carry):
                for s, acc in enumerate(accs):
                    plgpu.wgmma(acc, matrix.at[tile, s], low.at[tile].T)
                plgpu.wgmma_wait(0)
                return carry

            # a loop: ptxas would serialise straight code, where it sees the sums read
            lax.fori_loop(0, z.rank // 64, add, ())
            return tuple(acc[...] for acc in accs)

        total = None
        for s, sums in enumerate(_accumulated(accumulate, z.tokens, z.streams)):
            normed = _load(h.at[s].T, _TILE) * _to_tile(scales[s], z.tokens, 1)
            normed = normed * _to_tile(1 + _load(gains.at[s], _OVER_FEATURES), z.tokens, 0)
            term = jax.nn.sigmoid(sums) * normed.astype(jnp.bfloat16).astype(jnp.float32)
            total = term if total is None else total + term
        assert total is not None
        value = (total / z.streams).astype(jnp.bfloat16)
        mean.T[...] = plgpu.layout_cast(value, _TILE)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mean, refs["x"].at[every, pl.ds(start, 64)])
        plgpu.wait_smem_to_gmem(0)

    pl.run_scoped(
        run,
        _swizzled(z.rank // 64, z.streams, 64, 64),
        _swizzled(z.streams, z.tokens, 64),
        plgpu.SMEM((z.streams, 64), jnp.bfloat16),
        _swizzled(z.tokens, 64) if z.pending else None,
        *_weights(z),
        _swizzled(z.rank // 64, z.tokens, 64),
        _swizzled(z.tokens, 64),
        plgpu.Barrier(num_arrivals=2 * z.streams + 2 * z.pending),
        plgpu.Barrier(num_arrivals=z.rank // 64 * z.streams),
    )


def _low(z: Sizes, top: Any, tokens: Any, scales: list[Any], refs: dict[str, Any]) -> Any:
    """64 low-rank features from all slices, as the second product reads them."""
    total = _scaled_sum(z, top, tokens, scales, refs)
    return plgpu.layout_cast((total * jax.nn.sigmoid(total)).astype(jnp.bfloat16), _TILE)


def _scaled_sum(z: Sizes, top: Any, tokens: Any, scales: list[Any], refs: dict[str, Any]) -> Any:
    """The product of 64 rows with the normed streams, divided by their number."""
    total = None
    for stream, scale in enumerate(scales):
        parts = range(stream * SLICES, (stream + 1) * SLICES)
        tiles = [_load(refs["partial"].at[p, pl.ds(top, 64), tokens], _TILE) for p in parts]
        term = sum(tiles[1:], tiles[0]) * _to_tile(scale, tokens.size, 1)
        total = term if total is None else total + term
    assert total is not None
    return total / z.streams


def _scales(z: Sizes, tokens: Any, refs: dict[str, Any]) -> list[Any]:
    """For each stream the norm's factor of each token."""
    scales = []
    for stream in range(z.streams):
        parts = range(stream * SLICES, (stream + 1) * SLICES)
        squares = [_load(refs["squares"].at[part, tokens], _OVER_TOKENS) for part in parts]
        scales.append(lax.rsqrt(sum(squares[1:], squares[0]) / z.hidden + z.eps))
    return scales


def _updated(h: Any, y: Any, weight: Any) -> Any:
    """A tile of the streams with the update in it, rounded, in float32."""
    value = _load(h.T, _TILE)
    if y is None:
        return value
    value = value + _to_tile(weight, h.shape[0], 1) * _load(y.T, _TILE)
    return value.astype(jnp.bfloat16).astype(jnp.float32)


def _turn(weights: Any, turned: Any) -> None:
    """Puts injection weights [tokens, streams] by stream: loads take them in pairs of tokens."""
    turned[...] = plgpu.load(weights.T, layout=_lanes(4, 8), optimized=False)
    plgpu.commit_smem()


def _load(ref: Any, layout: Any) -> Any:
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _to_tile(vector: Any, tokens: int, axis: int) -> Any:
    """A vector along one axis of a tile, for each index of the other."""
    return lax.broadcast_in_dim(vector, (64, tokens), (axis,))


def _accumulated(run: Callable[..., Any], tokens: int, count: int) -> list[Any]:
    """What `run` leaves in some accumulators."""
    accs = [plgpu.WGMMAAccumulatorRef((64, tokens), jnp.float32)] * count
    return [plgpu.layout_cast(sums, _TILE) for sums in pl.run_scoped(run, *accs)]


def _swizzled(*shape: int) -> Any:
    return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)


def _weights(z: Sizes) -> tuple[Any, Any]:
    """Room for the injection weights of the update, as they come and turned."""
    if not z.pending:
        return None, None
    come = plgpu.SMEM((z.tokens, z.streams), jnp.float32)
    return come, plgpu.SMEM((z.streams, z.tokens), jnp.float32)
