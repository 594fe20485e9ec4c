"""What is computed in one go of arrays on a device: said as data, so that a device does it, or else NumPy.

Each kind of work says in which order it takes its arrays. They are memory without a dtype; the work says what it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from aiokv.codec import BFloat16, Float8, Float16, OneBit, TwoBit
from aiokv.kernels.plan import plan_norms, plan_update
from aiokv.optim import PRECISIONS, OwnRule

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from aiokv.codec import Codec
    from aiokv.device.records import Part
    from aiokv.errors import AiokvError
    from aiokv.optim import Norms, Optimizer, Step
    from aiokv.types import Piece

    Bytes = NDArray[np.uint8]


MOST_ADDED = 8
"""Arrays that one pass adds."""


class Add(NamedTuple):
    """Add arrays in their order: out, then the sources. With `adds` to what is in out already, which comes first."""

    out: str
    sources: tuple[str, ...]
    adds: bool

    def joined(self, other: Add) -> Add | None:
        """Return what adds the arrays of another one, too, in one pass; None if they are too many for that."""
        sources = self.sources + other.sources
        return self._replace(sources=sources) if other.adds and self.adds + len(sources) <= MOST_ADDED else None


class Decode(NamedTuple):
    """Make float32 of codes: out, payload.

    For each tensor: where its codes begin in the payload, its number of elements, and the unit of its values.
    """

    codec: Codec
    parts: tuple[tuple[int, int, float], ...]


class Scale(NamedTuple):
    """Multiply by a number: out, and the source if it is not out itself."""

    out: str
    source: str | None
    factor: float


class Divide(NamedTuple):
    """Divide by a number: out, and the source if it is not out itself."""

    out: str
    source: str | None
    divisor: int


class Cast(NamedTuple):
    """Round to another dtype: out, source."""

    out: str
    source: str


class Zero(NamedTuple):
    """Make zeros: out, and anything."""


class Compensate(NamedTuple):
    """Compensate a gradient: out, the gradient if it is not out itself, the weight, and that which was read.

    See `aiokv.kernels.Backend.compensate`.
    """

    out: str
    source: str | None
    weight: str
    lamda: float


class Combine(NamedTuple):
    """Reduce arrays: out, unless it is the first of the sources; then the sources."""

    out: str
    sources: tuple[str, ...]
    reduction: str


class Squares(NamedTuple):
    """Compute sums of squares for a phase before an update: results in float64, weight, total, state.

    For each piece there is a step, and what was gathered of all of it in the phases before.
    """

    rule: Optimizer
    phase: int
    steps: tuple[Step, ...]
    pieces: tuple[Piece, ...]
    gathered: tuple[Norms, ...]
    weight: str
    total: str
    names: tuple[str, ...]


class Renew(NamedTuple):
    """Update: weight, total, state, then out if the new weight does not go over the total, then what was read if it is.

    For each piece that is updated by itself there is a step, and norms; otherwise one step for all.
    """

    rule: Optimizer
    steps: tuple[Step, ...]
    pieces: tuple[Piece, ...]
    norms: tuple[Norms, ...]
    weight: str
    total: str
    out: bool
    names: tuple[str, ...]
    reads: bool


Work = Add | Decode | Scale | Divide | Cast | Zero | Compensate | Combine | Squares | Renew


def decodes(codec: Codec, dtype: str) -> bool:
    """Tell whether payloads for a dtype can be decoded on a device: where each value follows from its code alone."""
    return isinstance(codec, OneBit | TwoBit | Float16 | BFloat16 | Float8) and PRECISIONS.get(dtype) == "float32"


def has_kernel(rule: Optimizer) -> bool:
    """Tell whether a device can make a rule's updates: those that take weights, gradient and state alone."""
    return not isinstance(rule, OwnRule) and not rule.by_row and set(plan_update(rule).inputs) <= {"read"}


def runs_on_device(work: Work) -> bool:
    """Tell whether a device can do the work."""
    match work:
        case Combine():
            return False
        case Squares():
            return all(piece.size for piece in work.pieces)
        case Renew(rule, steps):
            # At a rate of 0 nothing is computed.
            stands = rule.divides_by_rate and not all(step.learning_rate for step in steps)
            return has_kernel(rule) and not stands
        case _:
            return True


def kind_of(work: Any) -> Hashable:
    """Return what works have in common that a device can do in one launch; None for one that it does alone."""
    match work:
        case Add() | Cast() | Zero():
            return work
        case Scale(out, source) | Divide(out, source):
            return type(work), out, source
        case Compensate(out, source, weight):
            return Compensate, out, source, weight
        case Decode(codec):
            return Decode, type(codec)
        case Squares(rule, phase) if runs_on_device(work):
            return Squares, plan_norms(rule, phase), work.weight, work.total, work.names
        case Renew(rule) if runs_on_device(work):
            return Renew, plan_update(rule), work.weight, work.total, work.out, work.names, work.reads
        case _:
            return None


class Engine(Protocol):
    """Devices that do what they are told, each stream in its order, and report events when they happen.

    Nothing waits for them here: calls return at once. Buffers and events are numbers of the caller's choice.
    """

    @property
    def limits(self) -> list[int]:
        """How many bytes buffers may have on each device."""
        ...

    def pinned(self, nbytes: int) -> Bytes:
        """Return memory of the host that devices copy from and to without another copy."""
        ...

    def start(self, report: Callable[[list[tuple[int, AiokvError | None]]], None]) -> None:
        """Begin; events are reported from a thread of the engine's, in lists."""
        ...

    def allocate(self, buffer: int, device: int, nbytes: int) -> None:
        """Make a buffer."""
        ...

    def deallocate(self, buffer: int) -> None:
        """Give a buffer back."""
        ...

    def copy(
        self,
        stream: tuple[int, str],
        waits: Sequence[int],
        event: int,
        target: int | Bytes,
        source: int | Bytes,
        part: tuple[int, int],
    ) -> None:
        """Copy between buffers or memory of the host: from the first byte of the source on, so many bytes."""
        ...

    def launch(self, stream: tuple[int, str], waits: Sequence[int], parts: Sequence[Part]) -> None:
        """Do works. See `aiokv.device.records.Launch`."""
        ...

    def close(self) -> None:
        """End, when all that was wanted is done. It may take a while: call it in a thread."""
        ...
