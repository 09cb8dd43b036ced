"""How a Triton kernel is handed to XLA: which parameters it has, and in which order."""

import jax.numpy as jnp
import pytest

from qwen4jax.pallas.gated_delta.triton_commit import commit_layers_kernel
from qwen4jax.pallas.skinny_matmul.triton_kernels import _projections
from qwen4jax.pallas.triton_call import _with_idle_pointer, source, takes, triton_call

POINTER = "!tt.ptr<{}> {{tt.divisibility = 16 : i32}}"
A, B, C = (f"%arg{i}: {POINTER.format(kind)}" for i, kind in enumerate(("bf16", "f32", "i32")))
TEXT = "module {{ tt.func public @name({}) attributes {{noinline = false}} {{ tt.return }} }}"


@pytest.mark.parametrize(
    ("place", "expected"),
    [(0, "{new}, {a}, {b}, {c}"), (2, "{a}, {b}, {new}, {c}"), (3, "{a}, {b}, {c}, {new}")],
)
def test_a_shared_result_has_an_idle_pointer_in_its_place(place: int, expected: str):
    """XLA passes operands, then results, those in an operand's memory too."""
    new = f"%idle{place}: {POINTER.format('f8E4M3FN')}"
    given = TEXT.format(f"{A}, {B}, {C}")
    want = TEXT.format(expected.format(new=new, a=A, b=B, c=C))
    assert _with_idle_pointer(given, place, "float8_e4m3fn") == want


def test_parameters_that_do_not_fit_are_named():
    constants = dict(ROWS=1, K=128, N0=16, N1=0, N2=0, N3=0, STAGES=2)
    constants |= dict(BLOCK_ROWS=8, BLOCK_N=16, BLOCK_K=64)
    fits = tuple(sorted(constants.items()))
    assert source(_projections, ("bfloat16",) * 9, fits).constants
    with pytest.raises(TypeError, match="8 arrays for the parameters x, w0, w1"):
        source(_projections, ("bfloat16",) * 8, fits)
    with pytest.raises(TypeError, match="no parameter BLOCK"):
        source(_projections, ("bfloat16",) * 9, (*fits, ("BLOCK", 1)))


def test_parameters_of_several_arrays_share_what_is_left():
    """Six of the layers' arrays, and the counts, which are one."""
    names = ["state", "conv", "window", "key", "delta", "decay", "count"]
    assert takes(commit_layers_kernel, names, 6 * 3 + 1) == [3] * 6 + [None]
    for arrays in (1, 6, 6 * 3 + 2):
        with pytest.raises(TypeError, match=f"{arrays} arrays for the parameters state, conv"):
            takes(commit_layers_kernel, names, arrays)


def test_outside_of_a_gpu_it_says_so():
    x = jnp.zeros((1, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="toy is a Triton kernel and was compiled for"):
        triton_call(x, kernel=_projections, name="toy", out=x, grid=(1,))
