"""`python -m qwen4jax [DIR] PROMPT`: streams a continuation from a checkpoint directory."""

import argparse
import os
import sys
import time
from typing import Any

from qwen4jax.weights.embedded import embedded_checkpoint

# JAX and the model are imported once the command line is known to be right: they take seconds


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(
        prog="python -m qwen4jax",
        description="Continue a prompt with a qwen4_exp checkpoint.",
        usage="%(prog)s [DIR] PROMPT [options]",
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=26),
    )
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument(
        "model", metavar="DIR", nargs="?", help="Hugging Face checkpoint (the one that comes along)"
    )
    prompt.add_argument("text", metavar="PROMPT", nargs="?", help="text to continue; or one of")
    prompt.add_argument("--chat", metavar="MESSAGE", help="a user's message, by the chat template")
    prompt.add_argument("--ids", metavar="5,6,7", help="token ids; needs no tokenizer")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument("--max-new-tokens", metavar="N", type=int, default=128)
    sampling.add_argument("--temperature", metavar="T", type=float, default=0.0, help="0: greedy")
    sampling.add_argument("--top-k", metavar="K", type=int)
    sampling.add_argument("--top-p", metavar="P", type=float, default=1.0)
    sampling.add_argument("--seed", metavar="N", type=int, default=0)
    sampling.add_argument("--ignore-eos", action="store_true")
    model = parser.add_argument_group("model")
    model.add_argument("--dtype", choices=("bfloat16", "float32"), help="default: as stored")
    at, choices = "of n-grams: device, pinned or host (device)", ("device", "pinned", "host")
    model.add_argument("--table", metavar="PLACE", choices=choices, default="device", help=at)
    model.add_argument("--draft", metavar="N", type=int, help="tokens per round, 0 to 7 (3)")
    model.add_argument("--draft-weights", choices=("fp8", "nvfp4"), help="default: as stored")
    model.add_argument("--draft-vocab", metavar="N", type=int, help="draft among the N lowest ids")
    model.add_argument("--index-share", choices=("fresh", "share", "share_frozen"))
    args = parser.parse_args(argv)
    if args.ids is not None:
        try:
            args.ids = [int(x) for x in args.ids.split(",")]
        except ValueError:
            parser.error(f"--ids: {args.ids!r} is no list of integers")
    elsewhere = (args.ids is not None) + (args.chat is not None)
    if args.text is None and not elsewhere and args.model and not os.path.isdir(args.model):
        # a single word is a prompt, for there is a default model
        args.model, args.text = None, args.model
    if elsewhere + (args.text is not None) != 1:
        parser.error("give one of PROMPT, --chat and --ids")
    if args.model is None:
        try:
            args.model = str(embedded_checkpoint())
        except FileNotFoundError as error:
            parser.error(f"DIR: is not given, and {error}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Loads, streams, and prints what it took; returns the exit code."""
    args = parse(argv)
    from qwen4jax.decode.compiling import clock

    note = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    try:
        deltas, has_text, notes = _begin(args)
    # whatever is wrong with an argument or a file is one of the first two
    except (TypeError, ValueError, MemoryError) as error:
        note(f"qwen4jax: {error}")
        return 2
    for line in notes:
        note(line)
    note("compiling")
    began, tokens, bursts, reason, first = time.perf_counter(), 0, 0, None, 0.0
    try:
        for delta in deltas:
            if not bursts:
                note(f"compiled in {clock.seconds:.1f} s")
                first = time.perf_counter()
            tokens, bursts = tokens + len(delta.token_ids), bursts + 1
            reason = delta.finish_reason
            ids = "".join(f"{token} " for token in delta.token_ids)
            print(delta.text if has_text else ids, end="", flush=True)
    except KeyboardInterrupt:
        reason = "interrupted"
    print()
    end = time.perf_counter()
    note(
        f"{tokens} tokens ({reason}) in {end - began:.1f} s with compiling; decoding "
        f"{max(tokens - 1, 0) / max(end - first, 1e-9):.1f} tokens/s, "
        f"{max(tokens - 1, 0) / max(bursts - 1, 1):.2f} tokens per round"
    )
    return {"interrupted": 130, "error": 1}.get(str(reason), 0)


def _begin(args: argparse.Namespace) -> tuple[Any, bool, list[str]]:
    """Deltas to come, whether they have text, and lines about the checkpoint."""
    from qwen4jax.decode.generate import stream
    from qwen4jax.decode.options import Sampling
    from qwen4jax.decode.text import Tokenizer
    from qwen4jax.weights.load import load_and_report

    sampling = Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        seed=args.seed,
        max_new_tokens=args.max_new_tokens,
        ignore_eos=args.ignore_eos,
    )
    tokenizer = None if args.ids is not None else Tokenizer.load(args.model)
    params, report = load_and_report(
        args.model,
        dtype=args.dtype,
        table=args.table,
        draft_weights=args.draft_weights,
        draft_vocab=args.draft_vocab,
    )
    prompt = args.ids if args.ids is not None else args.text
    if args.chat is not None:
        prompt = [{"role": "user", "content": args.chat}]
    deltas = stream(
        params,
        prompt,
        sampling=sampling,
        draft=args.draft,
        index_share=args.index_share,
        tokenizer=tokenizer,
    )
    size = f"{report.tensors_read} tensors, {report.parameter_bytes / 1e6:.1f} MB"
    notes = [f"{args.model}: {size} in {report.seconds:.1f} s", *report.notes]
    return deltas, tokenizer is not None, notes


if __name__ == "__main__":
    sys.exit(main())
