"""Arrays that a call gives for one key, one for each device: where their sum is made, and who makes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from aiokv.errors import SpecMismatchError
from aiokv.kernels.foreign import OnDevice
from aiokv.optim import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from aiokv.kernels import Backend
    from aiokv.types import Key

    Array = NDArray[Any]

FLOATS = frozenset(PRECISIONS)


class Device(Protocol):
    """What a worker uses a device for."""

    def sum_arrays(self, key: Key, arrays: Sequence[Any], /) -> Array:
        """Return the sum of arrays of one float dtype, in their order, as an array in the host's memory.

        Low precisions are added in float32, and rounded once. The key's buffer on the device is used again.
        """
        ...

    def to_host(self, array: Any, /) -> Array:
        """Return a copy in the host's memory of an array on the device, of any dtype."""
        ...


def least_loaded(loads: Sequence[int]) -> int:
    """Return which device has the fewest bytes; of equal ones the first."""
    return min(range(len(loads)), key=lambda device: (loads[device], device))


class Merger:
    """Sums the lists that a worker pushes.

    Each new key's buffer goes to the device that has the fewest bytes so far, and stays there. So where a key is
    depends on the order and the sizes of the keys alone, and no device has many more bytes than another.

    Args:
        backend: who adds in the host's memory.
        devices: on which floats are summed; none to sum in the host's memory.
    """

    def __init__(self, backend: Backend, devices: Sequence[Device] = ()) -> None:
        self._backend = backend
        self._devices = devices
        self.loads = [0] * len(devices)
        """Bytes of the buffers on each device."""
        self.places: dict[Key, int] = {}
        """On which device each key is summed."""

    @property
    def uses_devices(self) -> bool:
        """Whether sums may have to wait for a device."""
        return bool(self._devices)

    def sum(self, key: Key, arrays: Sequence[Any]) -> Array:
        """Return the sum of arrays of one spec, in their order; the same bits wherever it is made.

        Raises:
            SpecMismatchError: an array lies on a device, and this store uses none.
            SumOverflowError: a sum of whole numbers is out of range.
        """
        if self._devices and len(arrays) > 1 and arrays[0].dtype.name in FLOATS:
            given = [array.array if isinstance(array, OnDevice) else array for array in arrays]
            return self._devices[self._place(key, arrays[0])].sum_arrays(key, given)
        on_host = [self._to_host(key, array) if isinstance(array, OnDevice) else array for array in arrays]
        return sum_in_order(on_host, self._backend) if len(on_host) > 1 else on_host[0]

    def _to_host(self, key: Key, array: OnDevice) -> Array:
        return device_of(key, array, self._devices).to_host(array.array)

    def _place(self, key: Key, array: Any) -> int:
        place = self.places.get(key)
        if place is None:
            place = self.places[key] = least_loaded(self.loads)
            precision = np.dtype(PRECISIONS[array.dtype.name])
            self.loads[place] += array.nbytes // array.dtype.itemsize * precision.itemsize
        return place


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
