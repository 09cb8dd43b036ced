"""Which implementation of an operation runs, and what is said about it."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qwen4jax.pallas import measured, registry
from qwen4jax.pallas.registry import Kernel, Operation
from qwen4jax.pallas.skinny_matmul import skinny_matmul

H200 = "NVIDIA H200"
# kinds that nobody measured, as JAX names them -> whether they are Hopper
UNMEASURED = {
    "NVIDIA H100 80GB HBM3": True,
    "NVIDIA H200 NVL": True,
    "NVIDIA GH200 480GB": True,
    "NVIDIA B200": False,
    "NVIDIA GB200": False,
    "NVIDIA B300 SXM6 AC": False,
    "NVIDIA GB300": False,
}
RESULTS = Path(__file__).parents[2] / "bench" / "results"


def few_only(x):
    return None if x.shape[0] <= 4 else "takes up to 4 rows"


def add_two(x):
    return x + 2


def operation():
    """An operation whose implementations tell themselves apart by what they add."""
    return Operation(
        "toy",
        {
            "reference": lambda x: x + 1,
            "fast": Kernel(f"{__name__}.add_two", refuses=few_only),
            "foreign": Kernel(f"{__name__}.add_two", needs=("no_such_package",)),
        },
    )


def run(op, rows=1, implementation=None):
    return float(op.run(implementation, rows, jnp.zeros((rows, 1)))[0, 0])


def test_here_the_reference_runs():
    assert registry.device_kind() == "cpu"
    assert run(operation()) == 1


def test_the_measured_order_holds_where_it_applies(monkeypatch):
    monkeypatch.setitem(measured.FASTEST, H200, {"toy": ((2, ("fast",)), (8, ("fast",)))})
    op = operation()
    with registry.using(device=H200):
        assert op.order(H200, 3) == ["fast"]
        assert op.order(H200, 9) == []
        assert run(op, 1) == 2
        assert run(op, 8) == 1  # refused: more than four rows
        assert run(op, 9) == 1
    assert run(op, 1) == 1


@pytest.mark.parametrize(("device", "hopper"), UNMEASURED.items())
def test_what_nobody_measured_borrows_from_what_was(device: str, hopper: bool):
    """Kernels run there as on the H200, without those for Hopper elsewhere, and say why."""
    with registry.using(device=device):
        text = registry.explain()
    for op in registry.operations().values():
        for rows in (1, 4, 32, 128, 2048):
            assert op.order(device, rows) == op.order(H200, rows)
        for name, entry in op.items():
            if name == "mosaic_hopper":
                assert isinstance(entry, Kernel)
                assert (entry.missing(device) is None) == hopper
    assert f"no kernel was run on {device} yet: what was right and fastest on {H200} runs" in text
    assert "  triton: fastest on NVIDIA H200 for 1 to 128 rows" in text
    assert "measured fastest" not in text


@pytest.mark.parametrize(
    ("device", "experts"),
    [
        (H200, "for 1 to 128 rows where mosaic_hopper does not apply"),
        ("NVIDIA GB300", "fastest on NVIDIA H200 for 1 to 128 rows"),
    ],
)
def test_explain_names_what_runs_where_the_fastest_does_not(device: str, experts: str):
    """Mosaic's experts are for Hopper, and take no NVFP4 there."""
    with registry.using(device=device):
        block = registry.explain().partition("\nmoe.experts:\n")[2]
    assert f"  triton: {experts}\n" in block.partition("triton_sorted")[0]


@pytest.mark.parametrize("device", ["cpu", "NVIDIA GeForce RTX 5090", "NVIDIA GB10"])
def test_other_devices_borrow_nothing(device: str):
    """Consumers' Blackwell GPUs have less than half the shared memory."""
    with registry.using(device=device):
        text, note = registry.explain(), registry.unmeasured()
    assert all(op.order(device, 4) == [] for op in registry.operations().values())
    assert "fastest" not in text
    assert note == (
        None
        if device == "cpu"
        else f"no kernel was run on {device} yet: XLA's operations run, kernels when named"
    )


def test_what_was_measured_needs_no_note():
    with registry.using(device=H200):
        assert registry.unmeasured() is None
        assert "note:" not in registry.explain()


def test_a_kernel_is_for_one_device(monkeypatch):
    """XLA would gather what lies on several; inside `shard_map` each device has its own."""
    monkeypatch.setitem(measured.FASTEST, H200, {"toy": ((8, ("fast",)),)})
    op = operation()

    def program(function, devices=4):
        mesh = AbstractMesh((devices,), ("model",), axis_types=(AxisType.Auto,))
        placed = NamedSharding(mesh, P("model"))
        x = jax.ShapeDtypeStruct((4, 1), jnp.float32, sharding=placed)
        with registry.using(device=H200):
            return str(jax.jit(lambda x: function(mesh, x)).trace(x).jaxpr)

    # the kernel adds two
    assert "2.0" in program(lambda _, x: op.run(None, 1, x), devices=1)
    assert "2.0" not in program(lambda _, x: op.run(None, 1, x))
    # what was computed of a spread operand is spread
    assert "2.0" not in program(lambda _, x: op.run(None, 1, x * 3))

    def local(mesh, x):
        run = lambda x: op.run(None, 1, x)  # noqa: E731
        return jax.shard_map(run, mesh=mesh, in_specs=P("model"), out_specs=P("model"))(x)

    assert "2.0" in program(local)
    with pytest.raises(NotImplementedError, match=r"'fast' is for one device, .* a mesh of 4"):
        program(lambda _, x: op.run("fast", 1, x))


def test_a_named_implementation_runs_or_says_why_not():
    op = operation()
    with registry.using(device=H200):
        assert run(op, 4, "fast") == 2
        with pytest.raises(NotImplementedError, match="toy: 'fast' takes up to 4 rows"):
            run(op, 5, "fast")
        with pytest.raises(NotImplementedError, match=r"needs no_such_package \(pip install"):
            run(op, 1, "foreign")
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU, this is cpu"):
        run(op, 1, "fast")
    with pytest.raises(ValueError, match="toy: no implementation 'quick'; there are: reference"):
        run(op, 1, "quick")


def test_using_names_one_or_all(monkeypatch):
    op = operation()
    monkeypatch.setattr(registry, "operations", lambda: {"toy": op})
    with registry.using(device=H200):
        with registry.using("fast"):
            assert run(op, 1) == 2
            assert run(op, 5) == 1  # for all operations, where it applies
            with registry.using("reference"):
                assert run(op, 1) == 1
        with (
            registry.using({"toy": "fast"}),
            pytest.raises(NotImplementedError, match="up to 4 rows"),
        ):
            run(op, 5)
    with pytest.raises(ValueError, match="no operation 'tool'"), registry.using({"tool": "fast"}):
        pass
    with pytest.raises(ValueError, match="no implementation 'quick'"), registry.using("quick"):
        pass


def test_a_jitted_function_is_compiled_for_the_choice(monkeypatch):
    op = operation()
    monkeypatch.setattr(registry, "operations", lambda: {"toy": op})
    jitted = jax.jit(lambda x: op.run(None, 1, x))
    x = jnp.zeros((1, 1))
    with registry.using(device=H200):
        assert jitted(x) == 1
        with registry.using("fast"):
            assert jitted(x) == 2
        assert jitted(x) == 1


def test_explain_says_it_of_every_implementation():
    for device in ("cpu", H200):
        with registry.using(device=device):
            text = registry.explain()
        assert text.startswith(f"device: {device}\n")
        for op in registry.operations().values():
            assert f"\n{op.name}:\n" in text
    assert "triton: needs an NVIDIA GPU, this is cpu" in registry_text("cpu")
    with registry.using({"skinny_matmul": "reference"}, device=H200):
        assert "  reference: named by using()" in registry.explain()


def registry_text(device):
    with registry.using(device=device):
        return registry.explain()


def test_the_measured_table_names_what_there_is():
    known = registry.operations()
    for table in measured.FASTEST.values():
        for name, rows in table.items():
            assert list(rows) == sorted(rows, key=lambda row: row[0])
            for _, implementations in rows:
                assert set(implementations) <= set(known[name]), name


def test_what_is_preferred_was_right_and_measured_on_the_device():
    """A line is written only after the result was compared with the reference."""
    for device, table in measured.FASTEST.items():
        file = RESULTS / device.replace(" ", "-").lower() / "kernels.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        for op, entries in table.items():
            least = 0
            for most, (name, *_) in entries:
                own = [x for x in lines if (x["op"], x["implementation"]) == (op, name)]
                assert any(least < line["rows"] <= most for line in own), (op, name, most)
                least = most


def test_a_kernel_that_reaches_a_cpu_says_so():
    x, w = jnp.zeros((1, 128), jnp.bfloat16), jnp.zeros((16, 128), jnp.bfloat16)
    with (
        registry.using(device=H200),
        pytest.raises(NotImplementedError, match="is a Triton kernel and was compiled for cpu"),
    ):
        skinny_matmul(x, w, implementation="triton")
