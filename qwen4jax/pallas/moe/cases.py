"""Cases of the mixture of experts."""

import jax.numpy as jnp
import numpy as np

from qwen4jax import quant
from qwen4jax.pallas import counters
from qwen4jax.pallas.cases import BF16, F32, Case, integers, normal, stored, weight
from qwen4jax.pallas.moe import Shared


def _route(name, tokens, experts, k, dtype=F32, *, renormalize=True, logits=None, **more):
    def build(rng):
        values = normal(rng, (tokens, experts), dtype) if logits is None else logits(rng)
        return dict(logits=values, k=k, renormalize=renormalize)

    return Case("route", name, build, **more)


def _tied(rng):
    steps = rng.integers(0, 3, (5, 8))
    return jnp.asarray(steps, F32)


def _router(name, tokens, experts, k, hidden, dtype=BF16, *, most=1, renormalize=True, **more):
    """Small integers: every logit is exact in any order, and many are equal."""

    def whole(rng, shape):
        return jnp.asarray(rng.integers(-most, most + 1, shape) / 4.0, dtype)

    def build(rng):
        return dict(
            x=whole(rng, (tokens, hidden)),
            gate=whole(rng, (experts, hidden)),
            shared_gate=whole(rng, (1, hidden)),
            k=k,
            counter=counters.fresh(),
            renormalize=renormalize,
        )

    return Case("router", name, build, **more)


def _matrices(rng, shape, form, dtype):
    """Random matrices; NVFP4 as the kernels read it, where it has the shape for it."""
    if form == "plain":
        return weight(rng, shape, dtype)
    w = stored(rng, shape, form)
    if form == "nvfp4" and quant.fits_tiles(shape):
        return quant.TiledNvfp4.of(w)
    return w


def _experts(
    name,
    tokens,
    experts,
    k,
    hidden,
    width,
    dtype=F32,
    *,
    form="plain",
    pick=None,
    shared=False,
    device_only=False,
):
    def build(rng):
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :k] if pick is None else pick
        shares = rng.random((tokens, k)) + 0.1
        own = {}
        if shared:
            gate, up = (weight(rng, (width, hidden), dtype) for _ in range(2))
            down = weight(rng, (hidden, width), dtype)
            own = dict(shared=Shared(gate, up, down, normal(rng, (tokens, 1))), out_dtype=dtype)
        return own | dict(
            x=normal(rng, (tokens, hidden), dtype),
            ids=integers(ids),
            weights=jnp.asarray(shares / shares.sum(1, keepdims=True), F32),
            gate_up=_matrices(rng, (experts, 2, width, hidden), form, dtype),
            down=_matrices(rng, (experts, hidden, width), form, dtype),
        )

    return Case("experts", name, build, device_only)


def _same_ten(tokens):
    """All tokens choose the same experts."""
    return np.tile(3 + 51 * np.arange(10), (tokens, 1))


def _one_in_all(tokens):
    """One expert is among every token's choices, the others are any of the rest."""
    rng = np.random.default_rng(0)
    rest = np.argsort(rng.random((tokens, 511)), axis=1)[:, :9]
    return np.concatenate([rest + (rest >= 77), np.full((tokens, 1), 77)], axis=1)


CASES = (
    _route("one_token", 1, 8, 2),
    _route("tokens_63", 63, 16, 4),
    _route("ties_to_the_lower_expert", 5, 8, 3, logits=_tied),
    _route("all_experts", 3, 4, 4),
    _route("not_renormalised", 3, 8, 2, renormalize=False),
    _route("bfloat16", 5, 8, 2, BF16),
    _route("far_apart", 3, 8, 2, logits=lambda rng: normal(rng, (3, 8), scale=1e4)),
    _router("float32", 3, 8, 2, 33, F32, most=9),
    _router("one_token", 1, 16, 3, 64),
    _router("no_tokens", 0, 16, 3, 64),
    _router("not_renormalised", 3, 16, 4, 96, renormalize=False),
    _router("all_experts", 8, 16, 16, 32),
    _router("two_rows_of_128", 5, 144, 10, 256),
    _router("two_groups", 10, 32, 4, 128),
    _router("apart", 5, 32, 10, 64, most=9),
    _router("many", 33, 16, 3, 64),
    _router("many_in_two_rows_of_128", 40, 144, 10, 768, renormalize=False),
    _router("above_the_kernel", 129, 16, 3, 64),
    _experts("few_tokens", 2, 8, 3, 32, 16),
    _experts("many_tokens", 9, 4, 2, 32, 16),
    _experts("one_expert_for_all", 3, 8, 1, 16, 8, pick=[[7], [7], [7]]),
    _experts("no_tokens", 0, 4, 2, 16, 8),
    _experts("bfloat16_few", 2, 8, 3, 32, 16, BF16),
    _experts("bfloat16_many", 9, 4, 2, 32, 16, BF16),
    _experts("nvfp4_few", 2, 8, 3, 32, 16, form="nvfp4"),
    _experts("nvfp4_many_bfloat16", 9, 4, 2, 32, 16, BF16, form="nvfp4"),
    # widths of whole chunks: rows split over two warps, more steps than are loaded ahead, an
    # expert with more tokens than a tile has columns, tokens ranked within their experts
    _experts("nvfp4_two_warps", 2, 4, 2, 256, 128, BF16, form="nvfp4"),
    _experts("nvfp4_three_steps", 1, 3, 2, 384, 128, BF16, form="nvfp4"),
    _experts("nvfp4_skewed", 11, 3, 1, 128, 128, BF16, form="nvfp4", pick=[[2]] * 11),
    _experts("nvfp4_ranked", 10, 3, 2, 128, 128, BF16, form="nvfp4"),
    # two warps, and four with more steps than are under way
    _experts("nvfp4_listed_two_warps", 9, 3, 2, 256, 128, BF16, form="nvfp4"),
    _experts("nvfp4_listed_ring", 9, 3, 1, 2048, 128, BF16, form="nvfp4"),
    _experts("fp8_two_warps", 2, 4, 2, 128, 192, BF16, form="fp8"),
    _experts("fp8_split_blocks", 1, 3, 2, 256, 64, BF16, form="fp8"),
    _experts("bfloat16_two_warps", 2, 4, 2, 64, 32, BF16),
    # more steps than the cache is asked for at once
    _experts("bfloat16_asked", 2, 3, 1, 2048, 192, BF16, shared=True),
    _experts("fp8_few_edge_blocks", 1, 4, 2, 144, 136, form="fp8"),
    _experts("fp8_many", 9, 4, 2, 32, 16, form="fp8"),
    # tiles of whole blocks of 64 rows: tokens as columns, and gathered, of an expert with two tiles
    _experts("bfloat16_tiles", 3, 5, 2, 256, 128, BF16),
    _experts("fp8_tiles", 8, 3, 2, 256, 256, BF16, form="fp8"),
    _experts("bfloat16_tiles_gathered", 11, 3, 1, 256, 128, BF16, pick=[[2]] * 10 + [[0]]),
    _experts("shared_fp8_tiles_gathered", 10, 3, 2, 256, 128, BF16, form="fp8", shared=True),
    _experts("shared_many", 9, 4, 2, 32, 16, shared=True),
    _experts("shared_none", 0, 4, 2, 16, 8, shared=True),
    _experts("shared_nvfp4", 3, 8, 3, 256, 128, BF16, form="nvfp4", shared=True),
    _experts("shared_nvfp4_ranked", 10, 3, 2, 128, 128, BF16, form="nvfp4", shared=True),
    # more tokens than a program of the shared expert has
    _experts("shared_nvfp4_groups", 19, 3, 2, 128, 128, BF16, form="nvfp4", shared=True),
    _experts("shared_fp8", 2, 4, 2, 128, 64, BF16, form="fp8", shared=True),
    _experts("shared_bfloat16", 8, 4, 2, 64, 32, BF16, shared=True),
    _route("released_4", 4, 512, 10, BF16, device_only=True),
    _route("released_chunk", 4096, 512, 10, BF16, device_only=True),
    *(
        _router(f"released_{t}", t, 512, 10, 2560, device_only=True)
        for t in (1, 4, 8, 16, 32, 128, 2048)
    ),
    *(
        _experts(f"released_{form}_{t}", t, 512, 10, 2560, 640, BF16, form=form, device_only=True)
        for form in ("plain", "nvfp4", "fp8")
        for t in (1, 4, 32, 128)
    ),
    *(
        _experts(
            f"released_shared_{form}_{t}",
            *(t, 512, 10, 2560, 640, BF16),
            form=form,
            shared=True,
            device_only=True,
        )
        for form in ("plain", "nvfp4", "fp8")
        for t in (1, 4, 32, 128)
    ),
    _experts(
        "released_shared_nvfp4_8",
        *(8, 512, 10, 2560, 640, BF16),
        form="nvfp4",
        shared=True,
        device_only=True,
    ),
    # tokens enough for tiles of one expert: counts that fill no tile, experts without tokens, one
    # for all; rows in eight warps and in four; more steps than stages
    _experts("nvfp4_sorted", 131, 5, 2, 256, 128, BF16, form="nvfp4"),
    _experts("nvfp4_sorted_four_warps", 129, 3, 1, 128, 256, BF16, form="nvfp4"),
    _experts("nvfp4_sorted_one", 130, 4, 1, 128, 128, BF16, form="nvfp4", pick=[[2]] * 130),
    _experts("nvfp4_sorted_sparse", 140, 40, 1, 128, 128, BF16, form="nvfp4"),
    _experts("shared_nvfp4_sorted", 129, 3, 2, 512, 128, BF16, form="nvfp4", shared=True),
    _experts("fp8_sorted", 131, 3, 2, 256, 128, BF16, form="fp8"),
    _experts("shared_fp8_sorted_four_warps", 129, 3, 2, 128, 192, BF16, form="fp8", shared=True),
    _experts("bfloat16_sorted", 131, 3, 2, 256, 128, BF16),
    _experts("bfloat16_sorted_four_warps", 129, 3, 2, 128, 64, BF16),
    *(
        _experts(
            f"released_shared_{form}_{t}",
            *(t, 512, 10, 2560, 640, BF16),
            form=form,
            shared=True,
            device_only=True,
        )
        for form, t in (
            *(("nvfp4", t) for t in (256, 512, 1024, 2048, 4096, 8192)),
            ("fp8", 2048),
            ("plain", 2048),
            ("fp8", 8192),
            ("plain", 8192),
        )
    ),
    *(
        _experts(
            f"released_{'shared_' * shared}{form}_16",
            *(16, 512, 10, 2560, 640, BF16),
            form=form,
            shared=shared,
            device_only=True,
        )
        for form in ("plain", "nvfp4", "fp8")
        for shared in (False, True)
    ),
    # beside the cases of equal size, whose tokens choose at random
    *(
        _experts(
            f"released_{'shared_' * (t > 128)}{form}_{name}_{t}",
            *(t, 512, 10, 2560, 640, BF16),
            form=form,
            pick=pick(t),
            shared=t > 128,
            device_only=True,
        )
        for form, t in (
            *(("nvfp4", t) for t in (4, 16, 32, 128, 2048)),
            ("fp8", 32),
            ("plain", 32),
        )
        for name, pick in (("same_ten", _same_ten), ("one_in_all", _one_in_all))
    ),
)
