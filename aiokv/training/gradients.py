"""The gradients of a training step, before they leave the worker: read, summed, measured and scaled.

Tensors of other libraries are used where they lie: an array over their memory is made with DLPack, without a copy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.errors import ConfigError, KeyUseError, SpecMismatchError
from aiokv.kernels.foreign import OnDevice, is_on_device
from aiokv.optim import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiokv.arrays import Array
    from aiokv.kernels import Backend

BLOCK = 1 << 13
"""Elements whose squares are summed at a time: few enough to stay in the cache, and for BLAS to use one thread."""


def view(name: str, tensor: Any) -> Array:
    """Return an array over a tensor's memory.

    Args:
        name: of the parameter, for the error.
        tensor: a NumPy array, or a tensor with DLPack in the memory of the host; one that PyTorch differentiates too.

    Raises:
        SpecMismatchError: its memory can't be used, because of its device, dtype or type.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    # PyTorch does not export what it differentiates.
    source = tensor.detach() if hasattr(tensor, "detach") else tensor
    try:
        return np.from_dlpack(source)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        kind, expected = type(tensor).__name__, "an array of NumPy or a tensor with DLPack in the host's memory"
        text = f"{name!r}: expected {expected}, got {kind}: {error}"
        raise SpecMismatchError(text, key=name, expected=expected, got=kind) from error


def replicas(name: str, tensors: Any) -> list[Any]:
    """Return arrays over one tensor, or over each of a sequence of them; `OnDevice` for one on a device.

    Raises:
        SpecMismatchError: as in `view`; or the sequence is empty, or its shapes or dtypes differ.
    """
    parts = tensors if isinstance(tensors, list | tuple) else [tensors]
    arrays: list[Any] = [OnDevice(part) if is_on_device(part) else view(name, part) for part in parts]
    specs = list(dict.fromkeys(f"{array.dtype}{list(array.shape)}" for array in arrays))
    if len(specs) != 1:
        got = ", ".join(specs) or "none"
        raise SpecMismatchError(f"{name!r}: expected tensors of one shape and dtype, got {got}", key=name, got=got)
    return arrays


def without_aliases(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters in the order of their names; of one that has several names, the first counts.

    Raises:
        KeyUseError: there are none, or a name is no text.
    """
    if not params:
        raise KeyUseError("there is nothing to train: no parameter was given")
    for name in params:
        if not isinstance(name, str):
            raise KeyUseError(f"the names of parameters are texts, got {name!r}", key=repr(name), expected="str")
    seen: dict[int, str] = {}
    return {name: params[name] for name in sorted(params) if seen.setdefault(id(params[name]), name) == name}


def writable(name: str, arrays: list[Any]) -> list[Any]:
    """Return arrays that can be written; of those on devices that is seen when they are.

    Raises:
        SpecMismatchError: one of them can't.
    """
    for array in arrays:
        if not isinstance(array, OnDevice) and not array.flags.writeable:
            raise SpecMismatchError(f"{name!r} is read-only, and is to be written", key=name, got="read-only")
    return arrays


def attached(tensors: Any) -> Any:
    """Return the gradients that hang on tensors as their `.grad`, None where there are none."""
    if isinstance(tensors, list | tuple):
        grads = [getattr(tensor, "grad", None) for tensor in tensors]
        return None if any(grad is None for grad in grads) else grads
    return getattr(tensors, "grad", None)


def read_gradients(params: Mapping[str, Any], given: Mapping[str, Any] | None) -> dict[str, list[Any]]:
    """Return the gradients of all parameters, those of its devices for each.

    Args:
        params: the parameters, by name; a tensor, or a sequence of one for each device.
        given: the gradients, in the same form; None: the `.grad` of the parameters.

    Raises:
        KeyUseError: gradients are missing, or there are some of no parameter.
        SpecMismatchError: a gradient has another shape or dtype than its parameter.
    """
    found = {name: attached(tensors) for name, tensors in params.items()} if given is None else given
    missing = [name for name in params if found.get(name) is None]
    if missing:
        hint = "pass them to step(), or run backward() first" if given is None else "give one for every parameter"
        raise KeyUseError(f"no gradient of {', '.join(map(repr, missing))}: {hint}", key=missing[0])
    unknown = [name for name in found if name not in params]
    if unknown:
        known = ", ".join(map(repr, params))
        raise KeyUseError(f"gradient of {unknown[0]!r}, which is no parameter; there are: {known}", key=unknown[0])
    return {name: _like(name, replicas(name, found[name]), replicas(name, params[name])) for name in params}


def _like(name: str, gradients: list[Any], params: list[Any]) -> list[Any]:
    expected, got = params[0], gradients[0]
    if (expected.shape, expected.dtype) != (got.shape, got.dtype):
        specs = [f"{array.dtype}{list(array.shape)}" for array in (expected, got)]
        text = f"gradient of {name!r} must be {specs[0]}, got {specs[1]}"
        raise SpecMismatchError(text, key=name, expected=specs[0], got=specs[1])
    return gradients


class GradientSum:
    """The sum of gradients over devices and steps, until it is taken.

    A single gradient is not copied: it is the sum. Sums of low precisions are made in float32.

    Args:
        backend: who adds.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._buffers: dict[str, Array] = {}
        self.totals: dict[str, Array] = {}
        """The sums, by name, in the shape of their gradients; empty after `clear`."""

    def add(self, gradients: Mapping[str, Sequence[Array]], *, copy: bool) -> None:
        """Add a step's gradients; `copy`: they may change before the sum is used."""
        for name, arrays in gradients.items():
            if len(arrays) == 1 and not copy and name not in self.totals:
                self.totals[name] = arrays[0]
                continue
            rest = arrays
            if name not in self.totals:
                self.totals[name] = self._begin(name, arrays[0])
                rest = arrays[1:]
            total = self.totals[name].reshape(-1)
            for array in rest:
                self._backend.accumulate(total, np.ascontiguousarray(array).reshape(-1))

    def _begin(self, name: str, first: Array) -> Array:
        buffer = self._buffer(name, first)
        buffer[...] = first
        return buffer

    def _buffer(self, name: str, like: Array) -> Array:
        if name not in self._buffers:
            self._buffers[name] = np.empty(like.shape, PRECISIONS.get(like.dtype.name, like.dtype.name))
        return self._buffers[name]

    def clear(self) -> None:
        """Begin anew."""
        self.totals = {}

    def scaled(self, name: str, dtype: np.dtype[Any], factor: float) -> Array:
        """Return a sum times a factor, in a dtype; the sum itself where that changes nothing."""
        total = self.totals[name]
        if factor != 1.0:
            buffer = self._buffer(name, total)
            with np.errstate(all="ignore"):
                total = np.multiply(total, buffer.dtype.type(factor), out=buffer)
        with np.errstate(all="ignore"):
            return total.astype(dtype, copy=False)


class LossScale:
    """What the loss is multiplied by, so that small gradients do not vanish in a low precision.

    A "dynamic" one begins with 2**16; it is halved when a gradient overflows, and doubled after 2000 steps without
    (Micikevicius et al. 2018, with the numbers that PyTorch's GradScaler has).

    Args:
        scale: a number of more than 0, or "dynamic".
    """

    START = 2.0**16
    STEPS = 2000

    def __init__(self, scale: float | str) -> None:
        fits = scale == "dynamic" if isinstance(scale, str) else 0 < scale < np.inf
        if not fits:
            expected = "a number of more than 0, or 'dynamic'"
            raise ConfigError(f"loss_scale must be {expected}, got {scale!r}", expected=expected, got=repr(scale))
        self.is_dynamic = isinstance(scale, str)
        self.value = self.START if isinstance(scale, str) else float(scale)
        self.good_steps = 0

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs to go on as this one would."""
        return {"loss_scale": self.value, "good_steps": self.good_steps}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on as the one would have that the state is from."""
        self.value, self.good_steps = float(state["loss_scale"]), int(state["good_steps"])

    def stepped(self, *, overflow: bool) -> None:
        """Take note of how a step went."""
        if not self.is_dynamic:
            return
        self.good_steps = 0 if overflow else self.good_steps + 1
        if overflow:
            self.value = max(self.value / 2, 1.0)
        elif self.good_steps == self.STEPS:
            self.value, self.good_steps = self.value * 2, 0


def are_finite(arrays: Iterable[Array]) -> bool:
    """Say whether all elements are numbers: no inf and no NaN among them."""
    return all(bool(np.isfinite(array).all()) for array in arrays)


def global_norm(arrays: Iterable[Array]) -> float:
    """Return the Euclidean norm of all elements of all arrays together, summed in float64."""
    total = 0.0
    for array in arrays:
        flat = np.ascontiguousarray(array).reshape(-1)
        for start in range(0, flat.size, BLOCK):
            block = flat[start : start + BLOCK].astype(np.float64)
            total += float(np.dot(block, block))
    return float(np.sqrt(total))
