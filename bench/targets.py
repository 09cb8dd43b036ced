"""GPUs that programs are compiled for, none of which is here: XLA asks no more than this of one."""

import functools
from pathlib import Path

import jax
from jax.experimental import topologies

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


@functools.cache
def place_on(kind: str) -> jax.sharding.Sharding:
    """Where an array lies that is on one device of this kind; what is lowered for it compiles.

    Raises:
        KeyError: nobody described the kind.
        RuntimeError: XLA's compiler for CUDA is not installed.
    """
    try:
        topology = topologies.get_topology_desc(
            "gpu", platform="cuda", target_config=TARGETS[kind], topology="1x1x1"
        )
    except NotImplementedError as e:
        raise RuntimeError(f"{e}: pip install jax-cuda13-plugin jax-cuda13-pjrt") from e
    return jax.sharding.SingleDeviceSharding(topology.devices[0])
