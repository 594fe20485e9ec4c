"""Kernels that go over memory once: every element is read, something is computed of it, and the results are written.

All of them are made here, from what happens to one element. A launch goes over a table of tensors, part by part; a
thread takes a group of elements at a time, with loads and stores of 16 bytes, and neighbouring threads take
neighbouring groups. What is left of a part, and memory that starts at an odd address, is taken element by element.
"""

from __future__ import annotations

import functools
import linecache
import textwrap
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import cuda

from aiokv.kernels.cuda import launch
from aiokv.kernels.cuda.float8 import from_float8, to_float8
from aiokv.kernels.cuda.memory import SIMULATED, VECTOR, kind, like
from aiokv.kernels.cuda.rounding import DOUBLE, names
from aiokv.kernels.cuda.tensors import check_rows, tensor_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.kernels.cuda.tensors import Tensor

WARP = 32
WORD_BITS = 32


class Streaming(NamedTuple):
    """What a kernel does with each element.

    Attributes:
        name: of the kernel.
        reads: name and dtype of each array that is read.
        writes: name and dtype of each array that is written; it may be one that is read.
        element: source of a function `element`. It takes the read elements as numbers, then the numbers, and returns
            a tuple: the new element of each array that is written, then what is reduced.
        numbers: names of the numbers that each tensor has of its own.
        precision: of the numbers, and of what is computed.
        reduction: "", or how one result of each element is made one of each part, in float64: "add" or "largest".
        packed: name of the array whose elements are words of several codes, if there is one.
        bits: of a code.
        skips: what a tensor's numbers say, if there is nothing to do with it: then nothing of it is read.
    """

    name: str
    reads: tuple[tuple[str, str], ...]
    writes: tuple[tuple[str, str], ...]
    element: str
    numbers: tuple[str, ...] = ()
    precision: str = "float32"
    reduction: str = ""
    packed: str = ""
    bits: int = 0
    skips: str = ""

    @property
    def arrays(self) -> dict[str, str]:
        """The dtype of each array, in the order in which a table has them."""
        return dict(self.reads + self.writes)

    @property
    def group(self) -> int:
        """Elements that a thread takes at a time."""
        if self.packed:
            return WORD_BITS // self.bits
        return VECTOR // min(np.dtype(dtype).itemsize for dtype in self.arrays.values())


KERNEL = """\
def kernel({arguments}):
{prologue}
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    for part in range(cuda.blockIdx.x, parts.shape[0], cuda.gridDim.x):
        row, start, wide_end, end = parts[part, 0], parts[part, 1], parts[part, 2], parts[part, 3]
{setup}
        for i in range(start + {group} * thread, wide_end, {group} * threads):
{wide}
        for i in range(wide_end + {step} * thread, end, {step} * threads):
{rest}
{epilogue}
"""

# Sums of a warp in a fixed order, then those of the warps in theirs.
SHUFFLE = """\
for distance in (16, 8, 4, 2, 1):
    found = combine(found, cuda.shfl_down_sync(0xFFFFFFFF, found, distance))
if thread % 32 == 0:
    shared[thread // 32] = found
cuda.syncthreads()
if thread == 0:
    for warp in range(1, threads // 32):
        found = combine(found, shared[warp])
    results[part] = found
cuda.syncthreads()
"""

# The simulator has one warp and no shuffles; the order is the same.
THROUGH_MEMORY = """\
shared[thread] = found
for distance in (16, 8, 4, 2, 1):
    cuda.syncthreads()
    if thread < distance:
        shared[thread] = combine(shared[thread], shared[thread + distance])
cuda.syncthreads()
if thread == 0:
    results[part] = shared[0]
cuda.syncthreads()
"""

COMBINE = {"add": "def combine(a, b): return add_wide(a, b)", "largest": "def combine(a, b): return where(a > b, a, b)"}


def shift_of(k: Any, bits: int) -> Any:
    """Return by how much the k-th code of a word is shifted: the first is in the top bits of the first byte."""
    return k * bits // 8 * 8 + 8 - bits - k * bits % 8


def kernel_source(spec: Streaming) -> str:
    """Return the source of a kernel.

    Its arguments are the addresses, int64[tensors, arrays]; the parts, as `launch.make_parts` has them; the numbers,
    [tensors, numbers], if there are any; and the results, float64[parts], if something is reduced.
    """
    arguments = ["addresses", "parts"] + ["numbers"] * bool(spec.numbers) + ["results"] * bool(spec.reduction)
    prologue = [f"shared = cuda.shared.array({WARP}, wide)"] if spec.reduction else []
    setup = [f"at_{name} = addresses[row, {place}]" for place, name in enumerate(spec.arrays)]
    setup += [f"{name} = numbers[row, {place}]" for place, name in enumerate(spec.numbers)]
    setup += [f"if {spec.skips}:", "    continue"] * bool(spec.skips)
    setup += ["found = wide(0)"] * bool(spec.reduction)
    group = spec.group
    epilogue = (THROUGH_MEMORY if SIMULATED else SHUFFLE) if spec.reduction else ""
    return KERNEL.format(
        arguments=", ".join(arguments),
        prologue=_indent(prologue, 4),
        setup=_indent(setup, 8),
        group=group,
        step=group if spec.packed else 1,
        wide=_indent(_wide(spec, group), 12),
        rest=_indent(_packed_rest(spec, group) if spec.packed else _one(spec), 12),
        epilogue=textwrap.indent(epilogue, " " * 8),
    )


def _indent(lines: Sequence[str], spaces: int) -> str:
    return textwrap.indent("\n".join(lines), " " * spaces)


def _wide(spec: Streaming, group: int) -> list[str]:
    """Return what is done with a whole group: all loads first, so that they are under way together."""
    lines = []
    for name, dtype in spec.reads:
        if name == spec.packed:
            lines.append(f"word = read(at_{name}, i // {group}, kind_{name})")
            lines += [f"{name}_{k} = {_code('word', str(shift_of(k, spec.bits)), spec.bits)}" for k in range(group)]
            continue
        count = VECTOR // np.dtype(dtype).itemsize
        for first in range(0, group, count):
            loaded = ", ".join(f"{name}_{first + k}" for k in range(count))
            lines.append(f"{loaded} = read_vector(at_{name}, i + {first}, kind_{name})")
    for k in range(group):
        lines += _call(spec, f"_{k}")
    for name, dtype in spec.writes:
        if name == spec.packed:
            codes = " | ".join(_shifted(f"new_{name}_{k}", str(shift_of(k, spec.bits))) for k in range(group))
            lines.append(f"write(at_{name}, i // {group}, uint32({codes}))")
            continue
        count = VECTOR // np.dtype(dtype).itemsize
        for first in range(0, group, count):
            values = ", ".join(f"new_{name}_{first + k}" for k in range(count))
            lines.append(f"write_vector(at_{name}, i + {first}, ({values}))")
    return lines


def _one(spec: Streaming) -> list[str]:
    """Return what is done with a single element."""
    lines = [f"{name}_ = read(at_{name}, i, kind_{name})" for name, _ in spec.reads]
    lines += _call(spec, "_")
    return lines + [f"write(at_{name}, i, new_{name}_)" for name, _ in spec.writes]


def _packed_rest(spec: Streaming, group: int) -> list[str]:
    """Return what is done with the elements of a word that is not full; the rest of it is zeros."""
    packs = any(name == spec.packed for name, _ in spec.writes)
    inner = [f"shift = {shift_of_source(spec.bits)}"]
    for name, _ in spec.reads:
        code = _code("word", "shift", spec.bits)
        inner.append(f"{name}_ = {code if name == spec.packed else f'read(at_{name}, i + k, kind_{name})'}")
    inner += _call(spec, "_")
    for name, _ in spec.writes:
        shifted = _shifted(f"new_{name}_", "shift")
        inner.append(f"word = word | {shifted}" if name == spec.packed else f"write(at_{name}, i + k, new_{name}_)")
    begin = "word = uint32(0)" if packs else f"word = read(at_{spec.packed}, i // {group}, kind_{spec.packed})"
    lines = [begin, f"for k in range(min({group}, end - i)):", *(f"    {line}" for line in inner)]
    return [*lines, f"write(at_{spec.packed}, i // {group}, uint32(word))"] if packs else lines


def shift_of_source(bits: int) -> str:
    """Return `shift_of` as kernels write it."""
    return f"k * {bits} // 8 * 8 + {8 - bits} - k * {bits} % 8"


def _code(word: str, shift: str, bits: int) -> str:
    return f"({word} >> uint32({shift})) & uint32({(1 << bits) - 1})"


def _shifted(code: str, shift: str) -> str:
    return f"(uint32({code}) << uint32({shift}))"


def _call(spec: Streaming, suffix: str) -> list[str]:
    taken = [f"number({name}{suffix})" for name, _ in spec.reads] + list(spec.numbers)
    given = [f"new_{name}{suffix}" for name, _ in spec.writes] + ["reduced"] * bool(spec.reduction)
    lines = [f"{', '.join(given)}, = element_of({', '.join(taken)})"]
    for name, _ in spec.writes:
        if name != spec.packed:
            lines.append(f"new_{name}{suffix} = element(new_{name}{suffix}, like_{name})")
    return lines + ["found = combine(found, reduced)"] * bool(spec.reduction)


def make_kernel(source: str, precision: str, arrays: dict[str, str], functions: Sequence[str] = (), **more: Any) -> Any:
    """Compile nothing yet: a kernel is compiled when it is first launched, for each device.

    Args:
        source: of the function `kernel`.
        precision: of what is computed.
        arrays: name -> dtype, of what is read and written by address.
        functions: sources of what the kernel calls.
        more: other names that it uses.
    """
    made = dict(names(precision)) | more
    made |= {"uint32": np.uint32, "to_float8": to_float8, "from_float8": from_float8}
    made |= {f"{name}_wide": getattr(DOUBLE, name) for name in ("add", "multiply")}
    for name, dtype in arrays.items():
        made[f"kind_{name}"], made[f"like_{name}"] = kind(dtype), like(dtype)
    for text in functions:
        _define(text, made)
    _define(source, made)
    kernel = cuda.jit(made["kernel"])  # type: ignore[no-untyped-call]
    if not SIMULATED:
        return kernel
    from aiokv.kernels.cuda.simulator import InTurn  # noqa: PLC0415 - only there is what it is made of

    return InTurn(kernel)


def _define(source: str, made: dict[str, Any]) -> None:
    """Execute a source; the functions that kernels call are compiled into them."""
    before = set(made)
    # Numba quotes lines of it in its errors.
    file = f"<kernel {hash(source):x}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), made)
    for name in set(made) - before - {"__builtins__", "kernel"}:
        made[name] = cuda.jit(device=True, inline="always")(made[name])  # type: ignore[no-untyped-call]


@functools.cache
def streaming_kernel(spec: Streaming) -> Any:
    """Return the kernel that does it."""
    functions = [spec.element, COMBINE[spec.reduction]] if spec.reduction else [spec.element]
    return make_kernel(kernel_source(spec), spec.precision, spec.arrays, functions)


class Launch:
    """A kernel and the tensors that it goes over: made once, run at every step with other numbers.

    Args:
        spec: what is done.
        rows: for each tensor its arrays, in the order of `spec.arrays`; see `tensors.tensor_of`.
        stream: on which the table is copied to the device.

    Raises:
        SpecMismatchError: an array is not as the kernel needs it.
    """

    def __init__(self, spec: Streaming, rows: Sequence[Sequence[Any]], stream: Any = 0) -> None:
        arrays = list(spec.arrays)
        found = [[tensor_of(name, array) for name, array in zip(arrays, row, strict=True)] for row in rows]
        packed = frozenset([arrays.index(spec.packed)]) if spec.packed else frozenset()
        check_rows(found, spec)
        self.spec = spec
        self._rows = len(rows)
        self._table = launch.Table(found, spec.group, stream, packed)
        self._numbers: Any = None
        self._results: Any = None

    def move(self, rows: Sequence[Sequence[Tensor]], stream: Any, *, checks: bool) -> None:
        """Go over other tensors from now on, of the same lengths, aligned as the ones before. All is on this stream.

        Args:
            rows: as in the beginning.
            stream: on which addresses are copied to the device, if they have changed.
            checks: whether they are checked then.

        Raises:
            SpecMismatchError: an array is not as the kernel needs it.
        """
        self._table.move(rows, stream, (lambda: check_rows(rows, self.spec)) if checks else None)

    def forget(self) -> None:
        """Refer to the tensors no longer; before it is run again they are given once more."""
        self._table.forget()

    def run(self, numbers: Any = None, stream: Any = 0) -> Any:
        """Start the kernel.

        Args:
            numbers: [tensors, numbers], on the device already or not; None when there are none.
            stream: in whose order it runs.

        Returns:
            The reduced results, float64[parts] on the device, until the next time; None when nothing is reduced or
            there are no elements.
        """
        if not self._table.count:
            return None
        arguments = []
        if self.spec.numbers:
            wanted = (self._rows, len(self.spec.numbers))
            if not hasattr(numbers, "__cuda_ndarray__"):
                given = np.asarray(numbers, self.spec.precision).reshape(wanted)
                if self._numbers is None:
                    self._numbers = launch.new_on_device(wanted, given.dtype, stream)
                self._numbers.copy_to_device(given, stream=stream)
                numbers = self._numbers
            arguments.append(numbers)
        if self.spec.reduction:
            if self._results is None:
                self._results = launch.new_on_device(self._table.count, np.float64, stream)
            arguments.append(self._results)
        launch.run(streaming_kernel(self.spec), self._table, *arguments, stream=stream)
        return self._results
