"""The training loop: phases, held-out measurements, a log, and checkpoints to go on from.

A run lives in a folder. `plan.json` is what it was begun with; `log.jsonl` has one line per step
and one per held-out measurement; `checkpoints/` has the state, the place in the text, and the
length of the log. A process that goes on cuts the log back to that length, so that a run that was
killed, however often, leaves the log of one that was not.
"""

import concurrent.futures
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from qwen4jax.config import Config
from qwen4jax.train.losses import Mode, tokens_needed
from qwen4jax.train.recipe import Phase, Recipe
from qwen4jax.train.step import TrainState, evaluate_step, init_train_state, train_step
from qwen4jax.train.windows import bytes_per_token, held_out_windows, training_windows

# steps whose metrics may be on their way while the next ones are queued
_QUEUED = 8
# steps timed for a plan, after as many untimed ones
_TIMED = 8


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When a run measures, saves and stops.

    Attributes:
        steps: of the whole run; the learning rate depends on it.
        evaluate_every: steps between held-out measurements (one more at the end).
        evaluate_batches: held-out batches of each.
        save_every: steps between checkpoints.
    """

    steps: int
    evaluate_every: int = 200
    evaluate_batches: int = 4
    save_every: int = 500


class Trainer:
    """One run in its folder."""

    def __init__(self, config: Config, recipe: Recipe, text: Path, folder: Path):
        """Begins compiling; nothing is written.

        Args:
            config: what is trained, in the stored forms of the export.
            recipe: how.
            text: folder with `train.npy`, `heldout.npy` and `text.json`.
            folder: of the run.
        """
        self.config, self.recipe, self.text, self.folder = config, recipe, text, folder
        self._drafts = recipe.drafts if config.mtp_num_hidden_layers else 0
        self._bytes = {p: bytes_per_token(text, p) for p in ("train", "heldout")}
        self._programs = self._compile()

    def run(
        self,
        schedule: Schedule,
        *,
        stop_at: int | None = None,
        seconds: float = math.inf,
        note: Callable[[str], None] = print,
    ) -> tuple[TrainState, bool]:
        """Trains to the end, or goes on to it from the last checkpoint.

        Args:
            schedule: of the run; a run that goes on keeps the one it was begun with.
            stop_at: step to end at before the schedule does.
            seconds: time after which to save and return; compiling counts.
            note: called with lines of progress.

        Returns:
            The state, and whether it is that of the last step: time may have been up before.
        """
        began = time.monotonic()
        schedule = self._planned(schedule)
        last = min(schedule.steps, stop_at or schedule.steps)
        options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
        with ocp.CheckpointManager(
            (self.folder / "checkpoints").absolute(), options=options
        ) as kept:
            state, place = self._restored(kept)
            done = int(state.step)
            if done:
                note(f"going on after step {done}")
            with (self.folder / "log.jsonl").open("ab") as file:
                # a run that was killed may have written on after its checkpoint
                file.truncate(place["log"])
                log = _Log(file)
                phase, batches = -1, None
                while done < last:
                    number = self.recipe.phase_of(done, schedule.steps)
                    if number != phase:
                        phase = number
                        # an iterator's state belongs to the phase that it was saved in
                        resumed = place["iterator"] if place["phase"] == phase else None
                        batches = self._batches(phase, resumed)
                    assert batches is not None
                    shape = self.recipe.phases[phase]
                    step = self._program("train", shape)
                    window = jnp.asarray(next(batches))
                    total = jnp.asarray(schedule.steps, jnp.int32)
                    state, metrics = step(state, window, mode_of(shape), total)
                    done += 1
                    log.add({"step": done, "phase": phase}, metrics, self._bytes["train"])
                    ends = done == last
                    if ends or done % schedule.evaluate_every == 0:
                        log.flush()
                        line = self._measure(state, shape, schedule.evaluate_batches)
                        log.write({"step": done, "phase": phase, "heldout": line})
                        note(f"{time.monotonic() - began:6.1f} s  step {done}  {_brief(line)}")
                    # looking at the clock waits for no device: the log holds few steps back
                    late = time.monotonic() - began > seconds
                    if ends or late or done % schedule.save_every == 0:
                        log.flush()
                        place = {
                            "phase": phase,
                            "iterator": _as_json(batches.get_state()),
                            "log": file.tell(),
                        }
                        self._save(kept, state, place)
                    if late and not ends:
                        note(f"time is up after step {done} of {last}")
                        return state, False
        return state, True

    def steps_that_fit(self, seconds: float) -> int:
        """How many steps fit into a time, by timing a few of every phase.

        The state is thrown away. Compiling is not counted: it has been waited for.
        """
        per_step = 0.0
        begins = 0.0
        for number, phase in enumerate(self.recipe.phases):
            step, batches = self._program("train", phase), self._batches(number, None)
            window, mode = jnp.asarray(next(batches)), mode_of(phase)
            state, total = init_train_state(self.config, self.recipe), jnp.asarray(1000, jnp.int32)
            start = 0.0
            for i in range(2 * _TIMED):
                if i == _TIMED:
                    jax.block_until_ready(state.step)
                    start = time.monotonic()
                state, _ = step(state, window, mode, total)
            jax.block_until_ready(state.step)
            per_step += (phase.until - begins) * (time.monotonic() - start) / _TIMED
            begins = phase.until
        return max(1, int(seconds / per_step))

    def wait(self) -> None:
        """Returns when everything is compiled."""
        jax.block_until_ready(init_train_state(self.config, self.recipe))
        for phase in self.recipe.phases:
            self._program("train", phase)
            self._program("evaluate", phase)

    def _compile(self) -> dict[tuple[str, int, int], concurrent.futures.Future[Any]]:
        """Two programs per shape of batch, all compiled beside each other."""
        pool = concurrent.futures.ThreadPoolExecutor(max_workers=4)
        state = jax.eval_shape(lambda: init_train_state(self.config, self.recipe))
        found = {}
        for phase in self.recipe.phases:
            window = jax.ShapeDtypeStruct(self._shape(phase), jnp.int32)
            static = {"config": self.config, "recipe": self.recipe}
            mode, steps = mode_of(phase), jax.ShapeDtypeStruct((), jnp.int32)
            if ("train", *window.shape) not in found:
                train = train_step.lower(state, window, mode, steps, **static)
                evaluate = evaluate_step.lower(state.masters, window, mode, **static)
                for name, lowered in (("train", train), ("evaluate", evaluate)):
                    found[(name, *window.shape)] = pool.submit(lowered.compile)
        pool.shutdown(wait=False)
        return found

    def _program(self, name: str, phase: Phase) -> Any:
        return self._programs[(name, *self._shape(phase))].result()

    def _shape(self, phase: Phase) -> tuple[int, int]:
        return phase.batch, tokens_needed(phase.length, self._drafts)

    def _batches(self, number: int, resumed: Any) -> Any:
        phase = self.recipe.phases[number]
        iterator = iter(
            training_windows(
                self.text / "train.npy",
                length=tokens_needed(phase.length, self._drafts),
                batch=phase.batch,
                stride=phase.length,
                seed=self.recipe.seed + number,
            )
        )
        if resumed is not None:
            iterator.set_state(resumed)
        return iterator

    def _measure(self, state: TrainState, phase: Phase, batches: int) -> dict[str, Any]:
        """Mean metrics over the held-out batches of a phase's shape."""
        windows = held_out_windows(
            self.text / "heldout.npy",
            length=tokens_needed(phase.length, self._drafts),
            batch=phase.batch,
            batches=batches,
            stride=phase.length,
        )
        evaluate = self._program("evaluate", phase)
        each = [evaluate(state.masters, jnp.asarray(w), mode_of(phase)) for w in windows]
        mean = jax.tree.map(lambda *x: np.mean(np.stack(x), axis=0), *each)
        return _plain(mean, self._bytes["heldout"])

    def _planned(self, schedule: Schedule) -> Schedule:
        """Writes the plan of a new run; the plan of one that goes on, which must be the same."""
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "plan.json"
        mine = {"config": repr(self.config), "recipe": dataclasses.asdict(self.recipe)}
        mine = json.loads(json.dumps(mine))
        if not file.exists():
            partial = file.with_suffix(".partial")
            plan = mine | {"schedule": dataclasses.asdict(schedule)}
            partial.write_text(json.dumps(plan, indent=1))
            partial.replace(file)
            return schedule
        found = json.loads(file.read_text())
        for name, value in mine.items():
            if found[name] != value:
                raise ValueError(f"{file}: the run was begun with another {name}")
        return Schedule(**found["schedule"])

    def _restored(self, kept: ocp.CheckpointManager) -> tuple[TrainState, dict[str, Any]]:
        """The last checkpoint, or the beginning."""
        latest = kept.latest_step()
        if latest is None:
            state = init_train_state(self.config, self.recipe)
            return state, {"phase": -1, "iterator": None, "log": 0}
        like = jax.eval_shape(lambda: init_train_state(self.config, self.recipe))
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        like = jax.tree.map(lambda x: x.update(sharding=here), like)
        found = kept.restore(
            latest,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(jax.tree.leaves(like)),
                place=ocp.args.JsonRestore(),
            ),
        )
        return jax.tree.unflatten(jax.tree.structure(like), found["state"]), found["place"]

    def _save(self, kept: ocp.CheckpointManager, state: TrainState, place: dict[str, Any]) -> None:
        saved = ocp.args.Composite(
            # leaves in order: the tree's classes are not the checkpoint's business
            state=ocp.args.StandardSave(jax.tree.leaves(state)),
            place=ocp.args.JsonSave(place),
        )
        kept.save(int(state.step), args=saved, force=True)


class _Log:
    """Lines of JSON; metrics are fetched some steps late, so that the device never waits."""

    def __init__(self, file: Any):
        self._file, self._waiting = file, []

    def add(self, line: dict[str, Any], metrics: Any, bytes_per_token: float) -> None:
        self._waiting.append((line, metrics, bytes_per_token))
        if len(self._waiting) > _QUEUED:
            self._write_first()

    def flush(self) -> None:
        while self._waiting:
            self._write_first()
        self._file.flush()

    def write(self, line: dict[str, Any]) -> None:
        self._file.write((json.dumps(line) + "\n").encode())

    def _write_first(self) -> None:
        line, metrics, size = self._waiting.pop(0)
        self.write(line | _plain(jax.device_get(metrics), size))


def mode_of(phase: Phase) -> Mode:
    """The switches of a phase."""
    return Mode(jnp.asarray(phase.dense), jnp.asarray(phase.indexer_weight, jnp.float32))


def _plain(metrics: Any, bytes_per_token: float) -> dict[str, Any]:
    """Metrics as numbers, with the loss in bits per byte."""
    plain = {name: np.asarray(value).tolist() for name, value in metrics.items()}
    return plain | {"bits_per_byte": plain["loss"] / math.log(2) / bytes_per_token}


def _brief(line: dict[str, Any]) -> str:
    shown = [f"{line['bits_per_byte']:.4f} bits per byte"]
    if "accepted" in line:
        shares = ", ".join(f"{x:.3f}" for x in line["accepted"])
        shown.append(f"accepted {shares}")
    if "index_overlap" in line:
        shown.append(f"overlap {line['index_overlap']:.3f}")
    return ", ".join(shown)


def _as_json(state: Any) -> Any:
    return json.loads(state.decode()) if isinstance(state, bytes) else state
