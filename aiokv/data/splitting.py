"""A batch over several devices of one worker."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from aiokv.errors import ConfigError

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


def split_and_load(
    data: Sliceable | ArrayLike, devices: Sequence[str], axis: int = 0, even_split: bool = True
) -> list[Any]:
    """Cut a batch into one slice for each device, and put each there.

    Args:
        data: the batch; what has no shape, like a list, becomes a NumPy array.
        devices: names of devices. "cpu" is the only one so far, and its slices are views of the data.
        axis: the axis that is cut.
        even_split: as for `split_data`.

    Raises:
        ConfigError: there are no devices, one is not known, or the data can't be cut so.
    """
    if not devices:
        raise ConfigError("cannot load data onto no devices: expected one or more", expected="1 or more devices", got=0)
    for device in devices:
        if device != "cpu":
            raise ConfigError(
                f"cannot load data onto {device!r}: only 'cpu' is implemented, CUDA devices are not yet",
                expected="cpu",
                got=str(device),
            )
    array: Any = data if hasattr(data, "shape") else np.asarray(data)
    return split_data(array, len(devices), axis, even_split)
