"""Lines of results: where they go, and where and when they were measured."""

import json
import os
import subprocess
import time
from pathlib import Path

import jax

RESULTS = Path(__file__).parent / "results"


# of a line of decode.jsonl; behind it stands how keys and values are kept
PLAIN = "flash_next layers=48 experts=nvfp4 index_share=share kv="


def is_plain(line: dict) -> bool:
    """Whether it is of greedy rounds of the released model as stored, in which every slot runs."""
    # lines are older than modes
    greedy = line.get("mode", "greedy") == "greedy"
    return greedy and line["config"] in (f"{PLAIN}bf16", f"{PLAIN}e4m3")


def stamp() -> dict:
    """Device, commit, jax and date of a line that is written now."""
    commit = (
        os.environ.get("BENCH_COMMIT")
        or subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    return {
        "device": jax.devices()[0].device_kind,
        "commit": commit,
        "jax": jax.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }


def append(lines: list[dict], name: str, out: str | None) -> None:
    """Adds lines to `name` in `out`, by default the device's folder; a CPU has none."""
    if not lines or (out is None and jax.default_backend() == "cpu"):
        return
    device = jax.devices()[0].device_kind.replace(" ", "-").lower()
    folder = Path(out) if out else RESULTS / device
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
