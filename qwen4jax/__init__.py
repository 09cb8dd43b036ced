"""Qwen3.8-Flash-Next (`qwen4_exp`) in JAX."""

from qwen4jax.ablation import Ablation
from qwen4jax.config import Config
from qwen4jax.forward_pass import forward
from qwen4jax.params import init_params
from qwen4jax.weights.load import load

__all__ = ["Ablation", "Config", "forward", "init_params", "load"]
