"""The forward pass, the draft head and the stored forms against the reference implementation.

`tests/golden/README.md` says what the cases are. Errors are taken prompt by prompt.
"""

import json
import shutil
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from qwen4jax.config import Config
from qwen4jax.decode.prefill import decode_token, logits_of, prefill
from qwen4jax.forward_pass import forward
from qwen4jax.params import count_parameters, declare
from qwen4jax.state import init_state
from qwen4jax.weights.load import load
from tests.golden.cases import (
    HERE,
    assert_exact,
    draft_forced,
    plain_forward,
    read_case,
    settled_ids,
    teacher_forced,
)

CASES = ["t0", "base", "variant", "nvfp4", "fp8"]

# places of a prefill step; 64 take each prompt of t0 at once
CHUNKS = {"t0": (1, 3, 5, 7, 64)}


@pytest.fixture(scope="module", params=CASES)
def folder(request: pytest.FixtureRequest) -> str:
    """A case; all that is compiled for it is used by tests that run in a row."""
    return request.param


def test_selections_are_the_references_unless_scores_tie(folder: str):
    case, forced = read_case(folder), teacher_forced(folder)
    for place, layer in enumerate(case.sparse_layers):
        for row, prompt in enumerate(case.prompts):
            size = len(prompt)
            np.testing.assert_array_equal(
                forced.selected[place][row, :size, :size],
                case.selection(row, layer),
                err_msg=f"prompt {row}, layer {layer}",
            )


def test_own_selections_differ_only_at_ties(folder: str):
    case, forced, plain = read_case(folder), teacher_forced(folder), plain_forward(folder)
    for row, prompt in enumerate(case.prompts):
        # what follows the first difference sees other hidden states
        if (first := plain.agrees[row]) < len(prompt):
            assert forced.tied[row, first], f"prompt {row}, token {first}"
    agreeing = sum(plain.agrees)
    assert agreeing >= 0.9 * sum(map(len, case.prompts))


def test_logits(folder: str):
    case, forced, plain = read_case(folder), teacher_forced(folder), plain_forward(folder)
    for row, prompt in enumerate(case.prompts):
        want = case.io[f"p{row}.logits"]
        assert_exact(forced.logits[row, : len(prompt)], want, f"prompt {row}")
        same = slice(plain.agrees[row])
        assert_exact(plain.logits[row][same], want[same], f"prompt {row}, own ties")


def test_residual_streams_after_every_layer(folder: str):
    case, forced, plain = read_case(folder), teacher_forced(folder), plain_forward(folder)
    layers = [i for i in range(len(case.params.layers)) if f"p0.residual.{i}" in case.io]
    # the quantised cases are compared by their logits alone
    assert len(layers) == (0 if folder in ("nvfp4", "fp8") else len(case.params.layers))
    for layer in layers:
        for row, prompt in enumerate(case.prompts):
            want, where = case.io[f"p{row}.residual.{layer}"], f"prompt {row}, layer {layer}"
            assert_exact(forced.residual[layer][row, : len(prompt)], want, where)
            same = slice(plain.agrees[row])
            assert_exact(plain.residual[layer][row][same], want[same], f"{where}, own ties")


def test_logits_of_the_continuation(folder: str):
    case, forced = read_case(folder), teacher_forced(folder)
    for row, prompt in enumerate(case.prompts):
        want = case.io[f"p{row}.greedy_logits"]
        # the reference's choice among ties is known for the prompt only
        later = forced.tied[row, len(prompt) : len(prompt) + len(want) - 1]
        count = 1 + (int(later.argmax()) if later.any() else len(later))
        got = forced.logits[row, len(prompt) - 1 :][:count]
        assert_exact(got, want[:count], f"prompt {row}")


def test_left_padded_batch(folder: str):
    """Rows in which the reference itself is NaN are left out: its short rows of `base`."""
    case, plain = read_case(folder), plain_forward(folder)
    compared = 0
    for row, want in enumerate(case.io["batch.logits"]):
        if np.isnan(want).any() or plain.agrees[row] < len(case.prompts[row]):
            continue
        assert_exact(plain.logits[row][-1], want, f"prompt {row}")
        compared += 1
    assert compared >= (1 if folder == "base" else len(case.prompts) - 1)


def test_draft_head_teacher_forced(folder: str):
    case = read_case(folder)
    logits, residual, tied = draft_forced(folder)
    for row, prompt in enumerate(case.prompts):
        # one layer: a tie changes the row it stands in and no other
        untied = ~tied[row, : len(prompt) - 1]
        assert untied.mean() > 0.8 if len(untied) else len(prompt) == 1
        for name, got in (("logits", logits), ("residual", residual)):
            if len(untied):
                want = case.io[f"p{row}.mtp.{name}"]
                got = got[row, : len(untied)]
                assert_exact(got[untied], want[untied], f"prompt {row}, {name}")


def continue_greedily(
    folder: str, rows: Sequence[int], *, chunk: int, slots: int
) -> list[list[int]]:
    """Ids after the prompts `rows` of a case, fed together, the last one to slot 0."""
    case = read_case(folder)
    prompts = [case.prompts[row].tolist() for row in rows]
    where = list(range(len(rows)))[::-1]
    longest = max(map(len, case.prompts)) + len(case.greedy[0])
    state = init_state(case.params.config, slots=slots, max_length=longest, page_size=8)
    state, hidden = prefill(case.params, state, prompts, where, chunk=chunk)
    newest = np.zeros(slots, np.int32)
    newest[where] = np.asarray(logits_of(case.params, hidden)).argmax(-1)
    active = jnp.arange(slots) < len(rows)
    steps = [newest]
    for _ in range(len(case.greedy[0]) - 1):
        state, logits = decode_token(case.params, state, jnp.asarray(steps[-1]), active)
        steps.append(np.asarray(logits).argmax(-1).astype(np.int32))
    return np.stack(steps, axis=1)[where].tolist()


def assert_reference_ids(folder: str, rows: Sequence[int], found: list[list[int]]):
    """Equal up to the first id that a tie or a narrow margin leaves open."""
    case, settled = read_case(folder), settled_ids(folder)
    for row, ids in zip(rows, found, strict=True):
        count = settled[row]
        assert ids[:count] == case.greedy[row][:count].tolist(), f"{folder}, prompt {row}"


def test_greedy_ids(folder: str):
    """Prompts of 1 to 130 tokens in one ragged batch, in chunks of every kind."""
    case, settled = read_case(folder), settled_ids(folder)
    # few are excused by ties
    assert sum(settled) >= (0.85 if folder == "t0" else 1) * sum(map(len, case.greedy))
    rows = range(len(case.prompts))
    for chunk in CHUNKS.get(folder, (16,)):
        found = continue_greedily(folder, rows, chunk=chunk, slots=len(rows) + 1)
        assert_reference_ids(folder, rows, found)


def headers(checkpoint: Path) -> dict[str, tuple[str, int]]:
    """Tensor -> (dtype as the format spells it, bytes), of every file."""
    found = {}
    for file in checkpoint.glob("*.safetensors"):
        content = file.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            found[name] = (entry["dtype"], end - start)
    return found


@pytest.mark.parametrize(
    ("name", "dtypes"),
    [
        ("nvfp4", ["uint8", "float8_e4m3fn", "float32", "float32"]),
        ("fp8", ["float8_e4m3fn", "bfloat16"]),
    ],
)
def test_quantised_tensors_stay_in_their_stored_form(name: str, dtypes: list[str]):
    """In float32 as in bfloat16: the dtypes, and the bytes of the files to the last one."""
    checkpoint = HERE / name / "checkpoint"
    files = headers(checkpoint)

    def stored(pattern: str) -> int:
        # hash constants (I64) are part of the configuration in memory
        return sum(
            size for n, (kind, size) in files.items() if kind != "I64" and fnmatch(n, pattern)
        )

    def held(tree: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    params: Any = load(checkpoint, progress=False)
    wide: Any = read_case(name).params
    assert (params.config.dtype, wide.config.dtype) == ("bfloat16", "float32")
    assert held(params) == stored("*")
    for tree in (params, wide):
        experts = [layer.mlp.experts for layer in tree.layers]
        for block in experts:
            for weights in (block.gate_up_proj, block.down_proj):
                assert [leaf.dtype.name for leaf in jax.tree.leaves(weights)] == dtypes
        assert held(experts) == stored("model.layers.*.mlp.experts.*")
        tables = [layer.ple.ngram_embedding for layer in tree.layers if layer.ple]
        assert [t.weight.dtype.name for t in tables] == ["float8_e4m3fn"]
        assert held(tables) == stored("*.ngram_embedding.*")


@pytest.fixture(scope="module")
def fp8_draft_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `fp8` with its draft head's experts in FP8, one by one."""
    path = tmp_path_factory.mktemp("mtp_fp8") / "checkpoint"
    shutil.copytree(HERE / "fp8" / "checkpoint", path)
    shutil.copy(HERE / "fp8" / "mtp_fp8" / "model-mtp.safetensors", path)
    index = path / "model.safetensors.index.json"
    main = json.loads(index.read_text())["weight_map"]
    names = {n: file for n, file in main.items() if not n.startswith("mtp.")}
    names |= {n: "model-mtp.safetensors" for n in headers(path) if n.startswith("mtp.")}
    index.write_text(json.dumps({"metadata": {}, "weight_map": names}))
    return path


def test_draft_head_with_fp8_experts(fp8_draft_head: Path):
    case = read_case("fp8")
    params: Any = load(fp8_draft_head, dtype="float32", progress=False)
    assert params.config.quantization.mtp_experts == "fp8"
    experts = params.mtp.layers[0].mlp.experts
    assert experts.down_proj.weight.dtype.name == "float8_e4m3fn"
    logits, _, tied = draft_forced("fp8", params)
    assert not tied.any()
    want = load_file(HERE / "fp8" / "mtp_fp8" / "io.safetensors")
    for row, prompt in enumerate(case.prompts):
        assert_exact(logits[row, : len(prompt) - 1], want[f"p{row}.mtp.logits"], f"prompt {row}")


@pytest.mark.parametrize("name", ["t0", "base"])
def test_three_axis_positions(name: str):
    """Text, an image of 3 x 4, text, an image of 2 x 2, text: each axis has its own positions."""
    case = read_case(name)
    io = load_file(HERE / name / "mrope.safetensors")
    positions = jnp.asarray(io["positions"], jnp.int32)[None]
    got = forward(case.params, io["ids"][None], rope_positions=positions)
    assert_exact(np.asarray(got)[0], io["logits"], name)


def test_parameters_of_the_released_model():
    """Counted from the declarations; the vision tower is no part of the model."""
    assert count_parameters(declare(Config.flash_next())) == 179_551_050_368


def test_greedy_ids_of_each_prompt_alone_in_one_shot():
    rows = range(len(read_case("t0").prompts))
    found = [continue_greedily("t0", [row], chunk=64, slots=1)[0] for row in rows]
    assert_reference_ids("t0", rows, found)
