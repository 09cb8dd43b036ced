"""The arguments of a call, checked before anything is allocated, and the sizes it compiles for."""

import dataclasses
from typing import Any

import jax

from qwen4jax.config import Config
from qwen4jax.decode.batching import Engine, Sizes
from qwen4jax.decode.compiling import report_new_signature
from qwen4jax.decode.options import Row, make_controls
from qwen4jax.decode.portable import graft
from qwen4jax.decode.requests import is_many, make_requests, per_prompt
from qwen4jax.decode.stopping import Controls
from qwen4jax.decode.text import Tokenizer
from qwen4jax.params import Params
from qwen4jax.state import MAX_DRAFT, AttentionCache, DecodeState, abstract_state

_CHUNKS = (16, 64, 256, 512, 1024, 2048)
# rows and tokens of the steps for short prompts beside a long one, and for what a long one leaves
_ENDS = ((4, 256), (4, 1024))
_KV_DTYPES = ("bfloat16", "float32", "float8_e4m3fn")


class Call:
    """The arguments of a call, checked."""

    def __init__(
        self, params, prompts, sampling, draft, index_share, tokenizer, state, logprobs, slots,
        chunk, kv_dtype,
    ):  # fmt: skip
        check_params(params)
        check_integer("slots", slots)
        check_integer("chunk", chunk)
        check_kv_dtype(kv_dtype)
        config = params.config
        ablation = config.ablation
        if index_share is not None:
            ablation = dataclasses.replace(ablation, index_share=index_share)
        self.params = params.replace(config=config.replace(ablation=ablation))
        self.tokenizer = known_tokenizer(tokenizer)
        self.logprobs, self.source = bool(logprobs), state
        drafts = drafts_of(params, draft)
        self.history, pending = 0, None
        if state is not None:
            kv_dtype = kv_dtype or _kv_dtype_of(state)
            self.history, pending = _check_state(state, config, drafts, kv_dtype)
        # with a state to continue, an empty list is one prompt of no tokens
        alone = state is not None and isinstance(prompts, list | tuple) and not prompts
        self.many = not alone and is_many(prompts)
        each = list(prompts) if self.many else [prompts]
        self.eos_ids = eos_ids_of(config, self.tokenizer)
        longest = config.max_position_embeddings
        self.requests = make_requests(
            each,
            sampling,
            vocab_size=config.vocab_size,
            longest=longest,
            history=self.history,
            tokenizer=self.tokenizer,
            eos_ids=self.eos_ids,
            many=self.many,
            pending=pending,
        )
        self.samples = [one.n for one in per_prompt(sampling, len(each))]
        need = [self.history + len(r.ids) + r.sampling.max_new_tokens for r in self.requests]
        capacity = 0 if state is None else state.capacity
        feed = max(len(r.ids) for r in self.requests)
        most = chunk_for(feed, chunk)
        self.sizes = Sizes(
            slots=slots_for(len(self.requests), slots),
            max_length=bucket(max(capacity, *need), longest),
            drafts=drafts,
            chunk=most,
            kv_dtype=None if kv_dtype == config.dtype else kv_dtype,
            ends=tuple(end for end in _ENDS if end[1] < most),
        )

    def engine(self) -> Engine:
        """An engine for the call's requests."""
        sizes, mode, config = self.sizes, self._mode(), self.params.config
        # what the caller can change -> what the compiled programs depend on
        signature = {
            "slots (or the number of prompts)": sizes.slots,
            "prompts + max_new_tokens": sizes.max_length,
            "chunk (or the longest prompt)": sizes.chunk,
            "draft": sizes.drafts,
            "index_share": config.ablation.index_share,
            "kv_dtype": sizes.kv_dtype,
            "logprobs": self.logprobs,
            "state": None if self.source is None else _shape_of(self.source),
            "sampling": [name for name, value in vars(mode).items() if value is not None],
            "stop_ids": mode.stop_ids.shape[1],
        }
        plain = dataclasses.replace(config.ablation, index_share="fresh")
        report_new_signature(config.replace(ablation=plain), signature)
        return Engine(
            self.params,
            sizes,
            mode,
            tokenizer=self.tokenizer,
            eos_ids=self.eos_ids,
            logprobs=self.logprobs,
            source=self.source,
        )

    def _mode(self) -> Controls:
        """The narrowest mode that serves all requests."""
        vocab, fields, widest = self.params.config.vocab_size, {}, None
        # of equal options one row, for rows may be as wide as the vocabulary
        for options in {dataclasses.replace(r.sampling, seed=0) for r in self.requests}:
            row = make_controls([Row(options, 1, (0,))], 1, vocab, eos_ids=self.eos_ids)
            fields |= {name: value for name, value in vars(row).items() if value is not None}
            if widest is None or row.stop_ids.shape[1] > widest.shape[1]:
                widest = row.stop_ids
        return Controls(**(fields | {"stop_ids": widest}))


def check_params(params: Any) -> None:
    """Raises TypeError for what is no `Params`."""
    if not isinstance(params, Params):
        raise TypeError(f"params: {type(params).__name__} is no Params")


def check_integer(name: str, value: Any, most: int | None = None) -> None:
    """Checks a number of things, at least one."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: {value!r} is no integer")
    if value < 1 or (most is not None and value > most):
        raise ValueError(f"{name}: {value} is not " + (f"in 1..{most}" if most else "at least 1"))


def check_kv_dtype(kv_dtype: Any) -> None:
    """Raises ValueError for a dtype that keys and values are not kept in."""
    if kv_dtype is not None and kv_dtype not in _KV_DTYPES:
        raise ValueError(f"kv_dtype: {kv_dtype!r} is not one of {', '.join(_KV_DTYPES)}")


def known_tokenizer(tokenizer: Any) -> Tokenizer | None:
    """A `Tokenizer` of any kind of tokenizer."""
    return None if tokenizer is None else Tokenizer.from_object(tokenizer)


def drafts_of(params: Params, draft: Any) -> int:
    """Draft tokens per round, for the argument `draft`."""
    has_head = params.config.mtp_num_hidden_layers > 0
    if draft is None:
        return 3 if has_head else 0
    if not isinstance(draft, int) or isinstance(draft, bool):
        raise TypeError(f"draft: {draft!r} is no integer")
    if not 0 <= draft <= MAX_DRAFT:
        raise ValueError(f"draft: {draft} is not in 0..{MAX_DRAFT}")
    if draft and not has_head:
        raise ValueError(f"draft: {draft}, but the model has no draft head (mtp)")
    return draft


def _check_state(
    state: Any, config: Config, drafts: int, kv_dtype: str | None
) -> tuple[int, int | None]:
    """Tokens that a given state holds, and the pending one."""
    if not isinstance(state, DecodeState):
        raise TypeError(f"state: {type(state).__name__} is no DecodeState")
    if state.slots != 1:
        raise ValueError(f"state: has {state.slots} slots, one is expected")
    if len(state.layers) != config.num_hidden_layers:
        raise ValueError(
            f"state: is of a model of {len(state.layers)} layers, not {config.num_hidden_layers}"
        )
    if drafts and state.mtp is None:
        raise ValueError("state: was made without a draft head; pass draft=0")
    length, pending = int(state.length[0]), int(state.token[0])
    if not length:
        raise ValueError("state: holds no tokens")
    longest = config.max_position_embeddings
    if length > longest:
        raise ValueError(f"state: holds {length} tokens, the model has {longest} positions")
    if pending >= config.vocab_size:
        raise ValueError(f"state: its pending id {pending} is not in [0, {config.vocab_size})")
    slot = abstract_state(
        config,
        slots=1,
        max_length=bucket(state.capacity, longest),
        drafts=drafts,
        kv_dtype=kv_dtype,
    )
    try:
        jax.eval_shape(graft, slot, jax.ShapeDtypeStruct((), "int32"), state)
    except ValueError as error:
        raise ValueError(f"state: {str(error).removeprefix('source: ')}") from None
    return length, pending if pending >= 0 else None


def _kv_dtype_of(state: Any) -> str | None:
    layers = state.layers if isinstance(state, DecodeState) else ()
    return next((c.key.dtype.name for c in layers if isinstance(c, AttentionCache)), None)


def _shape_of(state: DecodeState) -> str:
    return f"room for {state.capacity} tokens and {state.drafts.shape[1]} drafts"


def eos_ids_of(config: Config, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The ids that end a sequence: the tokenizer's, else the configuration's."""
    own = config.eos_token_id
    own = (own,) if isinstance(own, int) else own
    found = tokenizer.eos_ids if tokenizer is not None and tokenizer.eos_ids else own
    return tuple(i for i in found if 0 <= i < config.vocab_size)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


def slots_for(requests: int, most: int) -> int:
    """The smallest bucket of slots that holds all requests at once, at most `most`."""
    return min(_power_of_two(requests), most)


def bucket(length: int, longest: int) -> int:
    """The smallest number of tokens that is compiled for and holds `length`, at most `longest`."""
    return min(_power_of_two(max(64, length)), longest)


def chunk_for(tokens: int, most: int) -> int:
    """The smallest bucket that holds a prompt, at most `most`."""
    return min(next((c for c in _CHUNKS if c >= tokens), most), most)
