"""Executes the inline assembly of Triton kernels on arrays: the instructions that they use.

`elementwise` takes what `tl.inline_asm_elementwise` takes. Registers hold 32 bits, which is
`pack` elements of an operand that is narrower, or more registers for one that is wider.
"""

import ctypes
import re
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np


def elementwise(
    text: str, operands: Sequence[np.ndarray], results: Sequence[np.dtype], pack: int
) -> list[np.ndarray]:
    """The results of a block of instructions, of the operands' shape.

    Args:
        text: PTX with `$0`, `$1`, ... for the registers of the results and then of the operands.
        operands: arrays of one shape; the last axis is a multiple of `pack`.
        results: dtype of each.
        pack: elements of each operand that one execution of the block takes.
    """
    shape = operands[0].shape
    widths = [max(1, pack * dtype.itemsize // 4) for dtype in results]
    registers: dict[str, np.ndarray] = {}
    for operand in operands:
        # an address is one register
        wide = operand.dtype.itemsize == 8
        rows = operand.reshape(-1, pack)
        words = rows.view(np.uint64) if wide else _words(rows)
        for column in range(words.shape[1]):
            registers[f"${sum(widths) + len(registers)}"] = words[:, column]
    count = operands[0].size // pack

    def value(source: str) -> np.ndarray:
        if source.startswith("0f"):
            return np.array(int(source[2:], 16), np.uint32)
        return registers[source] if source in registers else np.array(int(source, 0), np.uint32)

    def address(text: str) -> np.ndarray:
        base, _, offset = text.partition("+")
        return value(base) + value(base).dtype.type(offset or 0)

    for line in re.sub(r"\.reg [^;]*;|[{}]", "", text).split(";"):
        line = line.strip()
        if allocated := re.match(r"\.shared .* \.b(\d+) (\w+)\[(\d+)\]$", line):
            width, name, number = allocated.groups()
            registers[name] = _allocate(int(width) * int(number) // 32)
        elif access := re.match(r"(?:@(\w+) )?(st|red)\.shared([.\w]*) \[(.+)\], (.+)$", line):
            there, how, kind, to, sources = access.groups()
            there = registers[there] if there else np.uint32(1)
            word = np.uint16 if kind.endswith("16") else np.uint32
            for i, source in enumerate(sources.split(", ")):
                at = address(to) + np.uint32(4 * i)
                _change(how, word, *np.broadcast_arrays(there != 0, at, value(source)))
        elif access := re.match(r"ld\.(shared|global)[.\w]*\.([bu]\d+) (.+), \[(.+)\]$", line):
            where, kind, targets, from_ = access.groups()
            size = int(kind[1:]) // 8
            for i, target in enumerate(targets.split(", ")):
                registers[target] = _load(where, address(from_) + np.uint64(size * i), size)
        elif access := re.match(r"cp\.async\.c[ag]\S* \[(.+)\], \[(.+)\], (\d+)$", line):
            size = int(access[3])
            copies = np.broadcast_arrays(address(access[1]), address(access[2]))
            for to, from_ in zip(*(c.ravel().tolist() for c in copies), strict=True):
                _shared[0].view(np.uint8)[to : to + size] = _bytes(from_, size)
        elif line.startswith("mov.b32") and line.count(",") == 2:
            low, high, source = re.split(r"[ ,]+", line)[1:]
            registers[low], registers[high] = value(source) & 0xFFFF, value(source) >> 16
        elif product := re.match(r"mma\.sync\.aligned\.(\S+) (.+)$", line):
            names = re.split(r"[ ,]+", product[2].strip())
            given = np.stack(np.broadcast_arrays(*(value(name) for name in names[4:])))
            registers |= zip(names, _WARPS[product[1]](given), strict=False)
        elif line and not re.search(_NO_RESULT, line):
            name, target, *sources = (part.strip() for part in re.split(r"[ ,]+", line))
            registers[target] = _INSTRUCTIONS[name](*(value(s) for s in sources))
    out, at = [], 0
    for width, dtype in zip(widths, results, strict=True):
        columns = [np.broadcast_to(registers[f"${at + i}"], count) for i in range(width)]
        words = np.stack(columns, axis=1)
        at += width
        out.append(np.ascontiguousarray(words).view(dtype).reshape(shape))
    return out


def _words(values: np.ndarray) -> np.ndarray:
    """Rows of elements as 32-bit words."""
    return np.ascontiguousarray(values).view(np.uint32)


def _bytes(address: int, size: int) -> np.ndarray:
    """Of an operand of the kernel."""
    return np.frombuffer(ctypes.string_at(address, size), np.uint8)


def _load(where: str, address: np.ndarray, size: int) -> np.ndarray:
    """Words, or halves of them."""
    kind = np.dtype(f"uint{8 * size}")
    if where == "shared":
        return _shared[0].view(kind)[address // size].astype(np.uint32)
    return np.array([_bytes(a, size).view(kind)[0] for a in address.tolist()], np.uint32)


def _allocate(words: int) -> np.ndarray:
    """Address of shared memory for one program, which holds what no result has."""
    _shared[:] = [np.full(words, 0x7FFFFFB2, np.uint32)]
    return np.zeros((), np.uint32)


def _change(
    how: str, kind: type, there: np.ndarray, address: np.ndarray, value: np.ndarray
) -> None:
    """Stores words or their lower halves, or adds to words, where an access is there."""
    place = address[there] // np.dtype(kind).itemsize
    if how == "st":
        _shared[0].view(kind)[place] = value[there].astype(kind)
    else:
        np.add.at(_shared[0], place, value[there])


def _lop3(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Any function of three bits: bit 4 a + 2 b + c of the table."""
    out = np.zeros_like(a | b | c)
    for place in range(8):
        if int(table) >> place & 1:
            x, y, z = (v if place >> i & 1 else ~v for v, i in ((a, 2), (b, 1), (c, 0)))
            out |= x & y & z
    return out


def _prmt(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """Four of the eight bytes of two words, chosen by the selector's nibbles."""
    out = np.zeros_like(a | b)
    for i in range(4):
        place = int(selector) >> (4 * i) & 0xF
        byte = (b if place & 4 else a) >> np.uint32(8 * (place & 3)) & np.uint32(0xFF)
        out |= byte << np.uint32(8 * i)
    return out


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Products of two bfloat16 halves, rounded once."""
    with np.errstate(over="ignore", invalid="ignore"):
        product = (_halves(a) * _halves(b)).astype(ml_dtypes.bfloat16)
    return np.ascontiguousarray(product).view(np.uint32)[:, 0]


def _product_sum(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """`a b + c` of two bfloat16 halves, rounded once."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = (_halves(a) * _halves(b) + _halves(c)).astype(ml_dtypes.bfloat16)
    return np.ascontiguousarray(value).view(np.uint32)[:, 0]


def _fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """`a b + c` of float32; float64 rounds it before, far below."""
    x, y, z = (v.view(np.float32).astype(np.float64) for v in (a, b, c))
    with np.errstate(all="ignore"):
        return (x * y + z).astype(np.float32).view(np.uint32)


def _mma(given: np.ndarray, left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """`left right + sums` of each warp, float32 words [4, threads].

    Thread `4 g + t` has rows `g` and `g + 8` of columns `2 t` and `2 t + 1` of the sums.

    Args:
        given: ten words of each thread; the last four are the sums.
        left: a thread's numbers [4, a pair's keys, threads]: rows g and g + 8, then later keys.
        right: [2, a pair's keys, threads]: column g, then later keys.
    """
    # [half of the keys, half of the rows, keys, warp, g, t]
    left = left.reshape(2, 2, -1, left.shape[-1] // 32, 8, 4)
    right = right.reshape(2, -1, right.shape[-1] // 32, 8, 4)
    with np.errstate(all="ignore"):
        product = np.einsum("hrkwgt,hkwnt->rwgn", left, right)
    # [row's half, warp, g, t, column of the thread]
    product = product.reshape(2, -1, 8, 4, 2).transpose(0, 4, 1, 2, 3).reshape(4, -1)
    with np.errstate(all="ignore"):
        return (product + given[6:].view(np.float32)).astype(np.float32).view(np.uint32)


def _mma_tf32(given: np.ndarray) -> np.ndarray:
    """Of 8 keys in float32, whose last 13 bits are cut off."""
    cut = (given[:6] & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)[:, None]
    return _mma(given, cut[:4], cut[4:])


def _mma_bf16(given: np.ndarray) -> np.ndarray:
    """Of 16 keys, two bfloat16 in a word."""
    halves = np.stack([_halves(words) for words in given[:6]]).transpose(0, 2, 1)
    return _mma(given, halves[:4], halves[4:])


def _shuffle(a: np.ndarray, lane: np.ndarray, *_: np.ndarray) -> np.ndarray:
    """What another lane of the warp has."""
    return np.take_along_axis(a.reshape(-1, 32), lane.reshape(-1, 32).astype(np.int64), 1).ravel()


def _pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """Two float32 rounded to the bfloat16 halves of a word."""
    with np.errstate(all="ignore"):
        halves = np.stack([v.view(np.float32).astype(ml_dtypes.bfloat16) for v in (low, high)], 1)
    return np.ascontiguousarray(halves).view(np.uint32)[:, 0]


def _e4m3_pair(word: np.ndarray) -> np.ndarray:
    """The two low bytes, e4m3, as the float16 halves of a word."""
    numbers = np.ascontiguousarray(word.astype(np.uint16)).view(ml_dtypes.float8_e4m3fn)
    return numbers.astype(np.float16).view(np.uint32)


def _halves(words: np.ndarray) -> np.ndarray:
    """Values of pairs of bfloat16, float64."""
    return bfloat16_values(np.ascontiguousarray(words)[:, None].view(np.uint16))


def bfloat16_values(bits: np.ndarray) -> np.ndarray:
    """Values, float64, of bfloat16 from the bits: XLA's threads flush subnormals."""
    bits = bits.astype(np.int32)
    exponent, fraction = bits >> 7 & 0xFF, bits & 0x7F
    fraction = np.where(exponent > 0, fraction + 128, fraction)
    value = np.ldexp(fraction.astype(np.float64), np.maximum(exponent, 1) - 134)
    value = np.where(exponent == 255, np.where(fraction > 128, np.nan, np.inf), value)
    return np.where(bits >> 15, -value, value)


def _float(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """A function of float32 on words; results below the normal numbers are 0."""

    def run(a: np.ndarray) -> np.ndarray:
        with np.errstate(all="ignore"):
            value = function(a.view(np.float32).astype(np.float64)).astype(np.float32)
        return np.where(np.abs(value) < np.finfo(np.float32).tiny, 0, value).view(np.uint32)

    return run


# of the program under way: programs run one after the other
_shared: list[np.ndarray] = []
# what only asks the cache for bytes, in all threads or in one
_NO_RESULT = r"prefetch|%tid|setp\.(eq|lt)|mad\.wide|bar\.warp|cp\.async\.(commit|wait)"
_INSTRUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "shl.b32": np.left_shift,
    "shr.u32": np.right_shift,
    "and.b32": np.bitwise_and,
    "or.b32": np.bitwise_or,
    "mov.b32": np.copy,
    "mov.f32": np.copy,
    "mul.f32": lambda a, b: (a.view(np.float32) * b.view(np.float32)).view(np.uint32),
    "cvt.f32.f16": lambda a: a.astype(np.uint16).view(np.float16).astype(np.float32).view("u4"),
    "setp.ne.s32": np.not_equal,
    "shf.r.wrap.b32": lambda low, high, n: low >> (n & 31) | high << (32 - (n & 31)),
    "prmt.b32": _prmt,
    "lop3.b32": _lop3,
    "mul.rn.bf16x2": _product,
    "fma.rn.bf16x2": _product_sum,
    "fma.rn.f32": _fma,
    "cvt.rn.bf16x2.f32": _pair,
    "shfl.sync.idx.b32": _shuffle,
    "cvt.u16.u32": lambda word: word & np.uint32(0xFFFF),
    "cvt.rn.f16x2.e4m3x2": _e4m3_pair,
    "ex2.approx.ftz.f32": _float(np.exp2),
    "rcp.approx.ftz.f32": _float(np.reciprocal),
}
_WARPS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "m16n8k8.row.col.f32.tf32.tf32.f32": _mma_tf32,
    "m16n8k16.row.col.f32.bf16.bf16.f32": _mma_bf16,
}
