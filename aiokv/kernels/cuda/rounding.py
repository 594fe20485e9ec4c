"""The functions of `arithmetic` for a device, where every operation is rounded.

NVVM fuses a product and a sum into one operation that rounds once, and numba-cuda has no option against it. Operations
with explicit rounding are never fused: so the functions are compiled from their source with every operator replaced by
one of those.
"""

from __future__ import annotations

import ast
import functools
import inspect
import operator
import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import cuda

from aiokv.kernels import arithmetic
from aiokv.kernels.cuda import memory
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.plan import FUNCTIONS
from aiokv.kernels.reference import LANES

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.kernels.reference import Scalar


class Operations(NamedTuple):
    """What the functions compute with in one precision: each operation rounds its result once."""

    to_precision: type[Scalar]
    add: Callable[[Any, Any], Any]
    multiply: Callable[[Any, Any], Any]
    divide: Callable[[Any, Any], Any]
    sqrt: Callable[[Any], Any]


if SIMULATED:
    # Python fuses nothing.
    SINGLE = Operations(np.float32, operator.add, operator.mul, operator.truediv, np.sqrt)
    DOUBLE = SINGLE._replace(to_precision=np.float64)
else:
    from numba.cuda import libdevice as lib

    SINGLE = Operations(np.float32, lib.fadd_rn, lib.fmul_rn, lib.fdiv_rn, lib.fsqrt_rn)
    DOUBLE = Operations(np.float64, lib.dadd_rn, lib.dmul_rn, lib.ddiv_rn, lib.dsqrt_rn)

OPERATIONS = {"float32": SINGLE, "float64": DOUBLE}
"""By the precision of the computation."""


def device_function(function: Callable[..., Any]) -> Any:
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


_parsing = threading.Lock()
"""Each device has a thread, and CPython 3.11 fails when two of them have syntax trees made at the same time."""


@functools.cache
def names(precision: str) -> dict[str, Any]:
    """Return what the sources of kernels may name: `arithmetic` as device functions, and how memory is read."""
    found: dict[str, Any] = {
        "__name__": __name__,
        "LANES": LANES,
        "abs": abs,
        "cuda": cuda,
        "max": max,
        "min": min,
        "range": range,
        "wide": np.float64,
        **OPERATIONS[precision]._asdict(),
    }
    for name in ("read", "read_vector", "write", "write_vector", "number", "element", "where"):
        found[name] = getattr(memory, name)
    made = dict(found)
    with _parsing:
        source = _ExplicitRounding().visit(ast.parse(inspect.getsource(arithmetic)))
        exec(compile(ast.fix_missing_locations(source), arithmetic.__file__, "exec"), made)
    # What the module has imported must not replace what is put in its place.
    for name in FUNCTIONS:
        found[name] = device_function(_with_names(made[name], found))
    return found


def _with_names(function: Any, names: dict[str, Any]) -> Any:
    """Return the function with other global names."""
    return type(function)(function.__code__, names, function.__name__)
