"""`python -m qwen4jax.serve.client "prompt"`: streams an answer of a server."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from qwen4jax.serve.client import Client
from qwen4jax.serve.client_values import Finish, ServerError

# flags that are sampling options of the same name
_SAMPLING = ("temperature", "top_k", "top_p", "seed", "max_new_tokens", "stop", "ignore_eos")


def main(argv: list[str] | None = None) -> int:
    """Streams; returns the exit code: 0, 1 for a status of the server, 130 if interrupted."""
    args = _parse(argv)
    token = args.token_file and args.token_file.read_text().split()[0]
    options = {name: value for name in _SAMPLING if (value := getattr(args, name)) is not None}
    note = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    began, finish = time.perf_counter(), None
    with Client(
        args.target, token=token, tls_ca=args.tls_ca, tls_cert=args.tls_cert, tls_key=args.tls_key
    ) as client:
        try:
            for chunk in client.stream(_prompt(args), timeout=args.timeout, **options):
                ids = "".join(f"{token} " for token in chunk.token_ids)
                print(chunk.text if args.ids is None else ids, end="", flush=True)
                finish = chunk.finish
        except ServerError as error:
            print()
            note(f"qwen4jax.serve.client: {error} (request {error.request_id})")
            return 1
        except KeyboardInterrupt:
            print()
            return 130
    print()
    if finish is not None:
        note(_summary(finish, time.perf_counter() - began))
    return 0


def _prompt(args: argparse.Namespace) -> Any:
    if args.ids is not None:
        return args.ids
    if args.chat is not None:
        return [{"role": "user", "content": args.chat}]
    return args.text


def _summary(finish: Finish, seconds: float) -> str:
    speed = (finish.completion_tokens - 1) / max(finish.decode_seconds, 1e-9)
    rate = "" if finish.tokens_per_round is None else f", {finish.tokens_per_round:.2f} per round"
    return (
        f"{finish.completion_tokens} tokens ({finish.reason}) in {seconds:.2f} s: "
        f"queue {finish.queue_seconds:.3f}, prefill {finish.prefill_seconds:.3f}, "
        f"{speed:.1f} tokens/s{rate}; seed {finish.seed}"
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m qwen4jax.serve.client",
        description="Stream an answer of a qwen4jax server.",
        usage="%(prog)s PROMPT [options]",
    )
    prompt = parser.add_argument_group("prompt")
    prompt.add_argument("text", metavar="PROMPT", nargs="?", help="text to continue; or one of")
    prompt.add_argument("--chat", metavar="MESSAGE", help="a user's message")
    prompt.add_argument("--ids", metavar="5,6,7", type=_ids, help="token ids")
    sampling = parser.add_argument_group("sampling (as the server says, if not given)")
    sampling.add_argument("--max-new-tokens", metavar="N", type=int)
    sampling.add_argument("--temperature", metavar="T", type=float, help="0: greedy")
    sampling.add_argument("--top-k", metavar="K", type=int)
    sampling.add_argument("--top-p", metavar="P", type=float)
    sampling.add_argument("--seed", metavar="N", type=int)
    sampling.add_argument("--stop", metavar="TEXT", action="append")
    sampling.add_argument("--ignore-eos", action="store_true", default=None)
    server = parser.add_argument_group("server")
    server.add_argument("--target", metavar="HOST:PORT", default="127.0.0.1:50051")
    server.add_argument("--timeout", metavar="S", type=float, help="deadline of the call")
    server.add_argument("--token-file", metavar="FILE", type=Path, help="its first word is sent")
    server.add_argument("--tls-ca", metavar="FILE", type=Path, help="PEM: the server's authority")
    server.add_argument("--tls-cert", metavar="FILE", type=Path, help="PEM: own certificate")
    server.add_argument("--tls-key", metavar="FILE", type=Path, help="PEM: its private key")
    args = parser.parse_args(argv)
    if sum(value is not None for value in (args.text, args.chat, args.ids)) != 1:
        parser.error("give one of PROMPT, --chat and --ids")
    return args


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
