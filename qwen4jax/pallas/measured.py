"""What measured fastest, by kind of device: the preferences behind `registry`.

A row (most rows, names) holds for calls of up to that many rows; the names are tried in order, and
the reference after them. Every entry follows from lines of `bench/results/<device>/kernels.jsonl`.
"""

Rows = tuple[tuple[int, tuple[str, ...]], ...]

# one query row for each of up to 32 requests, and up to four; above them are chunks of prompts
_DECODE, _VERIFY = 32, 128
ANY = 1 << 30
_TRITON: Rows = ((ANY, ("triton",)),)
# for more rows cuBLAS and XLA
_FEW_TRITON: Rows = ((_DECODE, ("triton",)),)

# pattern of the device kind -> operation -> rows
FASTEST: dict[str, dict[str, Rows]] = {
    r"H200": {
        "skinny_matmul": _FEW_TRITON,
        "skinny_matmul.projections": _FEW_TRITON,
        "skinny_matmul.argmax": ((_DECODE, ("triton", "separate")),),
        # a Mosaic kernel of more rows is faster alone, but brings a memset, and every call of it in
        # a round is compiled by itself
        "gated_residual.boundary": ((8, ("triton_few", "triton")), (ANY, ("triton",))),
        "moe.router": ((_DECODE, ("triton", "separate")), (ANY, ("separate",))),
        "moe.route": _TRITON,
        "moe.experts": ((_VERIFY, ("triton", "triton_sorted")), (ANY, ("triton_sorted",))),
        "index_score": _TRITON,
        "index_topk": _TRITON,
        # consecutive queries of a prompt select much in common
        "sparse_attention": ((_VERIFY, ("triton",)), (ANY, ("triton_together", "triton"))),
        "compress_and_store.prepare_and_store": _TRITON,
        "ple.embed": _TRITON,
        "ple.mix": _FEW_TRITON,
        "gated_delta.step": ((_VERIFY, ("triton",)),),
        "gated_delta.commit": _FEW_TRITON,
        "gated_delta.chunks": _TRITON,
    }
}
