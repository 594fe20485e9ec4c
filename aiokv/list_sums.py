"""Arrays that a call gives for one key, one for each device: where their sum is made, and who makes it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aiokv.errors import SpecMismatchError, SumOverflowError
from aiokv.kernels.foreign import OnDevice
from aiokv.optim import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aiokv.codec import Codec
    from aiokv.kernels import Backend
    from aiokv.types import Key
    from aiokv.worker_device import Device

    Array = NDArray[Any]
    Ids = NDArray[np.int64]

logger = logging.getLogger("aiokv")

FLOATS = frozenset(PRECISIONS)


class Resident:
    """The sum of a call's arrays for one key, left on a device to be encoded there.

    Args:
        device: where it is.
        values: what the device has returned for it: float32. None when it is not needed any longer.
        like: an array of the shape and dtype of all of them.
    """

    __slots__ = ("device", "dtype", "nbytes", "shape", "size", "values")

    def __init__(self, device: Device, values: Any, like: Any) -> None:
        self.device = device
        self.values = values
        self.shape: tuple[int, ...] = tuple(like.shape)
        self.dtype: np.dtype[Any] = like.dtype
        self.nbytes: int = like.nbytes
        self.size = self.nbytes // self.dtype.itemsize

    def to_host(self) -> Array:
        """Return a copy in the host's memory."""
        return self.device.fetch([self.values])[0].reshape(self.shape).astype(self.dtype, copy=False)

    def release(self) -> None:
        """Give the device's memory back."""
        self.values = None


@dataclass(slots=True, eq=False)
class Work:
    """What one device has to do for a call: the numbers of keys, and of arrays in their lists."""

    sums: list[int] = field(default_factory=list)
    kept: list[int] = field(default_factory=list)
    fetched: list[tuple[int, int]] = field(default_factory=list)


def least_loaded(loads: Sequence[int]) -> int:
    """Return which device has the fewest bytes; of equal ones the first."""
    return min(range(len(loads)), key=lambda device: (loads[device], device))


class Merger:
    """Sums the lists that a worker pushes.

    Each new key goes to the device that has the fewest bytes so far, and stays there. So where a key is summed depends
    on the order and the sizes of the keys alone, and no device has many more bytes to sum than another.

    Args:
        backend: who adds in the host's memory.
        devices: on which floats are summed; none to sum in the host's memory.
    """

    def __init__(self, backend: Backend, devices: Sequence[Device] = ()) -> None:
        self._backend = backend
        self._devices = devices
        self.loads = [0] * len(devices)
        """Bytes of the sums on each device."""
        self._warned: set[tuple[str, str]] = set()
        self.places: dict[Key, int] = {}
        """On which device each key is summed."""

    @property
    def devices(self) -> Sequence[Device]:
        """Those that this store uses, by their numbers."""
        return self._devices

    def sum(
        self,
        keys: Sequence[Key],
        lists: Sequence[Sequence[Any]],
        codec: Codec | None = None,
        squares: dict[int, float] | None = None,
    ) -> list[Any]:
        """Return the sum of each key's arrays, in their order; the same bits wherever it is made.

        Args:
            keys: the keys.
            lists: for each key its arrays, of one spec.
            codec: with which the sums will be encoded; where a device can do that, they stay there, as `Resident`.
            squares: takes, by the key's place, the sums of squares that devices have added: each in float64, and finite
                if and only if all elements are.

        Raises:
            SpecMismatchError: an array lies on a device that this store does not use.
            SumOverflowError: a sum of whole numbers is out of range.
        """
        found: list[Any] = [None] * len(keys)
        given = [list(arrays) for arrays in lists]
        plan: dict[Device, Work] = {}
        for number, (key, arrays) in enumerate(zip(keys, given, strict=True)):
            self._assign(plan, number, key, arrays, codec)
        for device, work in plan.items():
            bare = {n: [_bare(array) for array in given[n]] for n in (*work.sums, *work.kept)}
            measured: list[float | None] | None = None if squares is None else []
            if work.sums:
                for n, total in zip(work.sums, device.sum_lists([bare[n] for n in work.sums], measured), strict=True):
                    found[n] = total
            if work.kept:
                for n, total in zip(work.kept, device.keep_sums([bare[n] for n in work.kept], measured), strict=True):
                    found[n] = Resident(device, total, given[n][0])
            if squares is not None and measured is not None:
                numbers = zip((*work.sums, *work.kept), measured, strict=True)
                squares |= {n: each for n, each in numbers if each is not None}
            if work.fetched:
                arrays = device.fetch([_bare(given[n][place]) for n, place in work.fetched])
                for (n, place), array in zip(work.fetched, arrays, strict=True):
                    given[n][place] = array
        for n, key in enumerate(keys):
            if found[n] is None:
                found[n] = self._sum_here(key, given[n])
        return found

    def _assign(self, plan: dict[Device, Work], number: int, key: Key, arrays: list[Any], codec: Codec | None) -> None:
        """Say who makes the sum of a key."""
        first = arrays[0]
        # Devices do not differ in what they can encode.
        kept = codec is not None and self._devices and self._devices[0].encodes(codec, first.dtype.name)
        if codec is not None and not kept and any(isinstance(array, OnDevice) for array in arrays):
            self._warn(codec, first.dtype.name)
        if self._devices and first.nbytes and first.dtype.name in FLOATS and (kept or len(arrays) > 1):
            alone = len(arrays) == 1 and isinstance(first, OnDevice)
            device = device_of(key, first, self._devices) if alone else self._devices[self._place(key, first)]
            work = plan.setdefault(device, Work())
            (work.kept if kept else work.sums).append(number)
            return
        for place, array in enumerate(arrays):
            if isinstance(array, OnDevice):
                device = device_of(key, array, self._devices)
                plan.setdefault(device, Work()).fetched.append((number, place))

    def _warn(self, codec: Codec, dtype: str) -> None:
        """Say once what is slower than it looks."""
        if (codec.name, dtype) not in self._warned:
            self._warned.add((codec.name, dtype))
            text = "gradients of %s are not compressed by %r on a device: they are copied to the host's memory for that"
            logger.warning(text, dtype, codec.name)

    def _sum_here(self, key: Key, arrays: list[Array]) -> Array:
        try:
            return sum_in_order(arrays, self._backend) if len(arrays) > 1 else arrays[0]
        except SumOverflowError as error:
            raise SumOverflowError(f"key {key!r}: {error.message}", key=key) from None

    def sum_rows(self, key: Key, ids: Ids, values: OnDevice) -> tuple[Ids, Array]:
        """Return rows that lie on a device, in the host's memory; those of floats each once, increasing.

        Raises:
            SpecMismatchError: this store does not use that device, or the values can't be used there.
        """
        device = device_of(key, values, self._devices)
        if values.dtype.name in FLOATS and ids.size:
            return device.sum_rows(ids, values.array)
        return ids, device.fetch([values.array])[0]

    def _place(self, key: Key, array: Any) -> int:
        place = self.places.get(key)
        if place is None:
            place = self.places[key] = least_loaded(self.loads)
            precision = np.dtype(PRECISIONS[array.dtype.name])
            self.loads[place] += array.nbytes // array.dtype.itemsize * precision.itemsize
        return place


def _bare(array: Any) -> Any:
    return array.array if isinstance(array, OnDevice) else array


T = TypeVar("T")


def device_of(key: Key, array: OnDevice, devices: Sequence[T]) -> T:
    """Return the device on which an array of a call lies.

    Raises:
        SpecMismatchError: the store uses none, or not that one.
    """
    if array.number < len(devices):
        return devices[array.number]
    kind = type(array.array).__name__
    expected = "one of the devices that this process sees" if devices else "arrays in host memory"
    hint = "" if devices else ': make the store with device="cuda"'
    text = f"key {key!r}: expected {expected}, got {kind} of {array.dtype} on device {array.number}{hint}"
    raise SpecMismatchError(text, key=key, expected=expected, got=kind)


def sum_in_order(arrays: Sequence[Array], backend: Backend) -> Array:
    """Add arrays in their order, low precisions in float32, and round once, at the end."""
    first = arrays[0]
    total = first.astype(PRECISIONS.get(first.dtype.name, first.dtype))
    flat = total.reshape(-1)
    for array in arrays[1:]:
        backend.accumulate(flat, array.reshape(-1))
    # A sum that is too large for the dtype shows it in its values.
    with np.errstate(over="ignore"):
        return total.astype(first.dtype, copy=False)
