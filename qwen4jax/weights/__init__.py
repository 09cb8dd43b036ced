"""Checkpoints: reading Hugging Face directories, writing them, storing converted parameters."""

from qwen4jax.weights.checkpoint import Survey, survey
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.load import LoadReport, load, load_and_report
from qwen4jax.weights.save import save
from qwen4jax.weights.store import restore, store

__all__ = [
    "CheckpointError",
    "LoadReport",
    "Survey",
    "load",
    "load_and_report",
    "restore",
    "save",
    "store",
    "survey",
]
