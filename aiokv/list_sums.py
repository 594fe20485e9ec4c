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

    from aiokv.codec import Codec
    from aiokv.kernels import Backend
    from aiokv.types import Key

    Array = NDArray[Any]
    Cuts = Sequence[tuple[int, int]]
    Ids = NDArray[np.int64]

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

    def sum_rows(self, ids: Ids, values: Any, /) -> tuple[Ids, Array]:
        """Return row ids, increasing and each once, and the sums of their rows in the host's memory.

        Rows of one id are added in their order, low precisions in float32, and rounded once.
        """
        ...

    def encodes(self, codec: Codec, dtype: str, /) -> bool:
        """Say whether gradients of a dtype can be encoded there."""
        ...

    def keep_sum(self, arrays: Sequence[Any], /) -> Any:
        """Return the sum that `sum_arrays` makes, in float32 on the device; one array of float32 is its own sum."""
        ...

    def release(self, total: Any, /) -> None:
        """Take back a sum that was made, and that nobody reads any longer."""
        ...

    def new_encoder(self, codec: Codec, key: Key, size: int, dtype: str, step: int, /) -> Any:
        """Return what encodes gradients of a key there; it has what `aiokv.codec.encoder.Encoder` has of a residual."""
        ...

    def check(self, gradients: Sequence[tuple[Any, Any, Cuts]], /) -> Any:
        """Return what `encode` takes of encoders, sums and cuts. Raises NotFiniteError: one can't be encoded."""
        ...

    def encode(self, checked: Any, /) -> list[list[memoryview]]:
        """Return the payloads of each gradient, one for each cut."""
        ...


class Resident:
    """The sum of a call's arrays for one key, left on a device to be encoded there.

    Args:
        device: where it is.
        values: what the device has returned for it: float32.
        like: an array of the shape and dtype of all of them.
        made: whether the device has made it, so that it takes it back.
    """

    __slots__ = ("_made", "device", "dtype", "nbytes", "shape", "size", "values")

    def __init__(self, device: Device, values: Any, like: Any, *, made: bool) -> None:
        self.device = device
        self.values = values
        self.shape: tuple[int, ...] = tuple(like.shape)
        self.dtype: np.dtype[Any] = like.dtype
        self.nbytes: int = like.nbytes
        self.size = self.nbytes // self.dtype.itemsize
        self._made = made

    def to_host(self) -> Array:
        """Return a copy in the host's memory."""
        return self.device.to_host(self.values).reshape(self.shape).astype(self.dtype, copy=False)

    def release(self) -> None:
        """Give it back; nobody may use it any longer."""
        if self._made:
            self._made = False
            self.device.release(self.values)


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

    def keeps(self, arrays: Sequence[Any], codec: Codec | None) -> bool:
        """Say whether the sum of arrays can be encoded on a device."""
        first = arrays[0]
        # Devices do not differ in what they can encode.
        return (
            codec is not None
            and first.nbytes > 0
            and bool(self._devices)
            and self._devices[0].encodes(codec, first.dtype.name)
        )

    def keep(self, key: Key, arrays: Sequence[Any]) -> Resident:
        """Return the sum of arrays as `sum` does, but leave it on the device.

        Raises:
            SpecMismatchError: an array lies on a device that this store does not use.
        """
        first = arrays[0]
        if len(arrays) == 1 and isinstance(first, OnDevice):
            device = device_of(key, first, self._devices)
        else:
            device = self._devices[self._place(key, first)]
        given = [array.array if isinstance(array, OnDevice) else array for array in arrays]
        made = len(arrays) > 1 or first.dtype.name != "float32"
        return Resident(device, device.keep_sum(given), first, made=made)

    def sum_rows(self, key: Key, ids: Ids, values: OnDevice) -> tuple[Ids, Array]:
        """Return rows that lie on a device, in the host's memory; those of floats each once, increasing.

        Raises:
            SpecMismatchError: this store does not use that device, or the values can't be used there.
        """
        device = device_of(key, values, self._devices)
        if values.dtype.name in FLOATS and ids.size:
            return device.sum_rows(ids, values.array)
        return ids, device.to_host(values.array)

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
