"""What measured fastest, by kind of device: the preferences behind `registry`.

A row (most rows, names) holds for calls of up to that many rows; the names are tried in order, and
the reference after them. Every entry follows from lines of `bench/results/<device>/kernels.jsonl`.
"""

# pattern of the device kind -> operation -> rows
FASTEST: dict[str, dict[str, tuple[tuple[int, tuple[str, ...]], ...]]] = {}
