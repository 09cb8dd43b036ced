"""Many clients at once, some of which go, are late or are wrong; then the books are balanced.

    python -m tests.serve.soak --requests 2000 --clients 64

Every completed answer equals that of the same request alone; no slot and no memory is lost; what
clients and server have counted agrees; speculation goes on being accepted (SPC-22).
"""

import argparse
import asyncio
import collections
import dataclasses
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from qwen4jax.serve.client import AsyncClient, ServerError
from qwen4jax.serve.options import EMBEDDED
from tests.serve.running import RunningServer

CANCELLED, LATE, WRONG = 0.2, 0.1, 0.05
# bytes that allocators may keep of a load without being a leak: a hundred calls took -26 to 38 MB,
# once 76, and 102 MB where each of them kept 1 MB. A leak does so in every load.
SLACK, LOADS = 48 << 20, 3
FLAGS = "--metrics-port 0 --queue 128".split()


@dataclasses.dataclass(frozen=True)
class Request:
    """One of a few prompts with options, which many calls repeat."""

    prompt: tuple[int, ...]
    options: dict[str, Any]


@dataclasses.dataclass
class Books:
    """What clients saw.

    Attributes:
        codes: ends of calls, by status.
        answers: number of the request, its ids, its tokens per round, in the order they came.
    """

    codes: collections.Counter[str]
    answers: list[tuple[int, tuple[int, ...], float | None]]


def make_requests(
    count: int, vocabulary: int, mean_output: int, chance: random.Random
) -> list[Request]:
    """Prompts and outputs of mixed lengths, greedy and sampled."""
    requests = []
    for number in range(count):
        length = min(int(chance.expovariate(1 / 60)) + 1, 700)
        options: dict[str, Any] = {
            "max_new_tokens": min(int(chance.expovariate(1 / mean_output)) + 1, 8 * mean_output),
            "seed": number,
            "temperature": chance.choice((0.0, 0.7, 1.0)),
            "logprobs": number % 3 == 0,
            "top_logprobs": 2 * (number % 4 == 0),
        }
        if number % 5 == 0:
            options |= {"top_p": 0.9, "presence_penalty": 0.2, "logit_bias": {3: 1.0}}
        prompt = tuple(chance.randrange(vocabulary) for _ in range(length))
        requests.append(Request(prompt, options))
    return requests


async def _call(
    client: AsyncClient, number: int, request: Request, kind: float, chance: random.Random
) -> tuple[str, tuple[int, tuple[int, ...], float | None] | None]:
    """One call of a kind: it is dropped, late, wrong, or read to its end."""
    prompt, options = list(request.prompt), dict(request.options)
    if kind < WRONG:
        prompt[-1] = -1
    elif kind < WRONG + LATE:
        options["timeout"] = chance.uniform(0.001, 0.3)
    dropped = WRONG + LATE <= kind < WRONG + LATE + CANCELLED
    patience = chance.expovariate(1 / 0.15)
    call = asyncio.create_task(client.generate(prompt, **options))
    try:
        answer = await (asyncio.wait_for(call, patience) if dropped else call)
    except TimeoutError:
        return "dropped", None
    except ServerError as error:
        return error.code, None
    return "OK", (number, tuple(answer.token_ids), answer.finish.tokens_per_round)


async def _load(target: str, requests: list[Request], count: int, clients: int, seed: int) -> Books:
    books, chance = Books(collections.Counter(), []), random.Random(seed)
    left = iter(range(count))

    async def one_client() -> None:
        async with AsyncClient(target) as client:
            for _ in left:
                number = chance.randrange(len(requests))
                kind = chance.random()
                code, answer = await _call(client, number, requests[number], kind, chance)
                books.codes[code] += 1
                if answer is not None:
                    books.answers.append(answer)

    await asyncio.gather(*(one_client() for _ in range(clients)))
    return books


async def _alone(target: str, requests: list[Request], numbers: set[int]) -> dict[int, Any]:
    """Each request again, while nothing else runs."""
    found = {}
    async with AsyncClient(target) as client:
        for number in sorted(numbers):
            request = requests[number]
            answer = await client.generate(list(request.prompt), **request.options)
            found[number] = tuple(answer.token_ids)
    return found


def _server_codes(server: RunningServer) -> collections.Counter[str]:
    prefix = "qwen4jax_requests_total{code="
    found: collections.Counter[str] = collections.Counter()
    for name, value in server.metrics().items():
        if name.startswith(prefix) and 'method="Generate"' in name:
            found[name.split('"')[1]] += int(value)
    return found


def soak(
    server: RunningServer, *, count: int, clients: int, distinct: int, mean_output: int = 25
) -> dict[str, Any]:
    """Loads a server that is idle, and checks what is left; returns figures.

    Args:
        server: with room in its queue for all clients.
        count: calls.
        clients: at once.
        distinct: requests that the calls repeat.
        mean_output: tokens.
    """
    with server.client() as client:
        vocabulary = client.model().vocab_size
    requests = make_requests(distinct, vocabulary, mean_output, random.Random(distinct))
    before = _server_codes(server)
    # what only the first calls allocate
    first = asyncio.run(_load(server.target, requests, max(count // 5, clients), clients, seed=0))
    programs, began = server.idle().compiled_programs, time.monotonic()
    books, grown = Books(collections.Counter(), []), []
    while not grown or (grown[-1] >= SLACK and len(grown) < LOADS):
        memory, seed = server.own_bytes(), len(grown) + 1
        load = asyncio.run(_load(server.target, requests, count, clients, seed))
        assert load.codes.total() == count
        server.idle()
        grown.append(server.own_bytes() - memory)
        books.codes.update(load.codes)
        books.answers.extend(load.answers)
    seconds = time.monotonic() - began
    assert grown[-1] < SLACK, f"memory has grown in each of {len(grown)} loads: {grown} bytes"
    status, codes = server.idle(), _server_codes(server) - before
    assert status.compiled_programs == programs
    assert (status.failed_rounds, status.non_finite_samples) == (0, 0)
    # of both: the server may count a call that was dropped in the first after the second began
    _balance(books.codes + first.codes, codes)

    alone = asyncio.run(_alone(server.target, requests, {one[0] for one in books.answers}))
    wrong = [number for number, ids, _ in books.answers if ids != alone[number]]
    assert not wrong, f"{len(wrong)} answers are not those of the request alone: {wrong[:9]}"
    window = 100
    rates = [rate for _, _, rate in books.answers if rate is not None]
    for first in range(0, max(len(rates) - window, 0) + 1, window):
        accepted = sum(rates[first : first + window]) / len(rates[first : first + window]) - 1
        assert accepted > 0, f"no draft was accepted in answers {first} to {first + window}"
    server.idle()
    return {
        "calls": books.codes.total(),
        "codes": dict(books.codes),
        "server": dict(codes),
        "seconds": round(seconds, 1),
        "memory_growth": grown[-1],
        "tokens_per_round": round(sum(rates) / len(rates), 3),
    }


def _balance(seen: collections.Counter[str], codes: collections.Counter[str]) -> None:
    """Every call has one end on either side, and they agree."""
    assert set(seen) <= {"OK", "dropped", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"}, seen
    assert set(codes) <= {"OK", "CANCELLED", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED"}, codes
    assert codes["INVALID_ARGUMENT"] == seen["INVALID_ARGUMENT"]
    # a call that was dropped, or whose time was up, may have been complete at the server, and it
    # may never have arrived there
    unsure = seen["dropped"] + seen["DEADLINE_EXCEEDED"]
    assert seen["OK"] <= codes["OK"] <= seen["OK"] + unsure
    assert seen.total() - unsure <= codes.total() <= seen.total()


def main() -> None:
    parser = argparse.ArgumentParser(description="Soak a server of the embedded checkpoint.")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--distinct", type=int, default=200)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        RunningServer(EMBEDDED, Path(folder) / "programs", *FLAGS) as server,
    ):
        server.ready()
        figures = soak(server, count=args.requests, clients=args.clients, distinct=args.distinct)
        server.signal()
        assert server.exit_code() == 0
    for name, value in figures.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
