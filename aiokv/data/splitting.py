"""A batch over several devices of one worker."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from aiokv.errors import ConfigError
from aiokv.kernels import devices_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike


class Sliceable(Protocol):
    """What `split_data` needs: a NumPy array, a torch tensor and their like have it."""

    @property
    def shape(self) -> Sequence[int]:
        """The length of each axis."""
        ...

    def __getitem__(self, index: Any, /) -> Any: ...


Data = TypeVar("Data", bound=Sliceable)


def split_data(data: Data, n: int, axis: int = 0, even_split: bool = True) -> list[Data]:
    """Cut a batch into `n` slices along an axis, as MXNet's `gluon.utils.split_data` does.

    The slices are what indexing gives: views, where NumPy arrays and torch tensors are cut.

    Args:
        data: the batch.
        n: the number of slices.
        axis: the axis that is cut; negative ones count from the last.
        even_split: refuse what can't be cut evenly. Otherwise the first (size mod n) slices are one longer than the
            others, which are empty when there are fewer elements than slices.

    Raises:
        ConfigError: the axis does not exist, there are no slices, or they would have different sizes.
    """
    shape = tuple(data.shape)
    if n < 1:
        raise ConfigError(f"cannot cut data into {n} slices: expected 1 or more", expected="n >= 1", got=n)
    if not -len(shape) <= axis < len(shape):
        expected = f"{-len(shape)} <= axis < {len(shape)}"
        raise ConfigError(f"data of shape {shape} has no axis {axis}: expected {expected}", expected=expected, got=axis)
    size, longer = divmod(shape[axis], n)
    if even_split and longer:
        raise ConfigError(
            f"data of shape {shape} can't be cut into {n} equal slices along axis {axis}: {shape[axis]} is no multiple "
            f"of {n}. Use another batch size, or even_split=False",
            expected=f"a multiple of {n}",
            got=shape[axis],
        )
    before = (slice(None),) * (axis % len(shape))
    # Where slice number i begins: every one before it has `size` elements, and min(i, longer) of them one more.
    starts = [i * size + min(i, longer) for i in range(n + 1)]
    cuts = [slice(*bounds) for bounds in itertools.pairwise(starts)]
    return [data[(*before, cut)] if before else data[cut] for cut in cuts]


CPU, CUDA = "cpu", "cuda"


def split_and_load(
    data: Sliceable | ArrayLike, devices: Sequence[object], axis: int = 0, even_split: bool = True
) -> list[Any]:
    """Cut a batch into one slice for each device, and put each there.

    Args:
        data: the batch; what has no shape, like a list, becomes a NumPy array.
        devices: names of devices: "cpu", "cuda:0", "cuda:1" and so on, "cuda" for the first one; one may stand
            several times. PyTorch's devices have such names, too.
        axis: the axis that is cut.
        even_split: as for `split_data`.

    Returns:
        The slices. On the CPU they are views of the data. On a CUDA device they are tensors where the data is one of
        PyTorch, else arrays of Numba, which every library takes that knows `__cuda_array_interface__`.

    Raises:
        ConfigError: there are no devices, one is not known or not here, or the data can't be cut so.
        SpecMismatchError: the device has no arrays of that dtype, or the data lies on a device already.
        MissingExtraError: numba-cuda is not installed.
        DeviceMemoryError: a device has not enough memory.
    """
    if isinstance(devices, str):
        expected = f"a list of devices, such as [{devices!r}]"
        raise ConfigError(f"expected {expected}, got the text {devices!r}", expected=expected, got=devices)
    if not devices:
        raise ConfigError("cannot load data onto no devices: expected one or more", expected="1 or more devices", got=0)
    numbers = [_number_of(str(device)) for device in devices]
    array: Any = data if hasattr(data, "shape") else np.asarray(data)
    slices: list[Any] = split_data(array, len(devices), axis, even_split)
    if hasattr(array, "to"):
        return [_move(part, str(device)) for part, device in zip(slices, devices, strict=True)]
    if all(number is None for number in numbers):
        return slices
    found = devices_for(CUDA)
    for number, device in zip(numbers, devices, strict=True):
        if number is not None and number >= len(found):
            expected = ", ".join(f"cuda:{number}" for number in range(len(found)))
            text = f"cannot load data onto {str(device)!r}: this process sees {expected}"
            raise ConfigError(text, expected=expected, got=str(device))
    return [part if number is None else found[number].load(part) for part, number in zip(slices, numbers, strict=True)]


def _number_of(device: str) -> int | None:
    """Return the number of a CUDA device, None for the CPU."""
    if device == CPU:
        return None
    name, _, number = device.partition(":")
    if name != CUDA or not (number or "0").isdecimal() or device.endswith(":"):
        expected = "'cpu', 'cuda' or 'cuda:N'"
        raise ConfigError(f"cannot load data onto {device!r}: expected {expected}", expected=expected, got=device)
    return int(number or 0)


def _move(tensor: Any, device: str) -> Any:
    """Return a tensor of PyTorch on a device; itself where it is there."""
    try:
        return tensor.to(device, non_blocking=True)
    except (AssertionError, RuntimeError) as error:
        text = f"cannot load a {type(tensor).__name__} onto {device!r}: {error}"
        raise ConfigError(text, expected="a device that its library can use", got=device) from error
