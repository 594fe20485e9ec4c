"""How fast each kernel is, in bytes per second of memory that it has to move, against a copy on the device."""

from __future__ import annotations

import functools
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import cuda

from aiokv.kernels.cuda import optimize, reduce, select, sparse
from aiokv.kernels.cuda.listing import Listed, every_kernel
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.cuda.streaming import Launch, Streaming
from aiokv.kernels.cuda.tensors import Copy
from aiokv.kernels.plan import plan_norms, plan_update
from aiokv.optim import LAMB, Adam

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

LAUNCHES = 1 if SIMULATED else 10
"""Between two looks at the clock, so that starting them does not count."""

ROW = 4 if SIMULATED else 64
"""Elements of a row."""

COPY = "copy on the device"


class Measured(NamedTuple):
    """A figure of one kernel.

    Attributes:
        name: of the kernel.
        gbps: GB/s of the bytes that it has to move.
        microseconds: of one launch.
    """

    name: str
    gbps: float
    microseconds: float


def timed(name: str, nbytes: float, work: Callable[[], Any], rounds: int) -> Measured:
    """Return the median of some rounds of several launches each; the first launch, which compiles, does not count."""
    work()
    cuda.synchronize()  # type: ignore[no-untyped-call]
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        for _ in range(LAUNCHES):
            work()
        cuda.synchronize()  # type: ignore[no-untyped-call]
        found.append((time.perf_counter() - begun) / LAUNCHES)
    seconds = statistics.median(found)
    return Measured(name, nbytes / seconds / 1e9, seconds * 1e6)


def measure(
    elements: int, tensors: Sequence[int], rounds: int, kernels: Sequence[Listed] | None = None
) -> Iterator[Measured]:
    """Measure the copy, each kernel that goes over memory once, and two that go over a model's tensors in one launch.

    Args:
        elements: of each array; many enough that they do not fit into a cache.
        tensors: elements of a model's tensors.
        rounds: how often each is timed.
        kernels: which ones; all when not given.
    """
    yield _measure_copy(elements, rounds)
    for listed in every_kernel() if kernels is None else kernels:
        if listed.spec is not None:
            launch, numbers = launch_of(listed.spec, [elements])
            yield timed(listed.name, listed.must_move * elements, lambda: launch.run(numbers), rounds)  # noqa: B023 - called at once
    if kernels is None:
        yield from _measure_others(elements, tensors, rounds)
    total = sum(tensors)
    adds = reduce.sum_spec("float32", ("float32",), adds=True)
    adam = optimize.update_spec(plan_update(Adam()), "float32", "float32", "float32", None)
    for name, spec, nbytes in (("accumulate, a model", adds, 12), ("adam, a model", adam, 28)):
        launch, numbers = launch_of(spec, tensors)
        yield timed(name, nbytes * total, lambda: launch.run(numbers), rounds)  # noqa: B023 - called at once


def _measure_copy(elements: int, rounds: int) -> Measured:
    source, target = (cuda.to_device(np.zeros(elements, np.float32)) for _ in range(2))
    return timed(COPY, source.nbytes + target.nbytes, lambda: target.copy_to_device(source), rounds)


def _measure_others(elements: int, tensors: Sequence[int], rounds: int) -> Iterator[Measured]:
    """Measure what goes over memory several times, or not in order."""
    array = Copy(np.random.default_rng(0).standard_normal(elements).astype(np.float32))
    count = elements // 100 + 1
    # Four passes for the digits, one that counts, and one that writes.
    yield timed("top-k of 1 %", 6 * 4 * elements, lambda: select.largest_places(array, count), rounds)
    rows = elements // ROW
    table, values = (Copy(np.zeros(rows * ROW, np.float32)) for _ in range(2))
    ids = np.random.default_rng(0).permutation(rows)
    nbytes = table.nbytes
    yield timed("gather rows", 2 * nbytes, lambda: sparse.gather(table, ids, values, ROW), rounds)
    yield timed("add rows", 3 * nbytes, lambda: sparse.scatter_add(table, ids, values, ROW), rounds)
    plan = plan_norms(LAMB(), 0)
    arrays = [[Copy(np.zeros(size, np.float32)).tensor for _ in range(4)] for size in tensors]
    numbers = np.ones((len(tensors), len(plan.numbers)), np.float32)
    work = functools.partial(optimize.add_squares, plan, "float32", arrays, numbers, 2)
    yield timed("squares for lamb, a model", 16 * sum(tensors), work, rounds)


def launch_of(spec: Streaming, sizes: Sequence[int]) -> tuple[Launch, Any]:
    """Return a launch over arrays of zeros, and the numbers that it is run with, on the device already.

    With those it has something to do: a factor of 1 would leave everything as it is.
    """
    rows = []
    for size in sizes:
        counts = {name: -(-size // spec.group) if name == spec.packed else size for name in spec.arrays}
        rows.append([Copy(np.zeros(counts[name], dtype)) for name, dtype in spec.arrays.items()])
    shape = len(sizes), len(spec.numbers)
    numbers = cuda.to_device(np.full(shape, 0.5, spec.precision)) if spec.numbers else None
    return Launch(spec, rows), numbers
