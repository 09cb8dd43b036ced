"""`python -m qwen4jax.serve`: serves a checkpoint over gRPC until it is told to stop."""

import os
import sys

from qwen4jax.serve.options import OptionsError, parse

# JAX and gRPC are imported once the command line is known to be right: they take seconds

# top-level names of the packages of the extra `serve`
_EXTRA = {"google", "grpc", "grpc_health", "grpc_reflection", "prometheus_client"}


def main(argv: list[str] | None = None) -> int:
    """Serves; returns the exit code."""
    try:
        options = parse(argv)
    except OptionsError as error:
        print(f"qwen4jax.serve: {error}", file=sys.stderr)
        return 2
    try:
        from qwen4jax.serve.server import run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _EXTRA:
            print(f"qwen4jax.serve: {error}; pip install 'qwen4jax[serve]'", file=sys.stderr)
            return 2
        raise
    return run(options)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # the device's thread may be compiling, which an ordinary exit would wait for
    os._exit(code)
