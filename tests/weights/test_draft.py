"""The draft head quantised on request."""

from typing import Any

import jax
import numpy as np
import pytest

from qwen4jax import generate
from qwen4jax.decode import capacity
from qwen4jax.params import declare
from qwen4jax.weights import load as loading
from qwen4jax.weights import quantize
from qwen4jax.weights.draft import lighten_draft
from qwen4jax.weights.embedded import embedded_checkpoint
from qwen4jax.weights.load import load
from qwen4jax.weights.save import save
from qwen4jax.weights.store import restore, store
from tests.decode.small import DRAWN, GREEDY, ids, params


@pytest.mark.parametrize(("form", "error"), [("fp8", 0.04), ("nvfp4", 0.2)])
def test_it_is_what_its_configuration_declares(form, error, tmp_path):
    stored = load(embedded_checkpoint(), dtype="float32", progress=False)
    made = lighten_draft(stored, form)
    declared = declare(made.config)
    assert jax.tree.structure(declared) == jax.tree.structure(made)
    for leaf, array in zip(jax.tree.leaves(declared), jax.tree.leaves(made), strict=True):
        assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype.name)
    wanted, got = np.asarray(stored.lm_head), np.asarray(made.mtp.lm_head.dequantize())
    assert np.abs(got - wanted).max() <= error * np.abs(wanted).max()
    assert made.lm_head is stored.lm_head
    with pytest.raises(ValueError, match="draft_weights"):
        save(made, tmp_path / "x")


def test_fp8_is_as_the_numpy_quantiser_makes_it():
    stored = load(embedded_checkpoint(), dtype="float32", progress=False)
    made = lighten_draft(stored, "fp8").mtp.fc_hidden
    matrix = np.asarray(stored.mtp.fc_hidden)
    scale = quantize.fp8_scale(matrix)
    np.testing.assert_array_equal(np.asarray(made.weight_scale_inv), scale)
    codes = quantize.fp8_encode(matrix, scale)
    np.testing.assert_array_equal(np.asarray(made.weight).view("u1"), codes.view("u1"))


def test_another_form_is_refused():
    with pytest.raises(ValueError, match="draft_weights: 'int4'"):
        load(embedded_checkpoint(), draft_weights="int4", progress=False)


def test_a_cut_vocabulary_is_what_its_configuration_declares(tmp_path):
    stored = load(embedded_checkpoint(), dtype="float32", progress=False)
    made = load(embedded_checkpoint(), dtype="float32", draft_vocab=300, progress=False)
    declared = declare(made.config)
    for leaf, array in zip(jax.tree.leaves(declared), jax.tree.leaves(made), strict=True):
        assert (leaf.shape, leaf.dtype) == (array.shape, array.dtype.name)
    head = stored.embed_tokens if stored.lm_head is None else stored.lm_head
    np.testing.assert_array_equal(made.mtp.lm_head, head[:300])
    with pytest.raises(ValueError, match="draft_vocab"):
        save(made, tmp_path / "x")


@pytest.mark.parametrize(("form", "cut"), [("nvfp4", False), ("fp8", True)])
def test_output_ids_do_not_depend_on_the_draft_head(form: Any, cut: bool):
    """The model checks every draft: greedy and drawn, of all ids and of low ones only."""
    prompts, sampling = [ids(9), ids(14)], [GREEDY, DRAWN]
    size = params().config.vocab_size
    vocab = size // 2 if cut else size
    made = lighten_draft(params(), form, vocab if cut else None)
    head = made.mtp.lm_head.dequantize()
    assert head.shape[0] == vocab
    assert not np.array_equal(head, params().lm_head[:vocab])
    found = generate(made, prompts, sampling=sampling)
    expected = generate(params(), prompts, sampling=sampling)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    if cut:
        # the model itself gives higher ids
        assert max(max(one.token_ids) for one in expected) >= vocab


@pytest.mark.parametrize("form", [None, "fp8"])
def test_a_store_keeps_a_cut_vocabulary(form, tmp_path):
    made = lighten_draft(params(), form, 100)
    store(made, tmp_path / "store")
    kept = restore(tmp_path / "store")
    assert kept.config == made.config
    assert jax.tree.structure(kept) == jax.tree.structure(made)
    for one, other in zip(jax.tree.leaves(kept.mtp), jax.tree.leaves(made.mtp), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.parametrize("vocab", [0, -3, 1 << 40, True, 2.5])
def test_a_number_of_ids_that_is_not_there_is_refused(vocab):
    with pytest.raises(ValueError, match="draft_vocab"):
        load(embedded_checkpoint(), draft_vocab=vocab, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(draft_weights="fp8"), r"draft_weights='fp8': the model has no draft head"),
        (dict(draft_vocab=30), r"draft_vocab=30: the model has no draft head"),
        (
            dict(draft_weights="fp8", draft_vocab=3),
            "draft_weights=.fp8., draft_vocab=3: the",
        ),
    ],
)
def test_a_model_without_a_draft_head_is_refused(options, message, tmp_path, monkeypatch):
    """Before anything is loaded; by the loader and by the report of what fits."""
    bare = params().config.replace(mtp_num_hidden_layers=0)
    save(params().replace(mtp=None, config=bare), tmp_path / "bare")
    load(tmp_path / "bare", progress=False)
    with pytest.raises(ValueError, match=message):
        lighten_draft(
            params().replace(mtp=None, config=bare),
            options.get("draft_weights"),
            options.get("draft_vocab"),
        )
    monkeypatch.setattr(loading, "Reader", lambda _: pytest.fail("read"))
    with pytest.raises(ValueError, match=message):
        load(tmp_path / "bare", progress=False, **options)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert capacity.main([str(tmp_path / "bare"), *flags]) == 2
