"""The benchmark of prefill chunks, on the CPU with the tiny model."""

from bench import prefill
from qwen4jax.config import Config, Quantization


def test_a_chunk_is_timed():
    config = Config.tiny(quantization=Quantization(experts="nvfp4"))
    found = prefill.measure(config, 16, 32, profile=False)
    assert found["ms"] > 0
    assert abs(found["tokens_per_s"] * found["ms"] / 16e3 - 1) < 0.01
    assert (found["chunk"], found["context"]) == (16, 32)
