"""Decoding: prefill, the speculative round, sampling, stopping, text."""
