"""Qwen3.8-Flash-Next (`qwen4_exp`) in JAX."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen4jax.ablation import Ablation
    from qwen4jax.config import Config
    from qwen4jax.decode.generate import generate, prefill, stream
    from qwen4jax.decode.options import Sampling
    from qwen4jax.decode.portable import fork, restore_state, save_state
    from qwen4jax.decode.requests import Completion
    from qwen4jax.decode.score import score
    from qwen4jax.decode.text import Tokenizer
    from qwen4jax.forward_pass import forward
    from qwen4jax.params import init_params
    from qwen4jax.weights.embedded import embedded_checkpoint
    from qwen4jax.weights.load import load

__all__ = [
    "Ablation",
    "Completion",
    "Config",
    "Sampling",
    "Tokenizer",
    "embedded_checkpoint",
    "fork",
    "forward",
    "generate",
    "init_params",
    "load",
    "prefill",
    "restore_state",
    "save_state",
    "score",
    "stream",
]

_HOMES = {
    "ablation": ("Ablation",),
    "config": ("Config",),
    "decode.generate": ("generate", "prefill", "stream"),
    "decode.options": ("Sampling",),
    "decode.portable": ("fork", "restore_state", "save_state"),
    "decode.requests": ("Completion",),
    "decode.score": ("score",),
    "decode.text": ("Tokenizer",),
    "forward_pass": ("forward",),
    "params": ("init_params",),
    "weights.embedded": ("embedded_checkpoint",),
    "weights.load": ("load",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imports a name when it is first asked for: JAX takes seconds, `--help` needs none of it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
