"""The arithmetic on a CUDA device, compiled by numba-cuda; runs in Numba's simulator too (NUMBA_ENABLE_CUDASIM=1).

Arrays lie in the host's memory: each call copies them to the device, and the results back. bfloat16 is turned to
float32 on the way, and rounded on the way back; integers are added on the host. Every bit is as in `reference`, except
in the payload of a NaN.

NVVM fuses a product and a sum into one operation that rounds once, and numba-cuda has no option against it. Operations
with explicit rounding are never fused: so the functions of `arithmetic` are compiled from their source with every
operator replaced by one of those.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
from numba import cuda
from numba.core import config

from aiokv.kernels import arithmetic, reference
from aiokv.kernels.loops import norms_source, update_source
from aiokv.kernels.plan import FUNCTIONS, Plan
from aiokv.kernels.reference import LANES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.kernels.reference import Array, Scalar

SIMULATED: bool = bool(config.ENABLE_CUDASIM)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# A kernel strides over its grid, so that any launch covers any length. Numba warns of fewer than 128 blocks, and idle
# ones cost next to nothing; but in the simulator every thread is a thread of Python.
THREADS, MIN_BLOCKS, MAX_BLOCKS = (32, 1, 2) if SIMULATED else (256, 128, 2048)

ELEMENTS = ["for i in range(cuda.grid(1), weight.size, cuda.gridsize(1)):"]
LANE_BY_LANE = [
    "for j in range(cuda.grid(1), LANES, cuda.gridsize(1)):",
    "    for i in range(j, weight.size, LANES):",
]


def missing() -> list[str]:
    """Say what is needed to run on a device and is not there; nothing in the simulator."""
    if SIMULATED:
        return []
    found = []
    if error := cuda.cuda_error():  # type: ignore[no-untyped-call]
        found.append(f"the NVIDIA driver or a device ({' '.join(str(error).split())})")
    if error := missing_toolkit():
        found.append(f"the CUDA toolkit ({error})")
    return found


def missing_toolkit() -> str | None:
    """Say which library of the CUDA toolkit Numba can't load, None when all are there."""
    from numba.cuda.cuda_paths import get_cuda_paths  # noqa: PLC0415 - the simulator has no such module

    try:
        get_cuda_paths()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        return " ".join(str(error).split())
    return None


class Operations(NamedTuple):
    """What the functions compute with in one precision: each operation rounds its result once."""

    number: type[Scalar]
    add: Callable[[Any, Any], Any]
    multiply: Callable[[Any, Any], Any]
    divide: Callable[[Any, Any], Any]
    sqrt: Callable[[Any], Any]


if SIMULATED:
    # Python fuses nothing.
    SINGLE = Operations(np.float32, operator.add, operator.mul, operator.truediv, np.sqrt)
    DOUBLE = SINGLE._replace(number=np.float64)
else:
    from numba.cuda import libdevice as lib

    SINGLE = Operations(np.float32, lib.fadd_rn, lib.fmul_rn, lib.fdiv_rn, lib.fsqrt_rn)
    DOUBLE = Operations(np.float64, lib.dadd_rn, lib.dmul_rn, lib.ddiv_rn, lib.dsqrt_rn)

OPERATIONS = {"float32": SINGLE, "float64": DOUBLE}
"""By the precision of the computation."""


def _device_function(function: Callable[..., Any]) -> Any:
    """Compile a function into the kernels that call it, which needs no device."""
    return cuda.jit(device=True, inline="always")(function)  # type: ignore[no-untyped-call]


_FUNCTION_OF: dict[type[ast.operator], str] = {ast.Add: "add", ast.Sub: "add", ast.Mult: "multiply", ast.Div: "divide"}


class _ExplicitRounding(ast.NodeTransformer):
    """Replaces operators by functions. A change of sign rounds nothing and stays; a difference is a sum with one."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        self.generic_visit(node)
        function = ast.Name(_FUNCTION_OF[type(node.op)], ast.Load())
        right = ast.UnaryOp(ast.USub(), node.right) if isinstance(node.op, ast.Sub) else node.right
        return ast.fix_missing_locations(ast.copy_location(ast.Call(function, [node.left, right], []), node))


@functools.cache
def _names(precision: str) -> dict[str, Any]:
    """Return the functions of `arithmetic` as device functions that call each other, and all else that loops use."""
    operations = OPERATIONS[precision]
    names: dict[str, Any] = {"__name__": __name__, "LANES": LANES, "abs": abs, "cuda": cuda, **operations._asdict()}
    names |= {"element": _same, "wide": np.float64, "where": _where}
    source = _ExplicitRounding().visit(ast.parse(inspect.getsource(arithmetic)))
    made = dict(names)
    exec(compile(ast.fix_missing_locations(source), arithmetic.__file__, "exec"), made)
    # What the module has imported must not replace what is put in its place.
    for name in FUNCTIONS:
        names[name] = _device_function(_with_names(made[name], names))
    return names


def _with_names(function: Any, names: dict[str, Any]) -> Any:
    """Return the function with other global names."""
    return type(function)(function.__code__, names, function.__name__)


@_device_function
def _where(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


@_device_function
def _same(number: Any, like: Any) -> Any:
    return number


def _make(precision: str, source: str, name: str) -> Any:
    made = dict(_names(precision))
    if precision == "float32" and "add_square" in source:
        # Squares are added in float64 whatever the precision of the rest.
        made["add_square"] = _names("float64")["add_square"]
    exec(source, made)
    return cuda.jit(made[name])  # type: ignore[no-untyped-call]


@functools.cache
def update_kernel(plan: Plan, precision: str, *, in_place: bool, master: bool) -> Any:
    """Return the kernel of an update."""
    source = update_source("update", plan, ELEMENTS, in_place=in_place, master=master)
    return _make(precision, source, "update")


@functools.cache
def norms_kernel(plan: Plan, precision: str, counted: int) -> Any:
    """Return the kernel that adds squares."""
    return _make(precision, norms_source("norms", plan, LANE_BY_LANE, counted), "norms")


@cuda.jit
def accumulate_kernel(target: Array, source: Array) -> None:
    """Add elementwise, float32 or float64."""
    for i in range(cuda.grid(1), target.size, cuda.gridsize(1)):
        target[i] += source[i]


@cuda.jit
def accumulate_half_kernel(target: Array, source: Array) -> None:
    """Add to float16, or float16 to float32.

    A float32 has more than twice the digits of a float16, so that rounding twice gives what rounding once would.
    """
    for i in range(cuda.grid(1), target.size, cuda.gridsize(1)):
        target[i] = np.float32(target[i]) + np.float32(source[i])


def accumulate(target: Array, source: Array) -> None:
    """Add `source` to `target`. See `reference.accumulate`."""
    kernel = accumulate_half_kernel if source.dtype == np.float16 else accumulate_kernel
    total = _to_device(target)
    kernel[_geometry(target.size)](total, _to_device(source))
    _to_host(total, target)


def add_integers(target: Array, source: Array) -> bool:
    """Add `source` to `target`, unless a sum is out of range. See `reference.add_integers`."""
    return reference.add_integers(target, source)


def update(
    plan: Plan,
    weight: Array,
    total: Array,
    out: Array,
    state: Sequence[Array],
    inputs: Sequence[Array],
    numbers: Sequence[Scalar],
    master: Array | None,
) -> None:
    """Write the new weight to `out`. See `reference.update`."""
    kernel = update_kernel(plan, numbers[0].dtype.name, in_place=out is total, master=master is not None)
    old = _to_device(weight if master is None else master)
    summed = _to_device(total)
    new = summed if out is total else _to_device(out)
    kept = [_to_device(array) for array in state]
    arrays = [old, summed, *([] if out is total else [new]), *kept, *map(_to_device, inputs)]
    kernel[_geometry(weight.size)](*arrays, numbers)
    _to_host(new, out)
    if master is not None:
        _to_host(old, master)
    for on_device, array in zip(kept, state, strict=True):
        _to_host(on_device, array)


def norms(
    plan: Plan,
    weight: Array,
    total: Array,
    state: Sequence[Array],
    inputs: Sequence[Array],
    numbers: Sequence[Scalar],
    lanes: Sequence[Array],
) -> None:
    """Add squares to lanes. See `reference.norms`."""
    kernel = norms_kernel(plan, numbers[0].dtype.name, len(lanes))
    on_device = tuple([_to_device(lane) for lane in lanes])
    arrays = [_to_device(array) for array in (weight, total, *state, *inputs)]
    kernel[_geometry(LANES)](*arrays, numbers, on_device)
    for found, lane in zip(on_device, lanes, strict=True):
        _to_host(found, lane)


def _geometry(size: int) -> tuple[int, int]:
    """Return blocks and threads per block for an array of that length."""
    return max(MIN_BLOCKS, min(MAX_BLOCKS, -(-size // THREADS))), THREADS


def _to_device(array: Array) -> Any:
    return cuda.to_device(array.astype(np.float32) if array.dtype == BFLOAT16 else array)


def _to_host(on_device: Any, array: Array) -> None:
    if array.dtype == BFLOAT16:
        with np.errstate(all="ignore"):
            array[...] = on_device.copy_to_host()
    else:
        on_device.copy_to_host(array)
