"""The arguments of `bench.decode`, and the runs that they ask for."""

import argparse
import copy

from bench import ahead
from bench.released import STAND_IN_ROWS

NAMES = dict(
    kv=("bf16", "e4m3"),
    index_share=("fresh", "share", "share_frozen"),
    mode=("greedy", "sampled", "server"),
)
VARIED = ("batch", "live", "context", "draft", "acceptance", *NAMES, "rounds", "profile")

# rounds that are queued; so few that the runtime, which holds 32 programs in flight, never makes
# the host wait
GROUP = 12


def parse(argv: list[str] | None, description: str | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config", choices=("flash_next", "tiny"), default="flash_next")
    parser.add_argument("--layers", type=int, default=48, help="of flash_next; a multiple of 4")
    parser.add_argument("--experts", choices=("nvfp4", "fp8", "bf16"), default="nvfp4")
    parser.add_argument(
        "--draft-weights", choices=("nvfp4", "fp8", "bf16"), default="bf16", help="of flash_next"
    )
    parser.add_argument("--draft-vocab", type=int, help="ids that are drafted, of flash_next")
    parser.add_argument("--table", choices=("device", "pinned"), default="device")
    parser.add_argument(
        "--table-rows",
        type=int,
        default=STAND_IN_ROWS,
        help="of each of 16 n-gram heads, 160 bytes each; of flash_next",
    )
    parser.add_argument("--kv", choices=NAMES["kv"], default="bf16")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--live", type=int, help="of the batch's slots that run; by default all")
    parser.add_argument("--context", type=int, default=65536)
    parser.add_argument("--draft", type=int, default=3, help="drafts per round, 0 to 7")
    parser.add_argument("--acceptance", type=float, help="mean tokens per round, bonus included")
    parser.add_argument("--index-share", choices=NAMES["index_share"], default="share")
    parser.add_argument("--mode", choices=NAMES["mode"], default="greedy", help="of sampling")
    parser.add_argument("--rounds", type=int, default=200, help=f"at least, in groups of {GROUP}")
    parser.add_argument(
        "--profile",
        type=int,
        choices=(0, 1),
        default=1,
        help="0: no parts, and the floor is of the expected number of experts",
    )
    parser.add_argument("--out", help="folder of decode.jsonl; by default bench/results/<device>")
    parser.add_argument(
        "--run",
        action="append",
        default=[],
        metavar="NAME=VALUE,...",
        help=f"one of several runs: what differs of {', '.join(VARIED)}",
    )
    ahead.add_arguments(parser)
    args = parser.parse_args(argv)
    if args.compile_for and args.table != "device":
        parser.error("--compile-for: a table in pinned memory is compiled where it is")
    if args.layers < 4 or args.layers % 4:
        parser.error(f"--layers: {args.layers} is not a multiple of 4")
    released = ("draft_weights", "draft_vocab", "table_rows")
    if args.config == "tiny" and any(getattr(args, n) != parser.get_default(n) for n in released):
        parser.error("--draft-weights, --draft-vocab, --table-rows: are of flash_next")
    if args.draft_vocab is not None and args.draft_vocab < 1:
        parser.error(f"--draft-vocab: {args.draft_vocab} is not over 0")
    for given in args.run:
        for part in given.split(","):
            name, equals, value = part.partition("=")
            if name not in VARIED or not equals:
                parser.error(f"--run: {part!r} is not NAME=VALUE with one of {', '.join(VARIED)}")
            if value not in NAMES.get(name, (value,)):
                parser.error(f"--run: {part!r} is not one of {', '.join(NAMES[name])}")
    return args


def scenarios(args: argparse.Namespace) -> list[argparse.Namespace]:
    """The arguments of each run."""
    runs = []
    for given in args.run or [""]:
        one = copy.copy(args)
        for name, value in (part.split("=") for part in given.split(",") if part):
            number = float if name == "acceptance" else int
            setattr(one, name, value if name in NAMES else number(value))
        if one.acceptance is None:
            one.acceptance = 3.23 if one.draft == 3 else 1 + 0.74 * one.draft
        one.live = one.batch if one.live is None else one.live
        if not 1 <= one.live <= one.batch:
            raise SystemExit(f"--live: {one.live} is not in 1..{one.batch}, the batch")
        runs.append(one)
    return runs
