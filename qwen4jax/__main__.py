"""`python -m qwen4jax DIR PROMPT`: streams a continuation from a checkpoint directory."""

import argparse
import sys
import time
from pathlib import Path

from qwen4jax.config import ConfigError
from qwen4jax.decode.chat import TokenizerError
from qwen4jax.decode.compiling import clock
from qwen4jax.decode.generate import stream
from qwen4jax.decode.sampling import Sampling
from qwen4jax.decode.text import Tokenizer
from qwen4jax.weights.errors import CheckpointError
from qwen4jax.weights.load import load_and_report


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m qwen4jax", description="Continue a prompt with a qwen4_exp checkpoint."
    )
    parser.add_argument("model", metavar="DIR", type=Path, help="Hugging Face checkpoint directory")
    prompt = parser.add_argument_group("prompt (one of)")
    prompt.add_argument("text", metavar="PROMPT", nargs="?", help="text to continue")
    prompt.add_argument("--chat", metavar="MESSAGE", help="a user's message, by the chat template")
    prompt.add_argument("--ids", metavar="5,6,7", help="token ids; needs no tokenizer")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", type=int, default=128)
    sampling.add_argument("--temperature", type=float, default=0.0, help="default 0: greedy")
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--seed", type=int, default=0)
    sampling.add_argument("--ignore-eos", action="store_true")
    model = parser.add_argument_group("model")
    model.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: as stored")
    model.add_argument("--draft", type=int, help="draft tokens per round, 0 to 7 (default 3)")
    model.add_argument("--index-share", choices=("fresh", "share", "share_frozen"))
    args = parser.parse_args(argv)
    if sum(x is not None for x in (args.text, args.chat, args.ids)) != 1:
        parser.error("give one of PROMPT, --chat and --ids")
    try:
        args.ids = None if args.ids is None else [int(x) for x in args.ids.split(",")]
    except ValueError:
        parser.error(f"--ids: {args.ids!r} is no list of integers")
    return args


def main(argv: list[str] | None = None) -> int:
    """Loads, streams, and prints what it took; returns the exit code."""
    args = parse(argv)
    note = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    try:
        sampling = Sampling(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
            max_new_tokens=args.max_new_tokens,
            ignore_eos=args.ignore_eos,
        )
        tokenizer = None if args.ids else Tokenizer.load(args.model)
        params, report = load_and_report(args.model, dtype=args.dtype)
        prompt = args.ids or args.text or [{"role": "user", "content": args.chat}]
        deltas = stream(
            params,
            prompt,
            sampling=sampling,
            draft=args.draft,
            index_share=args.index_share,
            tokenizer=tokenizer,
        )
    except (CheckpointError, ConfigError, TokenizerError, TypeError, ValueError) as error:
        note(f"qwen4jax: {error}")
        return 2
    note(
        f"{args.model}: {report.tensors_read} tensors, {report.parameter_bytes / 1e6:.1f} MB"
        f" in {report.seconds:.1f} s"
    )
    for line in report.notes:
        note(line)
    note("compiling")
    began, tokens, bursts, first = time.perf_counter(), 0, 0, 0.0
    for delta in deltas:
        if not bursts:
            note(f"compiled in {clock.seconds:.1f} s")
            first = time.perf_counter()
        tokens, bursts = tokens + len(delta.token_ids), bursts + 1
        print(delta.text or " ".join(map(str, delta.token_ids)), end="" if tokenizer else " ")
        sys.stdout.flush()
    print()
    seconds = time.perf_counter() - first
    note(
        f"{tokens} tokens in {time.perf_counter() - began:.1f} s with compiling; decoding "
        f"{(tokens - 1) / max(seconds, 1e-9):.1f} tokens/s, "
        f"{(tokens - 1) / max(bursts - 1, 1):.2f} tokens per round"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
