"""Imports the benchmarks' package before any test of theirs does, and leaves no trace of it."""

import os
from unittest import mock

# it sets what XLA reads when a process starts; these tests share theirs with all others, which
# would run with other flags beside them than alone
with mock.patch.dict(os.environ):
    import bench  # noqa: F401
