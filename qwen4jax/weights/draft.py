"""A cheaper draft head, on request: its tokens are proposals, which the model checks.

Output ids do not depend on it; how many drafts are accepted does.
"""

import dataclasses
import functools
import typing
from typing import Any, Literal

import jax
import jax.numpy as jnp

from qwen4jax import quant
from qwen4jax.config import Config
from qwen4jax.params import Params, draft_projections
from qwen4jax.weights import quantize

DraftForm = Literal["fp8", "nvfp4"]


def check_form(form: str | None) -> None:
    """Checks an argument `draft_weights`.

    Raises:
        ValueError: there is no such form.
    """
    if form is not None and form not in typing.get_args(DraftForm):
        raise ValueError(f"draft_weights: {form!r} is not 'fp8' or 'nvfp4'")


def check_vocab(vocab: int | None, size: int) -> None:
    """Checks an argument `draft_vocab` for a vocabulary of `size` ids.

    Raises:
        ValueError: it is no number of ids.
    """
    if vocab is not None and (isinstance(vocab, bool) or not isinstance(vocab, int)):
        raise ValueError(f"draft_vocab: {vocab!r} is not an integer")
    if vocab is not None and not 1 <= vocab <= size:
        raise ValueError(f"draft_vocab: {vocab} is not in 1..{size}")


def check_draft(config: Config, form: str | None, vocab: int | None) -> None:
    """Checks arguments `draft_weights` and `draft_vocab` for a model.

    Raises:
        ValueError: one is none of those it may be, or the model has no draft head to apply it to.
    """
    check_form(form)
    check_vocab(vocab, config.vocab_size)
    asked = {"draft_weights": form, "draft_vocab": vocab}
    given = [f"{name}={value!r}" for name, value in asked.items() if value is not None]
    if given and not config.mtp_num_hidden_layers:
        raise ValueError(f"{', '.join(given)}: the model has no draft head")


def lighten_draft(params: Params, form: DraftForm | None, vocab: int | None = None) -> Params:
    """The parameters with a draft head that reads fewer bytes, made on the device.

    In a stored form are its routed experts, its long projections, and a copy of the output head
    that only drafts read. Router, shared expert, gated residuals and norms stay, and so do experts
    that are in a stored form already.

    With a cut vocabulary the copy has the head's first rows, and no later id is drafted. Byte-pair
    encoders number tokens in the order in which they were merged, so that low ids are frequent.

    Args:
        params: of the model as loaded; what stays is shared with the result.
        form: block-scaled FP8, or NVFP4; None leaves the draft head as it is stored.
        vocab: ids that are drafted, the lowest; None is all.

    Raises:
        ValueError: there is no such form, it does not fit the shapes, there are not so many ids, or
            no draft head.
    """
    check_draft(params.config, form, vocab)
    if params.mtp is None or params.config.quantization.draft_copy:
        return params
    if vocab is not None:
        head = params.embed_tokens if params.lm_head is None else params.lm_head
        mtp = params.mtp.replace(lm_head=head[:vocab])
        stated = dataclasses.replace(params.config.quantization, draft_vocab=vocab)
        params = params.replace(mtp=mtp, config=params.config.replace(quantization=stated))
    return params if form is None else _quantized(params, form)


def _quantized(params: Params, form: DraftForm) -> Params:
    config = params.config
    assert params.mtp is not None
    head = params.mtp.lm_head
    if head is None:
        head = params.embed_tokens if params.lm_head is None else params.lm_head
    stored = lambda w: _stored(w, form)  # noqa: E731
    mtp = draft_projections(params.mtp.replace(lm_head=head), stored)
    experts = config.quantization.mtp_experts
    if experts == "bf16":
        layer = mtp.layers[0]
        routed = layer.mlp.experts
        routed = routed.replace(
            gate_up_proj=stored(routed.gate_up_proj), down_proj=stored(routed.down_proj)
        )
        mtp = mtp.replace(layers=(layer.replace(mlp=layer.mlp.replace(experts=routed)),))
        experts = form
    stated = dataclasses.replace(config.quantization, draft=form, mtp_experts=experts)
    return params.replace(mtp=mtp, config=config.replace(quantization=stated))


@functools.partial(jax.jit, static_argnums=1)
def _stored(matrices: jax.Array, form: str) -> Any:
    """Matrices [..., O, I] in a form, one after the other: the float32 values of one at a time."""
    lead = matrices.shape[:-2]
    # what does not fit the form is refused with its reason
    quant.stored_form(form, matrices.shape, "bfloat16")
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    encoded = jax.lax.map(_fp8 if form == "fp8" else _nvfp4, flat)
    return jax.tree.map(lambda x: x.reshape(*lead, *x.shape[1:]), encoded)


def _fp8(matrix: jax.Array) -> quant.BlockFp8:
    scale = quantize.block_scale(matrix)
    return quant.BlockFp8(quantize.fp8_encode(matrix, scale), scale)


def _nvfp4(matrix: jax.Array) -> quant.Nvfp4:
    scale_2 = quantize.matrix_scale(jnp.abs(matrix.astype(jnp.float32)).max())
    codes, scale = quantize.nvfp4_encode(matrix, scale_2)
    return quant.Nvfp4(codes, scale, scale_2, jnp.ones((), jnp.float32))
