"""What keeps the Triton kernels of the n-gram embedding from given arguments."""

# tokens of a row: what earlier ones of them give to the convolution is computed again
MOST_PLACES = 16


def mix(key, value, streams, *norms_and_taps, **_) -> str | None:
    """Limits of `mix`."""
    places = streams.shape[1]
    if places > MOST_PLACES:
        return f"takes up to {MOST_PLACES} tokens of a row, not {places}"
    return None
