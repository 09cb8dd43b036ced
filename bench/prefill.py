"""Times a prefill chunk of one request at the released widths, with random weights.

    python -m bench.prefill --layers 8 --chunk 2048 --context 60000

The slot holds `--context` random tokens; a chunk is fed behind them again and again, `ms` is the
median of wall times, each waited for. Parts come from a profile of one chunk, as in `bench.decode`.
With fewer than 48 layers the rest of the model (head, embedding, draft head) counts once all the
same. One JSON line goes to `bench/results/<device>/prefill.jsonl`.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from bench.profile import device_kernels, op_names, time_by_part
from bench.record import append, stamp
from bench.released import build, filled_state, released_config, state_shapes, tiny_config
from qwen4jax.config import Config
from qwen4jax.decode.prefill import prefill_chunk
from qwen4jax.state import DecodeState

CALLS = 7


def measure(config: Config, chunk: int, context: int, profile: bool) -> dict:
    """Everything a result line says but where it was measured."""
    begun = time.perf_counter()
    params = build(config)
    print(f"# built in {time.perf_counter() - begun:.1f} s", flush=True)
    shapes = state_shapes(config, batch=1, context=context, drafts=3, kv_dtype=None, room=chunk)
    tokens = jax.random.randint(jax.random.key(0), (1, chunk), 0, config.vocab_size, jnp.int32)
    fed = jnp.zeros(1, jnp.int32), tokens, jnp.full(1, chunk, jnp.int32)
    state = filled_state(config, shapes, context)
    begun = time.perf_counter()
    program = prefill_chunk.lower(params, state, *fed).compile()
    compile_s = time.perf_counter() - begun
    print(f"# compiled in {compile_s:.1f} s", flush=True)

    def call(state: DecodeState) -> DecodeState:
        state, _ = program(params, state, *fed)
        return state.replace(length=0 * state.length + context)

    state = jax.block_until_ready(call(state))
    walls = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        state = jax.block_until_ready(call(state))
        walls.append(time.perf_counter() - begun)
    print(f"# {statistics.median(walls) * 1e3:.3f} ms, before its profile", flush=True)
    parts = {}
    if profile:
        scopes = op_names(program.as_text() or "")
        found, _ = time_by_part(device_kernels(call, state, rounds=1), scopes, rounds=1)
        for (name, _), ms in found.items():
            parts[name] = round(parts.get(name, 0) + ms, 3)
    ms = statistics.median(walls) * 1e3
    return {
        "config": f"layers={config.num_hidden_layers} experts={config.quantization.experts}",
        "chunk": chunk,
        "context": context,
        "ms": round(ms, 3),
        "tokens_per_s": round(chunk / ms * 1e3),
        "compile_s": round(compile_s, 1),
        "parts_ms": dict(sorted(parts.items(), key=lambda item: -item[1])),
    }


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    config = tiny_config() if args.config == "tiny" else released_config(layers=args.layers)
    line = measure(config, args.chunk, args.context, jax.default_backend() != "cpu") | stamp()
    append([line], "prefill.jsonl", args.out)
    print(line, flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--config", choices=("flash_next", "tiny"), default="flash_next")
    parser.add_argument("--layers", type=int, default=8, help="of flash_next; a multiple of 4")
    parser.add_argument("--chunk", type=int, default=2048, help="tokens, up to 8,192")
    parser.add_argument("--context", type=int, default=60000, help="tokens in the slot before")
    parser.add_argument("--out", help="folder of prefill.jsonl; by default bench/results/<device>")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
