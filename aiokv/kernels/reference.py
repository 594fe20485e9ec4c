"""The arithmetic in NumPy: short, plain, and what the other backends are compared with, bit by bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from aiokv.kernels.plan import FUNCTIONS, Plan, parameters

if TYPE_CHECKING:
    from collections.abc import Sequence

Array = NDArray[Any]
Scalar = np.floating[Any]

LANES = 1024
"""Into how many sums the squares of an array are added: element i goes to lane i mod LANES, in the order of i."""


def accumulate(target: Array, source: Array) -> None:
    """Add `source` to `target`, floats of the same dtype, or those of a lower precision to float32."""
    # A gradient that overflows shows it in its values; compiled code does not warn either.
    with np.errstate(all="ignore"):
        np.add(target, source.astype(target.dtype, copy=False), out=target)


def add_integers(target: Array, source: Array) -> bool:
    """Add `source` to `target`, or leave it as it is and return False when one of the sums is out of range."""
    with np.errstate(all="ignore"):
        total = target + source
    if np.any(_overflowed(target, source, total)):
        return False
    target[...] = total
    return True


def _overflowed(target: Array, source: Array, total: Array) -> Array:
    if target.dtype.kind == "u":
        return np.asarray(total < target)
    # A sum that wrapped around has another sign than both summands.
    return np.asarray(((target ^ total) & (source ^ total)) < 0)


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
    """Write the new weight to `out`, computed in the dtype of the numbers; see `aiokv.kernels.Kernels`."""
    values = _values(plan, weight if master is None else master, total, state, inputs, numbers)
    with np.errstate(all="ignore"):
        new, *kept = _call(plan.function, values)
        for array, value in zip(state, kept, strict=True):
            array[...] = value
        if master is not None:
            master[...] = new
        out[...] = new


def gradient(plan: Plan, weight: Array, total: Array, numbers: Sequence[Scalar]) -> Array:
    """Return what a plan prepares."""
    prepared: Array = _values(plan, weight, total, (), (), numbers)["g"]
    return prepared


def norms(
    plan: Plan,
    weight: Array,
    total: Array,
    state: Sequence[Array],
    inputs: Sequence[Array],
    numbers: Sequence[Scalar],
    lanes: Sequence[Array],
) -> None:
    """Add the squares of what a plan computes to lanes of float64, one array of LANES for each result."""
    values = _values(plan, weight, total, state, inputs, numbers)
    with np.errstate(all="ignore"):
        for result, lane in zip(_call(plan.function, values), lanes, strict=True):
            wide = result.astype(np.float64)
            for start in range(0, wide.size, LANES):
                part = wide[start : start + LANES]
                lane[: part.size] = FUNCTIONS["add_square"](lane[: part.size], part)


def _values(
    plan: Plan,
    weight: Array,
    total: Array,
    state: Sequence[Array],
    inputs: Sequence[Array],
    numbers: Sequence[Scalar],
) -> dict[str, Any]:
    """Return everything that the plan's function takes, by name."""
    dtype = numbers[0].dtype
    values: dict[str, Any] = dict(zip(plan.numbers, numbers, strict=True))
    values.update(zip(plan.state, state, strict=False))
    values.update((name, array.astype(dtype, copy=False)) for name, array in zip(plan.inputs, inputs, strict=False))
    values["w"], values["g"] = (array.astype(dtype, copy=False) for array in (weight, total))
    with np.errstate(all="ignore"):
        for function in plan.prepare:
            values["g"] = _call(function, values)
    return values


def _call(function: str, values: dict[str, Any]) -> Any:
    return FUNCTIONS[function](*[values[name] for name in parameters(function)])
