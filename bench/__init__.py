"""Measurements on real devices; every figure of the docs comes from a line under results/.

Importing this package sets what XLA reads when jax starts: a larger share of the device's memory,
and a folder for the plan of the compiled round.
"""

import os
import tempfile

HLO_DUMP = tempfile.mkdtemp(prefix="qwen4jax-hlo-")

os.environ.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_dump_to={HLO_DUMP}",
        "--xla_dump_hlo_as_text",
        "--xla_dump_hlo_module_re=.*bench_round.*",
    ]
).strip()
