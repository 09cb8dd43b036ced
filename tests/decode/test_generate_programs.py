"""What a call compiles: once in a bucket, a warning outside it; drafts change nothing else."""

import dataclasses
import logging
import time
from typing import Any

import pytest

from qwen4jax.ablation import Ablation
from qwen4jax.decode import batching, compiling
from qwen4jax.decode.call import Call
from qwen4jax.decode.compiling import CompileClock, clock, report_new_signature
from qwen4jax.decode.generate import generate, stream
from qwen4jax.decode.options import Sampling
from qwen4jax.decode.round import next_round
from tests.decode.small import DRAWN, GREEDY, MODEL, ids, one_bucket, params, plain

SHORT = dataclasses.replace(GREEDY, max_new_tokens=8)
EOS = (MODEL.eos_token_id,)


def test_twenty_calls_in_a_bucket_compile_once():
    """Prompts of 1 to 16 tokens, up to 48 new ones, and other values of the same options."""
    programs = batching._prefill_and_begin, next_round
    before = [program._cache_size() for program in programs]
    began = time.perf_counter()
    first = generate(params(), ids(16), sampling=SHORT)
    wall = time.perf_counter() - began
    compiled, sizes = clock.programs, [program._cache_size() for program in programs]
    assert all(after - old <= 1 for old, after in zip(before, sizes, strict=True))
    found = []
    for i in range(20):
        options = dataclasses.replace(SHORT, max_new_tokens=1 + 47 * i // 19, stop_ids=[i])
        found.append(generate(params(), ids(1 + 15 * i // 19), sampling=options))
        assert found[-1].timings.compile_s == 0
    assert [program._cache_size() for program in programs] == sizes
    assert clock.programs == compiled
    assert {one.finish_reason for one in found} >= {"length"}
    # parts of the call, whatever a machine takes for it
    assert 0 <= first.timings.prefill_s + first.timings.decode_s < wall


def test_a_short_prompt_beside_a_long_one_takes_a_short_step():
    """And so does what a long one leaves: a place of a step costs as much empty as full."""
    longer = params().replace(config=MODEL.replace(max_position_embeddings=4096))
    call = Call(
        longer, [ids(5), ids(2100)], SHORT, 3, None, None, None, False, 8, 2048, None
    )  # fmt: skip
    shapes = [call.sizes.prefill_shape(left) for left in (5, 52, 300, 1025, 2100)]
    assert shapes == [(2, 256), (2, 256), (2, 1024), (2, 2048), (2, 2048)]


def test_three_calls_really_alone():
    """In the smallest bucket, of one slot."""
    prompts = [ids(n, 7) for n in (1, 8, 16)]
    want = plain(prompts, [SHORT] * 3, eos_ids=EOS)
    for prompt, one in zip(prompts, want, strict=True):
        got = generate(params(), prompt, sampling=SHORT)
        assert (got.token_ids, got.finish_reason) == (one.ids, one.reason)
        assert (got.text, got.logprobs, got.state, got.captured) == (None,) * 4


@pytest.fixture
def warnings(caplog, monkeypatch) -> Any:
    """The warnings of a call: no call before it counts."""
    monkeypatch.setattr(compiling, "_seen", {})
    caplog.set_level(logging.WARNING, "qwen4jax")

    def of(prompts: Any, sampling: Sampling = SHORT, **arguments: Any) -> list[str]:
        caplog.clear()
        # what is compiled is decided, and said, before the first delta
        stream(params(), prompts, sampling=sampling, **arguments).close()
        return [record.getMessage() for record in caplog.records]

    return of


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([5], {"sampling": GREEDY, "draft": 1}, "draft 3 -> 1"),
        ([5], {"index_share": "share"}, "index_share fresh -> share"),
        ([5], {"logprobs": True}, "logprobs False -> True"),
        ([5], {"kv_dtype": "bfloat16"}, "kv_dtype None -> bfloat16"),
        ([[5]] * 9, {}, "slots (or the number of prompts) 1 -> 8"),
        ([[5]] * 9, {"slots": 2}, "slots (or the number of prompts) 1 -> 2"),
        ([5] * 17, {}, "chunk (or the longest prompt) 16 -> 64"),
        ([5], {"sampling": Sampling(temperature=0)}, "prompts + max_new_tokens 64 -> 512"),
        ([5], {"sampling": dataclasses.replace(SHORT, stop_ids=range(5))}, "stop_ids 4 -> 8"),
        (
            [5],
            {"sampling": dataclasses.replace(SHORT, temperature=1)},
            "sampling ['max_length', 'stop_ids'] -> ['max_length', 'stop_ids', 'temperature', "
            "'seed', 'sample']",
        ),
    ],
)
def test_a_call_outside_the_bucket_names_what_changed(
    warnings: Any, prompts: Any, changes: dict[str, Any], message: str
):
    """One line, once."""
    assert warnings([5, 6, 7]) == []
    assert warnings([9] * 16, GREEDY) == []
    assert warnings(prompts, **changes) == [f"compiling again: {message}"]
    assert warnings(prompts, **changes) == []
    assert warnings([5]) == []


def test_all_changes_are_named_beside_the_nearest_call(warnings: Any):
    warnings([5])
    warnings([5], draft=5, logprobs=True)
    (line,) = warnings([5], draft=5, logprobs=True, kv_dtype="float8_e4m3fn")
    assert line == "compiling again: kv_dtype None -> float8_e4m3fn"
    (line,) = warnings([5], draft=1, index_share="share_frozen")
    assert line == "compiling again: draft 3 -> 1, index_share fresh -> share_frozen"


def test_the_models_own_dtype_is_no_change(warnings: Any):
    warnings([5])
    assert warnings([5], kv_dtype="float32") == []
    assert warnings([5], index_share="fresh") == []
    assert warnings([5], chunk=512, slots=3) == []


def test_other_models_are_not_compared(caplog, monkeypatch):
    monkeypatch.setattr(compiling, "_seen", {})
    report_new_signature("one", {"draft": 3})
    report_new_signature("other", {"draft": 2})
    assert not caplog.records


def test_the_clock_counts_programs_and_seconds(monkeypatch):
    heard = []
    monkeypatch.setattr(
        compiling.jax.monitoring, "register_event_duration_secs_listener", heard.append
    )
    one = CompileClock()
    (listener,) = heard
    listener("/jax/core/compile/jaxpr_trace_duration", 0.5)
    listener("/jax/core/compile/backend_compile_duration", 2.0, fun_name="f")
    listener("/jax/something/else", 9.0)
    assert (one.seconds, one.programs) == (2.5, 1)


@pytest.mark.parametrize(
    ("draft", "share"),
    [(0, "fresh"), (2, "share")],
)
def test_ids_depend_neither_on_drafts_nor_on_index_sharing(monkeypatch, draft: int, share: Any):
    """The configuration says otherwise: the keyword counts. `test_round` has more of both."""
    one_bucket(monkeypatch)
    frozen = params().replace(config=MODEL.replace(ablation=Ablation("share_frozen")))
    prompts = [ids(n, 5) for n in (70, 3, 40, 21, 66)]
    options = [dataclasses.replace(GREEDY, ignore_eos=True, max_new_tokens=24)] * 3
    options += [dataclasses.replace(DRAWN, seed=n, max_new_tokens=24) for n in (1, 2)]
    found = generate(
        frozen, prompts, sampling=options, draft=draft, index_share=share, logprobs=True
    )
    want = plain(prompts, options, eos_ids=EOS)
    assert [one.token_ids for one in found] == [one.ids for one in want]
    # greedy drafts are right now and then, or the test would show nothing
    mean = sum(one.tokens_per_round or 0 for one in found[:3]) / 3
    assert mean == 1 if draft == 0 else 1.02 < mean <= draft + 1


def test_an_explicit_keyword_overrides_the_configuration():
    from qwen4jax.decode.call import Call

    frozen = params().replace(config=MODEL.replace(ablation=Ablation("share_frozen")))

    def share(given: Any) -> str:
        arguments: Any = [frozen, [5], SHORT, None, given, None, None, False, 8, 256, None]
        return Call(*arguments).params.config.ablation.index_share

    assert [share(x) for x in (None, "fresh", "share")] == ["share_frozen", "fresh", "share"]
