"""Calls a `@triton.jit` kernel from JAX: one function, two routes.

`native` hands the kernel's Triton IR to XLA's own Triton compiler, so that it becomes an ordinary
kernel: a native node of a CUDA graph, which costs less than a captured custom call, kept by JAX's
persistent compilation cache. The custom-call target is internal to XLA, so that route is taken only
with the jax minor release it was tried with. `jax_triton` is the official binding and compiles with
the installed Triton. Triton itself is an extra ("qwen4jax[gpu]").
"""

import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import core
from jax.extend.core import Primitive
from jax.interpreters import mlir

Route = Literal["native", "jax_triton"]

# the release whose `__gpu$xla.gpu.triton` target the tests and measurements have seen
_NATIVE_RELEASE = (0, 11)
_TARGET = "__gpu$xla.gpu.triton"
# what a pointer points at, as Triton's signatures spell it and as its IR does
_POINTEES = {
    "bool": ("i1", "i1"),
    "int8": ("i8", "i8"),
    "uint8": ("u8", "i8"),
    "int16": ("i16", "i16"),
    "uint16": ("u16", "i16"),
    "int32": ("i32", "i32"),
    "uint32": ("u32", "i32"),
    "int64": ("i64", "i64"),
    "float16": ("fp16", "f16"),
    "bfloat16": ("bf16", "bf16"),
    "float32": ("fp32", "f32"),
    "float8_e4m3fn": ("fp8e4nv", "f8E4M3FN"),
}


def default_route() -> Route:
    """`native` with the jax release it is known to work with, else `jax_triton`."""
    return "native" if jax.__version_info__[:2] == _NATIVE_RELEASE else "jax_triton"


def triton_call(
    *operands: jax.Array,
    kernel: Any,
    name: str,
    out: Any,
    grid: Any,
    num_warps: int = 4,
    num_stages: int = 3,
    max_registers: int = 0,
    capability: int = 90,
    aliases: Mapping[int, int] | None = None,
    route: Route | None = None,
    **constants: Any,
) -> Any:
    """Runs `kernel` over `grid`; its parameters are the operands, the results, the constants.

    A result that shares an operand's memory has no parameter: the kernel writes the operand.
    Parameters annotated `tl.tuple` take several arrays, all as many (by the native route only).

    Args:
        operands: arrays, in the order of the kernel's pointer parameters.
        kernel: of `@triton.jit`.
        name: of the kernel in profiles.
        out: pytree of `jax.ShapeDtypeStruct`, whose leaves are the pointer parameters that follow.
        grid: programs along one to three axes.
        num_warps: of a program.
        num_stages: of software pipelines, unless a loop says otherwise.
        max_registers: of a thread, 0 for as many as ptxas likes (native route only). It is a goal
            too: loads are asked for as early as so many allow.
        capability: the GPU's compute capability times 10; decides how e4m3 is converted.
        aliases: operand number -> result number that shares its memory. The operand is given up.
        route: `native` or `jax_triton`; None is `default_route()`.
        constants: the kernel's `tl.constexpr` parameters.

    Returns:
        `out` with arrays. They hold whatever the kernel does not write.

    Raises:
        NotImplementedError: when lowered for another platform than CUDA.
        ModuleNotFoundError: the route's package is not installed.
    """
    leaves, tree = jax.tree.flatten(out)
    aliases = dict(aliases or {})
    if (route or default_route()) == "jax_triton":
        results = _through_jax_triton(
            operands, kernel, leaves, grid, num_warps, num_stages, capability, aliases, constants
        )
    else:
        results = _native.bind(
            *operands,
            kernel=kernel,
            name=name,
            out=tuple((tuple(o.shape), np.dtype(o.dtype)) for o in leaves),
            grid=(*grid, *(1,) * (3 - len(grid))),
            num_warps=num_warps,
            num_stages=num_stages,
            max_registers=max_registers,
            capability=capability,
            aliases=tuple(aliases.items()),
            constants=tuple(sorted(constants.items())),
        )
    return tree.unflatten(results)


_native = Primitive("triton_kernel")
_native.multiple_results = True


@_native.def_abstract_eval
def _(*operands: Any, out: Any, **_: Any) -> list[Any]:
    return [core.ShapedArray(shape, dtype) for shape, dtype in out]


@functools.cache
def _jitted(**how: Any) -> Any:
    return jax.jit(functools.partial(_native.bind, **how))


# outside of a jitted function
_native.def_impl(lambda *operands, **how: _jitted(**how)(*operands))


def _lower(ctx: Any, *operands: Any, kernel: Any, name: str, out: Any, **how: Any) -> Any:
    ir = mlir.ir
    aliased = dict(how["aliases"]).values()
    own = [str(dtype) for i, (_, dtype) in enumerate(out) if i not in aliased]
    pointers = [str(a.dtype) for a in ctx.avals_in] + own
    entry, text = _triton_ir(
        kernel,
        tuple(pointers),
        how["constants"],
        how["num_warps"],
        how["num_stages"],
        how["capability"],
    )
    # the function's name is the kernel's, in profiles too
    text = text.replace(f"@{entry}(", f"@{name}(")
    if most := how["max_registers"]:
        bounded, count = re.subn(
            r"^module \{", f"module attributes {{ttg.maxnreg = {most} : i32}} {{", text, flags=re.M
        )
        if count != 1:
            raise ValueError(f"{name}: no place for a bound on registers in Triton's module")
        text = bounded
    for i in sorted(aliased):
        text = _with_idle_pointer(text, len(ctx.avals_in) + i, str(out[i][1]))
    config = {
        "name": ir.StringAttr.get(name),
        "ir": ir.StringAttr.get(text),
        "num_stages": mlir.i32_attr(how["num_stages"]),
        "num_warps": mlir.i32_attr(how["num_warps"]),
        "debug": ir.BoolAttr.get(False),
    }
    config |= {f"grid_{axis}": mlir.i32_attr(n) for axis, n in zip("xyz", how["grid"], strict=True)}
    # operands and results are row-major unless told otherwise
    lowering = jax.ffi.ffi_lowering(
        _TARGET, backend_config=config, operand_output_aliases=dict(how["aliases"])
    )
    return lowering(ctx, *operands)


def _with_idle_pointer(text: str, place: int, dtype: str) -> str:
    """The kernel with one more parameter: XLA passes results that share memory, too."""
    head, rest = text.split("(", 1)
    parameters, body = rest.split(") attributes", 1)
    listed = re.split(r", (?=%)", parameters)
    kind = _POINTEES[dtype][1]
    listed.insert(place, f"%idle{place}: !tt.ptr<{kind}> {{tt.divisibility = 16 : i32}}")
    return f"{head}({', '.join(listed)}) attributes{body}"


def _refuse(ctx: Any, *operands: Any, name: str, **_: Any) -> Any:
    platforms = ", ".join(ctx.module_context.platforms)
    raise NotImplementedError(
        f"{name} is a Triton kernel and was compiled for {platforms}: choose the reference, or put "
        "the computation on the GPU (jax.default_device)"
    )


mlir.register_lowering(_native, _lower, platform="cuda")
mlir.register_lowering(_native, _refuse)


@functools.cache
def _triton_ir(
    kernel: Any,
    pointers: tuple[str, ...],
    constants: tuple[tuple[str, Any], ...],
    num_warps: int,
    num_stages: int,
    capability: int,
) -> tuple[str, str]:
    """The kernel's entry name and its Triton IR, made by Triton's front end."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", capability, 32)
    backend: Any = make_backend(target)
    options = backend.parse_options({"num_warps": num_warps, "num_stages": num_stages})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    module = source(kernel, pointers, constants).make_ir(
        target,
        options,
        backend.get_codegen_implementation(options),
        backend.get_module_map(),
        context,
    )
    module = backend.make_ttir(module, {}, options, capability)
    return module.get_entry_func_name(), module.str_nodebug()


def source(kernel: Any, pointers: tuple[str, ...], constants: tuple[tuple[str, Any], ...]) -> Any:
    """The kernel for these dtypes of its arrays and these constants, as Triton compiles it.

    Raises:
        TypeError: the kernel has other parameters.
    """
    from triton.compiler import ASTSource

    fixed = dict(constants)
    names = kernel.arg_names
    arrays = [n for n in names if n not in fixed]
    if unknown := sorted(set(fixed) - set(names)):
        raise TypeError(f"{kernel.__name__}: no parameter {', '.join(unknown)}")
    types: dict[str, Any] = {}
    attrs: dict[tuple[int, ...], Any] = {}
    aligned = [["tt.divisibility", 16]]
    given = iter(f"*{_POINTEES[p][0]}" for p in pointers)
    for name, number in zip(arrays, takes(kernel, arrays, len(pointers)), strict=True):
        place = names.index(name)
        if number is None:
            types[name], attrs[place,] = next(given), aligned
        else:
            types[name] = tuple(next(given) for _ in range(number))
            attrs |= {(place, i): aligned for i in range(number)}
    return ASTSource(
        kernel,
        signature={n: types.get(n, "constexpr") for n in names},
        constexprs={(names.index(n),): value for n, value in fixed.items()},
        attrs=attrs,
    )


def takes(kernel: Any, names: Sequence[str], arrays: int) -> list[int | None]:
    """How many arrays a kernel's parameters take: those annotated `tl.tuple` share the rest.

    Args:
        kernel: of `@triton.jit`.
        names: parameters for arrays.
        arrays: how many there are.

    Returns:
        For each name the length of its tuple, None for a single array.

    Raises:
        TypeError: they do not fit.
    """
    annotations = {p.name: p.annotation for p in kernel.params}
    tuples = [annotations[n] == "tuple" for n in names]
    rest = arrays - tuples.count(False)
    each, left = divmod(rest, tuples.count(True) or 1)
    if left or (rest and True not in tuples) or (not each and True in tuples):
        raise TypeError(f"{kernel.__name__}: {arrays} arrays for the parameters {', '.join(names)}")
    return [each if several else None for several in tuples]


def _through_jax_triton(
    operands: Sequence[jax.Array],
    kernel: Any,
    out: Sequence[Any],
    grid: Any,
    num_warps: int,
    num_stages: int,
    capability: int,
    aliases: Mapping[int, int],
    constants: Mapping[str, Any],
) -> list[jax.Array]:
    _complete_triton_driver()
    import jax_triton

    return jax_triton.triton_call(
        *operands,
        kernel=kernel,
        out_type=[jax.ShapeDtypeStruct(o.shape, jnp.dtype(o.dtype)) for o in out],
        grid=cast(Any, tuple(grid)),
        num_warps=num_warps,
        num_stages=num_stages,
        compute_capability=capability,
        input_output_aliases=dict(aliases),
        **constants,
    )


def _complete_triton_driver() -> None:
    """jax-triton 0.4.1 imports a constant that Triton 3.6 lacks and loads stubs without it."""
    driver: Any = importlib.import_module("triton.backends.nvidia.driver")
    if not hasattr(driver, "TMA_TF32"):
        # read for host-made TMA descriptors only, which no kernel here has
        driver.TMA_TF32 = 0
