"""The checkpoint that comes with the package: what it is, and that its draft head is worth it.

All requests run the same two programs, with drafts and without, in float32.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen4jax.decode.generate import stream
from qwen4jax.decode.sampling import Sampling
from qwen4jax.decode.text import Tokenizer
from qwen4jax.params import Params
from qwen4jax.weights import embedded
from qwen4jax.weights.embedded import embedded_checkpoint
from qwen4jax.weights.load import load

ROOT = Path(__file__).parent.parent
TINY = ROOT / "checkpoints" / "tiny"
MOST_BYTES = 20_000_000
NEW, PROMPT, REQUESTS = 16, 256, 20
GREEDY = Sampling(temperature=0, max_new_tokens=NEW, ignore_eos=True)


@dataclasses.dataclass
class Served:
    """Ids of every request, and what rounds accepted, in the order they came."""

    ids: list[list[int]]
    accepted: list[int]

    @property
    def tokens_per_round(self) -> float:
        return 1 + float(np.mean(self.accepted))


@functools.cache
def params() -> Params:
    return load(embedded_checkpoint(), dtype="float32", progress=False)


@functools.cache
def prompts() -> list[list[int]]:
    """Two from each held-out text, as long as what a query may select."""
    tokenizer = Tokenizer.load(TINY)
    lines = (TINY / "heldout.jsonl").read_text().splitlines()
    ids = [tokenizer.encode(json.loads(line)["text"]) for line in lines]
    assert params().config.indexer_budget == PROMPT
    return [row[start : start + PROMPT] for start in (0, 40) for row in ids]


def options(number: int) -> Sampling:
    """Every fourth request is sampled."""
    if number % 4 != 3:
        return GREEDY
    return dataclasses.replace(GREEDY, temperature=0.8, top_p=0.95, seed=number)


def serve(model: Params, count: int, draft: int, *, greedy: bool = False) -> Served:
    """Runs requests through eight slots; a slot is taken over when its request ends."""
    asked = [prompts()[n % len(prompts())] for n in range(count)]
    sampling = [GREEDY if greedy and n != 3 else options(n) for n in range(count)]
    found = Served([[] for _ in asked], [])
    for delta in stream(model, asked, sampling=sampling, draft=draft, slots=8, chunk=256):
        found.ids[delta.request] += delta.token_ids
        # the last round of a request may be cut short
        if delta.rounds and delta.finish_reason is None:
            found.accepted.append(len(delta.token_ids) - 1)
    return found


@functools.cache
def drafted() -> Served:
    return serve(params(), REQUESTS, 3)


def test_the_files_are_those_of_the_manifest():
    said = json.loads((TINY / "manifest.json").read_text())
    for name, digest in said["files"].items():
        assert hashlib.sha256((TINY / name).read_bytes()).hexdigest() == digest, name
    assert said["text"] == json.loads((ROOT / "checkpoints" / "tiny_text.json").read_text())
    for source in said["text"]["sources"]:
        assert source["package"]
        assert source["version"]
        assert source["licence"]
        assert len(source["sha256"]) == 64
    assert sum(f.stat().st_size for f in TINY.iterdir()) <= MOST_BYTES


def test_it_has_every_mechanism():
    config = params().config
    assert embedded_checkpoint() == TINY
    assert set(config.layer_types) == {"linear_attention", "qwen_sparse_attention"}
    assert config.hc_count == 4
    assert config.ple_layer_ids == (2,)
    assert config.num_experts == 16
    assert config.mtp_num_hidden_layers == 1
    assert config.quantization.ngram_embedding == "fp8"


def test_without_it_the_error_says_where_it_was_looked_for(monkeypatch, tmp_path: Path):
    monkeypatch.setattr(embedded, "_PLACES", (tmp_path / "one", tmp_path / "other"))
    with pytest.raises(FileNotFoundError, match=r"one or .*other; install the package again"):
        embedded_checkpoint()


def test_speculation_gives_the_ids_of_plain_decoding():
    """SPC-22 too: mixed requests, every answer is the one it has without drafts."""
    assert serve(params(), REQUESTS, 0).ids == drafted().ids


def test_drafts_go_on_being_accepted():
    """SPC-22: in no 20 rounds on end, across requests that come and go, is everything refused."""
    accepted = drafted().accepted
    assert len(accepted) > 60
    assert min(sum(accepted[i : i + 20]) for i in range(len(accepted) - 20)) > 0
    assert drafted().tokens_per_round > 2.0


def _swapped(head: Any) -> Any:
    """The token's half of the input where the residual's belongs."""
    return head.replace(fc_embedding=head.fc_hidden, fc_hidden=head.fc_embedding)


def _after_final_norm(head: Any) -> Any:
    """The main model's last norm for the head's own."""
    return head.replace(pre_fc_norm_hidden=params().hyper_connection_mixer.hc_norm)


@pytest.mark.parametrize("mutant", [_swapped, _after_final_norm])
def test_a_wrong_draft_head_shows_in_acceptance_alone(mutant):
    """SPC-13: what the floor of the test above is for; the ids are the same all the same."""
    head = params().mtp
    assert head is not None
    wrong = serve(params().replace(mtp=mutant(head)), len(prompts()), 3)
    assert wrong.ids == drafted().ids[: len(prompts())]
    assert np.mean(wrong.accepted) < 0.82 * np.mean(drafted().accepted)
