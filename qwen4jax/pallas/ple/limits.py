"""What keeps the Triton kernels of the n-gram embedding from given arguments."""

from qwen4jax.host_table import HostTable
from qwen4jax.quant import ScaledTable

# tokens of a row: what earlier ones of them give to the convolution is computed again
MOST_PLACES = 16


def gather(table, *_, **__) -> str | None:
    """Limits of `gather` and `embed`."""
    weight = table.weight if isinstance(table, ScaledTable) else table
    return "reads arrays, not a HostTable" if isinstance(weight, HostTable) else None


def mix(key, value, streams, *norms_and_taps, **_) -> str | None:
    """Limits of `mix`."""
    places = streams.shape[1]
    if places > MOST_PLACES:
        return f"takes up to {MOST_PLACES} tokens of a row, not {places}"
    return None
