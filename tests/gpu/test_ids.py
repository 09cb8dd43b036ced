"""`generate` on the device gives the ids that the references give on the CPU: a trained model."""

import jax

from qwen4jax import Sampling, Tokenizer, embedded_checkpoint, generate, load
from qwen4jax.pallas import registry

PROMPTS = (
    "import os\nimport ",
    "def main(",
    'class Reader:\n    """Reads lines',
    "for key, value in sorted(",
)


def ids(device: jax.Device) -> list[tuple[int, ...]]:
    """Greedy ids in float32, speculative, through slots that are fewer than the prompts."""
    greedy = Sampling(temperature=0, max_new_tokens=64, ignore_eos=True)
    tokenizer = Tokenizer.load(embedded_checkpoint())
    with jax.default_device(device):
        params = load(embedded_checkpoint(), dtype="float32")
        found = generate(params, list(PROMPTS), sampling=greedy, tokenizer=tokenizer, slots=3)
    return [tuple(one.token_ids) for one in found]


def test_the_embedded_checkpoint_gives_the_ids_of_the_cpu():
    got = ids(jax.devices()[0])
    with registry.using("reference"):
        want = ids(jax.devices("cpu")[0])
    assert got == want
    assert all(len(one) == 64 for one in got)
