"""What measured fastest, by kind of device: the preferences behind `registry`.

A row (most rows, names) holds for calls of up to that many rows; the names are tried in order, and
the reference after them. Every entry follows from lines of `bench/results/<device>/kernels.jsonl`.
"""

Rows = tuple[tuple[int, tuple[str, ...]], ...]

# one query row for each of up to 32 requests, and up to four
_DECODE, _VERIFY = 32, 128

# pattern of the device kind -> operation -> rows
FASTEST: dict[str, dict[str, Rows]] = {
    r"H200": {
        "skinny_matmul": ((_VERIFY, ("triton",)),),
        "skinny_matmul.projections": ((_VERIFY, ("triton",)),),
        "gated_residual.boundary": ((_DECODE, ("mosaic_hopper", "triton")), (_VERIFY, ("triton",))),
        "moe.route": ((_VERIFY, ("triton",)),),
        "moe.experts": ((_VERIFY, ("triton",)),),
        "index_score": ((_VERIFY, ("triton",)),),
        "index_topk": ((_VERIFY, ("triton",)),),
        "sparse_attention": ((_VERIFY, ("triton",)),),
        "compress_and_store.prepare_and_store": ((_VERIFY, ("triton",)),),
        "gated_delta.step": ((_VERIFY, ("triton",)),),
        "gated_delta.commit": ((_DECODE, ("triton",)),),
        "ple.embed": ((_VERIFY, ("triton",)),),
        "ple.mix": ((_VERIFY, ("triton",)),),
    }
}
