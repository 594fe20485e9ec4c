"""What the benchmark moves: the tensors of each workload, and how many rounds of it make a good measurement."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiokv.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
ITEM_BYTES = 4
"""Everything is float32."""

KNOWN = "large:MIB, resnet50, small, latency:BYTES, limits[:MIB], kernels[:MIB]"
"""What a user can ask for; the last is measured by `limits`, without tensors."""

_SMALL_KEYS, _SMALL_BYTES = 1000, 1024
_SECONDS_WORTH = 2 << 30
"""Bytes that take about a second, one way."""
_MAX_BYTES = 1 << 36

_RESNET50_STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and number of blocks; a block ends four times as wide as it works inside."""
_EXPANSION = 4
_CLASSES = 1000

Shape = tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Workload:
    """The float32 tensors that one call moves, by key, and the usual number of rounds."""

    name: str
    shapes: dict[str, Shape]
    rounds: int
    warmup: int

    @property
    def size(self) -> int:
        """Elements of all tensors together."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors together."""
        return self.size * ITEM_BYTES


def parse_workload(text: str) -> Workload:
    """Return the workload that the text names.

    Raises:
        ConfigError: there is none of that name, or its number is missing or out of range.
    """
    name, colon, number = text.partition(":")
    make = _WORKLOADS.get(name)
    if make is None or bool(colon) != (name in _NUMBERED):
        raise ConfigError(f"unknown workload {text!r}; known: {KNOWN}", expected=KNOWN, got=text)
    return make(text, number)


def resnet50_shapes() -> dict[str, Shape]:
    """Return the parameters of ResNet-50 for 1,000 classes: 161 tensors with 25,557,032 elements.

    Each convolution without a bias is followed by a batch normalisation with a scale and a shift.
    """
    shapes: dict[str, Shape] = {}

    def convolution(name: str, outputs: int, inputs: int, kernel: int) -> None:
        shapes[f"{name}.weight"] = (outputs, inputs, kernel, kernel)
        shapes[f"{name}.scale"] = shapes[f"{name}.shift"] = (outputs,)

    convolution("stem", 64, 3, 7)
    inputs = 64
    for stage, (width, blocks) in enumerate(_RESNET50_STAGES, start=1):
        outputs = width * _EXPANSION
        for block in range(blocks):
            prefix = f"stage{stage}.block{block}"
            convolution(f"{prefix}.conv1", width, inputs, 1)
            convolution(f"{prefix}.conv2", width, width, 3)
            convolution(f"{prefix}.conv3", outputs, width, 1)
            if block == 0:
                convolution(f"{prefix}.shortcut", outputs, inputs, 1)
            inputs = outputs
    shapes["classifier.weight"] = (_CLASSES, inputs)
    shapes["classifier.bias"] = (_CLASSES,)
    return shapes


def _large(text: str, number: str) -> Workload:
    nbytes = int(_number(text, number, "MiB, such as large:64", _mib))
    rounds = min(max(_SECONDS_WORTH // nbytes, 8), 200)
    return Workload(text, {"large": (nbytes // ITEM_BYTES,)}, rounds, warmup=3)


def _resnet50(text: str, _nothing: str) -> Workload:
    return Workload(text, resnet50_shapes(), rounds=20, warmup=3)


def _small(text: str, _nothing: str) -> Workload:
    shapes: dict[str, Shape] = {f"small.{index}": (_SMALL_BYTES // ITEM_BYTES,) for index in range(_SMALL_KEYS)}
    return Workload(text, shapes, rounds=100, warmup=10)


def _latency(text: str, number: str) -> Workload:
    nbytes = int(_number(text, number, f"bytes that is a multiple of {ITEM_BYTES}, such as latency:4", int))
    return Workload(text, {"latency": (nbytes // ITEM_BYTES,)}, rounds=2000, warmup=200)


_WORKLOADS: dict[str, Callable[[str, str], Workload]] = {
    "large": _large,
    "resnet50": _resnet50,
    "small": _small,
    "latency": _latency,
}
_NUMBERED = ("large", "latency")


def _mib(number: str) -> float:
    """Return so many MiB in bytes, rounded down to whole elements."""
    return float(number) * MIB // ITEM_BYTES * ITEM_BYTES


def _number(text: str, number: str, what: str, read: Callable[[str], float]) -> float:
    """Read the number behind the colon and return it in bytes; `what` says what it is a number of."""
    try:
        nbytes = read(number)
    except ValueError:
        nbytes = math.nan
    if not (ITEM_BYTES <= nbytes <= _MAX_BYTES and nbytes % ITEM_BYTES == 0):
        expected = f"a number of {what}, up to {_MAX_BYTES >> 30} GiB"
        raise ConfigError(f"workload {text!r} needs {expected}; got {number!r}", expected=expected, got=number)
    return nbytes
