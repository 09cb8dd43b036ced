"""Reading the golden cases, and running the model beside them with ties in block scores in view.

Where block scores tie at the edge of a query's budget the reference picks any of them, this
package the lower block. `teacher_forced` makes such a tie go the reference's way: it adds to the
blocks that the reference selected at most `TIE` of their score. So if its selections equal the
reference's, every difference of the package's own selection is a tie within `TIE`.
"""

import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from qwen4jax.config import SPARSE
from qwen4jax.forward_pass import forward
from qwen4jax.layers.capture import Capture
from qwen4jax.model import draft_step, head, read_out, step
from qwen4jax.params import Params
from qwen4jax.state import init_state
from qwen4jax.weights.load import load

# where the selection is made
CHOOSING = importlib.import_module("qwen4jax.pallas.index_topk.select")
HERE = Path(__file__).parent
TIE = 1e-5
# the narrowest lead of the best logit, relative to the largest, that settles an id
MARGIN = 1e-4


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden case.

    Attributes:
        params: its checkpoint, plain tensors in float32.
        io: the reference's inputs and outputs by name.
        prompts: ids of each prompt.
        greedy: the reference's continuation of each.
    """

    params: Params
    io: dict[str, np.ndarray]
    prompts: list[np.ndarray]
    greedy: list[np.ndarray]

    @property
    def sparse_layers(self) -> list[int]:
        """Numbers of the layers that select."""
        kinds = self.params.config.layer_types
        return [i for i, kind in enumerate(kinds) if kind == SPARSE]

    def selection(self, prompt: int, layer: int) -> np.ndarray:
        """[S, S], whether the reference let query t attend to key s."""
        return self.io[f"p{prompt}.qsa.{layer}"].astype(bool)


@functools.cache
def read_case(folder: str) -> Case:
    """The case in `folder`, a name beside this file or a path."""
    path = HERE / folder
    params = load(path / "checkpoint", dtype="float32", progress=False)
    io = load_file(path / "io.safetensors")
    names = [f"p{i}" for i in range(len(io)) if f"p{i}.ids" in io]
    return Case(
        params=params,
        io=io,
        prompts=[io[f"{n}.ids"] for n in names],
        greedy=[io[f"{n}.greedy"] for n in names],
    )


@dataclasses.dataclass(frozen=True)
class Forced:
    """A run over every prompt and its continuation, ties broken the reference's way.

    Attributes:
        logits: [B, T, V].
        residual: after each layer, [B, T, R*D].
        selected: of each sparse layer, [B, T, T] keys that a query attends to.
        tied: [B, T], whether a layer's scores tie at the edge of the budget.
    """

    logits: np.ndarray
    residual: list[np.ndarray]
    selected: list[np.ndarray]
    tied: np.ndarray


@functools.cache
def teacher_forced(folder: str) -> Forced:
    """Runs the main model over the prompts, each followed by the reference's continuation."""
    case = read_case(folder)
    config, ratio = case.params.config, case.params.config.indexer_compress_ratio
    rows = [np.concatenate([p, g[:-1]]) for p, g in zip(case.prompts, case.greedy, strict=True)]
    tokens, count = padded(rows)
    length = tokens.shape[1]
    preferred = np.zeros((len(case.sparse_layers), *tokens.shape, length // ratio), bool)
    for row, prompt in enumerate(case.prompts):
        size, blocks = len(prompt), len(prompt) // ratio
        for place, layer in enumerate(case.sparse_layers):
            keys = case.selection(row, layer)[:, : blocks * ratio]
            preferred[place, row, :size, :blocks] = keys.reshape(size, blocks, ratio).all(-1)

    @jax.jit
    def run(params, tokens, count, preferred):
        state = init_state(config, slots=len(rows), max_length=length, drafts=0)
        taps = Capture(("*.residual", "*.indexer.selected"))
        with broken_ties(preferred) as tied:
            _, pending = step(params, state, tokens, count, final=True, capture=taps)
        return head(params, read_out(params, pending.residual)), taps.values, tied

    logits, taps, tied = run(case.params, tokens, count, preferred)
    residual = [taps[f"layer{i:02d}.residual"] for i in range(config.num_hidden_layers)]
    return Forced(
        logits=np.asarray(logits),
        residual=[np.asarray(r).reshape(*tokens.shape, -1) for r in residual],
        selected=[
            attended(np.asarray(taps[f"layer{i:02d}.indexer.selected"]), length)
            for i in case.sparse_layers
        ],
        tied=np.any([np.asarray(t) for t in tied], axis=0),
    )


@dataclasses.dataclass(frozen=True)
class Plain:
    """What `forward` gives for the prompts, left-padded into the reference's batch.

    Attributes:
        logits: of each prompt's tokens, [S, V].
        residual: after each layer, of each prompt, [S, R*D].
        agrees: leading tokens of each prompt whose selections are all the reference's.
    """

    logits: list[np.ndarray]
    residual: list[list[np.ndarray]]
    agrees: list[int]


@functools.cache
def plain_forward(folder: str) -> Plain:
    """Runs `forward` as users do: ties go to the lower block."""
    case = read_case(folder)
    tokens, mask = case.io["batch.ids"], case.io["batch.mask"]
    names = ("*.residual", "*.indexer.selected")
    logits, taps = forward(case.params, tokens, mask=mask, capture=names)
    taps = {name: np.asarray(value) for name, value in taps.items()}
    length = tokens.shape[1]
    sizes = list(map(len, case.prompts))
    agrees = list(sizes)
    for layer in case.sparse_layers:
        keys = attended(taps[f"layer{layer:02d}.indexer.selected"], length)
        for row, size in enumerate(sizes):
            same = (keys[row, :size, :size] == case.selection(row, layer)).all(-1)
            agrees[row] = min(agrees[row], size if same.all() else int(same.argmin()))
    return Plain(
        logits=[np.asarray(logits)[row, length - size :] for row, size in enumerate(sizes)],
        residual=[
            [streams.reshape(*tokens.shape, -1)[row, :size] for row, size in enumerate(sizes)]
            for i in range(case.params.config.num_hidden_layers)
            if (streams := taps[f"layer{i:02d}.residual"]) is not None
        ],
        agrees=agrees,
    )


def settled_ids(folder: str) -> list[int]:
    """How many leading ids of each continuation neither a tie nor a narrow margin leaves open.

    A tie leaves an id open if the logits after it differ from the reference's.
    """
    case, forced, plain = read_case(folder), teacher_forced(folder), plain_forward(folder)
    counts = []
    for row, prompt in enumerate(case.prompts):
        want = case.io[f"p{row}.greedy_logits"]
        size, steps = len(prompt), len(want)
        best, scale = np.sort(want, axis=-1), np.abs(want).max(-1)
        undecided = best[:, -1] - best[:, -2] <= MARGIN * scale
        # token n of the continuation is fed at place size + n and decides id n + 1
        after_tie = np.zeros(steps, bool)
        after_tie[1:] = np.logical_or.accumulate(forced.tied[row, size : size + steps - 1])
        got = forced.logits[row, size - 1 : size - 1 + steps]
        undecided |= after_tie & (np.abs(got - want).max(-1) > MARGIN * scale)
        undecided |= plain.agrees[row] < size
        counts.append(int(undecided.argmax()) if undecided.any() else steps)
    return counts


def draft_forced(folder: str, params: Params | None = None) -> tuple[Any, Any, np.ndarray]:
    """The draft head over the prompts, fed the main model's residuals.

    Args:
        folder: of the case.
        params: others than the case's.

    Returns:
        Logits, residual streams, and where block scores tie, per prompt and place.
    """
    case = read_case(folder)
    params = params or case.params
    length = max(map(len, case.prompts)) - 1
    following, count = padded([p[1:] for p in case.prompts], length)
    residual = teacher_forced(folder).residual[-1][:, :length]
    residual = residual.reshape(*following.shape, params.config.hc_count, -1)

    @jax.jit
    def run(params, following, count, residual):
        state = init_state(params.config, slots=len(count), max_length=length, drafts=0)
        with broken_ties(()) as tied:
            _, rows = draft_step(params, state, following, residual, jnp.zeros_like(count), count)
        return head(params, rows.hidden), rows.residual, tied[0]

    logits, streams, tied = run(params, following, count, residual)
    return np.asarray(logits), np.asarray(streams).reshape(*following.shape, -1), np.asarray(tied)


class broken_ties:
    """While a model is traced in it, the i-th sparse layer prefers the blocks `preferred[i]`.

    Gives the list of [B, T] arrays, one for each such layer, of where its scores tie.
    """

    def __init__(self, preferred: Any):
        self.preferred = preferred
        self.tied: list[jax.Array] = []
        self.patch = mock.patch.object(CHOOSING, "index_topk", self.select)
        self.own = CHOOSING.index_topk

    def __enter__(self) -> list[jax.Array]:
        self.patch.start()
        return self.tied

    def __exit__(self, *exception: object) -> None:
        self.patch.stop()

    def select(self, scores: Any, index: Any, best: Any, *, blocks: int, ratio: int) -> Any:
        del best  # of the scores before they change
        place = len(self.tied)
        ordered = -jnp.sort(-scores, axis=-1)
        if blocks < scores.shape[-1]:
            inside, outside = ordered[..., blocks - 1], ordered[..., blocks]
            gap = inside - outside
            self.tied.append((gap <= TIE * jnp.maximum(1, inside)) & jnp.isfinite(outside))
        else:
            self.tied.append(jnp.zeros(scores.shape[:-1], bool))
        if place < len(self.preferred):
            wanted = self.preferred[place]
            wanted = jnp.pad(wanted, ((0, 0), (0, 0), (0, scores.shape[-1] - wanted.shape[-1])))
            scores = jnp.where(wanted, scores + TIE * jnp.maximum(1, scores), scores)
        return self.own(scores, index, blocks=blocks, ratio=ratio)


def attended(selected: np.ndarray, length: int) -> np.ndarray:
    """[B, T, length] keys attended to, from indices [B, T, M] with -1 for none."""
    keys = np.zeros((*selected.shape[:2], length + 1), bool)
    np.put_along_axis(keys, np.where(selected < 0, length, selected), True, axis=-1)
    return keys[..., :length]


def padded(rows: list[np.ndarray], length: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Ids [B, T] padded behind, and the lengths [B]."""
    count = np.array([len(r) for r in rows], np.int32)
    tokens = np.zeros((len(rows), length or count.max()), np.int32)
    for row, ids in enumerate(rows):
        tokens[row, : len(ids)] = ids
    return tokens, count


def error(got: np.ndarray, want: np.ndarray) -> tuple[float, float]:
    """Relative error in the norm; largest difference over the largest value."""
    assert got.shape == want.shape
    if not want.size:
        return 0.0, 0.0
    difference = np.abs(got.astype(np.float64) - want)
    norm = np.linalg.norm(difference) / np.linalg.norm(want.astype(np.float64))
    return float(norm), float(difference.max() / np.abs(want).max())


def assert_exact(got: np.ndarray, want: np.ndarray, what: str) -> None:
    """Within 1e-4 in the norm, and 3e-4 of the largest value everywhere."""
    norm, largest = error(got, want)
    assert norm <= 1e-4, f"{what}: relative error {norm}"
    assert largest <= 3e-4, f"{what}: off by {largest} of the largest value"
