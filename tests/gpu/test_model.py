"""The model on an NVIDIA GPU: golden outputs in float32, bfloat16 at the released widths, ids."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qwen4jax.config import LINEAR, SPARSE, Config, Quantization
from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.prefill import decode_token, logits_of, prefill
from qwen4jax.decode.round import begin_slots, run_round
from qwen4jax.forward_pass import forward
from qwen4jax.params import Params, init_params
from qwen4jax.state import init_state
from qwen4jax.weights.load import load

GOLDEN = Path(__file__).parents[1] / "golden"


def relative(a, b) -> float:
    return float(np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(np.asarray(b)))


@pytest.mark.parametrize("case", ["nvfp4", "fp8"])
def test_golden_logits(case: str):
    params = load(GOLDEN / case / "checkpoint", dtype="float32")
    io = load_file(GOLDEN / case / "io.safetensors")
    # the short prompt selects everything, so that no tie of block scores can decide
    ids = io["p0.ids"]
    assert relative(forward(params, ids[None])[0], io["p0.logits"]) < 1e-4


def widths(dtype: str) -> Config:
    """The released widths, with fewer layers, experts, ids and n-gram rows."""
    return Config.flash_next(
        num_hidden_layers=4,
        layer_types=(LINEAR, LINEAR, LINEAR, SPARSE),
        num_experts=32,
        vocab_size=4096,
        eos_token_id=0,
        ngram_vocab_size_base=10_000,
        quantization=Quantization(experts="nvfp4", ngram_embedding="fp8"),
        dtype=dtype,
    )


def as_float32(params: Params) -> Params:
    """The same values with float32 arithmetic; stored forms stay."""
    wide = jax.tree.map(lambda x: x.astype("float32") if x.dtype == jnp.bfloat16 else x, params)
    return wide.replace(config=params.config.replace(dtype="float32"))


def test_bfloat16_at_released_widths_is_near_float32():
    params = init_params(widths("bfloat16"), seed=3)
    ids = np.random.default_rng(0).integers(1, 4096, (2, 64))
    exact = forward(as_float32(params), ids)
    # a random network of 8 sublayers amplifies bfloat16's 2**-9 to a few percent
    assert relative(forward(params, ids), exact) < 0.08


def test_float32_on_the_gpu_equals_the_cpu():
    params = init_params(widths("float32"), seed=4)
    ids = np.random.default_rng(1).integers(1, 4096, (1, 16))
    on_gpu = np.asarray(forward(params, ids))
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu):
        on_cpu = np.asarray(forward(jax.device_put(params, cpu), ids))
    assert relative(on_gpu, on_cpu) < 1e-4


def test_round_gives_the_ids_of_plain_decoding():
    params = init_params(widths("float32"), seed=5)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(1, 4096, n).tolist() for n in (5, 30, 64)]
    new, slots = 24, [0, 1, 2]
    plain = [[] for _ in prompts]
    state = init_state(params.config, slots=3, max_length=256, drafts=0)
    state, hidden = prefill(params, state, prompts, slots, chunk=64)
    logits = logits_of(params, hidden)
    for _ in range(new):
        ids = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        for row, one in zip(plain, np.asarray(ids), strict=True):
            row.append(int(one))
        state, logits = decode_token(params, state, ids, jnp.ones(3, bool))

    state = init_state(params.config, slots=3, max_length=256, drafts=3)
    state, hidden = prefill(params, state, prompts, slots, chunk=64)
    greedy = Sampling(temperature=0, max_new_tokens=new, ignore_eos=True)
    controls = make_controls([Row(greedy, len(p)) for p in prompts], 3, 4096)
    state, controls, burst = begin_slots(params, state, controls, hidden, jnp.arange(3))
    # the plain continuation as drafts, so that whole bursts are accepted too
    state = state.replace(drafts=jnp.asarray([row[1:4] for row in plain], jnp.int32))
    active = jnp.ones(3, bool)
    out = [[int(t)] for t in np.asarray(burst.tokens[:, 0])]
    while bool(active.any()):
        state, controls, active, burst = run_round(params, state, controls, active)
        for row, tokens, count in zip(
            out, np.asarray(burst.tokens), np.asarray(burst.count), strict=True
        ):
            row += tokens[:count].tolist()
    assert out == plain
