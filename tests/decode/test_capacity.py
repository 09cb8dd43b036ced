"""What fits is known by arithmetic, and refused before anything is allocated."""

import dataclasses
import re
from typing import Any

import pytest

from qwen4jax import generate
from qwen4jax.config import LINEAR, SPARSE, Config, Quantization
from qwen4jax.decode import batching, capacity
from qwen4jax.decode.options import Sampling
from qwen4jax.params import init_params
from qwen4jax.state import init_state
from qwen4jax.weights.embedded import embedded_checkpoint
from tests.decode.small import params

RELEASED = Config.flash_next(quantization=Quantization(experts="nvfp4", ngram_embedding="fp8"))
SIZES: dict[str, Any] = dict(slots=3, max_length=300, drafts=2)


def test_the_plan_is_what_parameters_and_state_take():
    config = Config.tiny()
    plan = capacity.plan_memory(config, **SIZES)
    assert plan.weights + plan.table == capacity.nbytes(init_params(config))
    assert plan.state == capacity.nbytes(init_state(config, **SIZES))
    for place in ("pinned", "host"):
        assert capacity.plan_memory(config, table=place, **SIZES).table == 0
    assert plan.total == plan.weights + plan.table + plan.state + plan.work
    assert f"{plan.total / 1e9:.1f} GB" in plan.describe()


def test_a_quantised_draft_head_is_counted_with_its_copies():
    stored = Quantization(experts="nvfp4", mtp_experts="fp8", ngram_embedding="fp8", draft="fp8")
    config = RELEASED.replace(quantization=stored)
    plain, copied = (capacity.plan_memory(c, slots=1, max_length=64) for c in (RELEASED, config))
    # 512 experts at half the bytes, and one byte for each entry of the copied output head
    experts = 3 * 512 * RELEASED.moe_intermediate_size * RELEASED.hidden_size
    head = RELEASED.vocab_size * RELEASED.hidden_size
    assert copied.weights - plain.weights == pytest.approx(head - experts, rel=0.05)


def test_a_cut_vocabulary_is_counted_with_its_rows():
    stored = dataclasses.replace(RELEASED.quantization, draft_vocab=1000)
    config = RELEASED.replace(quantization=stored)
    plain, cut = (capacity.plan_memory(c, slots=1, max_length=64) for c in (RELEASED, config))
    assert cut.weights - plain.weights == 1000 * RELEASED.hidden_size * 2


@pytest.mark.parametrize("slots", [1, 32])
@pytest.mark.parametrize("kv_dtype", [None, "float8_e4m3fn"])
def test_the_longest_context_fits_and_a_page_more_does_not(slots: int, kv_dtype: str | None):
    available = 20_000_000_000 * slots // 16
    sizes: dict[str, Any] = dict(slots=slots, kv_dtype=kv_dtype)
    length = capacity.longest_context(RELEASED, available, **sizes)
    held = lambda n: capacity.plan_memory(RELEASED, max_length=n, **sizes).state  # noqa: E731
    assert 0 < length < RELEASED.max_position_embeddings
    assert held(length) <= available < held(length + capacity.DEFAULT_PAGE_SIZE)


def test_the_report_has_a_row_for_each_place_and_dtype(capsys: pytest.CaptureFixture[str]):
    assert capacity.main(["--memory", "138", "--slots", "1", "32"]) == 0
    rows = re.findall(
        r"\| (pinned or host|device) \| (\w+) \| (\d+) \| (\d+) \|", capsys.readouterr().out
    )
    found = {(place, dtype): (int(one), int(many)) for place, dtype, one, many in rows}
    assert list(found) == [
        (place, dtype)
        for place in ("pinned or host", "device")
        for dtype in ("bfloat16", "float8_e4m3fn")
    ]
    assert found["pinned or host", "bfloat16"][0] == RELEASED.max_position_embeddings
    assert (
        found["pinned or host", "float8_e4m3fn"][1] > found["pinned or host", "bfloat16"][1] > 32768
    )
    # a table of 51 GB beside weights of 83 GB
    assert found["pinned or host", "bfloat16"][0] > found["device", "bfloat16"][0] > 32768
    assert found["device", "bfloat16"][1] == 0


def test_the_report_of_a_checkpoint(capsys: pytest.CaptureFixture[str]):
    assert capacity.main([str(embedded_checkpoint()), "--slots", "1"]) == 0
    assert "n-gram tables 0.0 GB" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments", [["--memory", "0"], ["--slots", "0"], ["--draft", "8"], ["--chunk", "0"]]
)
def test_wrong_options_are_named(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        capacity.main(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_a_number_of_ids_that_the_model_lacks(capsys: pytest.CaptureFixture[str]):
    assert capacity.main([str(embedded_checkpoint()), "--draft-vocab", "100000"]) == 2
    assert "draft_vocab: 100000 is not in 1.." in capsys.readouterr().err


def test_a_directory_without_a_model(tmp_path, capsys: pytest.CaptureFixture[str]):
    assert capacity.main([str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err


def test_what_does_not_fit_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(capacity, "free_bytes", lambda: 10_000)
    monkeypatch.setattr(batching, "init_state", lambda *_, **__: pytest.fail("allocated"))
    sampling = Sampling(temperature=0, max_new_tokens=500)
    with pytest.raises(ValueError, match=r"slots, max_length: 1 x \d+ tokens need .* would fit"):
        generate(params(), [1, 2, 3], sampling=sampling)


# (layers, rows, tokens of a chunk, context) -> MB of temporaries that XLA plans for an H200
ANALYSED = {
    (4, 1, 512, 65536): 121.5,
    (4, 1, 8192, 65536): 1053.1,
    (8, 1, 2048, 262144): 531.4,
    (8, 4, 2048, 65536): 1382.0,
    (16, 4, 64, 65536): 223.8,
    (16, 4, 512, 65536): 590.8,
    (24, 1, 8192, 65536): 2230.8,
    (48, 1, 2048, 65536): 779.0,
}


@pytest.mark.parametrize("sizes", ANALYSED, ids=str)
def test_a_chunk_of_a_prompt_fits_into_what_is_set_aside(sizes: tuple[int, int, int, int]):
    layers, rows, tokens, _ = sizes
    kinds = (LINEAR, LINEAR, LINEAR, SPARSE) * (layers // 4)
    config = RELEASED.replace(num_hidden_layers=layers, layer_types=kinds)
    estimate = capacity.prefill_bytes(config, rows, tokens) / 1e6
    assert ANALYSED[sizes] <= estimate <= 1.4 * ANALYSED[sizes] + 268


def test_a_long_chunk_is_part_of_what_must_fit(monkeypatch: pytest.MonkeyPatch):
    """Rounds fit, and so does a short chunk; a long one is refused, and it says so."""
    sizes: dict[str, Any] = dict(slots=8, max_length=65536, drafts=3, kv_dtype=None)
    plan = capacity.plan_memory(RELEASED, **sizes, prefill=(4, 256))
    monkeypatch.setattr(capacity, "free_bytes", lambda: plan.state + plan.work)
    capacity.require_room(RELEASED, **sizes, prefill=(4, 256))
    with pytest.raises(ValueError, match=r"a smaller chunk than 4 x 8192 tokens.* would fit"):
        capacity.require_room(RELEASED, **sizes, prefill=(4, 8192))


def test_the_report_of_longer_chunks(capsys: pytest.CaptureFixture[str]):
    found = []
    for chunk in ("512", "8192"):
        assert capacity.main(["--slots", "8", "--chunk", chunk]) == 0
        found.append(int(re.findall(r"host \| bfloat16 \| (\d+)", capsys.readouterr().out)[0]))
    assert found[0] > found[1] > 32768
