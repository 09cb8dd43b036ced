"""The blocks of the model: each composes operations of `qwen4jax.pallas`."""
