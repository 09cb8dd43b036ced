"""The n-gram table at its full size in pinned host memory: filled, then gathered from at random.

    python -m bench.table                                # 51.2 GB, as an e4m3 checkpoint stores it
    python -m bench.table --tokens 4 --tokens 128 --compare
    python -m bench.table --rows-of-a-head 7000000       # 17.9 GB, for a run of limited time

The allocation takes longest: pages are cleared and pinned one after the other, and zeros copied
into them. The filling, by all cores and one block at a time while it is in their cache, is bound by
memory. What is printed says how far a run that was cut had come, and a line of results is kept as
soon as it is measured.

The table's pattern says each row's number. Token ids are random, so that every gathered row is a
read over the bus; 64 gathers with ids of their own are one CUDA graph, each waiting for the one
before, the graph is the body of a loop (`bench/timing.py`), and `us` is wall over gathers. Before
that the rows of every gather are compared with the pattern. `--compare` repeats all of it with the
table in device memory, which has to give the same bits. One JSON line per place and number of
tokens goes to `bench/results/<device>/table.jsonl`; `--peers` names the rows of
`bench.peers --op table`, to stand beside them.
"""

import argparse
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from bench import peers, timing
from bench.record import append, stamp
from qwen4jax.config import Config, Quantization
from qwen4jax.ngram import NgramHash
from qwen4jax.pallas.ple import embed, ngram_rows
from qwen4jax.params import declare, tensors
from qwen4jax.quant import ScaledTable
from qwen4jax.weights.placement import check_pinned, free_host_bytes, pinned_array

# gathers of a graph, and how often it goes round
CALLS, PASSES = 64, 16
# seconds between two words of a long filling
SAY_EVERY = 2.0
SCALE = 0.0123
DTYPE = jnp.bfloat16
# rows of the pattern: 2.6 MB, which stay in the cache of the thread that writes them
BLOCK = 1 << 14
# where the digits of a row's number begin, six bits each
_DIGITS = np.array((0, 6, 12, 18, 24), np.uint32)


def pattern_block(rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Random bytes [rows, width] that repeat through the table, none a NaN."""
    block = np.random.default_rng(seed).integers(0, 256, (rows, width), np.uint8)
    # 0x7f and 0xff are NaN
    block[block % 128 == 127] = 0
    return block


def number(part: np.ndarray, rows: np.ndarray) -> None:
    """Writes the numbers of rows into their first bytes, so that no two are alike."""
    part[..., : len(_DIGITS)] = rows[..., None].astype(np.uint32) >> _DIGITS & 63


def fill(memory: np.ndarray, block: np.ndarray) -> None:
    """Writes the pattern to all rows of e4m3 values; says how far it is, a few times."""
    stored = memory.view(np.uint8)
    begun, said = time.perf_counter(), time.perf_counter()

    def one(first: int) -> None:
        part = stored[first : first + len(block)]
        part[...] = block[: len(part)]
        number(part, np.arange(first, first + len(part)))

    firsts = range(0, len(stored), len(block))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for first, _ in zip(firsts, pool.map(one, firsts), strict=True):
            if time.perf_counter() - said > SAY_EVERY:
                said = time.perf_counter()
                done = first * stored.shape[1] / 1e9
                print(f"# {done:.1f} GB filled in {said - begun:.1f} s", flush=True)


def expected(rows: np.ndarray, block: np.ndarray) -> np.ndarray:
    """What a gather of these rows [B, T, heads] gives, float32 [B, T, heads * width]."""
    part = block[rows % len(block)]
    number(part, rows)
    scale = np.float32(ml_dtypes.bfloat16(SCALE))
    values = part.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    return values.astype(DTYPE).astype(np.float32).reshape(*rows.shape[:2], -1)


def gathers(table: ScaledTable, ids: list[jax.Array], hash: NgramHash, eos: int) -> Any:
    """`program(sinks, table, ids) -> results`: a gather for each of the ids [B, L].

    They are arrays of their own: parts of one would each be a kernel more.
    """

    def program(sinks, table, ids):
        def graph(_, last):
            del last
            results = []
            for own in ids:
                own, _ = jax.lax.optimization_barrier((own, results[-1:]))
                results.append(embed(table, own, hash, DTYPE, eos=eos))
            return results

        return jax.lax.fori_loop(0, PASSES, graph, sinks)

    one = jax.eval_shape(lambda t, i: embed(t, i, hash, DTYPE, eos=eos), table, ids[0])
    sinks = [jax.ShapeDtypeStruct(one.shape, one.dtype)] * len(ids)
    compiled = jax.jit(program, donate_argnums=0, keep_unused=True)
    return compiled.lower(sinks, table, ids).compile(timing.compile_options())


def measure(table: ScaledTable, tokens: int, config: Config, block: np.ndarray) -> dict:
    """Compares and times gathers of `tokens` tokens; raises SystemExit where a row is wrong."""
    hash, eos = config.ngram_hash(0), config.hash_eos_token_id
    history = config.ngram_size - 1
    shape = (CALLS, 1, history + tokens)
    ids = list(jax.random.randint(jax.random.key(tokens), shape, 0, config.vocab_size, jnp.int32))
    begun = time.perf_counter()
    program = gathers(table, ids, hash, eos)
    print(f"# {tokens} tokens: compiled in {time.perf_counter() - begun:.1f} s", flush=True)
    empty = lambda: [jnp.zeros((1, tokens, config.ple_embed_dim), DTYPE) for _ in range(CALLS)]  # noqa: E731
    got = program(empty(), table, ids)
    for own, result in zip(ids, got, strict=True):
        rows = np.asarray(ngram_rows(own, hash, eos=eos, implementation="reference"))
        if not np.array_equal(np.asarray(result, np.float32), expected(rows, block)):
            raise SystemExit(f"{tokens} tokens: gathered rows differ from the table's")
    measured = timing.per_call(lambda sinks: program(sinks, table, ids), empty(), CALLS * PASSES)
    nbytes = tokens * config.ple_embed_dim
    return {
        "tokens": tokens,
        "us": round(measured.us, 2),
        "host_us": round(measured.host_us, 2),
        "bytes": nbytes,
        "gb_per_s": round(nbytes / measured.us / 1e3, 2),
    }


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    config = Config.flash_next(
        ngram_vocab_size_base=args.rows_of_a_head,
        quantization=Quantization(ngram_embedding="fp8"),
    )
    (declared,) = (t for t in tensors(declare(config)) if t.axes[:1] == ("ngram_rows",))
    device = jax.devices()[0]
    check_pinned([declared], device.platform)
    block = pattern_block(BLOCK, declared.shape[1])
    before = free_host_bytes(), _in_use(device)
    begun = time.perf_counter()
    print(f"# {declared.nbytes / 1e9:.1f} GB to allocate", flush=True)
    array, memory = pinned_array(declared.shape, jnp.dtype(declared.dtype), device)
    allocated = time.perf_counter()
    print(f"# allocated in {allocated - begun:.1f} s", flush=True)
    fill(memory, block)
    filled = time.perf_counter()
    print(f"# filled in {filled - allocated:.1f} s", flush=True)
    common = {
        "rows": declared.shape[0],
        "table_bytes": memory.nbytes,
        "allocate_s": round(allocated - begun, 2),
        "fill_s": round(filled - allocated, 2),
        "host_bytes_free": [before[0], free_host_bytes()],
        "device_bytes_in_use": [before[1], _in_use(device)],
    }
    places = {"pinned": lambda: array}
    found = peers.load(args.peers) if args.peers else []
    if args.compare:
        places["device"] = lambda: jax.device_put(array, jax.sharding.SingleDeviceSharding(device))
    for place, get in places.items():
        table = ScaledTable(get(), jnp.asarray(SCALE, DTYPE))
        for tokens in args.tokens or [4, 128]:
            line = {"table": place} | measure(table, tokens, config, block) | common | stamp()
            wanted = peers.terms("table", f"released_{tokens}", tokens)
            line["peer"], line["peer_us"] = peers.best(found, wanted)
            append([line], "table.jsonl", args.out)
            print(line, flush=True)
        del table


def _in_use(device: Any) -> int | None:
    return (device.memory_stats() or {}).get("bytes_in_use")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rows-of-a-head", type=int, default=20_000_000, help="of 16 heads")
    parser.add_argument(
        "--tokens", type=int, action="append", help="of a gather; by default 4, 128"
    )
    parser.add_argument("--peers", type=Path, help="JSON of the peers; by default none")
    parser.add_argument("--compare", action="store_true", help="with the table on the device, too")
    parser.add_argument("--out", help="folder of table.jsonl; by default bench/results/<device>")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
