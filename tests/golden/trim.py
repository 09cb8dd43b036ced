"""Drop what no test reads from a case's outputs.

Usage: python trim.py OUT/io.safetensors tests/golden/CASE/io.safetensors PATTERN...

A pattern is matched against the part of a name after the prompt: `hidden`, `residual.*`.
"""

import fnmatch
import sys

from safetensors.numpy import load_file, save_file


def main(source: str, target: str, *patterns: str) -> None:
    tensors = load_file(source)
    kept = {
        name: value
        for name, value in tensors.items()
        if not any(fnmatch.fnmatchcase(name.partition(".")[2], p) for p in patterns)
    }
    save_file(kept, target)
    print(target, f"{len(kept)} of {len(tensors)} tensors")


if __name__ == "__main__":
    main(*sys.argv[1:])
