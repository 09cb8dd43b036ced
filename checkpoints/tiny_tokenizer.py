"""The tiny model's tokenizer: byte-level BPE, and the files of a Hugging Face directory for it."""

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, TURN_START, TURN_END)
FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")

# words with one sign or space before them, single digits, runs of signs, line ends with the blanks
# before them, blanks but the last; as in the tokenizers of this family of models
_PIECES = (
    r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> tokenizers.Tokenizer:
    """A tokenizer of `vocabulary` entries; the special tokens have the first ids."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(_PIECES), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_tokenizer(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """Writes `FILES`; the model stops at the end of a text and at the end of a turn."""
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": {
            str(i): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token, i in ids.items()
        },
    }
    generation = {
        "eos_token_id": [ids[TURN_END], ids[END_OF_TEXT]],
        "pad_token_id": ids[END_OF_TEXT],
    }
    for name, content in (("tokenizer_config", config), ("generation_config", generation)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
