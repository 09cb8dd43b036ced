"""The engine's benchmark on a CPU: its lines, and that a soak sees what goes wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench import engine
from bench.released import build
from qwen4jax.config import Config, Quantization
from qwen4jax.params import Params


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "engine.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def params() -> Params:
    """Of the model that the command line has, so that its programs are compiled once."""
    return build(Config.tiny(quantization=Quantization(experts="nvfp4")))


def test_lines_of_both_modes(tmp_path: Path):
    common = ["--config", "tiny", "--out", str(tmp_path)]
    engine.main(["rate", "--context", "512", "--groups", "1", *common])
    # four repetitions, after which the time is over
    engine.main(["soak", "--rounds", "1000000", "--seconds", "0", "--slots", "1", *common])
    rate, soak = lines(tmp_path)
    assert (rate["run"], rate["context"], rate["rounds"]) == ("rate", 512, 20)
    assert rate["share"] == pytest.approx(rate["rounds_per_s"] / rate["bare_rounds_per_s"], 0.01)
    assert (soak["run"], soak["requests"], soak["slots"]) == ("soak", 12, 1)
    assert soak["rounds"] > 4
    assert soak["round_ms_last"] > 0


def test_a_soak_ends_when_there_were_enough_rounds(params: Params):
    assert engine.soak(params, 1, 1)["requests"] == 4 * 3


def test_a_repetition_with_other_ids_ends_the_soak(params: Params, monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    engine_of = engine.engine_of

    class Wrong:
        """An engine whose second repetition has one token too few."""

        def __init__(self, real: Any):
            self.real = real

        def run(self, requests: list) -> Any:
            yield from self.real.run(requests)
            asked.append(requests)
            if len(asked) == 2:
                self.real.finished[0].ids = self.real.finished[0].ids[:-1]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    def wrong(*arguments: Any) -> tuple[Any, list]:
        real, requests = engine_of(*arguments)
        return Wrong(real), requests

    monkeypatch.setattr(engine, "engine_of", wrong)
    with pytest.raises(SystemExit, match="repetition 1 gave other ids"):
        engine.soak(params, 1, 1)
