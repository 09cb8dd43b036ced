"""Qwen3.8-Flash-Next (`qwen4_exp`) in JAX."""
