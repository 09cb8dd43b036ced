"""Scoring: log-probabilities of given texts, without generating anything."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int, Int32

from qwen4jax.decode.call import (
    check_integer,
    check_params,
    chunk_for,
    known_tokenizer,
    slots_for,
)
from qwen4jax.decode.prefill import feed
from qwen4jax.decode.requests import is_many, prompt_ids
from qwen4jax.model import head
from qwen4jax.params import Params
from qwen4jax.state import DecodeState, init_state

# float32 logits that exist at a time, 512 MiB
_MOST_LOGITS = 1 << 27


@dataclasses.dataclass(frozen=True, eq=False)
class Score:
    """What the model thinks of one text.

    Row `i` of `named` and of `top_*` is of the token that follows `token_ids[: i + 1]`. So all
    rows but the last stand beside `logprobs`, and the last is of what would follow the text.

    Attributes:
        token_ids: the text's ids.
        logprobs: natural log-probability of each id but the first, given those before it: float32
            log-softmax of the raw logits.
        named: log-probabilities of the ids that were asked for; None if none were.
        top_ids: the most probable ids, best first; None if not asked for.
        top_logprobs: their log-probabilities.
        bytes: UTF-8 bytes of the text; None where ids were given.
    """

    token_ids: Int32[np.ndarray, " T"]
    logprobs: Float32[np.ndarray, " S"]
    named: Float32[np.ndarray, "T K"] | None = None
    top_ids: Int32[np.ndarray, "T M"] | None = None
    top_logprobs: Float32[np.ndarray, "T M"] | None = None
    bytes: int | None = None

    @property
    def tokens(self) -> int:
        """How many tokens have a log-probability: all but the first."""
        return len(self.logprobs)

    @property
    def total(self) -> float:
        """Sum of the log-probabilities, in float64; 0 for a text of one token."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def bits_per_byte(self) -> float | None:
        """Bits of the scored tokens by bytes of the whole text.

        None where ids were given, or where no token has a log-probability.
        """
        return bits_per_byte(-self.total, self.bytes) if self.tokens else None


def bits_per_byte(nats: float, size: int | None) -> float | None:
    """`nats` in bits, by `size` bytes; None without bytes."""
    return nats / math.log(2) / size if size else None


def score(
    params: Params,
    texts: Any,
    *,
    tokenizer: Any = None,
    token_ids: Any = None,
    top: int = 0,
    chunk: int = 512,
    batch: int = 8,
) -> Score | list[Score]:
    """Log-probabilities of every token of one text or of a list of texts.

    Texts of like length are fed together, in steps of a few fixed shapes: at most `batch` rows of
    at most `chunk` tokens, with room for a power of two of chunks. So the number of compiled
    programs grows with the logarithm of the longest text. A text's result depends on its company
    by float32 rounding only.

    Args:
        params: of the model.
        texts: a string, ids, chat messages, or a list of these. One gives one result, a list gives
            a list.
        tokenizer: a `Tokenizer`, or what `Tokenizer.from_object` takes; needed for
            strings and messages.
        token_ids: ids whose log-probabilities are wanted at every position.
        top: how many of the most probable ids are wanted at every position.
        chunk: most tokens of each row in one step.
        batch: most rows of one step.

    Raises:
        TypeError, ValueError: names the argument, the index of the text and what is wrong: it is
            empty, too long, no text, or has an id that the model has not.
    """
    check_params(params)
    config = params.config
    many = is_many(texts, "texts")
    if not len(texts):
        raise ValueError("texts: is empty")
    check_integer("chunk", chunk)
    check_integer("batch", batch)
    if top != 0 or isinstance(top, bool):
        check_integer("top", top, config.vocab_size)
    wanted = (
        [] if token_ids is None else prompt_ids(token_ids, "token_ids", config.vocab_size, None)
    )
    tokenizer = known_tokenizer(tokenizer)
    texts = texts if many else [texts]
    rows = []
    for index, text in enumerate(texts):
        where = f"texts[{index}]" if many else "texts"
        ids = prompt_ids(text, where, config.vocab_size, tokenizer)
        if len(ids) > config.max_position_embeddings:
            raise ValueError(
                f"{where}: {len(ids)} tokens are over max_position_embeddings="
                f"{config.max_position_embeddings}"
            )
        rows.append(np.asarray(ids, np.int32))

    shape = {
        "batch": slots_for(len(rows), batch),
        "chunk": chunk_for(max(len(row) for row in rows), chunk),
    }
    found: dict[int, Score] = {}
    by_length = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    for first in range(0, len(rows), batch):
        group = by_length[first : first + batch]
        scores = score_rows(params, [rows[i] for i in group], **shape, token_ids=wanted, top=top)
        found |= zip(group, scores, strict=True)
    results = []
    for index, text in enumerate(texts):
        size = len(text.encode()) if isinstance(text, str) else None
        unasked = {"named": None} if token_ids is None else {}
        unasked |= {} if top else {"top_ids": None, "top_logprobs": None}
        results.append(dataclasses.replace(found[index], bytes=size, **unasked))
    return results if many else results[0]


def score_rows(
    params: Params,
    rows: Sequence[Int32[np.ndarray, " _"]],
    *,
    batch: int,
    chunk: int,
    token_ids: Sequence[int] = (),
    top: int = 0,
) -> list[Score]:
    """Scores rows of checked ids together; of a score's fields only `bytes` is None.

    Args:
        params: of the model.
        rows: at most `batch`, of any lengths; a row without ids has a score without rows.
        batch: rows of the compiled step.
        chunk: places of the compiled step.
        token_ids: as `score`.
        top: as `score`.
    """
    scoring = Scoring(params, rows, batch=batch, chunk=chunk, token_ids=token_ids, top=top)
    while scoring.advance():
        pass
    return scoring.scores()


class Scoring:
    """Rows of checked ids on their way through the model, a chunk of each at a time."""

    def __init__(
        self,
        params: Params,
        rows: Sequence[Int32[np.ndarray, " _"]],
        *,
        batch: int,
        chunk: int,
        token_ids: Sequence[int] = (),
        top: int = 0,
        room: int | None = None,
    ):
        """At the beginning of all rows.

        Args:
            params: of the model.
            rows: as `score_rows`.
            batch: as `score_rows`.
            chunk: as `score_rows`.
            token_ids: as `score_rows`.
            top: as `score_rows`.
            room: tokens that the state holds; by default as many as a power of two of chunks.
        """
        config = params.config
        self._params, self._rows, self._top = params, rows, top
        self._lengths = np.zeros(batch, np.int64)
        self._lengths[: len(rows)] = [len(row) for row in rows]
        self._chunk, steps = chunk, max(1, -(-int(self._lengths.max()) // chunk))
        self._starts = iter(range(0, steps * chunk, chunk))
        self._ids = np.zeros((batch, steps * chunk + 1), np.int32)
        for row, given in enumerate(rows):
            self._ids[row, : len(given)] = given
        if room is None:
            room = min(chunk << (steps - 1).bit_length(), config.max_position_embeddings)
        # nothing is drafted: the draft head need not follow
        plain = config.replace(mtp_num_hidden_layers=0)
        self._state = init_state(plain, slots=batch, max_length=room, drafts=0)
        self._wanted = jnp.asarray(token_ids, jnp.int32)
        self._pieces: list[dict[str, Array]] = []

    def advance(self) -> bool:
        """Feeds the next chunk of every row; False if there was none left."""
        start = next(self._starts, None)
        if start is None:
            return False
        tokens, following = (
            jnp.asarray(self._ids[:, s : s + self._chunk]) for s in (start, start + 1)
        )
        count = jnp.asarray(np.clip(self._lengths - start, 0, self._chunk), jnp.int32)
        self._state, piece = _score_chunk(
            self._params, self._state, tokens, following, count, self._wanted, top=self._top
        )
        self._pieces.append(piece)
        return True

    def wait(self) -> None:
        """Returns when the device has done what was fed so far."""
        jax.block_until_ready(self._pieces)

    def scores(self) -> list[Score]:
        """The rows' scores, when all is fed."""
        pieces = self._pieces
        whole = {n: np.concatenate([piece[n] for piece in pieces], axis=1) for n in pieces[0]}
        scores = []
        for row, given in enumerate(self._rows):
            # copies: a view would keep the whole batch
            own: dict[str, Any] = {n: x[row, : len(given)].copy() for n, x in whole.items()}
            own["logprobs"] = own["logprobs"][:-1]
            scores.append(Score(token_ids=given, **own))
        return scores


@functools.partial(jax.jit, donate_argnames=("state",), static_argnames=("top",))
def _score_chunk(
    params: Params,
    state: DecodeState,
    tokens: Int[Array, "B T"],
    following: Int[Array, "B T"],
    count: Int[Array, " B"],
    token_ids: Int[Array, " K"],
    *,
    top: int,
) -> tuple[DecodeState, dict[str, Array]]:
    """Feeds a chunk of every row.

    Returns:
        The state, and of the token after each place: `logprobs` [B, T] of `following`, `named`
        [B, T, K], `top_ids` and `top_logprobs` [B, T, top].
    """
    state, hidden = feed(params, state, tokens, count)
    rows, places = tokens.shape
    # as many places at a time as the logits have room for
    width = max(1, _MOST_LOGITS // (rows * params.config.vocab_size))
    width = min(places, 1 << (width.bit_length() - 1))
    parts = -(-places // width)

    def split(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, parts * width - places)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(rows, parts, width, *x.shape[2:]), 1, 0)

    def reduce(part: tuple[Array, Array]) -> dict[str, Array]:
        logprobs = jax.nn.log_softmax(head(params, part[0]))
        best, best_ids = jax.lax.top_k(logprobs, top)
        return dict(
            logprobs=jnp.take_along_axis(logprobs, part[1][..., None], axis=-1)[..., 0],
            named=logprobs[..., token_ids],
            top_ids=best_ids,
            top_logprobs=best,
        )

    def join(x: Array) -> Array:
        x = jnp.moveaxis(x, 0, 1)
        return x.reshape(rows, parts * width, *x.shape[3:])[:, :places]

    with jax.named_scope("logprobs"):
        mapped: Any = jax.lax.map(reduce, (split(hidden), split(following)))
        return state, {name: join(values) for name, values in mapped.items()}
