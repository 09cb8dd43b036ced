"""The protocol `qwen4jax.v1`; the code beside `generation.proto` is generated from it."""
