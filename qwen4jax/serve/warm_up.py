"""Every program of the server, compiled before the first request."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from qwen4jax.decode.batching import Engine
from qwen4jax.decode.compiling import clock
from qwen4jax.decode.options import Sampling
from qwen4jax.decode.requests import Request
from qwen4jax.decode.score import Scoring
from qwen4jax.serve.model import NAMED_IDS, Served


def new_engine(served: Served) -> Engine:
    """An engine with all slots free, in the one mode that serves every request."""
    return Engine(
        served.params,
        served.sizes,
        served.mode(),
        tokenizer=served.tokenizer,
        eos_ids=served.eos_ids,
        logprobs=True,
        top=served.top_logprobs,
    )


def new_scoring(served: Served, ids: Sequence[int], named: Sequence[int]) -> Scoring:
    """A text on its way, in the one shape that every text has."""
    return Scoring(
        served.params,
        [np.asarray(ids, np.int32)],
        batch=1,
        chunk=served.sizes.chunk,
        token_ids=[*named, *[0] * (NAMED_IDS - len(named))],
        top=served.top_logprobs,
        room=served.max_context,
    )


def warm_up(engine: Engine, served: Served, say: Callable[[str], None]) -> None:
    """Runs every program once, through the calls that requests go through.

    Args:
        engine: with all slots free; they are free again afterwards.
        served: the model.
        say: told before each program what is compiled, and at the end what it took.
    """
    began, programs = clock.seconds, list(_programs(engine, served))
    for number, (name, run) in enumerate(programs, start=1):
        say(f"compiling {name} ({number} of {len(programs)})")
        run()
    say(f"compiled in {clock.seconds - began:.1f} s")


def _programs(engine: Engine, served: Served) -> Iterator[tuple[str, Callable[[], None]]]:
    sizes = engine.sizes

    def generate(length: int, new: int) -> None:
        options = Sampling(max_new_tokens=new, ignore_eos=True)
        engine.admit(-1, Request(0, 0, (0,) * length, options))
        while engine.running:
            for _ in engine.advance():
                pass
        # its last round is in flight
        for _ in engine.advance():
            pass
        engine.finished.clear()

    def score() -> None:
        scoring = new_scoring(served, (0,), ())
        while scoring.advance():
            pass
        scoring.scores()

    first = True
    for rows, tokens in (*sizes.ends, (sizes.rows, sizes.chunk)):
        name = f"prefill of {min(rows, sizes.slots)} x {tokens} tokens"
        # the first goes on to rounds; a prompt leaves room for a token
        new = 1 + 2 * first * (sizes.drafts + 1)
        length = min(tokens, served.max_context - 1)
        yield (
            f"{name} and a round of {sizes.slots} slots" if first else name,
            lambda length=length, new=new: generate(length, new),
        )
        first = False
    yield f"score of {sizes.chunk} tokens", score
