"""Measurements on real devices; every figure of the docs comes from a line under results/.

Importing this package sets what XLA reads when jax starts: a larger share of the device's memory,
and a folder for the plan of the compiled round, unless XLA_FLAGS name one.
"""

import os
import re
import tempfile
import uuid

_flags = os.environ.get("XLA_FLAGS", "")
_named = re.search(r"--xla_dump_to=(\S+)", _flags)
# XLA makes the folder when it has something to write
HLO_DUMP = (
    _named.group(1)
    if _named
    else os.path.join(tempfile.gettempdir(), f"qwen4jax-hlo-{uuid.uuid4()}")
)

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")
if not _named:
    os.environ["XLA_FLAGS"] = " ".join(
        [
            _flags,
            f"--xla_dump_to={HLO_DUMP}",
            "--xla_dump_hlo_as_text",
            "--xla_dump_hlo_module_re=.*bench_round.*",
        ]
    ).strip()
