"""The arithmetic in one pass over memory: compiled by Numba, without the interpreter's lock.

Without `fastmath` LLVM neither reorders nor fuses operations, so that every bit is as in `reference`. A loop is
compiled when it is first used. Compiled code is kept for the next process in Numba's cache, under a name that has a
digest of the source in it. A processor without instructions for float16 leaves those to `reference`.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

from aiokv.kernels import halves, reference
from aiokv.kernels.halves import FLOAT16, as_integers
from aiokv.kernels.loops import digest, norms_source, update_source
from aiokv.kernels.plan import FUNCTIONS, Plan
from aiokv.kernels.reference import LANES

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.kernels.reference import Array, Scalar

ELEMENTS = ["for i in range(weight.size):"]
LANE_BY_LANE = [
    "for start in range(0, weight.size, LANES):",
    "    for j in range(min(LANES, weight.size - start)):",
    "        i = start + j",
]


def _can_cache() -> bool:
    """Tell whether there is a folder where compiled code can be kept for the next process."""
    try:
        njit(cache=True)(_can_cache)
    except RuntimeError:
        # Numba says so when no folder can be written, as in a container with a read-only file system.
        return False
    return True


CACHE = _can_cache()
HALF_PRECISION = halves.has_float16()


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _accumulate(target: Array, source: Array) -> None:
    # A float32 has more than twice the digits of a float16, so that rounding twice gives what rounding once would.
    for i in range(target.size):
        target[i] = halves.element(halves.number(target[i]) + halves.number(source[i]), target[i])


@njit(nogil=True, cache=CACHE, error_model="numpy")
def _add_integers(target: Array, source: Array, low: Any, high: Any, zero: Any) -> bool:
    found = False
    for i in range(target.size):
        t, s = target[i], source[i]
        found |= (t > high - s) if s > zero else (t < low - s)
    if found:
        return False
    for i in range(target.size):
        target[i] += source[i]
    return True


@njit(error_model="numpy")
def _where(condition: Any, yes: Any, no: Any) -> Any:
    return yes if condition else no


def _compilable() -> dict[str, Any]:
    """Return the functions of `arithmetic` as they call each other in compiled code."""
    names: dict[str, Any] = {"__name__": __name__, "sqrt": np.sqrt, "where": _where, "abs": abs}
    for name, function in FUNCTIONS.items():
        names[name] = njit(error_model="numpy")(types.FunctionType(function.__code__, names, name))
    return names


_NAMES = _compilable() | {
    "LANES": LANES,
    "element": halves.element,
    "number": halves.number,
    "wide": np.float64,
}


def _compile(name: str, make_source: Callable[[str], str]) -> Any:
    """Return a loop that is compiled for each combination of types with which it is called."""
    if CACHE:
        own = [inspect.getsource(module) for module in (sys.modules[__name__], halves)]
        name = f"{name}_{digest(make_source(name), *own)}"
    made = dict(_NAMES)
    # Numba keeps compiled code beside the file from which a function comes.
    exec(compile(make_source(name), __file__, "exec"), made)
    return njit(nogil=True, cache=CACHE, error_model="numpy")(made[name])


@functools.cache
def update_loop(plan: Plan, *, in_place: bool, master: bool) -> Any:
    """Return the loop of an update."""
    return _compile(plan.function, lambda name: update_source(name, plan, ELEMENTS, in_place=in_place, master=master))


@functools.cache
def norms_loop(plan: Plan, counted: int) -> Any:
    """Return the loop that adds squares."""
    return _compile(plan.function, lambda name: norms_source(name, plan, LANE_BY_LANE, counted))


def accumulate(target: Array, source: Array) -> None:
    """Add `source` to `target`. See `reference.accumulate`."""
    if _fits(target, source):
        _accumulate(as_integers(target), as_integers(source))
    else:
        reference.accumulate(target, source)


def add_integers(target: Array, source: Array) -> bool:
    """Add `source` to `target`, unless a sum is out of range. See `reference.add_integers`."""
    kind, limits = target.dtype.type, np.iinfo(target.dtype)
    return bool(_add_integers(target, source, kind(limits.min), kind(limits.max), kind(0)))


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
    if not _fits(weight, total, *inputs):
        reference.update(plan, weight, total, out, state, inputs, numbers, master)
        return
    loop = update_loop(plan, in_place=out is total, master=master is not None)
    arrays = [weight if master is None else master, total, *([] if out is total else [out]), *state, *inputs]
    loop(*map(as_integers, arrays), numbers)


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
    if not _fits(weight, total, *inputs):
        reference.norms(plan, weight, total, state, inputs, numbers, lanes)
        return
    loop = norms_loop(plan, len(lanes))
    loop(*map(as_integers, [weight, total, *state, *inputs]), numbers, tuple(lanes))


def _fits(*arrays: Array) -> bool:
    """Tell whether compiled code can take the arrays."""
    return HALF_PRECISION or all(array.dtype != FLOAT16 for array in arrays)
