"""What holds for every test: the device, run-time shape checks, property tests without chance."""

import contextlib
import os
from pathlib import Path
from unittest import mock

import hypothesis
import jaxtyping
import pytest

GPU_TESTS = Path(__file__).parent / "gpu"

# Params, state and quantised arrays stay out: their annotations are declarations that a tree
# transformation may fill with anything (a sharding, a ShapeDtypeStruct, None).
SHAPE_CHECKED = ("qwen4jax.pallas", "qwen4jax.layers", "qwen4jax.model", "qwen4jax.decode")

# The same examples in every run, and no time limit: the first example of a test compiles, and a
# busy machine draws slowly.
hypothesis.settings.register_profile(
    "qwen4jax",
    derandomize=True,
    max_examples=20,
    deadline=None,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("qwen4jax")
# it draws constants of the project's modules too, of those that this process has imported so far:
# a test would have other examples alone, in company, and on another worker. A release that has it
# elsewhere fails one test, not all (test_examples.py).
with contextlib.suppress(ImportError):
    from hypothesis.internal.conjecture import providers

    providers.is_local_module_file = lambda path: False


def pytest_addoption(parser: pytest.Parser):
    parser.addoption("--gpu", action="store_true", help="let JAX use the GPU, for tests/gpu")


def pytest_configure(config: pytest.Config):
    if not config.getoption("--gpu"):
        # JAX reads both when it is imported, which only test modules do. Most of a CPU run is
        # compiling programs that run once: a third of it goes into optimising them.
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
        # threads of XLA's pool, otherwise one a core: in Mosaic's simulator each warpgroup of a
        # kernel holds one while it waits for the others
        os.environ.setdefault("NPROC", "8")
        # the benchmarks' package sets what XLA reads when a process starts; its tests share theirs
        # with all others, which would run with other flags beside them than alone
        with mock.patch.dict(os.environ):
            import bench  # noqa: F401
        # before any test module imports the package; Triton compiles no function that it wraps
        jaxtyping.install_import_hook(SHAPE_CHECKED, "beartype.beartype")


def pytest_itemcollected(item: pytest.Item):
    if item.path.is_relative_to(GPU_TESTS):
        item.add_marker(pytest.mark.gpu)


def pytest_runtest_setup(item: pytest.Item):
    for marker in item.iter_markers("gpu"):
        if missing := _missing_gpu(item.config, *marker.args):
            pytest.skip(missing)


def _missing_gpu(config: pytest.Config, kind: str = "") -> str | None:
    """What keeps a test that needs an NVIDIA GPU of this kind from running here, if anything."""
    wanted = f"needs an NVIDIA GPU ({kind})" if kind else "needs an NVIDIA GPU"
    if not config.getoption("--gpu"):
        return f"{wanted}: not asked for with --gpu"
    import jax  # here, so that collecting tests does not wait for it

    found = jax.devices()[0]
    if found.platform != "gpu" or kind not in found.device_kind:
        return f"{wanted}: JAX found {found.device_kind}"
    return None


# a process may have 65,530 mappings, and every program that XLA's CPU compiler makes takes some
_MANY_MAPPINGS = 40_000


@pytest.fixture(scope="module", autouse=True)
def _few_mappings():
    """Compiled programs are dropped before so many are held that the next cannot be mapped."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        import jax

        jax.clear_caches()
