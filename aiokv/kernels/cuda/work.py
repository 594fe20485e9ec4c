"""The work of a store, launched on a stream of its own device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba.cuda.cudadrv import driver

from aiokv.kernels.checks import precision_for
from aiokv.kernels.cuda import codec, optimize, reduce
from aiokv.kernels.cuda.launches import Launches
from aiokv.kernels.cuda.optimize import SquaresLaunch, places_of
from aiokv.kernels.cuda.tensors import Tensor, tensor_of
from aiokv.kernels.plan import plan_norms, plan_update, prepare
from aiokv.kernels.work import Add, Cast, Compensate, Decode, Divide, Renew, Scale, Squares, Work, Zero

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.kernels.cuda.streaming import Streaming
    from aiokv.kernels.plan import Plan

FLOAT_BYTES = 4
"""Of a float32."""

Place = tuple[int, int, int]
"""Which buffer, first byte, and number of elements."""


class _Planned(NamedTuple):
    """A kernel, where the arrays of each of its tensors lie, and the numbers of each."""

    spec: Streaming
    rows: list[list[Place]]
    numbers: list[Sequence[Any]]


class Works:
    """Launches work on one device.

    Args:
        buffers: the memory of each buffer, as bytes on the device.
    """

    def __init__(self, buffers: Mapping[int, Any]) -> None:
        self._buffers = buffers
        # What a server's buffers are is decided by itself.
        self._launches = Launches(checks=False)

    def launch(self, works: Sequence[tuple[Work, Sequence[int]]], stream: Any) -> None:
        """Start works of one kind, each on buffers in the order that it says; see `aiokv.kernels.work.kind_of`."""
        first, _ = works[0]
        if isinstance(first, Zero):
            # Each by itself, but beside each other, so that what follows can be one launch.
            for memory in [self._buffers[buffers[0]] for _, buffers in works]:
                driver.device_memset(memory, 0, memory.nbytes, stream=stream)  # type: ignore[no-untyped-call]
        elif isinstance(first, Squares):
            self._add_squares(first, works, stream)
        else:
            planned = [self._planned(work, buffers) for work, buffers in works]
            spec = planned[0].spec
            tensors = self._tensors([row for each in planned for row in each.rows], list(spec.arrays.values()))
            numbers = [each for one in planned for each in one.numbers] if spec.numbers else None
            run = self._launches.run if len(works) == 1 else self._launches.run_together
            run(spec, tensors, numbers, stream)

    def _planned(self, work: Work, buffers: Sequence[int]) -> _Planned:
        match work:
            case Add(out, sources, adds):
                named = {"out": buffers[0]} | {f"source_{n}": buffer for n, buffer in enumerate(buffers[1:])}
                return self._whole(reduce.sum_spec(out, sources, adds=adds), named)
            case Cast(out, source) if source == "float32":
                return self._whole(reduce.narrow_spec(out), {"out": buffers[0], "total": buffers[1]})
            case Cast(out, source):
                return self._whole(
                    reduce.sum_spec(out, (source,), adds=False), {"out": buffers[0], "source_0": buffers[1]}
                )
            case Decode():
                return self._decoded(work, buffers)
            case Scale(out, source, factor):
                spec, named = reduce.scale_spec(out), {"out": buffers[0]}
                if source is not None:
                    spec = reduce.sum_spec(out, (source,), adds=False, scales=True)
                    named["source_0"] = buffers[1]
                return self._whole(spec, named, [factor])
            case Divide(out, source, divisor):
                named = {"out": buffers[0], "source": buffers[-1]}
                return self._whole(reduce.quotient_spec(out, source), named, [divisor])
            case Compensate(out, source, weight, lamda):
                named = {"out": buffers[0], "source": buffers[-3], "weight": buffers[-2], "read": buffers[-1]}
                return self._whole(optimize.compensation_spec(out, source, weight), named, [lamda])
            case Renew():
                return self._renewed(work, buffers)
            case _:
                raise TypeError(f"no kernel does it: {work!r}")

    def _whole(self, spec: Streaming, named: Mapping[str, int], numbers: Sequence[Any] = ()) -> _Planned:
        """Return a kernel over the whole of buffers."""
        dtype, buffer = np.dtype(spec.arrays["out"]), named["out"]
        size = self._buffers[buffer].nbytes // dtype.itemsize
        return _Planned(spec, [[(named[name], 0, size) for name in spec.arrays]], [numbers])

    def _decoded(self, work: Decode, buffers: Sequence[int]) -> _Planned:
        spec = codec.decode_spec(work.codec)
        out, payload = buffers
        rows: list[list[Place]] = []
        numbers: list[Sequence[Any]] = []
        first = 0
        for begin, size, unit in work.parts:
            if size:
                codes = -(-size // spec.group) if spec.packed else size
                rows.append([(payload, begin, codes), (out, first * FLOAT_BYTES, size)])
                numbers.append([{"threshold": unit, "scale": unit, "one": 1.0}[name] for name in spec.numbers])
            first += size
        return _Planned(spec, rows, numbers)

    def _tensors(self, rows: list[list[Place]], dtypes: list[str]) -> list[list[Tensor]]:
        return [[self._tensor(*place) for place in zip(row, dtypes, strict=True)] for row in rows]

    def _tensor(self, place: Place, dtype: str) -> Tensor:
        buffer, first, size = place
        memory = self._buffers[buffer]
        address = tensor_of("buffer", memory).address + first
        # The memory is kept by who has the buffers: a launch that is kept must not keep it.
        return Tensor(address, size, np.dtype(dtype), None, (size,))

    def _rows(self, work: Squares | Renew, named: Mapping[str, tuple[int, str]]) -> list[list[Place]]:
        """Return where the arrays of each piece lie, those of the whole where all are updated at once."""
        sizes = [piece.size for piece in work.pieces]
        if len(work.steps) < len(sizes):
            sizes = [sum(sizes)]
        rows, first = [], 0
        for size in sizes:
            rows.append([(buffer, first * np.dtype(dtype).itemsize, size) for buffer, dtype in named.values()])
            first += size
        return rows

    def _named(self, work: Squares | Renew, plan: Plan, buffers: Sequence[int]) -> dict[str, tuple[int, str]]:
        """Return buffer and dtype of weight, total and the state that a plan takes, as kernels name them."""
        weight, total, *state = buffers
        precision = precision_for(np.dtype(work.weight)).name
        kept = dict(zip(work.names, state, strict=False))
        old = (kept["master"], precision) if "master" in kept else (weight, work.weight)
        named = {"weight": old, "total": (total, work.total)}
        return named | {f"array_{name}": (kept[name], precision) for name in plan.state}

    def _add_squares(self, first: Squares, works: Sequence[tuple[Any, Sequence[int]]], stream: Any) -> None:
        precision, counted = precision_for(np.dtype(first.weight)), first.rule.norm_counts[first.phase]
        plan = plan_norms(first.rule, first.phase)
        tensors: list[list[Tensor]] = []
        numbers: list[Any] = []
        places: list[int] = []
        for work, buffers in works:
            prepared = prepare(work.rule, str(work.phase), precision)
            named = self._named(work, plan, buffers[1:])
            tensors += self._tensors(self._rows(work, named), [dtype for _, dtype in named.values()])
            numbers += [prepared.numbers(step, norms) for step, norms in zip(work.steps, work.gathered, strict=True)]
            places += places_of(self._buffers[buffers[0]], counted * len(work.steps))
        weight, total = (tensor.dtype.name for tensor in tensors[0][:2])
        name = plan, precision.char, weight, total
        launched = self._launches.find(name, lambda: SquaresLaunch(plan, precision.name, weight, total, counted))
        launched.run(tensors, numbers, places, stream)

    def _renewed(self, work: Renew, buffers: Sequence[int]) -> _Planned:
        precision = precision_for(np.dtype(work.weight))
        plan = plan_update(work.rule)
        prepared = prepare(work.rule, "update", precision)
        named = self._named(work, plan, buffers)
        if work.reads:
            named["array_read"] = (buffers[-1], work.weight)
        if work.out:
            named["out"] = (buffers[2 + len(work.names)], work.weight)
        spec = optimize.update_spec(
            plan,
            precision.name,
            named["weight"][1],
            work.total,
            work.weight if work.out else None,
            (work.weight,) if work.reads else (),
            master="master" in work.names,
        )
        norms = work.norms or [()] * len(work.steps)
        numbers = [prepared.numbers(step, each) for step, each in zip(work.steps, norms, strict=True)]
        rows = self._rows(work, {name: named[name] for name in spec.arrays})
        # A key without elements has nothing to update.
        present = [n for n, row in enumerate(rows) if row[0][2]]
        return _Planned(spec, [rows[n] for n in present], [numbers[n] for n in present])
