"""Runs `@triton.jit` kernels on a CPU, in Triton's interpreter and without torch.

    with interpreted():                 # every `triton_call` runs here, also inside `jax.jit`
        step(..., implementation="triton")
    out, = interpret(kernel, grid, operands, outs, constants)

Triton's own way (TRITON_INTERPRET=1) must be set before Triton is imported, keeps kernels from
being compiled in the same process, and wants torch tensors. Here the language is replaced for the
time of one kernel. Casts go through `ml_dtypes`: those of the interpreter lose the carry of a
rounding. What a kernel leaves unwritten is NaN, or a number that no result has.

Programs that meet halfway (`triton_meeting`) run twice: the second time each finds what all have
stored before the meeting, which must not depend on what is stored after it.

Inline assembly is executed by `ptx.py`. Not interpreted: `libdevice`.
"""

import contextlib
import inspect
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from qwen4jax.pallas import registry, triton_call, triton_meeting
from tests.pallas import ptx

_NUMPY = {
    tl.bfloat16: ml_dtypes.bfloat16,
    tl.float8e4nv: ml_dtypes.float8_e4m3fn,
    tl.float16: np.float16,
    tl.float32: np.float32,
    tl.float64: np.float64,
}
_TRITON = {
    "bool": tl.int1,
    "bfloat16": tl.bfloat16,
    "float8_e4m3fn": tl.float8e4nv,
    **{n: getattr(tl, n) for n in ("float16", "float32", "int8", "int16", "int32", "int64")},
    **{n: getattr(tl, n) for n in ("uint8", "uint16", "uint32", "uint64")},
}


def interpret(
    kernel: Any,
    grid: Sequence[int],
    operands: Sequence[np.ndarray],
    outs: Sequence[Any],
    constants: Mapping[str, Any],
    aliases: Mapping[int, int] | None = None,
) -> list[np.ndarray]:
    """The results of a kernel, its programs run one after the other.

    Args:
        kernel: of `@triton.jit`.
        grid: programs along one to three axes.
        operands: arrays for the first pointer parameters; they stay as they are.
        outs: shape and dtype of each result, whose pointers follow, but for those in `aliases`.
        constants: the `tl.constexpr` parameters.
        aliases: operand number -> number of the result that shares its memory.
    """
    # only what a kernel may write is copied: pools are larger than what one call touches
    given = [np.ascontiguousarray(x) for x in operands]
    results = [_poisoned(out) for out in outs]
    for operand, result in (aliases or {}).items():
        results[result] = given[operand] = np.array(operands[operand], order="C")
    names = [n for n in kernel.arg_names if n not in constants]
    # a result in an operand's memory has no pointer of its own
    shared = set((aliases or {}).values())
    arrays = [*given, *(r for i, r in enumerate(results) if i not in shared)]
    given_to = iter([_pointer(x) for x in arrays])
    pointers = {
        name: next(given_to) if number is None else tuple(next(given_to) for _ in range(number))
        for name, number in zip(names, triton_call.takes(kernel, names, len(arrays)), strict=True)
    }
    # a device overflows silently, and subtracts what overflowed
    with _one_at_a_time, _interpreted_language(), np.errstate(over="ignore", invalid="ignore"):
        run = _function(kernel)
        sizes = (*grid, *(1,) * (3 - len(grid)))
        interpreter.interpreter_builder.set_grid_dim(*sizes)
        meets = triton_meeting.meet in vars(inspect.getmodule(kernel.fn)).values()
        for meeting in (_come, _go_on) if meets else (None,):
            with _replaced(_Meeting, "run", meeting):
                for place in np.ndindex(*sizes):
                    interpreter.interpreter_builder.set_grid_idx(*place)
                    run(**pointers, **constants)
    return results


@contextlib.contextmanager
def interpreted(device: str = "NVIDIA H200") -> Iterator[None]:
    """Within it, `triton_call` runs kernels here, and the registry chooses for `device`."""
    here = types.SimpleNamespace(bind=_call_back)
    with _replaced(triton_call, "_native", here), registry.using(device=device):
        yield


def _call_back(
    *operands: Any, kernel: Any, out: Any, grid: Any, aliases: Any, constants: Any, **_: Any
) -> Any:
    outs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in out]

    def run(*arrays: Any) -> list[np.ndarray]:
        given = [np.asarray(x) for x in arrays]
        return interpret(kernel, grid, given, outs, dict(constants), dict(aliases))

    if not any(isinstance(x, jax.core.Tracer) for x in operands):
        # without the copies that a callback makes of its arguments
        return [jnp.asarray(x) for x in run(*operands)]
    return jax.pure_callback(run, outs, *operands)


def _poisoned(out: Any) -> np.ndarray:
    dtype = np.dtype(out.dtype)
    if dtype.kind == "b":
        return np.ones(out.shape, dtype)
    if dtype.kind in "iu":
        return np.full(out.shape, np.iinfo(dtype).max - 77, dtype)
    return np.full(out.shape, np.nan, dtype)


def _pointer(array: np.ndarray) -> Any:
    kind = tl.pointer_type(_TRITON[array.dtype.name])
    address = np.array([array.ctypes.data], np.uint64)
    return tl.tensor(interpreter.TensorHandle(address, kind), kind)


def _function(kernel: Any) -> Any:
    """The kernel as a Python function, its helpers too."""
    return interpreter.FunctionRewriter(_with_helpers(kernel.fn)).rewrite_ast()


def _with_helpers(fn: Any) -> Any:
    """The same function over globals in which compiled helpers are interpreted ones."""
    # without the checks of annotations that tests add to the package's functions
    fn = inspect.unwrap(fn)
    scope = dict(fn.__globals__)
    for name, value in scope.items():
        if value is triton_meeting.meet:
            scope[name] = _Meeting()
        elif isinstance(value, JITFunction):
            scope[name] = _Helper(value.fn)
    copy = types.FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    copy.__annotations__ = fn.__annotations__
    copy.__module__ = fn.__module__
    return copy


class _Helper:
    """A function that kernels call."""

    def __init__(self, fn: Any, *, own_globals: bool = False):
        self.fn = fn
        self._own = own_globals
        self._run = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is None:
            fn = self.fn if self._own else _with_helpers(self.fn)
            self._run = interpreter.FunctionRewriter(fn).rewrite_ast()
        kwargs.pop("_semantic", None)
        return self._run(*args, **kwargs)


class _Meeting:
    """`triton_meeting.meet`, of one program after the other."""

    run: Any = None

    def __call__(self, counter: Any, N: Any) -> None:
        type(self).run(counter, N)


def _come(counter: Any, programs: Any) -> None:
    """What all programs add turns the sign."""
    first = interpreter.interpreter_builder.grid_idx[0] == 0
    tl.atomic_add(counter, 2**31 - (int(programs) - 1) if first else 1)


def _go_on(counter: Any, programs: Any) -> None:
    """All have come."""


@contextlib.contextmanager
def _interpreted_language() -> Iterator[None]:
    """Triton's language works on NumPy arrays, and goes back to compiling afterwards."""
    with contextlib.ExitStack() as stack:
        # its own functions (`tl.sum`) are compiled helpers too; their globals are patched in place
        for module in (tl, tl.core, tl.standard, tl.math):
            for name, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    helper = _helpers.setdefault(value, _Helper(value.fn, own_globals=True))
                    stack.enter_context(_replaced(module, name, helper))
        stack.enter_context(_replaced(interpreter, "_convert_float", _convert))
        stack.enter_context(_replaced(interpreter.InterpreterBuilder, "create_dot", _dot))
        for owner, name, value in _CHEAPER:
            stack.enter_context(_replaced(owner, name, value))
        assembly = ("create_inline_asm", _inline_asm)
        stack.enter_context(_replaced(interpreter.InterpreterBuilder, *assembly))
        both = types.FunctionType(compile("0", "", "eval"), {"tl": tl, "core": tl.core})
        scope = interpreter._patch_lang(both)
        stack.callback(scope.restore)
        # bounds of loops: NumPy 2 makes no number of an array of one
        scope.set_attr(tl.tensor, "__index__", lambda self: self.handle.data.item())
        yield


def _like_the_first(initialise: Any, key: Any) -> Any:
    """An `__init__` that copies all attributes from the first object of the same key."""
    first: dict[Any, dict[str, Any]] = {}

    def init(self: Any, *args: Any) -> None:
        known = first.get(found := key(*args))
        if known is None:
            initialise(self, *args)
            first[found] = dict(vars(self))
        else:
            vars(self).update(known)

    return init


def _kind_of_block(element: Any, shape: Any) -> Any:
    return element.name, tuple(getattr(n, "value", n) for n in shape)


def _tensor(initialise: Any) -> Any:
    shaped = _like_the_first(initialise, lambda handle, kind: (type(kind), kind.name))

    def init(self: Any, handle: Any, kind: Any) -> None:
        shaped(self, handle, kind)
        self.handle, self.type = handle, kind

    return init


def _by_name(function: Any) -> Any:
    """A function of a type, asked once for each name."""
    known: dict[str, Any] = {}

    def call(kind: Any) -> Any:
        if kind.name not in known:
            known[kind.name] = function(kind)
        return known[kind.name]

    return call


# An operation of the language takes longer to describe its result's type and shape, always the same
# few, than NumPy takes to compute it: half of a kernel's time.
_CHEAPER = (
    (tl.tensor, "__init__", _tensor(tl.tensor.__init__)),
    (tl.block_type, "__init__", _like_the_first(tl.block_type.__init__, _kind_of_block)),
    (interpreter, "_get_np_dtype", _by_name(interpreter._get_np_dtype)),
)

_helpers: dict[Any, _Helper] = {}
# the language, and the place in the grid, are global; XLA may call back from several threads
_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


def _convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Rounds to nearest even; returns the bits."""
    if rounding not in (None, interpreter._ir.ROUNDING_MODE.RTNE):
        raise NotImplementedError(f"rounding mode {rounding}")
    values = np.ascontiguousarray(data).view(_NUMPY[source]).reshape(data.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(_NUMPY[target])
    return cast.view(f"uint{8 * cast.dtype.itemsize}").reshape(data.shape)


def _inline_asm(
    self: Any, text: Any, constraints: Any, values: Any, types_: Any, _: Any, pack: Any
):
    """The results of a block of PTX; of floats that NumPy lacks, the bits."""
    own = {tl.float16: np.float16, tl.float32: np.float32}
    signed = {getattr(tl, n): np.dtype(n) for n in ("int8", "int16", "int32", "int64")}
    own |= signed
    bits = [np.dtype(own.get(t.scalar, f"uint{t.scalar.primitive_bitwidth}")) for t in types_]
    out = ptx.elementwise(text, [v.data for v in values], bits, pack)
    handles = [interpreter.TensorHandle(x, t.scalar) for x, t in zip(out, types_, strict=True)]
    return types.SimpleNamespace(get_result=handles.__getitem__)


def _dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any):
    """A product of the operands' values, added up in float32 (integers: in the result's dtype)."""

    def values(x: Any) -> Any:
        kind = _NUMPY.get(x.dtype.scalar)
        if kind is None:
            return x.data.astype(d.data.dtype)
        bits = np.ascontiguousarray(x.data)
        if kind is ml_dtypes.bfloat16:
            magnitude = bits.view(np.uint16) & 0x7FFF
            if np.any((magnitude > 0) & (magnitude < 0x80)):
                return ptx.bfloat16_values(bits.view(np.uint16)).reshape(bits.shape)
        return bits.view(kind).reshape(bits.shape).astype(np.float32)

    product = np.matmul(values(a), values(b)).astype(d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)
