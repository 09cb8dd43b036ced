"""Registers, spills and shared memory of the Triton kernels at released sizes, without a device.

    python -m bench.resources --op gated_residual --case "released_(4|32)$"

Compiles with the installed Triton and its assembler what the native route hands to XLA's Triton:
the two agree on most kernels, not on all. A stack means spills; an H200 gives a program up to 227
KB of shared memory and a multiprocessor 65,536 registers.
"""

import argparse
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.operations import named, operations, split
from qwen4jax.pallas import registry, triton_call


class Recorder:
    """Stands where the primitive does, and notes the launches of a traced call."""

    def __init__(self):
        self.launches: dict[str, dict[str, Any]] = {}

    def bind(self, *operands: Any, name: str, out: Any, **how: Any) -> list[Any]:
        """Notes a launch; returns results of its shapes."""
        self.launches[name] = how | {"operands": operands, "out": out}
        return [jnp.zeros(shape, dtype) for shape, dtype in out]


def launches(function: Any, case: Any, implementation: str) -> dict[str, dict[str, Any]]:
    """Kernel name -> what it is launched with, for one case."""
    static: dict[str, Any] = {}

    def arrays() -> dict[str, Any]:
        given, rest = split(case.build(np.random.default_rng(0)))
        static.update(rest)
        return given

    shapes = jax.eval_shape(arrays)
    recorder, primitive = Recorder(), triton_call._native
    triton_call._native = recorder  # type: ignore[assignment]
    try:
        with registry.using(device="NVIDIA H200"):
            jax.make_jaxpr(lambda x: function(**x, **static, implementation=implementation))(shapes)
    finally:
        triton_call._native = primitive
    return recorder.launches


def resources(launch: dict[str, Any]) -> str:
    """What one program of a launch takes."""
    import triton
    from triton.backends.compiler import GPUTarget

    shared = dict(launch["aliases"]).values()
    own = [str(dtype) for i, (_, dtype) in enumerate(launch["out"]) if i not in shared]
    pointers = [*(str(x.dtype) for x in launch["operands"]), *own]
    source = triton_call.source(launch["kernel"], tuple(pointers), launch["constants"])
    options = {name: launch[name] for name in ("num_warps", "num_stages")}
    built = triton.compile(source, GPUTarget("cuda", 90, 32), options)
    reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built.asm["cubin"])
        file.flush()
        report = subprocess.run(
            [reader, "-res-usage", file.name], capture_output=True, text=True, check=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", report.stdout)
    registers, stack = found.groups() if found else ("?", "?")
    return (
        f"grid {launch['grid']}, {launch['num_warps']} warps: {registers} registers, "
        f"{stack} B stack, {built.metadata.shared / 1024:.0f} KB shared"
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--op", action="append", default=[], help="operation or package")
    parser.add_argument("--case", default="", help="regular expression of case names")
    parser.add_argument("--small", action="store_true", help="cases of tests, not of the release")
    args = parser.parse_args(argv)
    for operation in operations().values():
        if not named(operation.name, args.op):
            continue
        for case in operation.cases:
            if case.device_only == args.small or not re.search(args.case, case.name):
                continue
            for name in operation.implementations:
                if not name.startswith("triton"):
                    continue
                try:
                    found = launches(operation.function, case, name)
                except NotImplementedError as refusal:
                    print(f"{operation.name} {case.name}: {refusal}")
                    continue
                for kernel, launch in found.items():
                    print(f"{operation.name} {case.name} {name} {kernel}: {resources(launch)}")


if __name__ == "__main__":
    main()
