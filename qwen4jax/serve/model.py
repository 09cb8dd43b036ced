"""What is served: a checkpoint on the device, and the shapes its programs are compiled for."""

import dataclasses
import random
from pathlib import Path

import jax
import jax.numpy as jnp

from qwen4jax.config import Config
from qwen4jax.decode.batching import Sizes
from qwen4jax.decode.call import check_kv_dtype, drafts_of, eos_ids_of
from qwen4jax.decode.options import Row, Sampling, make_controls
from qwen4jax.decode.stopping import Controls
from qwen4jax.decode.text import Tokenizer
from qwen4jax.params import Params
from qwen4jax.serve.options import Options, OptionsError
from qwen4jax.weights.load import LoadReport, load_and_report
from qwen4jax.weights.progress import Progress

# places for stop ids, the model's own included
STOP_IDS = 32
# ids whose log-probabilities one Score call may ask for
NAMED_IDS = 32
# strings that may end one request
STOP_STRINGS = 32

# tokens of smaller prefill steps, for short prompts and for the ends of long ones
_ENDS = (16, 64)
_MOST_ROWS = 4
_DEFAULT_CONTEXT = 8192


@dataclasses.dataclass(frozen=True)
class Served:
    """A model, ready to be compiled for.

    Attributes:
        name: of the checkpoint.
        params: of the model, with the options' index sharing.
        tokenizer: None where the checkpoint has none: prompts are token ids then.
        eos_ids: that end a sequence.
        sizes: of the compiled programs.
        max_context: most tokens of prompt and output together.
        top_logprobs: alternatives that every round computes.
        parameter_bytes: of the parameters on the device.
        drafting_off_reason: why rounds do not draft; empty where they do.
        notes: what differs from the checkpoint's own configuration, or from what was measured.
    """

    name: str
    params: Params
    tokenizer: Tokenizer | None
    eos_ids: tuple[int, ...]
    sizes: Sizes
    max_context: int
    top_logprobs: int
    parameter_bytes: int
    drafting_off_reason: str
    notes: tuple[str, ...]

    def mode(self) -> Controls:
        """Controls with every option: one program serves greedy, sampled and penalised rows.

        A row's tokens then come from the same program whatever its company asks for.
        """
        return every_option(self.params.config.vocab_size)


def every_option(vocab_size: int) -> Controls:
    """The controls of one slot in the mode that has every option."""
    every = Sampling(
        temperature=0.9,
        top_k=1,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        logit_bias={0: 1.0},
        min_new_tokens=1,
    )
    row = make_controls([Row(every, 1, (0,))], 1, vocab_size)
    return dataclasses.replace(row, stop_ids=jnp.full((1, STOP_IDS), -1, jnp.int32))


def load_served(options: Options, progress: Progress) -> Served:
    """Reads the checkpoint onto the device.

    Args:
        options: of the server.
        progress: called with (bytes read, bytes in all).

    Raises:
        OptionsError: an option does not fit the model.
        ValueError: the checkpoint or its tokenizer is damaged; the file is named.
    """
    if options.draft_vocab is not None:
        # before anything is read, and by the name of the flag
        size = Config.from_hf(options.model).vocab_size
        if options.draft_vocab > size:
            raise OptionsError(
                f"--draft-vocab: {options.draft_vocab} is over the model's {size} ids"
            )
    params, report = load_and_report(
        options.model,
        dtype=options.dtype,
        table=options.table,
        draft_weights=options.draft_weights,
        draft_vocab=options.draft_vocab,
        progress=progress,
    )
    config = params.config
    if options.index_share is not None:
        ablation = dataclasses.replace(config.ablation, index_share=options.index_share)
        params = params.replace(config=config.replace(ablation=ablation))
    longest = config.max_position_embeddings
    context = min(longest, _DEFAULT_CONTEXT) if options.max_context is None else options.max_context
    if context > longest:
        raise OptionsError(f"--max-context: {context} is over the model's {longest} positions")
    check_kv_dtype(options.kv_dtype)
    try:
        drafts = drafts_of(params, options.draft)
    except ValueError as error:
        raise OptionsError(f"--{error}") from None
    tokenizer, notes = _tokenizer(options.model), list(report.notes)
    if tokenizer is None:
        notes.append("no tokenizer.json: prompts are token ids, answers have no text")
    return Served(
        name=options.model.absolute().name,
        params=params,
        tokenizer=tokenizer,
        eos_ids=eos_ids_of(config, tokenizer),
        sizes=_sizes(options, context, drafts),
        max_context=context,
        top_logprobs=min(options.top_logprobs, config.vocab_size),
        parameter_bytes=sum(leaf.nbytes for leaf in jax.tree.leaves(params)),
        drafting_off_reason=_why_not_drafting(options, report, drafts),
        notes=tuple(notes),
    )


def seeds_from(seed: int | None) -> random.Random:
    """Where the seeds of calls without one come from."""
    return random.Random(seed)


def _tokenizer(directory: Path) -> Tokenizer | None:
    if not (directory / "tokenizer.json").exists():
        return None
    return Tokenizer.load(directory)


def _sizes(options: Options, context: int, drafts: int) -> Sizes:
    chunk = min(options.chunk, context)

    def rows(tokens: int) -> int:
        # a step of any shape keeps the running streams waiting no longer than a whole chunk
        return min(_MOST_ROWS, chunk // tokens)

    return Sizes(
        slots=options.max_slots,
        max_length=context,
        drafts=drafts,
        chunk=chunk,
        kv_dtype=options.kv_dtype,
        rows=rows(chunk),
        ends=tuple((rows(tokens), tokens) for tokens in _ENDS if tokens < chunk),
    )


def _why_not_drafting(options: Options, report: LoadReport, drafts: int) -> str:
    if drafts:
        return ""
    if options.draft == 0:
        return "--draft 0"
    # of the loader's notes the one that says which tensors are not there
    found = next((note for note in report.notes if "draft head" in note), None)
    return found or "the checkpoint's configuration has no draft head"
