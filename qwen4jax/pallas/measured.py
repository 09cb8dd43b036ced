"""What measured fastest, by kind of device: the preferences behind `registry`.

A row (most rows, names) holds for calls of up to that many rows; the names are tried in order, and
the reference after them. Every entry follows from lines of `bench/results/<device>/kernels.jsonl`,
or, where the rest of a round decides, from rounds in `choices.jsonl` beside it.
A kind that nobody has measured, but that the kernels compile for, borrows the rows of one that was
(`BORROWED`), until somebody runs `python -m bench.kernels --released` there.
"""

import re

Rows = tuple[tuple[int, tuple[str, ...]], ...]

# one query row for each of up to 32 requests, and up to four; above them are chunks of prompts
_DECODE, _VERIFY = 32, 128
ANY = 1 << 30
_TRITON: Rows = ((ANY, ("triton",)),)
# for more rows cuBLAS and XLA
_FEW_TRITON: Rows = ((_DECODE, ("triton",)),)

# device kind, as JAX names it -> operation -> rows
FASTEST: dict[str, dict[str, Rows]] = {
    "NVIDIA H200": {
        # four streams for each row go into the draft head
        "skinny_matmul": ((4 * _VERIFY, ("triton",)),),
        "skinny_matmul.projections": ((_VERIFY, ("triton",)),),
        "skinny_matmul.argmax": ((_VERIFY, ("triton", "separate")),),
        # a Mosaic kernel of more rows is faster alone, but brings a memset, and every call of it in
        # a round is compiled by itself
        "gated_residual.boundary": (
            (8, ("triton_one", "triton_few", "triton")),
            (512, ("triton",)),
            (ANY, ("triton_many", "triton")),
        ),
        # up to 32 rows a launch less, which rounds show and single calls do not (`choices.jsonl`)
        "moe.router": ((_VERIFY, ("triton", "separate")), (ANY, ("separate",))),
        "moe.route": _TRITON,
        # FP8 and bfloat16 in Mosaic, NVFP4 in Triton
        "moe.experts": (
            (_VERIFY, ("mosaic_hopper", "triton", "triton_sorted")),
            (ANY, ("triton_sorted",)),
        ),
        "index_score": _TRITON,
        "index_topk": _TRITON,
        # consecutive queries of a prompt select much in common
        "sparse_attention": ((_VERIFY, ("triton",)), (ANY, ("triton_together", "triton"))),
        "compress_and_store.prepare_and_store": _TRITON,
        "ple.embed": _TRITON,
        "ple.mix": _FEW_TRITON,
        "gated_delta.step": ((_VERIFY, ("triton",)),),
        "gated_delta.commit": _FEW_TRITON,
        "gated_delta.chunks": ((ANY, ("mosaic_hopper", "triton")),),
    }
}

# patterns of kinds: with wgmma, and after them
HOPPER, BLACKWELL = r"H100|H200|H800|H20\b", r"B[23]00"
# pattern of kinds without rows of their own -> whose they take: data-center GPUs from Hopper on,
# which have the H200's 227 KB of shared memory for a program; consumers' Blackwell GPUs have 99
BORROWED = {f"{HOPPER}|{BLACKWELL}": "NVIDIA H200"}


def source(device: str) -> str | None:
    """The kind of device whose measurements decide on this one: its own, another's, or none."""
    if device in FASTEST:
        return device
    return next((kind for names, kind in BORROWED.items() if re.search(names, device)), None)


def rows_of(device: str, operation: str) -> Rows:
    """What is preferred for an operation on a kind of device; empty where nothing is known."""
    kind = source(device)
    return FASTEST[kind].get(operation, ()) if kind else ()
