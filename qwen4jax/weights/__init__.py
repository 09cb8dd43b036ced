"""Checkpoints on disk: `load.load`, `save.save`, `store.store` and `store.restore`."""
