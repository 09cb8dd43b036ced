"""Times the speculative round at the released size, with random weights and a synthetic acceptance.

    python -m bench.decode --batch 1 --context 65536 --draft 3 --acceptance 3.23

Method: weights are random in the stored forms, keys and states are random; each round accepts a
number of drafts drawn per slot and round so that the mean is `--acceptance` (the bonus token
counts), so its work is that of a real round. Rounds are queued one behind the other as a server
would; `round_ms` is the median over groups of rounds of wall time over rounds. Parts come from a
profile of single rounds: kernel durations by `jax.named_scope`, without a command buffer.
One JSON line per run goes to `bench/results/<device>/decode.jsonl`.
"""

import argparse
import dataclasses
import functools
import json
import os
import re
import statistics
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench import HLO_DUMP
from bench.parts import expected_distinct, floor_parts
from bench.profile import device_kernels, time_by_part
from bench.released import (
    abstract,
    build,
    device_bytes,
    filled_state,
    plan_memory,
    released_config,
    require_memory,
    state_shapes,
)
from qwen4jax.ablation import Ablation
from qwen4jax.config import Config, Quantization
from qwen4jax.decode.round import speculative_round
from qwen4jax.decode.sampling import Row, Sampling, make_controls
from qwen4jax.decode.stopping import synthetic_accept
from qwen4jax.layers.capture import Capture
from qwen4jax.model import step

RESULTS = Path(__file__).parent / "results"


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if args.config == "flash_next":
        config = released_config(layers=args.layers, experts=args.experts)
    else:
        config = Config.tiny(quantization=Quantization(experts=args.experts))
    config = config.replace(ablation=Ablation(index_share=args.index_share))
    kv = None if args.kv == "bf16" else "float8_e4m3fn"
    room = min(args.rounds + 64, 1024) * (args.draft + 1)
    shapes = state_shapes(
        config, batch=args.batch, context=args.context, drafts=args.draft, kv_dtype=kv, room=room
    )
    plan = plan_memory(config, abstract(config, shapes))
    print(plan.describe(), flush=True)
    if device_bytes():
        require_memory(plan, device_bytes())
    started = time.time()
    params = build(config)
    state = filled_state(config, shapes, args.context)
    jax.block_until_ready(state)
    print(f"built in {time.time() - started:.1f} s", flush=True)
    record = measure(args, config, params, state)
    record |= {
        "bytes_weights": plan.weights,
        "bytes_table": plan.table,
        "bytes_state": plan.state,
        "build_s": round(time.time() - started, 1),
    }
    write(record, args.out)


def measure(args, config, params, state) -> dict:
    """Runs and times rounds; everything a result line says but the memory plan."""
    batch, drafts = args.batch, args.draft
    greedy = Sampling(temperature=0, max_new_tokens=1 << 30, ignore_eos=True)
    controls = make_controls([Row(greedy, args.context)] * batch, batch, config.vocab_size)
    active = jnp.ones(batch, bool)
    distinct = distinct_experts(params, state, drafts)

    @functools.partial(jax.jit, donate_argnums=(1, 2, 3, 4))
    def bench_round(params, state, controls, active, number):
        accepted = synthetic_accept(
            args.acceptance, 0, number, jnp.arange(batch, dtype=jnp.int32), drafts
        )
        state, controls, active, burst = speculative_round(
            params, state, controls, active, accepted
        )
        return state, controls, active, number + 1, burst

    carry = (state, controls, active, jnp.int32(0))
    begun = time.time()
    compiled = bench_round.lower(params, *carry).compile()
    compile_s = time.time() - begun
    print(f"compiled in {compile_s:.1f} s", flush=True)
    run = lambda c: compiled(params, *c)  # noqa: E731
    # the first rounds build the graph
    carry, _ = queue_rounds(run, carry, 3)
    groups = []
    for _ in range(max(args.rounds // GROUP, 1)):
        carry, group = queue_rounds(run, carry, GROUP)
        groups.append(group)
    walls = [g.wall_s for g in groups]
    hosts = [s for g in groups for s in g.host_s]
    given = [n for g in groups for n in g.tokens]
    round_ms = statistics.median(walls) * 1e3
    parts, kernels = {}, None
    if not args.no_profile:
        events = device_kernels(lambda c: run(c)[:4], carry, rounds=3)
        parts, kernels = time_by_part(events, compiled.as_text() or "", rounds=3)
    floor = floor_parts(
        config,
        batch=batch,
        context=args.context,
        drafts=drafts,
        kv_bytes=1 if args.kv == "e4m3" else 2,
        distinct=statistics.mean(distinct),
    )
    floor_ms = sum(p.floor_ms for p in floor)
    tokens = statistics.mean(given)
    choices = batch * (drafts + 1) * config.num_experts_per_tok
    phase = {p: sum(ms for (_, ph), ms in parts.items() if ph == p) for p in PHASES}
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "config": f"{args.config} layers={config.num_hidden_layers} experts={args.experts}"
        f" index_share={args.index_share} kv={args.kv}",
        "devices": 1,
        "batch": batch,
        "context": args.context,
        "draft": drafts,
        "acceptance": args.acceptance,
        "tokens_per_round": round(tokens, 3),
        "round_ms": round(round_ms, 3),
        "round_ms_spread": [round(min(walls) * 1e3, 3), round(max(walls) * 1e3, 3)],
        "rounds": len(hosts),
        "verify_ms": round(phase["verify"], 3),
        "draft_ms": round(phase["draft"], 3),
        "commit_ms": round(phase["commit"], 3),
        "host_ms": round(statistics.median(hosts) * 1e3, 3),
        "tokens_per_s_per_user": round(tokens / round_ms * 1e3, 1),
        "tokens_per_s": round(batch * tokens / round_ms * 1e3, 1),
        "floor_ms": round(floor_ms, 3),
        "floor_fraction": round(floor_ms / round_ms, 3),
        "kernels": kernels,
        "graph_segments": graph_segments(),
        "distinct_experts": [round(statistics.mean(distinct), 1), min(distinct), max(distinct)],
        "expected_distinct": round(expected_distinct(choices, config.num_experts), 1),
        "compile_s": round(compile_s, 1),
        "bytes_peak": stats.get("peak_bytes_in_use"),
        "parts_ms": {f"{name} ({ph})": round(ms, 4) for (name, ph), ms in sorted(parts.items())},
        "floor_parts_ms": {f"{p.name} ({p.phase})": round(p.floor_ms, 4) for p in floor},
    }


@dataclasses.dataclass(frozen=True)
class Group:
    """Rounds queued one behind the other: seconds per round, of each dispatch, tokens given."""

    wall_s: float
    host_s: list[float]
    tokens: list[float]


def queue_rounds(run, carry, rounds: int) -> tuple[tuple, Group]:
    """Dispatches rounds without waiting between them, then waits for the last."""
    begun, hosts, counts = time.perf_counter(), [], []
    for _ in range(rounds):
        called = time.perf_counter()
        *carry, burst = run(carry)
        hosts.append(time.perf_counter() - called)
        counts.append(burst.count)
    jax.block_until_ready(counts)
    wall = (time.perf_counter() - begun) / rounds
    return tuple(carry), Group(wall, hosts, [float(np.mean(np.asarray(n))) for n in counts])


GROUP = 20
PHASES = ("verify", "commit", "draft")


def distinct_experts(params, state, drafts: int) -> list[int]:
    """Distinct experts of each layer in one verification of the state's tokens."""

    @jax.jit
    def routes(params, state):
        taps = Capture(("layer*.router.ids",))
        fed = jnp.concatenate([state.token[:, None], state.drafts], axis=1)
        count = jnp.full(state.slots, drafts + 1, jnp.int32)
        step(params, state, fed, count, final=False, capture=taps)
        return taps.values

    found = jax.device_get(routes(params, state))
    return [len(np.unique(ids)) for ids in found.values()]


def graph_segments() -> int | None:
    """Command buffers of the compiled round, from XLA's own plan; None if it wrote none."""
    plans = sorted(Path(HLO_DUMP).glob("*bench_round*thunk_sequence_after_thunk_passes.txt"))
    if not plans:
        return None
    return len(re.findall(r"kCommandBuffer", plans[-1].read_text()))


def write(record: dict, out: str | None) -> None:
    device = jax.devices()[0].device_kind
    commit = (
        os.environ.get("BENCH_COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    record |= {
        "device": device,
        "commit": commit,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    folder = Path(out) if out else RESULTS / device.replace(" ", "-").lower()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "decode.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record), flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", choices=("flash_next", "tiny"), default="flash_next")
    parser.add_argument("--layers", type=int, default=48, help="of flash_next; a multiple of 4")
    parser.add_argument("--experts", choices=("nvfp4", "fp8", "bf16"), default="nvfp4")
    parser.add_argument("--kv", choices=("bf16", "e4m3"), default="bf16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--draft", type=int, default=3, help="drafts per round, 0 to 7")
    parser.add_argument("--acceptance", type=float, help="mean tokens per round, bonus included")
    parser.add_argument(
        "--index-share", choices=("fresh", "share", "share_frozen"), default="share"
    )
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--out", help="folder of decode.jsonl; by default bench/results/<device>")
    args = parser.parse_args(argv)
    if args.layers < 4 or args.layers % 4:
        parser.error(f"--layers: {args.layers} is not a multiple of 4")
    if args.acceptance is None:
        args.acceptance = 3.23 if args.draft == 3 else 1 + 0.74 * args.draft
    return args


if __name__ == "__main__":
    main()
