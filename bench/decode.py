"""Times the speculative round at the released size, with random weights and a synthetic acceptance.

    python -m bench.decode --batch 1 --context 65536 --draft 3 --acceptance 3.23
    python -m bench.decode --run batch=1 --run draft=0 --run batch=32,kv=e4m3,rounds=40
    python -m bench.decode --table pinned --table-rows 7000000     # what the host's table costs

Method: weights are random in the stored forms, keys and states are random; each round accepts a
number of drafts drawn per slot and round so that the mean is `--acceptance` (the bonus token
counts), so its work is that of a real round. Rounds are queued one behind the other as a server
would; `round_ms` is the median over groups of rounds of wall time over rounds. Parts come from a
profile of single rounds: kernel durations by `jax.named_scope`, without a command buffer. A run
with `profile=0` has no parts, and the expected number of distinct experts in its floor.
A greedy round writes no logits; a sampled one has a temperature of 1, top-k 20 and top-p 0.95 in
every row, as the model card advises; `server` has the same rows in the one mode that the server
compiles: every option, and the log-probabilities of the chosen id and of the `TOP` best.
One JSON line per run goes to `bench/results/<device>/decode.jsonl`. Several runs share the weights
and compile side by side; `bytes_peak` is the process's peak up to then, so name the small ones
first.
"""

import argparse
import concurrent.futures
import copy
import dataclasses
import json
import math
import re
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench import HLO_DUMP
from bench.parts import expected_distinct, floor_parts
from bench.profile import device_kernels, time_by_kernel, time_by_part
from bench.record import append, stamp
from bench.released import (
    STAND_IN_ROWS,
    abstract,
    build,
    device_bytes,
    filled_state,
    released_config,
    require_memory,
    state_shapes,
    tiny_config,
)
from qwen4jax.ablation import Ablation
from qwen4jax.config import Config
from qwen4jax.decode.burst import Sent, empty, fields_of, to_host
from qwen4jax.decode.capacity import plan_memory
from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.round import speculative_round
from qwen4jax.decode.stopping import Controls, synthetic_accept
from qwen4jax.layers.capture import Capture
from qwen4jax.model import step
from qwen4jax.params import Params
from qwen4jax.serve.model import every_option


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.config == "flash_next":
        config = released_config(
            layers=args.layers,
            experts=args.experts,
            draft=args.draft_weights,
            draft_vocab=args.draft_vocab,
            table_rows=args.table_rows,
        )
    else:
        config = tiny_config(args.experts)
    runs = [Run(one, config) for one in scenarios(args)]
    for run in runs:
        print(run.plan.describe(), flush=True)
        if device_bytes():
            require_memory(run.plan, device_bytes())
    started = time.time()
    params = build(config, table=args.table)
    print(f"built in {time.time() - started:.1f} s", flush=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        programs = list(pool.map(lambda run: compile_round(run, params), runs))
    for run, program in zip(runs, programs, strict=True):
        write(measure(run, program, params), args.out)


# alternatives that a server computes by default
TOP = 5
NAMES = dict(
    kv=("bf16", "e4m3"),
    index_share=("fresh", "share", "share_frozen"),
    mode=("greedy", "sampled", "server"),
)
VARIED = ("batch", "live", "context", "draft", "acceptance", *NAMES, "rounds", "profile")


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
    def name(self) -> str:
        """Unlike those of the other runs of a process; XLA's dump carries it."""
        a = self.args
        sizes = f"b{a.batch}_l{a.live}_c{a.context}_n{a.draft}"
        return f"bench_round_{sizes}_{a.kv}_{a.index_share}_{a.mode}"


def compile_round(run: Run, params: Params) -> tuple[Any, float]:
    """The compiled round, and the seconds it took."""
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
    active = jax.ShapeDtypeStruct((batch,), bool)
    compiled = (
        jax.jit(bench_round, donate_argnums=(1, 2, 3, 4, 5), keep_unused=True)
        .lower(
            params.replace(config=run.config),
            abstract(run.config, run.shapes),
            run.controls(),
            active,
            jax.ShapeDtypeStruct((), jnp.int32),
            empty(batch, drafts, **run.asked),
        )
        .compile()
    )
    seconds = time.time() - begun
    print(f"{run.name}: compiled in {seconds:.1f} s", flush=True)
    return compiled, seconds


def measure(run: Run, program: tuple[Any, float], params: Params) -> dict:
    """Runs and times rounds; everything a result line says but where it was measured."""
    args, config, (compiled, compile_s) = run.args, run.config, program
    batch, live, drafts = args.batch, args.live, args.draft
    params = params.replace(config=config)
    state = filled_state(config, run.shapes, args.context)
    choices = live * (drafts + 1) * config.num_experts_per_tok
    expected = expected_distinct(choices, config.num_experts)
    distinct = distinct_experts(params, state, drafts, live) if args.profile else None
    active = jnp.arange(batch) < live
    room = empty(batch, drafts, **run.asked)
    carry = (state, run.controls(), active, jnp.int32(0), room)
    del state
    call = lambda c: compiled(params, *c)  # noqa: E731
    # the first rounds build the graph
    carry, _ = queue_rounds(call, carry, 3)
    groups = []
    for _ in range(max(math.ceil(args.rounds / GROUP), 1)):
        carry, group = queue_rounds(call, carry, GROUP)
        groups.append(group)
    walls = [g.wall_s for g in groups]
    hosts = [s for g in groups for s in g.host_s]
    given = [n for g in groups for n in g.tokens]
    round_ms = statistics.median(walls) * 1e3
    parts, kernels, longest = {}, None, {}
    if args.profile:
        events = device_kernels(lambda c: call(c)[0], carry, rounds=3)
        parts, kernels = time_by_part(events, compiled.as_text() or "", rounds=3)
        longest = time_by_kernel(events, rounds=3)
    floor = floor_parts(
        config,
        batch=live,
        context=args.context,
        drafts=drafts,
        kv_bytes=1 if args.kv == "e4m3" else 2,
        distinct=statistics.mean(distinct) if distinct else expected,
    )
    floor_ms = sum(p.floor_ms for p in floor)
    tokens = statistics.mean(given) / live
    spent = lambda phase: round(sum(ms for (_, ph), ms in parts.items() if ph == phase), 3)  # noqa: E731
    phase = {f"{p}_ms": spent(p) if parts else None for p in ("verify", "draft", "commit")}
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "config": f"{args.config} layers={config.num_hidden_layers} experts={args.experts}"
        f" index_share={args.index_share} kv={args.kv}"
        + (f" draft_weights={args.draft_weights}" if args.draft_weights != "bf16" else "")
        + (f" draft_vocab={args.draft_vocab}" if args.draft_vocab else "")
        + (f" live={live}" if live != batch else "")
        + (f" table={args.table}" if args.table != "device" else "")
        + (f" table_rows={args.table_rows}" if args.table_rows != STAND_IN_ROWS else ""),
        "devices": 1,
        "batch": batch,
        "context": args.context,
        "draft": drafts,
        "mode": args.mode,
        "acceptance": args.acceptance,
        "tokens_per_round": round(tokens, 3),
        "round_ms": round(round_ms, 3),
        "round_ms_spread": [round(min(walls) * 1e3, 3), round(max(walls) * 1e3, 3)],
        "rounds": len(hosts),
        **phase,
        "host_ms": round(statistics.median(hosts) * 1e3, 3),
        "tokens_per_s_per_user": round(tokens / round_ms * 1e3, 1),
        "tokens_per_s": round(live * tokens / round_ms * 1e3, 1),
        "floor_ms": round(floor_ms, 3),
        "floor_fraction": round(floor_ms / round_ms, 3),
        "kernels": kernels,
        "graph_segments": graph_segments(run.name),
        "distinct_experts": distinct
        and [round(statistics.mean(distinct), 1), min(distinct), max(distinct)],
        "expected_distinct": round(expected, 1),
        "compile_s": round(compile_s, 1),
        "bytes_weights": run.plan.weights,
        "bytes_table": run.plan.table,
        "bytes_state": run.plan.state,
        "bytes_peak": stats.get("peak_bytes_in_use"),
        "parts_ms": {f"{name} ({ph})": round(ms, 4) for (name, ph), ms in sorted(parts.items())},
        "longest_kernels": longest,
        "floor_parts_ms": {f"{p.name} ({p.phase})": round(p.floor_ms, 4) for p in floor},
    }


@dataclasses.dataclass(frozen=True)
class Group:
    """Rounds queued one behind the other: seconds per round, of each dispatch, tokens of each."""

    wall_s: float
    host_s: list[float]
    tokens: list[float]


def queue_rounds(run, carry, rounds: int) -> tuple[tuple, Group]:
    """Dispatches rounds without waiting between them, then waits for the last."""
    begun, hosts, bursts = time.perf_counter(), [], []
    for _ in range(rounds):
        called = time.perf_counter()
        carry, words = run(carry)
        bursts.append(words)
        hosts.append(time.perf_counter() - called)
    fields = fields_of(carry[-1])
    given = [float(np.sum(Sent(words, fields).read()["count"])) for words in bursts]
    wall = (time.perf_counter() - begun) / rounds
    return carry, Group(wall, hosts, given)


# so few that the runtime, which holds 32 programs in flight, never makes the host wait
GROUP = 12


def distinct_experts(params, state, drafts: int, live: int) -> list[int]:
    """Distinct experts of each layer in one verification of the first `live` slots' tokens."""

    @jax.jit
    def routes(params, state):
        taps = Capture(("layer*.router.ids",))
        fed = jnp.concatenate([state.token[:, None], state.drafts], axis=1)
        count = jnp.where(jnp.arange(state.slots) < live, drafts + 1, 0)
        step(params, state, fed, count, final=False, capture=taps)
        return taps.values

    found = jax.device_get(routes(params, state))
    return [len(np.unique(ids[:live])) for ids in found.values()]


def graph_segments(name: str) -> int | None:
    """Command buffers of a compiled round, from XLA's own plan; None if it wrote none."""
    plans = sorted(Path(HLO_DUMP).glob(f"*jit_{name}.*thunk_sequence_after_thunk_passes.txt"))
    if not plans:
        return None
    return len(re.findall(r"kCommandBuffer", plans[-1].read_text()))


def write(record: dict, out: str | None) -> None:
    record |= stamp()
    append([record], "decode.jsonl", out)
    print(json.dumps(record), flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", choices=("flash_next", "tiny"), default="flash_next")
    parser.add_argument("--layers", type=int, default=48, help="of flash_next; a multiple of 4")
    parser.add_argument("--experts", choices=("nvfp4", "fp8", "bf16"), default="nvfp4")
    parser.add_argument(
        "--draft-weights", choices=("nvfp4", "fp8", "bf16"), default="bf16", help="of flash_next"
    )
    parser.add_argument("--draft-vocab", type=int, help="ids that are drafted, of flash_next")
    parser.add_argument("--table", choices=("device", "pinned"), default="device")
    parser.add_argument(
        "--table-rows",
        type=int,
        default=STAND_IN_ROWS,
        help="of each of 16 n-gram heads, 160 bytes each; of flash_next",
    )
    parser.add_argument("--kv", choices=NAMES["kv"], default="bf16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--live", type=int, help="of the batch's slots that run; by default all")
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--draft", type=int, default=3, help="drafts per round, 0 to 7")
    parser.add_argument("--acceptance", type=float, help="mean tokens per round, bonus included")
    parser.add_argument("--index-share", choices=NAMES["index_share"], default="share")
    parser.add_argument("--mode", choices=NAMES["mode"], default="greedy", help="of sampling")
    parser.add_argument("--rounds", type=int, default=200, help=f"at least, in groups of {GROUP}")
    parser.add_argument(
        "--profile",
        type=int,
        choices=(0, 1),
        default=1,
        help="0: no parts, and the floor is of the expected number of experts",
    )
    parser.add_argument("--out", help="folder of decode.jsonl; by default bench/results/<device>")
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help=f"one of several runs: what differs of {', '.join(VARIED)}",
    )
    args = parser.parse_args(argv)
    if args.layers < 4 or args.layers % 4:
        parser.error(f"--layers: {args.layers} is not a multiple of 4")
    released = ("draft_weights", "draft_vocab", "table_rows")
    if args.config == "tiny" and any(getattr(args, n) != parser.get_default(n) for n in released):
        parser.error("--draft-weights, --draft-vocab, --table-rows: are of flash_next")
    if args.draft_vocab is not None and args.draft_vocab < 1:
        parser.error(f"--draft-vocab: {args.draft_vocab} is not over 0")
    for given in args.run:
        for part in given.split(","):
            name, equals, value = part.partition("=")
            if name not in VARIED or not equals:
                parser.error(f"--run: {part!r} is not NAME=VALUE with one of {', '.join(VARIED)}")
            if value not in NAMES.get(name, (value,)):
                parser.error(f"--run: {part!r} is not one of {', '.join(NAMES[name])}")
    return args


def scenarios(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The arguments of each run."""
    runs = []
    for given in args.run or [""]:
        one = copy.copy(args)
        for name, value in (part.split("=") for part in given.split(",") if part):
            number = float if name == "acceptance" else int
            setattr(one, name, value if name in NAMES else number(value))
        if one.acceptance is None:
            one.acceptance = 3.23 if one.draft == 3 else 1 + 0.74 * one.draft
        one.live = one.batch if one.live is None else one.live
        if not 1 <= one.live <= one.batch:
            raise SystemExit(f"--live: {one.live} is not in 1..{one.batch}, the batch")
        runs.append(one)
    return runs


if __name__ == "__main__":
    main()
