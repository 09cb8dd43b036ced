"""The speculative decode round: verify, accept, commit, draft; one program for all slots.

With `L` live tokens and a pending token `t` (sampled, not fed), a slot holds drafts `d1..dN`.

    verify  the main model runs `t, d1..dN` at places `L..L+N`; row `j` chooses the token at L+j+1
    accept  drafts while they equal what the row before chose; the next choice is the bonus token
    commit  `t` and the accepted drafts become live, every state with them; the rest is as if it
            had never been
    extend  the draft head runs its rows of the new tokens on the main model's residuals
    chain   N-1 more rows of the draft head, each on the residual of the one before

Because each row samples with the key of its position and a draft is accepted while it equals the
sample, a request's tokens do not depend on its drafts at all: not on N, on index sharing, or on
the draft head's weights. For a deterministic draft this accepts with the target's probability of
the draft, and the output has exactly the target's distribution.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qwen4jax.decode.burst import Burst, to_host
from qwen4jax.decode.sampling import Sampled, sample, takes_the_largest
from qwen4jax.decode.stopping import Controls, Cut, accept, count_tokens, cut
from qwen4jax.layers.attention import FrozenSelection
from qwen4jax.layers.mtp import DraftRows
from qwen4jax.model import commit, draft_step, head, likeliest, read_out, step
from qwen4jax.params import Params
from qwen4jax.state import DecodeState, put_slots, take_slots


def speculative_round(
    params: Params,
    state: DecodeState,
    controls: Controls,
    active: Bool[Array, " S"],
    accepted: Int[Array, " S"] | None = None,
    *,
    logprobs: bool = False,
    top: int = 0,
) -> tuple[DecodeState, Controls, Bool[Array, " S"], Burst]:
    """One round of every active slot; the number of drafts is the state's.

    Slots that are not active keep every state. Near the end of a slot's pages fewer rows run.

    Args:
        params: of the model; `config.ablation.index_share` says how later draft steps select.
        state: a pending token in every active slot.
        controls: sampling and stopping of each slot.
        active: slots that run.
        accepted: number of drafts to accept whatever was sampled, for benchmarks.
        logprobs: whether the burst has them; static.
        top: how many of the most probable ids the burst has beside `logprobs`; static.

    Returns:
        The state, the controls with the new tokens counted, the slots still active, the burst.
    """
    drafts = state.drafts.shape[1]
    length = state.length
    fed = jnp.concatenate([state.token[:, None], state.drafts], axis=1)
    count = jnp.where(active, jnp.minimum(drafts + 1, state.capacity - length), 0)
    with jax.named_scope("verify"):
        state, pending = step(params, state, fed, count, final=False)
        hidden = read_out(params, pending.residual)
    with jax.named_scope("accept"):
        positions = length[:, None] + 1 + jnp.arange(drafts + 1)
        sampled = _choose(params, hidden, fed, positions, controls, active, logprobs, top)
        tokens, matched = sampled.ids, accept(sampled.ids, state.drafts)
        if accepted is not None:
            matched = accepted
            kept = jnp.arange(drafts + 1) < accepted[:, None]
            tokens = jnp.where(kept, jnp.pad(state.drafts, ((0, 0), (0, 1))), tokens)
        matched = jnp.minimum(matched, jnp.maximum(count - 1, 0))
        given = jnp.where(active, matched + 1, 0)
        end = cut(tokens, given, length + 1, controls, sampled.finite)
        controls = count_tokens(controls, tokens, end.n)
    state = commit(state, pending, end.n)
    matched = jnp.where(active, matched, 0)
    burst = _burst(sampled, tokens, matched, end)
    state = _propose(params, state, tokens, pending.residual, length, end.n)
    return state, controls, active & ~end.finished, burst


run_round = jax.jit(
    speculative_round,
    donate_argnames=("state", "controls", "active"),
    static_argnames=("logprobs", "top"),
)


@functools.partial(
    jax.jit,
    donate_argnames=("state", "controls", "active", "room"),
    static_argnames=("logprobs", "top"),
    # `room` is there for its memory only
    keep_unused=True,
)
def next_round(
    params: Params,
    state: DecodeState,
    controls: Controls,
    active: Bool[Array, " S"],
    room: Burst,
    *,
    logprobs: bool = False,
    top: int = 0,
) -> tuple[DecodeState, Controls, Bool[Array, " S"], Burst, Int[Array, "S W"]]:
    """`run_round` for a loop, in which no buffer moves from round to round.

    Args:
        params: as the rest, of `speculative_round`.
        state: given up.
        controls: given up.
        active: given up.
        room: the burst before, or an `empty` one: given up, the new one takes its memory.
        logprobs: static.
        top: static.

    Returns:
        What `speculative_round` does, and the burst's words in host memory.
    """
    del room
    results = speculative_round(params, state, controls, active, logprobs=logprobs, top=top)
    state, controls, active, burst, words = to_host(results)
    return state, controls, active, burst, words


def begin(
    params: Params,
    state: DecodeState,
    controls: Controls,
    hidden: Float[Array, "S D"],
    ready: Bool[Array, " S"],
    *,
    logprobs: bool = False,
    top: int = 0,
) -> tuple[DecodeState, Controls, Bool[Array, " S"], Burst]:
    """Samples the first token after a prompt and drafts what may follow it.

    Args:
        params: of the model.
        state: after `prefill`.
        controls: of each slot.
        hidden: output head's input at each slot's last token.
        ready: slots whose prompt is complete; the others keep every state.
        logprobs: whether the burst has them; static.
        top: as `speculative_round`.

    Returns:
        As `speculative_round`; a burst of one token.
    """
    last = state.ngram_ids[:, -1:]
    where = state.length[:, None]
    sampled = _choose(params, hidden[:, None], last, where, controls, ready, logprobs, top)
    given = ready.astype(jnp.int32)
    end = cut(sampled.ids, given, state.length, controls, sampled.finite)
    controls = count_tokens(controls, sampled.ids, end.n)
    streams = state.residual.reshape(state.slots, 1, params.config.hc_count, -1)
    state = _propose(params, state, sampled.ids, streams, state.length - 1, end.n)
    burst = _burst(sampled, sampled.ids, jnp.zeros_like(end.n), end)
    return state, controls, ready & ~end.finished, burst


@functools.partial(jax.jit, donate_argnames=("state", "controls"), static_argnames=("logprobs",))
def begin_slots(
    params: Params,
    state: DecodeState,
    controls: Controls,
    hidden: Float[Array, "B D"],
    slots: Int[Array, " B"],
    *,
    logprobs: bool = False,
) -> tuple[DecodeState, Controls, Burst]:
    """`begin` for some slots; a number past the last slot is a row that is not there."""
    rows = take_slots(state, slots)
    row_controls = jax.tree.map(lambda x: x.at[slots].get(mode="clip"), controls)
    rows, row_controls, _, burst = begin(params, rows, row_controls, hidden, slots < state.slots)
    controls = jax.tree.map(
        lambda x, row: x.at[slots].set(row, mode="drop"), controls, row_controls
    )
    return put_slots(state, slots, rows), controls, burst


def _choose(
    params: Params,
    hidden: Float[Array, "S T D"],
    fed: Int[Array, "S T"],
    positions: Int[Array, "S T"],
    controls: Controls,
    running: Bool[Array, " S"],
    logprobs: bool,
    top: int,
) -> Sampled:
    """`sample` of the output head's logits, which nobody writes where only the largest counts.

    From slots that do not run nothing is drawn, whatever options their last request left.
    """
    if not logprobs and takes_the_largest(controls):
        ids, finite = likeliest(params, hidden)
        return Sampled(ids, None, finite)
    if controls.temperature is not None:
        temperature = jnp.where(running, controls.temperature, 0.0)
        controls = dataclasses.replace(controls, temperature=temperature)
    logits = head(params, hidden)
    return sample(logits, fed, positions, controls, logprobs=logprobs, top=top)


def _burst(
    sampled: Sampled, tokens: Int[Array, "S T"], accepted: Int[Array, " S"], end: Cut
) -> Burst:
    return Burst(
        tokens=tokens,
        count=end.n,
        accepted=accepted,
        logprobs=sampled.logprobs,
        finished=end.finished,
        reason=end.reason,
        top_ids=sampled.top_ids,
        top_logprobs=sampled.top_logprobs,
    )


def _propose(
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "S T"],
    residual: Float[Array, "S T R D"],
    start: Int[Array, " S"],
    count: Int[Array, " S"],
) -> DecodeState:
    """Makes the last of `count` new tokens pending and drafts what follows it.

    Args:
        params: of the model.
        state: with the tokens before the last live.
        tokens: new tokens; token `j` belongs to the draft head's row `start + j`.
        residual: main model's streams of those rows.
        start: first of the rows.
        count: new tokens of each slot; 0 keeps the slot's pending token and drafts.
    """
    drafts = state.drafts.shape[1]
    last = jnp.maximum(count - 1, 0)[:, None]
    running = count > 0
    newest = jnp.take_along_axis(tokens, last, axis=1)[:, 0]
    state = state.replace(token=jnp.where(running, newest, state.token))
    if not drafts:
        return state
    with jax.named_scope("draft_extend"):
        state, rows = draft_step(params, state, tokens, residual, start, count)
        row = last[..., None]
        hidden = jnp.take_along_axis(rows.hidden, row, axis=1)
        streams = jnp.take_along_axis(rows.residual, row[..., None], axis=1)
        selected = jnp.take_along_axis(rows.selected, row, axis=1)[:, 0]
        proposed = [likeliest(params, hidden, draft=True)[0][:, 0]]
    frozen = FrozenSelection(selected, start + count)
    share = params.config.ablation.index_share
    for number in range(1, drafts):
        with jax.named_scope(f"draft_{number}"):
            given = None
            if share != "fresh":
                given = frozen.at_step(number, append=share == "share")
            state, rows = _chained(
                params, state, proposed[-1], streams, start + count - 1 + number, running, given
            )
            streams = rows.residual
            proposed.append(likeliest(params, rows.hidden, draft=True)[0][:, 0])
    fresh = jnp.stack(proposed, axis=1)
    return state.replace(drafts=jnp.where(running[:, None], fresh, state.drafts))


def _chained(
    params: Params,
    state: DecodeState,
    token: Int[Array, " S"],
    streams: Float[Array, "S 1 R D"],
    place: Int[Array, " S"],
    running: Bool[Array, " S"],
    selected: Int[Array, "S 1 M"] | None,
) -> tuple[DecodeState, DraftRows]:
    """One row of the draft head on its own earlier residual."""
    return draft_step(
        params, state, token[:, None], streams, place, running.astype(jnp.int32), selected=selected
    )
