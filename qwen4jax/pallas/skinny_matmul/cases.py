"""Cases of the dense projection."""

import itertools

import jax.numpy as jnp
import numpy as np

from qwen4jax.pallas.cases import BF16, F32, Case, normal, stored, weight


def _weight(rng, shape, dtype, form):
    return stored(rng, shape, form) if form else weight(rng, shape, dtype)


def _case(
    name, rows, outputs, inputs, dtype=F32, *, bias=False, form="", device_only=False, **extra
):
    def build(rng):
        return dict(
            x=normal(rng, (*rows, inputs), dtype),
            w=_weight(rng, (outputs, inputs), dtype, form),
            bias=normal(rng, (outputs,), dtype) if bias else None,
            **extra,
        )

    return Case("skinny_matmul", name, build, device_only)


def _several(
    name, rows, outputs, inputs, dtype=BF16, *, out_dtypes=None, forms=None, device_only=False
):
    forms = forms or [""] * len(outputs)

    def build(rng):
        return dict(
            x=normal(rng, (*rows, inputs), dtype),
            weights=tuple(
                _weight(rng, (n, inputs), dtype, form)
                for n, form in zip(outputs, forms, strict=True)
            ),
            out_dtypes=out_dtypes,
        )

    return Case("projections", name, build, device_only)


def _argmax(name, rows, outputs, inputs, dtype=BF16, *, form="", device_only=False):
    def build(rng):
        return dict(
            x=normal(rng, (*rows, inputs), dtype), w=_weight(rng, (outputs, inputs), dtype, form)
        )

    return Case("argmax", name, build, device_only)


def _ties(rng):
    """Equal outputs in one tile and in several; a row whose largest are zeros of both signs."""
    w = np.zeros((200, 128), np.float32)
    w[[17, 18, 90, 199], 0] = 1.0
    w[[3, 60], 1] = 2.0
    # only -0 and what is below
    w[:, 2] = -1.0
    w[[70, 130], 2] = -0.0
    w[130, 3] = 0.0
    x = np.zeros((4, 128), np.float32)
    x[[0, 1, 2, 3], [0, 1, 2, 3]] = 1.0
    return dict(x=jnp.asarray(x, BF16), w=jnp.asarray(w, BF16))


def _not_finite(rng):
    """Rows with infinities, with -inf, with NaN, with nothing but -inf, and a sound one."""
    w = rng.standard_normal((150, 128)).astype(np.float32)
    w[:, :5] = 0
    w[[40, 100], 0], w[120, 1], w[77, 2], w[77, 4], w[:, 3] = 3e38, -3e38, 3e38, -3e38, -3e38
    x = np.zeros((5, 128), np.float32)
    x[[0, 1, 2, 2, 3], [0, 1, 2, 4, 3]], x[4, 9] = 4, 1
    return dict(x=jnp.asarray(x, BF16), w=jnp.asarray(w, BF16))


def _biased(rng):
    given = _several("", (2, 3), (48, 7, 4), 32, F32).build(rng)
    return given | {"biases": (normal(rng, (48,)), None, normal(rng, (4,)))}


def _poisoned_row(rng):
    x = rng.standard_normal((3, 16))
    x[1] = np.nan
    return dict(x=normal(rng, (3, 16)).at[:].set(x), w=weight(rng, (8, 16)), bias=None)


# outputs, inputs of the released model's projections
_RELEASED = {
    "delta_qkv": (10240, 2560),
    "delta_out": (2560, 6144),
    "query_gate": (12288, 2560),
    "key": (512, 2560),
    "router": (512, 2560),
    "shared_down": (2560, 640),
    "lm_head": (248320, 2560),
    "fc": (2560, 2560),
}
# of the weights that read the same rows
_RELEASED_TOGETHER = {
    "delta_in": ((10240, 6144, 48, 48), 2560),
    "sparse_in": ((12288, 512, 512, 640), 2560),
    "router_and_shared": ((512, 640, 640, 1), 2560),
}
# of the draft head, on request: its last weight stays as it is
_DRAFT_IN = ((12288, 512, 512, 640), 2560)
_FORMS = ("fp8", "nvfp4")

CASES = (
    _case("one_row", (1,), 48, 32),
    _case("batch_and_time", (2, 3), 48, 32),
    _case("odd_sizes", (5,), 7, 33),
    _case("rows_63", (63,), 8, 16),
    _case("no_rows", (0,), 8, 16),
    _case("one_output", (4,), 1, 32),
    _case("bias", (3,), 8, 16, bias=True),
    _case("bfloat16", (2, 3), 48, 32, BF16),
    _case("bfloat16_bias", (3,), 8, 160, BF16, bias=True),
    _case("bfloat16_to_float32", (3,), 8, 160, BF16, out_dtype=F32),
    Case("skinny_matmul", "nan_row_stays_alone", _poisoned_row),
    _case("bfloat16_tiles", (5,), 48, 256, BF16),
    _case("bfloat16_by_eights", (20,), 136, 256, BF16),
    _case("bfloat16_halves_to_float32", (3,), 96, 256, BF16, out_dtype=F32),
    _case("bfloat16_ragged_tiles", (17,), 83, 384, BF16),
    _case("bfloat16_wide_tiles", (3,), 6403, 128, BF16),
    _case("bfloat16_square_tiles", (40,), 12803, 128, BF16),
    _case("bfloat16_split", (2, 20), 200, 768, BF16),
    # three splits, of four steps
    _case("bfloat16_split_unevenly", (40,), 2560, 256, BF16),
    _case("bfloat16_split_to_float32", (67,), 48, 384, BF16, out_dtype=F32),
    _case("bfloat16_square_tiles_of_128", (67,), 12803, 128, BF16),
    Case("projections", "biases", _biased),
    _several("two", (2, 3), (48, 7), 32),
    _several("four", (3,), (48, 7, 1, 20), 256, out_dtypes=(BF16, F32, F32, BF16)),
    _several("by_eights", (3,), (136, 48), 128),
    _several("wide", (9,), (6400, 83, 1), 128),
    *(_case(f"{form}_edges", (3,), 7, 48, form=form) for form in _FORMS),
    *(_case(f"{form}_ragged_tiles", (9,), 200, 384, BF16, form=form) for form in _FORMS),
    *(_case(f"{form}_wide_tiles", (3,), 6403, 128, BF16, form=form) for form in _FORMS),
    *(
        _case(f"{form}_{rows}_rows", (rows,), 200, 384, BF16, form=form)
        for form in _FORMS
        for rows in (40, 67)
    ),
    _case("bfloat16_many_rows", (300,), 200, 256, BF16),
    _case("fp8_many_rows", (150,), 130, 256, BF16, form="fp8"),
    _case("fp8_square_tiles", (40,), 12803, 128, BF16, form="fp8"),
    _case("fp8_few_rows", (3,), 32, 1024, BF16, form="fp8"),
    _case("fp8_few_rows_to_float32", (8,), 160, 512, BF16, form="fp8", out_dtype=F32),
    # room for three splits of 64 outputs, of seven steps
    _case("fp8_split_unevenly", (20,), 2560, 896, BF16, form="fp8"),
    _case("fp8_to_float32", (3,), 130, 256, BF16, form="fp8", out_dtype=F32),
    _several("three_forms", (3,), (130, 48, 7), 256, forms=("fp8", "", "nvfp4")),
    _several("three_forms_40_rows", (40,), (130, 48, 7), 256, forms=("fp8", "", "nvfp4")),
    _argmax("float32", (2, 3), 48, 32, F32),
    _argmax("one_output", (2,), 1, 128),
    _argmax("ragged_tiles", (17,), 83, 384),
    _argmax("wide_tiles", (1, 3), 6403, 128),
    _argmax("square_tiles", (2, 20), 12803, 128),
    *(_argmax(f"{form}_ragged_tiles", (9,), 200, 256, form=form) for form in _FORMS),
    *(_argmax(f"{form}_40_rows", (40,), 200, 256, form=form) for form in _FORMS),
    Case("argmax", "ties", _ties),
    Case("argmax", "not_finite", _not_finite),
    *(
        _case(
            f"draft_{name}_{form}_{rows}",
            (rows,),
            *_RELEASED[name],
            BF16,
            form=form,
            device_only=True,
        )
        for name, form, rows in (
            *itertools.product(("delta_out", "lm_head"), _FORMS, (1, 4)),
            *itertools.product(("delta_out", "fc"), ("fp8",), (32, 128)),
            *(("fc", "fp8", rows) for rows in (1, 4, 512)),
        )
    ),
    *(
        _argmax(f"lm_head_{rows}", (rows,), *_RELEASED["lm_head"], device_only=True)
        for rows in (1, 4, 16, 32, 128)
    ),
    *(
        _argmax(
            f"draft_lm_head_{form}_{rows}",
            (rows,),
            *_RELEASED["lm_head"],
            form=form,
            device_only=True,
        )
        for form, rows in (*itertools.product(_FORMS, (1, 8)), ("fp8", 32))
    ),
    # the lowest 65,536 ids, as `draft_vocab` has it
    _argmax("draft_lm_head_fp8_65536_ids_1", (1,), 65536, 2560, form="fp8", device_only=True),
    *(
        _several(
            f"draft_in_{form}_{rows}",
            (rows,),
            *_DRAFT_IN,
            forms=(form, form, form, ""),
            device_only=True,
        )
        for form, rows in (*itertools.product(_FORMS, (1, 4)), ("fp8", 32), ("fp8", 128))
    ),
    *(_case(f"fc_{n}", (n,), *_RELEASED["fc"], BF16, device_only=True) for n in (256, 512)),
    *(
        _case(f"{name}_{rows}", (rows,), *shape, BF16, device_only=True)
        for name, shape in _RELEASED.items()
        for rows in (1, 4, 16, 32, 128)
    ),
    *(
        _several(f"{name}_{rows}", (rows,), *shape, device_only=True)
        for name, shape in _RELEASED_TOGETHER.items()
        for rows in (1, 4, 16, 32, 64, 128)
    ),
)
