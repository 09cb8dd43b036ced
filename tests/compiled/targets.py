"""GPUs that programs are compiled for, none of which is here."""

from pathlib import Path

# as XLA dumped it on an H200 (`--xla_dump_to` writes `*gpu_target_config.pbtxt`)
_H200 = (Path(__file__).parent / "h200.txtpb").read_text()

# device kind, as JAX names it -> description; of the GB300 nobody dumped one: here is what differs
# as far as a compiler asks
TARGETS = {
    "NVIDIA H200": _H200,
    "NVIDIA GB300": _H200.replace("core_count: 132", "core_count: 152").replace(
        "    major: 9\n", "    major: 10\n    minor: 3\n"
    ),
}
