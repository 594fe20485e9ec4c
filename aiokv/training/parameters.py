"""The parameters of a trainer: in the host's memory, or on devices, each maybe on several ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from aiokv.arrays import Arguments, DeviceOut
from aiokv.kernels import devices_for
from aiokv.kernels.checks import is_low
from aiokv.kernels.foreign import OnDevice
from aiokv.list_sums import Merger
from aiokv.staging import stage
from aiokv.training.gradients import replicas, without_aliases, writable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.arrays import Array
    from aiokv.kernels import Backend

Name = TypeVar("Name", bound="str | tuple[str, int]")


class Parameters:
    """Parameters by name, in the order of the names.

    Args:
        params: tensors, or lists of their replicas.
        backend: who adds in the host's memory.

    Raises:
        KeyUseError: there are none, or a name is no text.
        SpecMismatchError: a tensor can't be used, or replicas differ.
        ConfigError, MissingExtraError: a tensor lies on a device, and it or its packages can't be used.
    """

    def __init__(self, params: Mapping[str, Any], backend: Backend) -> None:
        self.tensors = without_aliases(params)
        """As they were given."""
        self.replicas = {name: writable(name, replicas(name, self.tensors[name])) for name in self.tensors}
        """Arrays over the memory of each; `OnDevice` what lies on a device."""
        parts = [part for arrays in self.replicas.values() for part in arrays]
        self._merger = Merger(backend, devices_for("cuda") if any(isinstance(part, OnDevice) for part in parts) else [])
        self.weights: dict[str, Array] = {}
        """The first replica of each, or where that lies on a device, what it was when it was fetched."""
        self.fetch()

    @property
    def on_devices(self) -> bool:
        """Whether some of them lie on devices."""
        return bool(self._merger.devices)

    def fetch(self) -> None:
        """Bring weights up to date that lie on devices."""
        self.weights = self._in_host({name: arrays[:1] for name, arrays in self.replicas.items()})

    def gathered(self, gradients: Mapping[str, list[Any]], *, apart: bool) -> Mapping[str, list[Array]]:
        """Return gradients in the host's memory, for sums with the same bits as of gradients that were there before.

        Args:
            gradients: those of devices are summed where they lie.
            apart: they are not, since others come before them. Nor are those of low precision: their sum is rounded
                when it has been scaled.
        """
        if not any(isinstance(array, OnDevice) for arrays in gradients.values() for array in arrays):
            return gradients
        lists = {
            (name, part): [array]
            for name, arrays in gradients.items()
            if apart or is_low(arrays[0].dtype)
            for part, array in enumerate(arrays)
        }
        whole = {(name, 0): arrays for name, arrays in gradients.items() if (name, 0) not in lists}
        found: dict[str, list[Array]] = {name: [] for name in gradients}
        for (name, _), total in self._in_host(whole | lists).items():
            found[name].append(total)
        return found

    def spread(self) -> None:
        """Give all replicas the weights."""
        self.write(self.replicas, self.weights)

    def write(self, arrays: Mapping[str, list[Any]], values: Mapping[str, Array]) -> None:
        """Give all arrays of a name its value.

        Raises:
            SpecMismatchError: one can't be written.
        """
        names = list(arrays)
        on_devices = [
            DeviceOut(number, part)
            for number, name in enumerate(names)
            for part in arrays[name]
            if isinstance(part, OnDevice)
        ]
        for name, parts in arrays.items():
            for part in parts:
                if not isinstance(part, OnDevice) and part is not values[name]:
                    part[...] = values[name]
        if on_devices:
            targets = [values[name] for name in names]
            arguments = Arguments(list(names), [], targets, [], single=False, device_outs=on_devices)
            staged = stage(arguments, self._merger.devices)
            for target, name in zip(arguments.targets, names, strict=True):
                if target is not values[name]:
                    target[...] = values[name]
            staged.copy()

    def _in_host(self, arrays: Mapping[Name, list[Any]]) -> dict[Name, Array]:
        """Return the sum of each list, for one of a single array that itself."""
        totals = self._merger.sum([str(name) for name in arrays], list(arrays.values()))
        return dict(zip(arrays, totals, strict=True))


def bare(arrays: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return arrays as a store takes them."""
    return {
        name: [part.array if isinstance(part, OnDevice) else part for part in parts] for name, parts in arrays.items()
    }
