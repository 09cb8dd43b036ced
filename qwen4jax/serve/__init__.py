"""`python -m qwen4jax.serve`: a gRPC server of one model, and a client for it."""
