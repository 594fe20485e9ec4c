"""Launches that are made once for tensors of these lengths, and run again and again.

What a launch needs beside its arrays is on the device then: which parts they have, and room for addresses, numbers and
results. Where nothing has changed since the last time nothing is copied there, and nothing is allocated in any case: to
free memory of a device would stop it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from aiokv.kernels.cuda import launch
from aiokv.kernels.cuda.memory import VECTOR
from aiokv.kernels.cuda.streaming import Launch, streaming_kernel
from aiokv.kernels.cuda.tensors import tensor_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.kernels.cuda.streaming import Streaming
    from aiokv.kernels.cuda.tensors import Tensor

MOST_LAUNCHES = 4096
"""Launches that are kept; each takes a few hundred bytes of a device's memory, and a few KiB for norms."""


class Run(Protocol):
    """Starts a kernel over tensors; returns what it reduces. See `aiokv.kernels.cuda.streaming.Launch`."""

    def __call__(self, spec: Streaming, rows: Sequence[Sequence[Any]], numbers: Any = None, stream: Any = 0) -> Any:
        """Start it."""
        ...


def once(spec: Streaming, rows: Sequence[Sequence[Any]], numbers: Any = None, stream: Any = 0) -> Any:
    """Start a kernel over tensors that it will hardly see again."""
    return Launch(spec, rows, stream).run(numbers, stream)


class Launches:
    """Those of one device, on one stream. Tensors are not kept: who starts a kernel keeps them until it is done.

    Args:
        checks: whether tensors that have moved are checked again.
    """

    def __init__(self, *, checks: bool = True) -> None:
        self._checks = checks
        self._made: dict[Any, Any] = {}

    def run(self, spec: Streaming, rows: Sequence[Sequence[Any]], numbers: Any = None, stream: Any = 0) -> Any:
        """Start a kernel; what it reduces is overwritten by the next one like it."""
        tensors = [[tensor_of(name, array) for name, array in zip(spec.arrays, row, strict=True)] for row in rows]
        launched = self.find((spec, shape_of(tensors)), lambda: Launch(spec, tensors, stream))
        launched.move(tensors, stream, checks=self._checks)
        try:
            return launched.run(numbers, stream)
        finally:
            launched.forget()

    def run_together(
        self, spec: Streaming, tensors: Sequence[Sequence[Tensor]], numbers: Any = None, stream: Any = 0
    ) -> None:
        """Start a kernel that reduces nothing over tensors that will hardly come together again."""
        name = "together", spec
        self.find(name, lambda: Together(spec)).run(tensors, numbers, stream)

    def find(self, name: Any, make: Callable[[], Any]) -> Any:
        """Return what was made under a name, or make it."""
        found = self._made.get(name)
        if found is None:
            if len(self._made) >= MOST_LAUNCHES:
                self._made.clear()
            found = self._made[name] = make()
        return found


class Together:
    """Launches of one kernel over tensors that are others each time.

    Args:
        spec: what is done; nothing is reduced.
    """

    def __init__(self, spec: Streaming) -> None:
        self._spec = spec
        arrays = list(spec.arrays)
        self._packed = frozenset([arrays.index(spec.packed)]) if spec.packed else frozenset[int]()
        self._room = launch.Room()

    def run(self, rows: Sequence[Sequence[Tensor]], numbers: Any, stream: Any) -> None:
        """Start the kernel."""
        addresses, parts = launch.table_of(rows, self._spec.group, self._packed)
        if not len(parts):
            return
        arguments = [self._room.put("addresses", addresses, stream), self._room.put("parts", parts, stream)]
        if self._spec.numbers:
            given = np.asarray(numbers, self._spec.precision).reshape(len(rows), len(self._spec.numbers))
            arguments.append(self._room.put("numbers", given, stream))
        kernel = streaming_kernel(self._spec)
        kernel[(*launch.geometry(len(parts)), stream)](*arguments)


def shape_of(tensors: Sequence[Sequence[Tensor]]) -> tuple[tuple[int, bool], ...]:
    """Return the length of each row, and whether it can be read 16 bytes at a time.

    What has several codes in a word is not as long as the others.
    """
    return tuple(
        [(max([tensor.size for tensor in row]), all(tensor.address % VECTOR == 0 for tensor in row)) for row in tensors]
    )
