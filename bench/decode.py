"""Times the speculative round at the released size, with random weights and a synthetic acceptance.

    python -m bench.decode --batch 1 --context 65536 --draft 3 --acceptance 3.23
    python -m bench.decode --run batch=1 --run draft=0 --run batch=32,kv=e4m3,rounds=40
    python -m bench.decode --run draft=3 --compile-for "NVIDIA H200" --programs DIR # bench/ahead.py
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

import concurrent.futures
import dataclasses
import json
import math
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench import ahead
from bench.ahead import Kept, Store
from bench.parts import expected_distinct, floor_parts
from bench.profile import device_kernels, time_by_kernel, time_by_part
from bench.record import append, stamp
from bench.released import (
    STAND_IN_ROWS,
    build,
    describe,
    device_bytes,
    filled_state,
    released_config,
    require_memory,
    tiny_config,
)
from bench.round_program import Run, compile_round, compile_routes
from bench.scenarios import GROUP, parse, scenarios
from qwen4jax.decode.burst import Sent, empty, fields_of
from qwen4jax.params import Params


def main(argv: list[str] | None = None) -> None:
    args = parse(argv, (__doc__ or "").split("\n\n")[0])
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
    store = ahead.store(args)
    runs = [Run(one, config) for one in scenarios(args)]
    for run in runs:
        print(run.plan.describe(), flush=True)
        if device_bytes() and not args.compile_for:
            require_memory(run.plan, device_bytes())
    started = time.time()
    if args.compile_for:
        params = store.place(describe(config, args.compile_for))
    else:
        params = build(config, table=args.table)
        print(f"built in {time.time() - started:.1f} s", flush=True)
    with concurrent.futures.ThreadPoolExecutor(ahead.jobs(args, 8)) as pool:
        rounds = pool.map(lambda run: round_of(run, store, params), runs)
        routes = list(pool.map(lambda run: routes_of(run, store, params), runs))
    if args.compile_for:
        list(rounds)
        return
    for run, kept, routed in zip(runs, rounds, routes, strict=True):
        write(measure(run, kept, routed, params), args.out)


def round_of(run: Run, store: Store, params: Params) -> Kept:
    """The program that is timed."""
    return store.get(("round", *run.key), lambda: compile_round(run, params))


def routes_of(run: Run, store: Store, params: Params) -> Kept | None:
    """The one that tells the experts of a run that is profiled."""
    if not run.args.profile:
        return None
    return store.get(("routes", *run.key), lambda: compile_routes(run, params))


def measure(run: Run, kept: Kept, routes: Kept | None, params: Params) -> dict:
    """Runs and times rounds; everything a result line says but where it was measured.

    Args:
        run: of which scenario.
        kept: of `compile_round`.
        routes: of `compile_routes`; None counts no experts.
        params: of the model.
    """
    args, config, facts = run.args, run.config, kept.facts
    batch, live, drafts = args.batch, args.live, args.draft
    params = params.replace(config=config)
    state = filled_state(config, run.shapes, args.context)
    choices = live * (drafts + 1) * config.num_experts_per_tok
    expected = expected_distinct(choices, config.num_experts)
    distinct = None
    if routes is not None:
        distinct = distinct_experts(routes.programs["routes"](params, state), live)
    active = jnp.arange(batch) < live
    room = empty(batch, drafts, **run.asked)
    carry = (state, run.controls(), active, jnp.int32(0), room)
    del state
    call = lambda c: kept.programs["round"](params, *c)  # noqa: E731
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
        parts, kernels = time_by_part(events, facts["scopes"], rounds=3)
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
        "graph_segments": facts["graph_segments"],
        "distinct_experts": distinct
        and [round(statistics.mean(distinct), 1), min(distinct), max(distinct)],
        "expected_distinct": round(expected, 1),
        "compiled": kept.compiled,
        "compile_s": round(facts["compile_s"], 1),
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


def distinct_experts(ids: dict[str, jax.Array], live: int) -> list[int]:
    """Distinct experts of each layer in one verification of the first `live` slots' tokens."""
    return [len(np.unique(of[:live])) for of in jax.device_get(ids).values()]


def write(record: dict, out: str | None) -> None:
    record |= stamp()
    append([record], "decode.jsonl", out)
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
