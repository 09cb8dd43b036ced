"""The n-gram table in host memory: pinned, read by the GPU where it lies, and by a call back."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from bench.table import BLOCK, expected, fill, pattern_block
from qwen4jax.host_table import HostTable
from qwen4jax.pallas.ple import embed, ngram_rows
from qwen4jax.pallas.ple.cases import TENTH_HASH
from qwen4jax.quant import ScaledTable
from qwen4jax.weights.placement import pinned_array

EOS, WIDTH = 248044, 160


def test_rows_of_a_pinned_table_are_those_of_the_host():
    """5 GB: any row number of 31 bits, offsets past 32 bits. `bench.table` has all 51 GB."""
    block = pattern_block(BLOCK, WIDTH)
    array, memory = pinned_array(
        (TENTH_HASH.rows, WIDTH), np.dtype(ml_dtypes.float8_e4m3fn), jax.devices()[0]
    )
    fill(memory, block)
    table = ScaledTable(array, jnp.asarray(0.0123, jnp.bfloat16))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 248320, (4, 66)), jnp.int32)
    run = jax.jit(lambda t, i: embed(t, i, TENTH_HASH, jnp.bfloat16, eos=EOS))
    got = np.asarray(run(table, ids).astype(jnp.float32))
    rows = np.asarray(ngram_rows(ids, TENTH_HASH, eos=EOS, implementation="reference"))
    np.testing.assert_array_equal(got, expected(rows, block))
    # by a call back to the host
    kept = HostTable([(memory.view(np.uint8), memory.dtype)], memory.dtype)
    called = run(ScaledTable(kept, table.weight_scale), ids)
    np.testing.assert_array_equal(np.asarray(called.astype(jnp.float32)), got)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(run(table, ids).astype(jnp.float32)), got)
