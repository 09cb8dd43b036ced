"""The checkpoint that the tests of the server serve."""

import os
from pathlib import Path

from qwen4jax.weights.save import save
from tests.decode import small
from tests.decode.sample_tokenizers import write


def made_in(folder: Path) -> Path:
    """A checkpoint directory with a tokenizer in `folder`, made if it is not there yet."""
    directory = folder / "small-model"
    if not directory.exists():
        made = small.params()
        own = folder / f"small-model-{os.getpid()}"
        save(made.replace(config=made.config.replace(max_position_embeddings=4096)), own)
        write(own)
        # of two processes that make it the first one's stays
        try:
            own.rename(directory)
        except OSError:
            assert directory.exists()
    return directory
