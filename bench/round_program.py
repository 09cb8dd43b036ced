"""The round that `bench.decode` times: one run's shapes, and its programs."""

import argparse
import re
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench import HLO_DUMP, ahead
from bench.ahead import Kept
from bench.profile import op_names
from bench.released import abstract, state_shapes
from qwen4jax.ablation import Ablation
from qwen4jax.config import Config
from qwen4jax.decode.burst import empty, to_host
from qwen4jax.decode.capacity import plan_memory
from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.round import speculative_round
from qwen4jax.decode.stopping import Controls, synthetic_accept
from qwen4jax.layers.capture import Capture
from qwen4jax.model import step
from qwen4jax.params import Params
from qwen4jax.serve.model import every_option
from qwen4jax.state import DecodeState

# alternatives that a server computes by default
TOP = 5


class Run:
    """One line of the results to be: what is fixed before anything is allocated."""

    def __init__(self, args: argparse.Namespace, config: Config):
        self.args = args
        self.config = config.replace(ablation=Ablation(index_share=args.index_share))
        self.shapes = state_shapes(
            self.config,
            batch=args.batch,
            context=args.context,
            drafts=args.draft,
            kv_dtype=None if args.kv == "bf16" else "float8_e4m3fn",
            room=min(args.rounds + 64, 1024) * (args.draft + 1),
        )
        self.plan = plan_memory(self.config, **self.shapes)

    def controls(self) -> Controls:
        """Rows that never end."""
        drawn: dict[str, Any] = dict(temperature=1.0, top_k=20, top_p=0.95)
        if self.args.mode == "greedy":
            drawn = dict(temperature=0)
        sampling = Sampling(**drawn, max_new_tokens=1 << 30, ignore_eos=True)
        batch, vocab = self.args.batch, self.config.vocab_size
        rows = [Row(sampling, self.args.context)] * batch
        like = every_option(vocab) if self.args.mode == "server" else None
        return make_controls(rows, batch, vocab, like=like)

    @property
    def asked(self) -> dict[str, Any]:
        """What the bursts have beside tokens."""
        return dict(logprobs=True, top=TOP) if self.args.mode == "server" else {}

    @property
    def key(self) -> ahead.Key:
        """What its programs depend on, as `ahead.Store` has it."""
        a = self.args
        stored = f"{a.config}_{a.layers}_{a.experts}_{a.draft_weights}_{a.draft_vocab}"
        numbers = f"{a.table}_{a.table_rows}_{self.shapes['max_length']}_{a.acceptance}"
        return self.name, stored, numbers

    @property
    def name(self) -> str:
        """Unlike those of the other runs of a process; XLA's dump carries it."""
        a = self.args
        sizes = f"b{a.batch}_l{a.live}_c{a.context}_n{a.draft}"
        return f"bench_round_{sizes}_{a.kv}_{a.index_share}_{a.mode}"


def compile_round(run: Run, params: Params) -> Kept:
    """`round(params, state, controls, active, number, room)`, which gives all but `params` anew.

    Beside it the seconds that it took, XLA's command buffers, and the scopes of its kernels.

    Args:
        run: of which scenario.
        params: arrays, or their shapes with the place that they will have.
    """
    batch, drafts = run.args.batch, run.args.draft

    def bench_round(params, state, controls, active, number, room):
        del room
        accepted = synthetic_accept(
            run.args.acceptance, 0, number, jnp.arange(batch, dtype=jnp.int32), drafts
        )
        state, controls, active, burst = speculative_round(
            params, state, controls, active, accepted, **run.asked
        )
        *carry, words = to_host((state, controls, active, number + 1, burst))
        return tuple(carry), words

    bench_round.__name__ = run.name
    begun = time.time()
    compiled = (
        jax.jit(bench_round, donate_argnums=(1, 2, 3, 4, 5), keep_unused=True)
        .lower(
            params.replace(config=run.config),
            abstract(run.config, run.shapes),
            run.controls(),
            jax.ShapeDtypeStruct((batch,), bool),
            jax.ShapeDtypeStruct((), jnp.int32),
            empty(batch, drafts, **run.asked),
        )
        .compile()
    )
    seconds = time.time() - begun
    print(f"{run.name}: compiled in {seconds:.1f} s", flush=True)
    facts = dict(
        compile_s=seconds,
        graph_segments=graph_segments(run.name),
        scopes=op_names(compiled.as_text() or ""),
    )
    return Kept(dict(round=compiled), facts)


def compile_routes(run: Run, params: Params) -> Kept:
    """`routes(params, state)`: the experts of each layer's tokens in one verification."""
    live, drafts = run.args.live, run.args.draft

    def routes(params: Params, state: DecodeState) -> dict[str, jax.Array]:
        taps = Capture(("layer*.router.ids",))
        fed = jnp.concatenate([state.token[:, None], state.drafts], axis=1)
        count = jnp.where(jnp.arange(state.slots) < live, drafts + 1, 0)
        step(params, state, fed, count, final=False, capture=taps)
        return taps.values

    lowered = jax.jit(routes).lower(
        params.replace(config=run.config), abstract(run.config, run.shapes)
    )
    return Kept(dict(routes=lowered.compile()))


def graph_segments(name: str) -> int | None:
    """Command buffers of a compiled round, from XLA's own plan; None if it wrote none."""
    plans = list(Path(HLO_DUMP).glob(f"*jit_{name}.*thunk_sequence_after_thunk_passes.txt"))
    if not plans:
        return None
    newest = max(plans, key=lambda plan: plan.stat().st_mtime)
    return len(re.findall(r"kCommandBuffer", newest.read_text()))
