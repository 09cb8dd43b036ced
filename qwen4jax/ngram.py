"""Constants of the n-gram hash of the per-layer embedding (PLE), derived from the configuration.

Source: the reference implementation `transformers.models.qwen4_exp` (class
`Qwen4ExpTextNGramEmbedding`); checkpoints store the same numbers in three int64 buffers, which the
loader compares with these.
"""

import dataclasses
import math

_MASK64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_LAYER_SEED_STRIDE = 10007


@dataclasses.dataclass(frozen=True)
class NgramHash:
    """How token ids become rows of one PLE layer's table.

    With `c[0]` the current id and `c[i]` the id `i` places before it, order `n` mixes
    `m = c[0]*multipliers[0] ^ ... ^ c[n-1]*multipliers[n-1]`, and head `h` of that order reads row
    `m % head_sizes[h] + head_offsets[h]`. Heads are ordered bigrams first, then trigrams, ...

    Attributes:
        multipliers: one odd 63-bit number per place in the n-gram; `id * multiplier < 2**63` for
            every id of the vocabulary.
        head_sizes: one prime per head, `(ngram_size - 1) * heads_per_ngram` of them.
        head_offsets: first row of each head.
        rows: rows of the table, padded.
        heads_per_ngram: heads of each n-gram order.
    """

    multipliers: tuple[int, ...]
    head_sizes: tuple[int, ...]
    head_offsets: tuple[int, ...]
    rows: int
    heads_per_ngram: int

    @property
    def ngram_size(self) -> int:
        """Tokens of the longest n-gram."""
        return len(self.multipliers)


def ngram_hash(
    *,
    vocab_size: int,
    ngram_size: int,
    heads_per_ngram: int,
    ngram_vocab_size_base: int,
    divisible_by: int,
    seed: int,
    ple_index: int,
) -> NgramHash:
    """The hash of the `ple_index`-th PLE layer (from 0)."""
    heads = (ngram_size - 1) * heads_per_ngram
    primes = _primes_from(ngram_vocab_size_base, (ple_index + 1) * heads)
    head_sizes = tuple(primes[ple_index * heads :])
    offsets = tuple(sum(head_sizes[:h]) for h in range(heads))
    return NgramHash(
        multipliers=_multipliers(vocab_size, ngram_size, seed + _LAYER_SEED_STRIDE * ple_index),
        head_sizes=head_sizes,
        head_offsets=offsets,
        rows=math.ceil(sum(head_sizes) / divisible_by) * divisible_by,
        heads_per_ngram=heads_per_ngram,
    )


def _multipliers(vocab_size: int, count: int, seed: int) -> tuple[int, ...]:
    # bounded so that id * multiplier stays below 2**63: signed and unsigned readers then agree
    half = max(1, ((1 << 63) - 1) // max(vocab_size, 1) // 2)
    return tuple(2 * (_splitmix64(seed + _GOLDEN_GAMMA * (i + 1)) % half) + 1 for i in range(count))


def _splitmix64(value: int) -> int:
    """One output of the splitmix64 generator (Steele, Lea and Flood, OOPSLA 2014)."""
    z = (value + _GOLDEN_GAMMA) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def _primes_from(start: int, count: int) -> list[int]:
    primes: list[int] = []
    candidate = max(start, 2)
    while len(primes) < count:
        if all(candidate % d for d in range(2, math.isqrt(candidate) + 1)):
            primes.append(candidate)
        candidate += 1
    return primes
