"""What the benchmark of the public kernels times."""


def kinds() -> set[tuple[str, str]]:
    """(group, case) of each row that `bench_peers.py` prints at full length."""
    found: set[tuple[str, str]] = set()

    def add(groups: str, *cases: str) -> None:
        found.update((group, case) for group in groups.split() for case in cases)

    add("mix combine norm chain", *(f"{n} rows" for n in (1, 4, 16, 32, 128, 256, 2048)))
    for queries, lengths in ((4, (4, 16, 56, 256)), (1, (4, 16, 64, 256))):
        at = [f"{r} req x {queries} q, {k}k tokens" for r in (1, 32) for k in lengths]
        add("qsa_score qsa_topk qsa_both", *at)
        add("qsa_slots", *(case for case in at if "56k" in case or "64k" in case))
    add("qsa_prep", *(f"{n} rows ({n // q} req x {q})" for n, q in ((1, 1), (4, 4), (32, 1))))
    add("qsa_prep", "128 rows (32 req x 4)")
    for rank, heads, key, value in (("TP1", "24q/2kv", 16, 48), ("TP4", "6q/1kv", 4, 12)):
        add("attention", *(f"{rank} {heads}, {n} rows" for n in (1, 4, 16, 128)))
        for batch in (1, 4, 16, 32):
            at = f"{rank} {key}k/{value}v, batch {batch}"
            add("gdn", f"{at}, decode", f"{at}, verify 4")
            add("gdn_norm", *(f"{rank} {value}v, {batch * n} tokens" for n in (1, 4)))
        add("gdn", *(f"{rank} batch {n}, commit 3 of 4, 36 layers" for n in (1, 4)))
        add("gdn_prefill", f"{rank} {key}k/{value}v, 8192 tokens")
    for requests, length in ((1, 1), (1, 4), (4, 4), (32, 4)):
        tokens = requests * length
        at = f"{tokens} tokens ({requests} req x {length})"
        add("ple_ids ple_proj ple_gate ple_conv ple_chain", at)
        add("ple_gather", f"{at} fp8", f"{at} bf16")
        sizes = ("0.5", "2", "8", "16", "32")
        add("ple_scale", *(f"{tokens} tokens, fp8 table {gib} GiB" for gib in sizes))
    rows = (1, 4, 16, 64, 128)
    # two of which a measurement of 30 November 2026 added
    added = (32, 8192)
    add("moe_bf16 moe_fp8 moe_int8 moe_4bit", *(f"TP1 inter 640, {n} rows" for n in rows + added))
    add("moe_bf16", *(f"TP4 inter 160, {n} rows" for n in rows))
    return found
