"""A small model whose every operation takes the kernel that an H200 runs by default.

The smallest widths that all of them accept, but those of `kernel_choices.ONLY_WIDE`: products read
inputs in 128s, experts in NVFP4 come in tiles of 16 x 128 and the shared one is as wide, low ranks
in 32s, a head of a chunk has 16 channels or more. In `weights/arrange.py` a GPU puts such experts
in tiles; so does `params` here.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qwen4jax.config import LINEAR, SPARSE, Config, ExpertFormat, Quantization, RopeParameters
from qwen4jax.params import Params, Tensor, declare
from qwen4jax.weights.arrange import tiled

VOCAB, EOS = 64, 1
EXPERTS, CHOICES = 16, 2
# what the model likes to say: so few ids that some drafts are right
SAID = (5, 11, 22)


class Forms(NamedTuple):
    """How the routed experts are stored: of the main model, of the draft head."""

    main: ExpertFormat
    draft: ExpertFormat


FORMS = (Forms("nvfp4", "fp8"), Forms("fp8", "nvfp4"))


def config(forms: Forms) -> Config:
    """Four layers, the last of them sparse, and the draft head."""
    return Config(
        vocab_size=VOCAB,
        hidden_size=128,
        num_hidden_layers=4,
        layer_types=(LINEAR, LINEAR, LINEAR, SPARSE),
        max_position_embeddings=1024,
        eos_token_id=EOS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        rope_parameters=RopeParameters(mrope_section=(2, 1, 1)),
        indexer_n_heads=4,
        indexer_head_dim=16,
        indexer_budget=4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOICES,
        moe_intermediate_size=128,
        shared_expert_intermediate_size=128,
        hc_lowrank=32,
        ple_embed_dim=128,
        heads_per_ngram=4,
        ngram_vocab_size_base=1000,
        split_ngram_parts=4,
        quantization=Quantization(
            experts=forms.main, mtp_experts=forms.draft, ngram_embedding="fp8"
        ),
    )


@functools.cache
def params(forms: Forms) -> Any:
    """Random weights, norms and scales too; the best experts of a token are far from the next.

    Embeddings carry a code of the token that routers look for: which of nearly equal experts is
    chosen would hang on the last bit of a sum, and all that follows on it.
    """
    shapes = config(forms)
    rng = np.random.default_rng(0)
    made: Params = jax.tree.map(functools.partial(_fill, rng), declare(shapes))
    # Walsh functions, one for each group of experts
    place, group = np.arange(shapes.hidden_size), np.arange(EXPERTS // CHOICES)
    walsh = (-1.0) ** np.bitwise_count(place & group[:, None])
    code = 2 * walsh[np.arange(VOCAB) % len(group)]
    look = walsh[np.arange(EXPERTS) // CHOICES] / 8
    through = 2 * np.eye(shapes.hidden_size)

    def planted(layer: Any) -> Any:
        return layer.replace(mlp=layer.mlp.replace(gate=_plus(layer.mlp.gate / 2, look)))

    assert made.mtp is not None
    assert made.lm_head is not None
    liked = np.where(np.isin(np.arange(VOCAB), SAID), 1.0, 0.1)[:, None]
    # blind to the code: else an id would say its successor
    said = np.asarray(made.lm_head, np.float64) * liked
    said -= said @ walsh.T @ walsh / shapes.hidden_size
    made = made.replace(
        embed_tokens=_plus(made.embed_tokens, code),
        layers=tuple(map(planted, made.layers)),
        lm_head=jnp.asarray(said, made.lm_head.dtype),
        mtp=made.mtp.replace(
            fc_embedding=_plus(made.mtp.fc_embedding, through),
            layers=tuple(map(planted, made.mtp.layers)),
        ),
    )
    return jax.jit(tiled)(made)


def _plus(x: jax.Array, more: np.ndarray) -> jax.Array:
    return (x.astype(jnp.float32) + more).astype(x.dtype)


def _fill(rng: np.random.Generator, t: Tensor) -> jax.Array:
    """As `init_params`, but what that makes equal everywhere is uneven: no two may be swapped."""
    if t.init == "codes":
        return jnp.asarray(rng.integers(0, 256, t.shape, np.uint8))
    if t.init == "decay":
        values = np.log(rng.uniform(0.3, 4, t.shape))
    elif t.init in ("ones", "fill"):
        values = (t.spread if t.init == "fill" else 1) * 2.0 ** rng.integers(-1, 2, t.shape)
    else:
        values = rng.standard_normal(t.shape) * (t.spread if t.init == "normal" else 0.2)
    return jnp.asarray(values, jnp.float32).astype(t.dtype)
