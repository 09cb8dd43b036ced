"""The n-gram table in host memory: pinned, read by the GPU where it lies, and by a call back."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from qwen4jax.host_table import HostTable
from qwen4jax.pallas.ple import embed, ngram_rows
from qwen4jax.pallas.ple.cases import TENTH_HASH
from qwen4jax.quant import ScaledTable
from qwen4jax.weights.placement import pinned_array

EOS, WIDTH = 248044, 160


def test_rows_of_a_pinned_table_are_those_of_the_host():
    """5 GB: any row number of 31 bits, offsets past 32 bits."""
    rng = np.random.default_rng(0)
    block = rng.integers(0, 256, (1 << 20, WIDTH), np.uint8)
    # 0x7f and 0xff are NaN
    block[block % 128 == 127] = 0
    array, memory = pinned_array(
        (TENTH_HASH.rows, WIDTH), ml_dtypes.float8_e4m3fn, jax.devices()[0]
    )
    stored = memory.view(np.uint8)
    for first in range(0, len(stored), len(block)):
        part = stored[first : first + len(block)]
        part[...] = block[: len(part)]
        # so that no two blocks are alike
        part[:, :4] = np.arange(first, first + len(part), dtype=np.uint32)[:, None] >> (
            0,
            6,
            12,
            18,
        )
        part[:, :4] &= 63
    table = ScaledTable(array, jnp.asarray(0.0123, jnp.bfloat16))
    ids = jnp.asarray(rng.integers(0, 248320, (4, 66)), jnp.int32)
    run = jax.jit(lambda t, i: embed(t, i, TENTH_HASH, jnp.bfloat16, eos=EOS))
    got = np.asarray(run(table, ids).astype(jnp.float32))
    rows = np.asarray(ngram_rows(ids, TENTH_HASH, eos=EOS, implementation="reference"))
    scale = np.float32(ml_dtypes.bfloat16(0.0123))
    values = memory[rows].astype(np.float32) * scale
    want = values.astype(ml_dtypes.bfloat16).astype(np.float32).reshape(got.shape)
    np.testing.assert_array_equal(got, want)
    # by a call back to the host
    kept = HostTable([(stored, memory.dtype)], memory.dtype)
    called = run(ScaledTable(kept, table.weight_scale), ids)
    np.testing.assert_array_equal(np.asarray(called.astype(jnp.float32)), got)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(run(table, ids).astype(jnp.float32)), got)
