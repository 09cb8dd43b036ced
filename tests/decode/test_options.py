"""Every rule about a request's options."""

import math
from typing import Any

import numpy as np
import pytest

from qwen4jax.decode.options import Row, Sampling, make_controls

VOCAB = 16

BAD = [
    *[("temperature", v) for v in (-1, math.nan, math.inf, True, "1", None, 1e31)],
    *[("top_k", v) for v in (-1, 2.0, True, "5", math.nan, 2**31)],
    *[("top_p", v) for v in (0, -0.1, 1.5, math.nan, None, True)],
    *[("min_p", v) for v in (-0.1, 1.1, math.nan, None)],
    *[("repetition_penalty", v) for v in (0, -1, math.nan, math.inf, False)],
    *[("presence_penalty", v) for v in (math.nan, math.inf, 1e5, True)],
    *[("frequency_penalty", v) for v in (math.nan, -math.inf, -1e5, "0")],
    *[("logit_bias", v) for v in (None, 5, "ab", {-1: 0.0}, {1.5: 0.0}, {True: 1.0}, {2**31: 1.0})],
    *[("logit_bias", {1: v}) for v in (math.nan, math.inf, 1e5, "x", True, None)],
    *[("seed", v) for v in (-1, 2**64, 1.0, True)],
    *[("max_new_tokens", v) for v in (0, -1, 2**31, 1.5, None, True)],
    *[("min_new_tokens", v) for v in (-1, 1.5, None, 257)],
    *[("stop", v) for v in ("", ("a", ""), 5, (5,), None, b"x", {"a"})],
    *[("stop_ids", v) for v in (5, (-1,), (True,), (1.0,), "12", None, {1}, (2**31,))],
    *[("ignore_eos", v) for v in (1, None, "yes")],
    *[("n", v) for v in (0, -1, 1.0, True, None)],
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_smp_08_a_bad_option_is_an_error_that_names_it(name: str, value: Any):
    """SMP-08: refused when the options are made, whatever is wrong with them."""
    with pytest.raises(ValueError, match=f"^{name}"):
        Sampling(**{name: value})


def test_smp_08_contradictions_are_errors():
    """SMP-08: min_new_tokens above max_new_tokens; several samples of a greedy request."""
    with pytest.raises(ValueError, match=r"^min_new_tokens"):
        Sampling(min_new_tokens=6, max_new_tokens=5)
    with pytest.raises(ValueError, match=r"^n="):
        Sampling(temperature=0, n=2)
    with pytest.raises(ValueError, match="ban every id"):
        Sampling(logit_bias=dict.fromkeys(range(4), -math.inf)).validate_for(4)
    with pytest.raises(ValueError, match="ban every id"):
        Sampling(min_new_tokens=1, stop_ids=(0, 1, 2)).validate_for(4, eos_ids=(3,))
    Sampling(min_new_tokens=1, stop_ids=(0, 1, 2), ignore_eos=True).validate_for(4, eos_ids=(3,))


def test_smp_08_values_at_the_edge_are_accepted():
    """SMP-08: what each edge means."""
    off = Sampling(top_k=None, seed=None)
    assert (off.top_k, off.seed) == (0, 0)
    assert off == Sampling(top_k=0, seed=0)
    assert hash(off) == hash(Sampling())
    for top_k in (VOCAB, VOCAB + 1):
        Sampling(top_k=top_k).validate_for(VOCAB)
        controls = make_controls([Row(Sampling(top_k=top_k), 1)], 1, VOCAB)
        assert controls.top_k is None
    bias: Any = {np.int64(2): np.float32(1)}
    few = Sampling(stop_ids=[4, 4, 5], stop="x", logit_bias=bias)
    assert (few.stop_ids, few.stop, few.logit_bias) == ((4, 4, 5), ("x",), ((2, 1.0),))
    assert few.stops((1,)) == (1, 4, 5)
    assert Sampling(ignore_eos=True, stop_ids=(4,)).stops((1,)) == (4,)
    many = Sampling(stop_ids=tuple(range(100)))
    assert make_controls([Row(many, 1)], 1, 128, eos_ids=(127,)).stop_ids.shape == (1, 128)
    assert make_controls([Row(Sampling(), 1)], 1, VOCAB).stop_ids.tolist() == [[-1] * 4]
