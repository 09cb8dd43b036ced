"""The operations: one folder each, with a contract, a reference in plain `jnp`, and kernels."""
