"""Updates on the device: one pass over all tensors of a model for each rule, and the norms that some rules need.

The arithmetic is that of `aiokv.kernels.arithmetic`. Weight, sum and state are read once and written once; where the
weight is a master copy in float32, the copy in a low precision is written in the same pass.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.kernels.cuda import launch
from aiokv.kernels.cuda.memory import VECTOR
from aiokv.kernels.cuda.rounding import names
from aiokv.kernels.cuda.streaming import Streaming, make_kernel
from aiokv.kernels.cuda.tensors import tensor_of
from aiokv.kernels.plan import Plan, parameters
from aiokv.kernels.reference import LANES
from aiokv.optim import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.kernels.cuda.tensors import Tensor


SUM_BYTES = 8
"""Of a sum of squares, float64."""


@functools.cache
def update_spec(
    plan: Plan,
    precision: str,
    weight: str,
    total: str,
    out: str | None,
    inputs: tuple[str, ...] = (),
    *,
    master: bool = False,
) -> Streaming:
    """Return the kernel of an update.

    Its arrays are weight, total, the plan's state and inputs, and out, unless that is the total.

    Args:
        plan: what is computed.
        precision: float32 or float64.
        weight: dtype of the weight; that of the computation when it is a master copy.
        total: dtype of the sum.
        out: dtype of the new weight; None when it goes where the sum is.
        inputs: dtypes of the plan's inputs; without any, what was read is the weight.
        master: the weight is written, too.
    """
    reads = [("weight", weight), ("total", total), *((_kept(name), precision) for name in plan.state)]
    reads += [(_kept(name), dtype) for name, dtype in zip(plan.inputs, inputs, strict=bool(inputs))]
    writes = [("total", total) if out is None else ("out", out)]
    writes += [(_kept(name), precision) for name in plan.state] + [("weight", weight)] * master
    results = ["w", *plan.state]
    lines = [*_prepared(plan, reads), f"    {', '.join(results)}, = {_call(plan.function)}"]
    lines.append(f"    return {', '.join(results + ['w'] * master)},")
    return Streaming(f"update_{plan.function}", tuple(reads), tuple(writes), "\n".join(lines), plan.numbers, precision)


@functools.cache
def compensation_spec(out: str, source: str | None, weight: str) -> Streaming:
    """Return the kernel that compensates a gradient for what was changed since its weight was read.

    Args:
        out: dtype of the result.
        source: that of the gradient; None where the result takes its place.
        weight: dtype of the weight, and of what was read.
    """
    gradient = "out" if source is None else "source"
    element = f"def element_of({gradient}, weight, read, lamda):\n"
    element += f"    result, = compensation(to_precision(weight), {gradient}, to_precision(read), lamda)\n"
    element += "    return result,"
    reads = ((gradient, source or out), ("weight", weight), ("read", weight))
    return Streaming("compensate", reads, (("out", out),), element, ("lamda",), PRECISIONS[out])


def _prepared(plan: Plan, reads: Sequence[tuple[str, str]], name: str = "element_of") -> list[str]:
    arrays = [name for name, _ in reads]
    taken = arrays + list(plan.numbers)
    lines = [f"def {name}({', '.join(taken)}):"]
    lines += ["    w = to_precision(weight)", "    g = to_precision(total)"]
    lines += [
        f"    {name} = {f'to_precision({_kept(name)})' if _kept(name) in arrays else 'w'}"
        for name in plan.state + plan.inputs
    ]
    return lines + [f"    g = {_call(function)}" for function in plan.prepare]


def _call(function: str) -> str:
    return f"{function}({', '.join(parameters(function))})"


def _kept(name: str) -> str:
    return f"array_{name}"


# --- norms ---

NORMS = """\
def kernel(addresses, sizes, numbers, lanes):
    for row in range(cuda.blockIdx.x, addresses.shape[0], cuda.gridDim.x):
        size, aligned = sizes[row, 0], sizes[row, 1]
{setup}
        for lane in range({group} * cuda.threadIdx.x, LANES, {group} * cuda.blockDim.x):
            i = lane
{begin}
            while aligned and i + {group} <= size:
{wide}
                i += LANES
            while i < size:
{rest}
                i += LANES
{end}
"""


@functools.cache
def norms_kernel(plan: Plan, precision: str, arrays: tuple[tuple[str, str], ...], counted: int) -> Any:
    """Return the kernel that adds squares to lanes, as `reference.norms` does.

    A block takes a tensor, a thread some neighbouring lanes: 16 bytes at a time. Its arguments are the addresses,
    int64[tensors, arrays]; sizes, and whether 16 bytes can be read at a time, int64[tensors, 2]; the numbers,
    [tensors, numbers]; and the lanes, float64[tensors * results, LANES].
    """
    functions = ["\n".join([*_prepared(plan, arrays), f"    return {_call(plan.function)}"])]
    source = norms_source(plan, arrays, counted)
    # Squares are added in float64 whatever the precision of the rest.
    return make_kernel(source, precision, dict(arrays), functions, square=names("float64")["add_square"])


def norms_source(plan: Plan, arrays: tuple[tuple[str, str], ...], counted: int) -> str:
    """Return the source of `norms_kernel`."""
    group = VECTOR // min(np.dtype(dtype).itemsize for _, dtype in arrays)
    places = [(n, k) for n in range(counted) for k in range(group)]
    setup = [f"at_{name} = addresses[row, {place}]" for place, (name, _) in enumerate(arrays)]
    setup += [f"{name} = numbers[row, {place}]" for place, name in enumerate(plan.numbers)]
    loads = []
    for name, dtype in arrays:
        count = VECTOR // np.dtype(dtype).itemsize
        for first in range(0, group, count):
            loaded = ", ".join(f"{name}_{first + k}" for k in range(count))
            loads.append(f"{loaded} = read_vector(at_{name}, i + {first}, kind_{name})")
    wide, rest = list(loads), []
    for k in range(group):
        wide += _add_squares(plan, arrays, counted, k)
        rest.append(f"if i + {k} < size:")
        rest += [f"    {name}_{k} = read(at_{name}, i + {k}, kind_{name})" for name, _ in arrays]
        rest += [f"    {line}" for line in _add_squares(plan, arrays, counted, k)]
    return NORMS.format(
        group=group,
        setup=_lines(setup, 8),
        begin=_lines([f"sum_{n}_{k} = wide(0)" for n, k in places], 12),
        wide=_lines(wide, 16),
        rest=_lines(rest, 16),
        end=_lines([f"lanes[row * {counted} + {n}, lane + {k}] = sum_{n}_{k}" for n, k in places], 12),
    )


def _lines(lines: list[str], spaces: int) -> str:
    return "\n".join(" " * spaces + line for line in lines)


def _add_squares(plan: Plan, arrays: tuple[tuple[str, str], ...], counted: int, k: int) -> list[str]:
    taken = [f"number({name}_{k})" for name, _ in arrays] + list(plan.numbers)
    lines = [f"{', '.join(f'result_{n}' for n in range(counted))}, = element_of({', '.join(taken)})"]
    return lines + [f"sum_{n}_{k} = square(sum_{n}_{k}, wide(result_{n}))" for n in range(counted)]


def norms_arrays(plan: Plan, precision: str, weight: str, total: str) -> tuple[tuple[str, str], ...]:
    """Return name and dtype of the arrays that the squares are made of."""
    return (("weight", weight), ("total", total), *((_kept(name), precision) for name in plan.state))


# All threads of a block read a row together; then one of them adds, in the order of the lanes.
FOLD = """\
def kernel(lanes, places):
    shared = cuda.shared.array(LANES, wide)
    for n in range(cuda.blockIdx.x, lanes.shape[0], cuda.gridDim.x):
        for lane in range(cuda.threadIdx.x, LANES, cuda.blockDim.x):
            shared[lane] = lanes[n, lane]
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            total = shared[0]
            for lane in range(1, LANES):
                total = add(total, shared[lane])
            write(places[n], 0, total)
        cuda.syncthreads()
"""


@functools.cache
def fold_kernel() -> Any:
    """Return the kernel that adds the lanes of each tensor, in their order, and writes each sum to an address."""
    return make_kernel(FOLD, "float64", {})


class SquaresLaunch:
    """The squares that a plan computes of some tensors: two launches, for others each time.

    Args:
        plan: from `plan_norms`.
        precision: of the computation.
        weight: dtype of the weights.
        total: dtype of the sums.
        counted: how many results the plan has.
    """

    def __init__(self, plan: Plan, precision: str, weight: str, total: str, counted: int) -> None:
        self._kernel = norms_kernel(plan, precision, norms_arrays(plan, precision, weight, total), counted)
        self._numbers, self._precision, self._counted = len(plan.numbers), precision, counted
        self._room = launch.Room()

    def run(self, rows: Sequence[Sequence[Tensor]], numbers: Any, places: Sequence[int], stream: Any = 0) -> Any:
        """Start the kernels; return the lanes, float64[tensors * counted, LANES], until the next time.

        Args:
            rows: weight, total and state of each tensor, of at least one element.
            numbers: [tensors, numbers].
            places: address of each sum, int64[tensors * counted].
            stream: in whose order it happens.
        """
        addresses = np.array([[tensor.address for tensor in row] for row in rows], np.int64)
        aligned = (addresses % VECTOR == 0).all(axis=1)
        sizes = np.stack([np.array([row[0].size for row in rows], np.int64), aligned.astype(np.int64)], axis=1)
        given = np.asarray(numbers, self._precision).reshape(len(rows), self._numbers)
        named = {"addresses": addresses, "sizes": sizes, "numbers": given}
        arguments = [self._room.put(name, array, stream) for name, array in named.items()]
        lanes = self._room.take("lanes", (len(places), LANES), np.float64, stream)
        self._kernel[(*launch.geometry(len(rows)), stream)](*arguments, lanes)
        on_device = self._room.put("places", np.array(places, np.int64), stream)
        fold_kernel()[(*launch.geometry(len(places)), stream)](lanes, on_device)
        return lanes


def add_squares(
    plan: Plan, precision: str, rows: Sequence[Sequence[Tensor]], numbers: Any, counted: int, *, stream: Any = 0
) -> tuple[Any, Any]:
    """Add the squares that a plan computes of each tensor: the first phase of a rule that needs norms.

    Args:
        plan: from `plan_norms`.
        precision: of the computation.
        rows: weight, total and state of each tensor, of at least one element, with the same dtypes for all.
        numbers: [tensors, numbers].
        counted: how many results the plan has.
        stream: in whose order it happens.

    Returns:
        The lanes, float64[tensors * counted, LANES], and their sums, float64[tensors * counted]; on the device.
    """
    weight, total = (tensor.dtype.name for tensor in rows[0][:2])
    totals = launch.new_on_device(len(rows) * counted, np.float64, stream)
    places = places_of(totals, len(rows) * counted)
    return SquaresLaunch(plan, precision, weight, total, counted).run(rows, numbers, places, stream), totals


def places_of(totals: Any, count: int) -> list[int]:
    """Return the address of each number of an array of float64 on the device."""
    first = tensor_of("totals", totals).address
    return list(range(first, first + count * SUM_BYTES, SUM_BYTES))
