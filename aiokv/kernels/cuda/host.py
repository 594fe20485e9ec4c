"""What a backend has: arithmetic on arrays in the host's memory, which each call copies to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from aiokv.kernels import reference
from aiokv.kernels.cuda import optimize, reduce
from aiokv.kernels.cuda.streaming import Launch
from aiokv.kernels.cuda.tensors import Copy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.kernels.plan import Plan
    from aiokv.kernels.reference import Array, Scalar


def accumulate(target: Array, source: Array) -> None:
    """Add `source` to `target`. See `reference.accumulate`."""
    spec = reduce.sum_spec(target.dtype.name, (source.dtype.name,), adds=True)
    total, added = Copy(target), Copy(source)
    Launch(spec, [[total, added]]).run()
    total.copy_to(target)


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
    old = weight if master is None else master
    arrays = [old, total, *state, *inputs, *([] if out is total else [out])]
    spec = optimize.update_spec(
        plan,
        numbers[0].dtype.name,
        old.dtype.name,
        total.dtype.name,
        None if out is total else out.dtype.name,
        tuple([array.dtype.name for array in inputs]),
        master=master is not None,
    )
    copies = [Copy(array) for array in arrays]
    Launch(spec, [copies]).run([numbers])
    # What is only read may be the master copy as well, so the names say what was written.
    of_name = dict(zip(spec.arrays, zip(copies, arrays, strict=True), strict=True))
    for name, _ in spec.writes:
        copy, array = of_name[name]
        copy.copy_to(array)


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
    arrays = [weight, total, *state]
    row = [Copy(array).tensor for array in arrays]
    found, _ = optimize.add_squares(plan, numbers[0].dtype.name, [row], [numbers], len(lanes))
    for on_device, lane in zip(found.copy_to_host(), lanes, strict=True):
        np.add(lane, on_device, out=lane)
