"""Prefill and speculative rounds by kernels, and what the references make of the same tokens.

No id that a kernel chose is compared with one that a reference chose: after a near tie the two
would go different ways. The kernels' ids are fed to the references, whose logits say how far each
is from the best; and what the rounds leave in every state is what a prefill of these ids leaves.
"""

import collections
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from qwen4jax import quant
from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.prefill import feed, logits_of, prefill
from qwen4jax.decode.round import begin_slots, run_round
from qwen4jax.model import draft_step, head
from qwen4jax.pallas import registry
from qwen4jax.params import Params
from qwen4jax.state import DecodeState, init_state
from tests.kernel_choices import BOTH, PREFILL, ROUND
from tests.kernel_widths import EOS, VOCAB
from tests.oracle import Oracle
from tests.tiny import live

DRAFTS = 3
# of both paths: a page has more tokens than `triton_together` asks for, and fewer than a sequence
PAGE = 8
# operations of which each has a kernel on this path
WITH_KERNEL = (BOTH | ROUND | PREFILL) - {"gated_residual.update"}
# largest difference as a share of the largest value, of the references in bfloat16 and of those in
# float64: on a CPU 0.013 was the largest found
TOLERANCE = 0.03


class Decoded(NamedTuple):
    """What kernels gave.

    Attributes:
        prompts: ids of each slot.
        ids: greedy ids after them, the last one pending.
        accepted: drafts accepted in each round and slot.
        logits: after the prompts.
        state: at the end.
    """

    prompts: list[list[int]]
    ids: list[list[int]]
    accepted: list[list[int]]
    logits: np.ndarray
    state: DecodeState


class Followed(NamedTuple):
    """What references give for the same ids.

    Attributes:
        logits: [slot, place, id].
        drafts: likewise, of the drafts that the kernels proposed last.
        state: with all ids but the pending one live.
    """

    logits: np.ndarray
    drafts: np.ndarray
    state: DecodeState


def random_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Ids without the end of a document."""
    rng = np.random.default_rng(seed)
    return [rng.integers(2, VOCAB, n).tolist() for n in lengths]


def decode(params: Params, prompts: list[list[int]], *, rounds: int, chunk: int) -> Decoded:
    """Prefill, the first token and its drafts, and rounds of all slots."""
    slots = len(prompts)
    state: Any = _new_state(params, prompts, 1 + rounds * (DRAFTS + 1))
    state, hidden = prefill(params, state, prompts, range(slots), chunk=chunk)
    logits = np.asarray(logits_of(params, hidden))
    greedy = Sampling(temperature=0, max_new_tokens=64, ignore_eos=True)
    controls = make_controls([Row(greedy, len(p)) for p in prompts], slots, VOCAB)
    state, controls, burst = begin_slots(params, state, controls, hidden, jnp.arange(slots))
    ids, accepted, active = [[] for _ in prompts], [], jnp.ones(slots, bool)
    _take(burst, ids)
    for _ in range(rounds):
        state, controls, active, burst = run_round(params, state, controls, active)
        _take(burst, ids)
        accepted.append(np.asarray(burst.accepted).tolist())
    assert np.asarray(active).all()
    return Decoded(prompts, ids, accepted, logits, jax.block_until_ready(state))


def _take(burst: Any, ids: list[list[int]]) -> None:
    for row, tokens, count in zip(
        ids, np.asarray(burst.tokens), np.asarray(burst.count), strict=True
    ):
        row += tokens[:count].tolist()


def _new_state(params: Params, prompts: Sequence[Sequence[int]], more: int) -> DecodeState:
    longest = max(map(len, prompts)) + more + DRAFTS
    sizes = dict(slots=len(prompts), max_length=longest, page_size=PAGE, drafts=DRAFTS)
    return init_state(params.config, **sizes)


def follow(params: Params, decoded: Decoded) -> Followed:
    """The references over all that was decoded, in one step."""
    rows = [p + ids for p, ids in zip(decoded.prompts, decoded.ids, strict=True)]
    width = max(map(len, rows)) - 1
    tokens = np.full((len(rows), width), EOS, np.int32)
    count = np.asarray([len(row) - 1 for row in rows], np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row) - 1] = row[:-1]
    pending = np.asarray([row[-1] for row in rows], np.int32)
    drafts = jnp.asarray(decoded.state.drafts)
    with registry.using("reference"):
        state = _new_state(params, rows, DRAFTS)
        given = _follow(params, state, tokens, count, pending, drafts)
    return Followed(*map(np.asarray, given[:2]), given[2])


@functools.partial(jax.jit, donate_argnames=("state",))
def _follow(
    params: Params, state: Any, tokens: Any, count: Any, pending: Any, drafts: Any
) -> tuple[Any, Any, Any]:
    state, hidden = feed(params, state, tokens, count)
    fed = jnp.concatenate([pending[:, None], drafts[:, :-1]], axis=1)
    streams = state.residual.reshape(len(tokens), 1, params.config.hc_count, -1)
    chain, found = state, []
    for number in range(DRAFTS):
        one, start = jnp.ones_like(count), count - 1 + number
        chain, rows = draft_step(params, chain, fed[:, number : number + 1], streams, start, one)
        streams = rows.residual
        found.append(head(params, rows.hidden)[:, 0])
    return head(params, hidden), jnp.stack(found, axis=1), state


def assert_agree(decoded: Decoded, followed: Followed, *, share: float = 1.0) -> None:
    """Logits, ids as far as margins allow, drafts likewise, and every state.

    Args:
        decoded: by kernels.
        followed: by references.
        share: of the values that the last layer's choice of blocks has touched, how many are held
            to the tolerance: where scores are nearly equal, both choices are right.
    """
    scale = float(np.abs(followed.logits).max())
    touched = collections.defaultdict(list)
    for slot, (prompt, ids) in enumerate(zip(decoded.prompts, decoded.ids, strict=True)):
        logits, last = followed.logits[slot], len(prompt) - 1
        touched["hidden"].append(_off(decoded.logits[slot], logits[last]))
        touched["ids"] += [_gap(logits[last + i], one, scale) for i, one in enumerate(ids)]
        proposed = zip(followed.drafts[slot], np.asarray(decoded.state.drafts[slot]), strict=True)
        touched["drafts"] += [_gap(row, one, scale) for row, one in proposed]
        got, want = live(decoded.state, slot), live(followed.state, slot)
        for name, value in want.items():
            # a ring keeps rejected rows beyond what is live; the references propose nothing
            if name in ("token", "drafts") or name.endswith("ring"):
                continue
            if np.issubdtype(value.dtype, np.integer):
                np.testing.assert_array_equal(got[name], value, err_msg=f"slot {slot}: {name}")
            elif name == "residual":
                touched["hidden"].append(_off(got[name], value))
            elif name.startswith("mtp"):
                rows = zip(got[name], value, strict=True)
                touched[name] += [_off(a, b, like=value) for a, b in rows]
            else:
                off = _off(got[name], value)
                assert off <= TOLERANCE, f"slot {slot}: {name} is off by {off}"
    _assert_most(touched, share)


def assert_exact(params: Params, decoded: Decoded, *, share: float = 1.0) -> None:
    """Likewise of references in float64 that share no code with the layers."""
    touched = collections.defaultdict(list)
    stored = lambda w: isinstance(w, quant.Quantized)  # noqa: E731
    plain = jax.tree.map(quant.dequantize, params, is_leaf=stored)
    for slot, (prompt, ids) in enumerate(zip(decoded.prompts, decoded.ids, strict=True)):
        oracle = Oracle(plain)
        logits, last = oracle.logits([*prompt, *ids]), len(prompt) - 1
        # of the last token that is live: the one after it is pending
        residual = oracle.residual[-1][-2].reshape(-1)
        draft = oracle.mtp_logits([*prompt, *ids])[-1]
        scale = float(np.abs(logits).max())
        touched["hidden"].append(_off(decoded.logits[slot], logits[last]))
        touched["hidden"].append(_off(decoded.state.residual[slot], residual))
        touched["ids"] += [_gap(logits[last + i], one, scale) for i, one in enumerate(ids)]
        touched["drafts"].append(_gap(draft, int(decoded.state.drafts[slot, 0]), scale))
    _assert_most(touched, share)


def _assert_most(found: Mapping[str, list[float]], share: float) -> None:
    for name, off in found.items():
        # a NaN is the largest
        most = np.quantile(np.nan_to_num(off, nan=np.inf), share, method="lower")
        assert most <= TOLERANCE, f"{name} is off by {most}: {off}"


def _gap(logits: np.ndarray, chosen: int, scale: float) -> float:
    """How wrong both an id's logit and the largest are at least, if the id was found the best."""
    return float(logits.max() - logits[chosen]) / (2 * scale)


def _off(got: Any, want: Any, like: Any = None) -> float:
    """Largest difference as a share of the largest value of `like`, by default `want`."""
    got, want = (np.asarray(x).astype(np.float64) for x in (got, want))
    assert got.shape == want.shape, f"{got.shape} is not {want.shape}"
    largest = np.abs(want if like is None else np.asarray(like).astype(np.float64)).max(initial=0)
    return float(np.max(np.abs(got - want), initial=0) / max(largest, 1e-9))
