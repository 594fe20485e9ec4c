"""The arithmetic of updates, behind one wrapper: it checks the arguments, a backend computes.

    reference   NumPy: plain, always there, the oracle of the others
    cpu         Numba: one pass over memory, without the interpreter's lock    pip install "aiokv[cpu]"
    cuda        Numba on a CUDA device, or in Numba's simulator                pip install "aiokv[cuda]"

All give the same bits, except in the payload of a NaN: each rule is written once, in `arithmetic`, and all compute it
in the same order, with every operation rounded. Floats that overflow become inf or nan, and nothing warns; a sum of
integers that would overflow is an error. Rules of a user's own are computed by NumPy, whatever the backend. Numba is
imported only when a backend needs it.
"""

from __future__ import annotations

import functools
import importlib
import logging
from typing import TYPE_CHECKING, Any

from aiokv.errors import ConfigError, MissingExtraError
from aiokv.kernels import reference
from aiokv.kernels.backend import Backend

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import ModuleType

    from aiokv.kernels.backend import Kernels
    from aiokv.kernels.work import Engine

__all__ = ["Backend", "backend_for", "devices_for", "engine_for", "get_backend", "measure_kernels"]

BACKENDS = ("auto", "cpu", "cuda", "reference")

_logger = logging.getLogger(__name__)


def get_backend(name: str = "auto") -> Backend:
    """Return the backend of that name.

    Args:
        name: "reference", "cpu", "cuda", or "auto": cpu where Numba can be imported, else reference.

    Raises:
        ConfigError: there is no such backend, or this machine lacks what it runs on.
        MissingExtraError: the backend's packages are not installed.
    """
    match name:
        case "auto":
            try:
                found = get_backend("cpu")
            except MissingExtraError as error:
                _say_once(f"backend 'auto' is 'reference' here: {error}")
                return get_backend("reference")
            _say_once("backend 'auto' is 'cpu'; say 'cuda' to use a device")
            return found
        case "reference":
            return Backend(name, reference)
        case "cpu":
            return Backend(name, _import_cpu())
        case "cuda":
            kernels: Any = _import_cuda()
            return Backend(name, kernels)
        case _:
            known = ", ".join(BACKENDS)
            raise ConfigError(f"unknown backend {name!r}; known: {known}", expected=known, got=name)


@functools.cache
def _say_once(text: str) -> None:
    _logger.info("%s", text)


DEVICES = {"cpu": "reference", "cuda": "cuda"}
"""Where a worker sums its arrays -> the backend that does it; NumPy's sums are as fast as memory."""


def backend_for(device: str) -> Backend:
    """Return the backend that sums a worker's arrays on a device.

    Args:
        device: "cpu" or "cuda".

    Raises:
        ConfigError: there is no such device, or this machine has none.
        MissingExtraError: the device's packages are not installed.
    """
    if device not in DEVICES:
        known = ", ".join(DEVICES)
        raise ConfigError(f"unknown device {device!r}; known: {known}", expected=known, got=repr(device))
    return get_backend(DEVICES[device])


def devices_for(device: str) -> list[Any]:
    """Return what sums on each device, none for "cpu"; see `aiokv.list_sums.Device`.

    Raises:
        ConfigError: this machine has no such device.
        MissingExtraError: the device's packages are not installed.
    """
    return list(_import_cuda().all_devices()) if device == "cuda" else []


def engine_for(device: str, on_host: Callable[[Any, list[Any]], None]) -> Engine:
    """Return what keeps a server's parameters on devices, not started.

    Args:
        device: "cuda" for all devices, or their numbers: "cuda:0", "cuda:0,1".
        on_host: does the work for which there is no kernel, on arrays of bytes; see `aiokv.kernels.work`.

    Raises:
        ConfigError: there is no such device, or this machine has none.
        MissingExtraError: the device's packages are not installed.
    """
    cuda = _import_cuda()
    from aiokv.kernels.cuda.engine import Engine  # noqa: PLC0415 - numba-cuda is optional and slow to import

    kind, _, given = device.partition(":")
    there = len(cuda.all_devices())
    numbers = [int(number) for number in given.split(",")] if given else list(range(there))
    if kind != "cuda" or not set(numbers) <= set(range(there)) or len(set(numbers)) != len(numbers):
        expected = f"cuda, or cuda: with different numbers from 0 to {there - 1}"
        raise ConfigError(f"no device {device!r} here; expected {expected}", expected=expected, got=device)
    return Engine(numbers, on_host)


def export_array(array: Any) -> Any:
    """Return an array on a device with DLPack. See `aiokv.data.with_dlpack`."""
    _import_cuda()
    from aiokv.kernels.cuda.exchange import Exported  # noqa: PLC0415 - numba-cuda is optional and slow to import

    return Exported(array)


def measure_kernels(elements: int, tensors: Sequence[int], rounds: int) -> Iterator[tuple[str, float, float]]:
    """Yield name, GB/s and microseconds of a copy on the device, and of each CUDA kernel that goes over memory once.

    Args:
        elements: of each array.
        tensors: elements of a model's tensors, which some kernels take in one launch.
        rounds: how often each is timed.

    Raises:
        ConfigError: this machine has no device.
        MissingExtraError: numba-cuda is not installed.
    """
    _import_cuda()
    from aiokv.kernels.cuda.measure import measure  # noqa: PLC0415 - numba-cuda is optional and slow to import

    yield from measure(elements, tensors, rounds)


def _import_cpu() -> Kernels:
    try:
        from aiokv.kernels import cpu  # noqa: PLC0415 - Numba is optional and slow to import
    except ImportError as error:
        raise MissingExtraError(_how_to_install("cpu", error)) from error
    return cpu


def _import_cuda() -> ModuleType:
    try:
        # Without this package `numba.cuda` would be what Numba itself brings, which is deprecated.
        importlib.import_module("numba_cuda")
        from aiokv.kernels import cuda  # noqa: PLC0415 - numba-cuda is optional and slow to import
    except ImportError as error:
        raise MissingExtraError(_how_to_install("cuda", error)) from error
    if missing := cuda.missing():
        raise ConfigError(
            f"backend 'cuda': the Python packages are there, but this machine lacks {' and '.join(missing)}. "
            "Install what is missing, or choose backend 'cpu'",
            expected="a CUDA driver, device and toolkit",
            got=missing,
        )
    return cuda


def _how_to_install(extra: str, error: ImportError) -> str:
    return (
        f'backend {extra!r} needs a package that can\'t be imported ({error}); install it: pip install "aiokv[{extra}]"'
    )
