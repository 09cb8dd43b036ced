"""Loads a server as its users would: calls arrive by chance, whether it keeps up or not.

    python -m qwen4jax.serve --model DIR --port 50051 &
    python -m bench.serve --target 127.0.0.1:50051 --concurrency 1,2,4,8,16,32 --plot

Method: first, at each concurrency C, C callers one call after the other (closed loop) tell how
many calls per second the server completes then. Then the measurement (open loop): `--requests`
calls arrive by a Poisson process at `--load` of that rate; at most C are in progress, and a call
that has to wait for its turn waits on its own clock, so that a server that falls behind shows it.
Prompts are random ids; lengths of prompts and outputs are uniform within `--spread` of their means;
outputs ignore the end-of-sequence id, so that each has the length that was drawn.

Seconds are the client's. Time to first token counts from the arrival. Tokens of a chunk share the
time since the chunk before (a speculative round gives several at once); the first token of an
answer is no interval. Interactivity is the reciprocal of the P90 of these intervals, in tokens/s
per user. One JSON line per concurrency goes to `--out`.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
import os
import random
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qwen4jax.serve.client import AsyncClient, Chunk, ServerError

RESULTS = Path(__file__).parent / "results"
NAME = "serve.jsonl"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call to make.

    Attributes:
        arrival: seconds after the beginning.
        prompt: ids.
        output: tokens to generate.
        seed: of its sampling.
    """

    arrival: float
    prompt: list[int]
    output: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a client saw of a call; seconds.

    Attributes:
        first: from arrival to the first token.
        last: from arrival to the end.
        intervals: between tokens after the first.
        tokens_per_round: as the server says.
        error: status, where it failed.
    """

    first: float = 0.0
    last: float = 0.0
    intervals: Sequence[float] = ()
    tokens_per_round: float | None = None
    error: str | None = None


def draw_calls(
    count: int,
    rate: float | None,
    vocabulary: int,
    args: argparse.Namespace,
    chance: random.Random,
) -> list[Call]:
    """Calls with arrivals at `rate` per second; all at once without a rate."""

    def length(mean: int) -> int:
        return max(1, round(mean * chance.uniform(1 - args.spread, 1 + args.spread)))

    calls, now = [], 0.0
    for _ in range(count):
        now += chance.expovariate(rate) if rate else 0.0
        prompt = [chance.randrange(vocabulary) for _ in range(length(args.prompt_tokens))]
        calls.append(Call(now, prompt, length(args.output_tokens), chance.getrandbits(63)))
    return calls


async def run_calls(
    client: AsyncClient, calls: Sequence[Call], concurrency: int, args: argparse.Namespace
) -> tuple[list[Seen], float]:
    """Makes the calls as they arrive, at most `concurrency` at a time; and the seconds of all."""
    turns, began = asyncio.Semaphore(concurrency), time.perf_counter()

    async def one(call: Call) -> Seen:
        arrival = began + call.arrival
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        async with turns:
            return await _see(client, call, arrival, args)

    seen = await asyncio.gather(*map(one, calls))
    return list(seen), time.perf_counter() - began


async def _see(client: AsyncClient, call: Call, arrival: float, args: argparse.Namespace) -> Seen:
    moments: list[tuple[float, Chunk]] = []
    try:
        async for chunk in client.stream(
            call.prompt,
            max_new_tokens=call.output,
            ignore_eos=True,
            temperature=args.temperature,
            seed=call.seed,
            timeout=args.timeout,
        ):
            moments.append((time.perf_counter() - arrival, chunk))
    except ServerError as error:
        return Seen(error=error.code)
    intervals: list[float] = []
    for (before, _), (now, chunk) in itertools.pairwise(moments):
        count = len(chunk.token_ids)
        intervals += [(now - before) / max(count, 1)] * count
    finish = moments[-1][1].finish
    rate = None if finish is None else finish.tokens_per_round
    return Seen(moments[0][0], moments[-1][0], intervals, rate)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90 and p99; of few values the nearest."""
    if len(values) < 2:
        return dict.fromkeys(("p50", "p90", "p99"), values[0] if values else 0.0)
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return {name: cuts[place - 1] for name, place in (("p50", 50), ("p90", 90), ("p99", 99))}


def figures(calls: Sequence[Call], seen: Sequence[Seen], seconds: float) -> dict[str, Any]:
    """What a line says of the calls."""
    done = [one for one in seen if one.error is None]
    pairs = zip(calls, seen, strict=True)
    tokens = sum(call.output for call, one in pairs if one.error is None)
    intervals = [value for one in done for value in one.intervals]
    first, last = ([getattr(one, n) for one in done] for n in ("first", "last"))
    between = percentiles(intervals)
    rates = [one.tokens_per_round for one in done if one.tokens_per_round is not None]
    line: dict[str, Any] = {"completed": len(done), "failed": len(seen) - len(done)}
    for name, values in (("ttft", percentiles(first)), ("inter_token", between)):
        line |= {f"{name}_{p}_ms": round(value * 1e3, 3) for p, value in values.items()}
    line |= {f"latency_{p}_s": round(value, 4) for p, value in percentiles(last).items()}
    return line | {
        "requests_per_s": round(len(done) / seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 1),
        "interactivity": round(1 / between["p90"], 1) if between["p90"] else None,
        "tokens_per_round": round(statistics.mean(rates), 3) if rates else None,
        "seconds": round(seconds, 2),
    }


async def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A line for each concurrency."""
    async with AsyncClient(args.target, token=args.token) as client:
        model = await client.model()
        lines = []
        for concurrency in args.concurrency:
            chance = random.Random(args.seed)
            count = max(2 * concurrency, 4)
            probe = draw_calls(count, None, model.vocab_size, args, chance)
            seen, seconds = await run_calls(client, probe, concurrency, args)
            completed = sum(one.error is None for one in seen)
            if not completed:
                raise SystemExit(f"bench.serve: no call was answered: {seen[0].error}")
            rate = args.load * completed / seconds
            calls = draw_calls(args.requests, rate, model.vocab_size, args, chance)
            seen, seconds = await run_calls(client, calls, concurrency, args)
            line = {
                "model": model.name,
                "device": model.device,
                "jax": model.jax_version,
                "dtype": model.dtype,
                "experts": model.experts_form,
                "drafts": model.drafts,
                "concurrency": concurrency,
                "load": args.load,
                "offered_per_s": round(rate, 3),
                "requests": args.requests,
                "prompt_tokens": args.prompt_tokens,
                "output_tokens": args.output_tokens,
                "spread": args.spread,
                "temperature": args.temperature,
                **figures(calls, seen, seconds),
                "commit": _commit(),
                "date": time.strftime("%Y-%m-%d"),
            }
            print(json.dumps(line), flush=True)
            lines.append(line)
    return lines


def plot(lines: Sequence[dict[str, Any]], file: Path) -> None:
    """Throughput by interactivity, and times by concurrency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    left.plot(
        [line["interactivity"] for line in lines],
        [line["output_tokens_per_s"] for line in lines],
        marker="o",
    )
    for line in lines:
        where = (line["interactivity"], line["output_tokens_per_s"])
        left.annotate(f" {line['concurrency']}", where)
    left.set_xlabel("interactivity: 1 / P90 of the inter-token time, tokens/s per user")
    left.set_ylabel("output tokens/s of all users")
    left.set_title("by number of users")
    users = [line["concurrency"] for line in lines]
    for name, label in (("ttft", "to the first token"), ("inter_token", "between tokens")):
        for percentile, style in (("p50", "-"), ("p90", "--"), ("p99", ":")):
            values = [line[f"{name}_{percentile}_ms"] for line in lines]
            right.plot(users, values, style, marker=".", label=f"{label}, {percentile}")
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set_xlabel("users")
    right.set_ylabel("ms")
    right.legend(fontsize="small")
    figure.suptitle(f"{lines[0]['model']} on {lines[0]['device']}")
    figure.savefig(file, dpi=120)
    plt.close(figure)


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return os.environ.get("BENCH_COMMIT") or done.stdout.strip()


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Load a server; one JSON line per concurrency.")
    add = parser.add_argument
    add("--target", default="127.0.0.1:50051")
    add("--token", help="bearer token of the server")
    add("--concurrency", type=_counts, default=_counts("1,2,4,8,16,32"), metavar="1,2,4")
    add("--requests", type=int, default=200, help="of each concurrency (200)")
    add("--load", type=float, default=0.8, help="arrivals by what the server completes (0.8)")
    add("--prompt-tokens", type=int, default=512, help="mean (512)")
    add("--output-tokens", type=int, default=128, help="mean (128)")
    add("--spread", type=float, default=0.5, help="of both, by their means (0.5)")
    add("--temperature", type=float, default=0.0)
    add("--timeout", type=float, default=600.0, help="deadline of a call, seconds (600)")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder (bench/results/DEVICE; of a CPU none)")
    add("--plot", action="store_true", help="write serve.png beside the lines")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    lines = asyncio.run(measure(args))
    device = lines[0]["device"].replace(" ", "-").lower()
    if args.out is None and device == "cpu":
        return
    folder = args.out or RESULTS / device
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / NAME).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    if args.plot:
        plot(lines, folder / "serve.png")


if __name__ == "__main__":
    main()
