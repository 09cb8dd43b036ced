"""The benchmark of prefill chunks, on the CPU with the tiny model: what it times, and how."""

import json
import statistics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import prefill
from qwen4jax.config import Config
from qwen4jax.decode.prefill import prefill as prefill_in_pieces
from qwen4jax.decode.prefill import prefill_chunk
from qwen4jax.params import Params
from qwen4jax.state import DecodeState

CHUNK, CONTEXT = 16, 32
COMPILING = 2.5


class Watched:
    """`prefill_chunk` under a clock that runs while it compiles, and while its result is awaited.

    Attributes:
        fed: slots, tokens and counts of each call.
        before: the state of each, kept.
        after: the result of each: state, and the output head's input.
        waits: seconds that each takes.
    """

    def __init__(self) -> None:
        self.fed: list[tuple[jax.Array, ...]] = []
        self.before: list[DecodeState] = []
        self.after: list[tuple[DecodeState, jax.Array]] = []
        self.waits: list[float] = []
        self._now = self._pending = 0.0

    def lower(self, params: Params, *given: Any) -> "Watched":
        self.params = params
        self._program = prefill_chunk.lower(params, *given)
        return self

    def compile(self) -> "Watched":
        self._program = self._program.compile()
        self._now += COMPILING
        return self

    def as_text(self) -> str:
        return ""

    def __call__(self, params: Params, state: DecodeState, *fed: jax.Array) -> Any:
        assert params is self.params
        self.before.append(_copy(state))
        self.fed.append(fed)
        state, hidden = self._program(params, state, *fed)
        self.after.append(_copy((state, hidden)))
        # unlike each other, and not in order
        self.waits.append(0.001 * (3 + 5 * len(self.waits) % 7))
        self._pending += self.waits[-1]
        return state, hidden

    def block_until_ready(self, x: Any) -> Any:
        self._now, self._pending = self._now + self._pending, 0.0
        return x

    def perf_counter(self) -> float:
        return self._now


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Watched]:
    """The line of a run, and what was seen of it."""
    folder, seen = tmp_path_factory.mktemp("prefill"), Watched()
    sizes = ["--chunk", str(CHUNK), "--context", str(CONTEXT)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "prefill_chunk", seen)
        patch.setattr(prefill.time, "perf_counter", seen.perf_counter)
        patch.setattr(prefill.jax, "block_until_ready", seen.block_until_ready)
        prefill.main(["--config", "tiny", *sizes, "--out", str(folder)])
    (line,) = (folder / "prefill.jsonl").read_text().splitlines()
    return json.loads(line), seen


def _copy(tree: Any) -> Any:
    return jax.tree.map(jnp.copy, tree)


def test_ms_is_the_median_of_waits_for_a_chunk(run: tuple[dict, Watched]):
    line, watched = run
    assert len(watched.waits) == 1 + prefill.CALLS
    ms = 1e3 * statistics.median(watched.waits[1:])
    assert line["ms"] == pytest.approx(ms)
    assert line["tokens_per_s"] == round(CHUNK / ms * 1e3)
    assert line["compile_s"] == COMPILING
    assert (line["chunk"], line["context"], line["parts_ms"]) == (CHUNK, CONTEXT, {})
    assert (line["config"], line["device"]) == ("layers=4 experts=nvfp4", "cpu")


def test_every_call_feeds_a_whole_chunk_behind_the_context(run: tuple[dict, Watched]):
    _, watched = run
    vocab = Config.tiny().vocab_size
    for (slots, tokens, count), before, (after, hidden) in zip(
        watched.fed, watched.before, watched.after, strict=True
    ):
        assert (slots.tolist(), count.tolist()) == ([0], [CHUNK])
        assert tokens.shape == (1, CHUNK)
        assert len(np.unique(tokens)) > CHUNK // 2
        assert int(tokens.min()) >= 0
        assert int(tokens.max()) < vocab
        assert before.length.tolist() == [CONTEXT]
        assert before.capacity >= CONTEXT + CHUNK
        assert after.length.tolist() == [CONTEXT + CHUNK]
        assert hidden.shape == (1, watched.params.config.hidden_size)
    # what stands in the slot is not the zeros of a new one
    for leaf in jax.tree.leaves((watched.before[0].layers, watched.before[0].residual)):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert 0 < float(jnp.std(leaf.astype(jnp.float32))) < 1


@pytest.mark.parametrize("call", [0, prefill.CALLS])
def test_a_timed_chunk_gives_what_pieces_of_it_give(run: tuple[dict, Watched], call: int):
    _, watched = run
    _, tokens, _ = watched.fed[call]
    got = watched.after[call]
    want = prefill_in_pieces(
        watched.params, watched.before[call], np.asarray(tokens).tolist(), [0], chunk=5
    )
    found = jax.tree_util.tree_leaves_with_path(got)
    for (path, a), b in zip(found, jax.tree.leaves(want), strict=True):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3, err_msg=name)
