"""What `generate` makes of the round: its rounds per second, and a soak.

    python -m bench.engine rate --context 65536        # the released model
    python -m bench.engine soak --layers 4 --rounds 20000 --seconds 300

`rate` drives the engine behind `generate` with one greedy request whose slot is set to a context of
zeros, and queues the same program with the same shapes behind itself, as `bench.decode` does; both
in groups, in turn, medians. `soak` repeats one schedule of requests that come and go, with
temperature and without, until there were so many rounds: each repetition must give the ids of the
first, leave the memory in use as it was after the second, and not take longer; after `--seconds`
the running repetition is the last. Random weights. What is printed says how far a run that was cut
had come; one JSON line goes to `bench/results/<device>/engine.jsonl`.
"""

import argparse
import math
import resource
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.record import append, stamp
from bench.released import build, released_config, tiny_config
from qwen4jax.decode.batching import Engine
from qwen4jax.decode.call import Call
from qwen4jax.decode.options import Sampling
from qwen4jax.decode.round import next_round
from qwen4jax.params import Params

GROUP = 20
# seconds between two words of a soak
SAY_EVERY = 10.0
DRAFTS = 3


def engine_of(params: Params, prompts: list, sampling: Any, slots: int) -> tuple[Engine, list]:
    """The engine that `generate` would run, and its requests."""
    call = Call(
        params, prompts, sampling, DRAFTS, None, None, None, False, slots, 256, None
    )  # fmt: skip
    return call.engine(), list(call.requests)


def rate(params: Params, context: int, groups: int) -> dict:
    """Rounds per second of the engine and of the bare program."""
    longest = min(2 * context, params.config.max_position_embeddings)
    sampling = Sampling(temperature=0, max_new_tokens=longest - 600, ignore_eos=True)
    engine, requests = engine_of(params, [list(range(1, 257))], sampling, 1)
    engine.admit(0, requests[0])
    began = time.perf_counter()
    while engine.rounds < 8:
        list(engine.advance())
    print(f"# first rounds, compiled: {time.perf_counter() - began:.1f} s", flush=True)
    # from arrays that are there, whose place the compiled programs know
    engine.state = engine.state.replace(length=0 * engine.state.length + context)
    through, bare = [], []
    for _ in range(groups):
        began, given = time.perf_counter(), 0
        for _ in range(GROUP):
            given = sum(len(delta.token_ids) for delta in engine.advance())
        jax.block_until_ready(engine.state)
        through.append((time.perf_counter() - began) / GROUP)
        if not given:
            raise SystemExit("the request ended before it was timed")
        began = time.perf_counter()
        # the same program, its tokens thrown away
        room = jax.tree.map(jnp.zeros_like, engine._room)
        carry = (engine.state, engine._controls, engine._active, room)
        sent = []
        for _ in range(GROUP):
            *carry, words = next_round(params, *carry, **engine._wanted)
            sent.append(words)
        for words in sent:
            np.asarray(words)
        bare.append((time.perf_counter() - began) / GROUP)
        print(f"# {through[-1] * 1e3:.3f} ms a round, bare {bare[-1] * 1e3:.3f}", flush=True)
        engine.state, engine._controls, engine._active, _ = carry
    one, other = statistics.median(through), statistics.median(bare)
    return {
        "context": context,
        "rounds": groups * GROUP,
        "rounds_per_s": round(1 / one, 2),
        "bare_rounds_per_s": round(1 / other, 2),
        "share": round(other / one, 4),
    }


def schedule(vocab: int, number: int) -> tuple[list, list]:
    """Prompts and sampling of `number` requests of many lengths."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, vocab, rng.integers(1, 200)).tolist() for _ in range(number)]
    sampling = [
        Sampling(
            temperature=float(i % 2),
            seed=i,
            max_new_tokens=int(rng.integers(1, 160)),
            ignore_eos=True,
        )
        for i in range(len(prompts))
    ]
    return prompts, sampling


def soak(params: Params, rounds: int, slots: int, limit: float = math.inf) -> dict:
    """Repeats the schedule; raises SystemExit where a repetition gives other ids.

    At least four times, then until there were `rounds`, or `limit` seconds are over.
    """
    prompts, sampling = schedule(params.config.vocab_size, 3 * slots)
    engine, requests = engine_of(params, prompts, sampling, slots)
    first, seconds, held, resident = None, [], [], []
    start = said = time.perf_counter()
    over = lambda: engine.rounds >= rounds or time.perf_counter() - start > limit  # noqa: E731
    while len(seconds) < 4 or not over():
        began, before = time.perf_counter(), engine.rounds
        for _ in engine.run(requests):
            pass
        jax.block_until_ready(engine.state)
        ids = [engine.finished.pop(number).ids for number in range(len(requests))]
        if first is None:
            first = ids
        if ids != first:
            raise SystemExit(f"repetition {len(seconds)} gave other ids")
        seconds.append((time.perf_counter() - began) / (engine.rounds - before))
        held.append((jax.devices()[0].memory_stats() or {}).get("bytes_in_use"))
        resident.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
        if len(seconds) <= 4 or time.perf_counter() - said > SAY_EVERY:
            said = time.perf_counter()
            many = f"repetition {len(seconds)}, {engine.rounds} rounds in {said - start:.1f} s"
            print(f"# {many}, the last {seconds[-1] * 1e3:.3f} ms each", flush=True)
    if held[-1] != held[1]:
        raise SystemExit(f"memory in use went from {held[1]} to {held[-1]} bytes")
    # the first repetition compiles
    tenth = max(len(seconds) // 10, 1)
    return {
        "rounds": engine.rounds,
        "requests": len(requests) * len(seconds),
        "slots": slots,
        "round_ms_first": round(statistics.median(seconds[1 : 1 + tenth]) * 1e3, 4),
        "round_ms_last": round(statistics.median(seconds[-tenth:]) * 1e3, 4),
        "bytes_device": held[-1],
        "bytes_host_grown": resident[-1] - resident[1],
    }


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    config = tiny_config() if args.config == "tiny" else released_config(layers=args.layers)
    began = time.perf_counter()
    params = build(config)
    print(f"# built in {time.perf_counter() - began:.1f} s", flush=True)
    if args.mode == "rate":
        found = rate(params, args.context, args.groups)
    else:
        found = soak(params, args.rounds, args.slots, args.seconds)
    line = {"run": args.mode, "config": f"{args.config} layers={config.num_hidden_layers}"}
    line |= found | stamp()
    append([line], "engine.jsonl", args.out)
    print(line, flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("mode", choices=("rate", "soak"))
    parser.add_argument("--config", choices=("flash_next", "tiny"), default="flash_next")
    parser.add_argument("--layers", type=int, default=48, help="of flash_next; a multiple of 4")
    parser.add_argument("--context", type=int, default=65536, help="tokens in the slot, of rate")
    parser.add_argument("--groups", type=int, default=5, help="of 20 rounds each, of rate")
    parser.add_argument("--rounds", type=int, default=20000, help="at least, of soak")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="after which no repetition begins, of soak"
    )
    parser.add_argument("--slots", type=int, default=8, help="of soak")
    parser.add_argument("--out", help="folder of engine.jsonl; by default bench/results/<device>")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
