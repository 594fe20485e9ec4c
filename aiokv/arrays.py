"""From the arguments of a call to arrays: which keys, what is sent, and what is received into."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - with it NumPy knows the name "bfloat16"
import numpy as np
from numpy.typing import NDArray

from aiokv.errors import KeyUseError, SpecMismatchError
from aiokv.types import Key, TensorSpec

if TYPE_CHECKING:
    from aiokv.core.stimuli import Rows

Array = NDArray[Any]

Keys = Key | Mapping[Any, Any]
"""One key, or a dict of keys and arrays. (`Mapping` is invariant in its keys, hence Any.)"""


MAX_SPECS = 10_000
_SPECS: dict[tuple[tuple[int, ...], np.dtype[Any]], TensorSpec] = {}


@dataclass(slots=True, eq=False)
class Arguments:
    """The arrays of a call, in the order of its keys.

    `sources` are sent. `targets` are received into; where one is not the caller's own array, `finish` copies it there.
    """

    keys: list[Key]
    sources: list[Array]
    targets: list[Array]
    outs: list[Array]
    single: bool
    specs: list[TensorSpec] | None = None
    """Shape and dtype of each tensor, where the arrays do not say it."""
    rows: list[Rows] = field(default_factory=list)
    """Which rows the last arrays have: those of row-sparse keys; see `aiokv.sparse`."""

    @property
    def tensors(self) -> list[tuple[Key, TensorSpec]]:
        """Each key with the spec of its tensor."""
        if self.specs is not None:
            return list(zip(self.keys, self.specs, strict=True))
        arrays = self.sources or self.targets
        return [(key, spec_of(array)) for key, array in zip(self.keys, arrays, strict=True)]

    def finish(self) -> Any:
        """Return what the caller gets: the array of a single key, else the list of arrays."""
        for target, out in zip(self.targets, self.outs, strict=True):
            if target is not out:
                out[...] = target
        return self.outs[0] if self.single else self.outs


def spec_of(array: Array) -> TensorSpec:
    """Return an array's shape and dtype."""
    # Building the name of a dtype takes longer than all the rest, and equal specs that are one object compare at once.
    named = (array.shape, array.dtype)
    spec = _SPECS.get(named)
    if spec is None:
        if len(_SPECS) >= MAX_SPECS:
            _SPECS.clear()
        spec = _SPECS[named] = TensorSpec(tuple(array.shape), array.dtype.name)
    return spec


def bytes_of(array: Array) -> memoryview:
    """Return the memory of a C-contiguous array as bytes, without a copy; works for shapes () and (0, 5) too."""
    return array.reshape(-1).view(np.uint8).data


def digest_of(array: Array) -> bytes:
    """Return 16 bytes that no other content has, whatever the shape."""
    return hashlib.blake2b(bytes_of(array), digest_size=16).digest()


def gather(arrays: Sequence[Array]) -> memoryview:
    """Return copies of C-contiguous arrays' memory, one after the other."""
    return memoryview(b"".join([array.data for array in arrays]))


def scatter(buffer: memoryview, arrays: Sequence[Array]) -> None:
    """Copy what lies one after the other into C-contiguous arrays."""
    offset = 0
    for array in arrays:
        end = offset + array.nbytes
        array.data.cast("B")[:] = buffer[offset:end]
        offset = end


def sending(key: Keys, value: Any) -> Arguments:
    """Read the arguments of a call that sends.

    Raises:
        KeyUseError: a value is missing, or both a dict and a value are given.
    """
    keys, values = named(key, value)
    for name, array in zip(keys, values, strict=True):
        if array is None:
            raise KeyUseError(f"key {name!r}: a value is missing", key=name)
    return Arguments(keys, [_source(array) for array in values], [], [], not isinstance(key, Mapping))


def receiving(key: Keys, out: Any, spec: Callable[[Key], TensorSpec | None]) -> Arguments:
    """Read the arguments of a call that receives.

    Args:
        key: one key, or a dict of keys and arrays.
        out: the array of the one key, or None for a new one.
        spec: what is known of a key, to make new arrays.

    Raises:
        KeyUseError: an array is missing and the key's shape is not known.
        SpecMismatchError: an array can't be written.
    """
    keys, given = named(key, out)
    outs = []
    for name, array in zip(keys, given, strict=True):
        outs.append(_new_out(name, spec(name)) if array is None else checked_out(name, array))
    return Arguments(keys, [], _targets(outs), outs, not isinstance(key, Mapping))


def exchanging(key: Keys, value: Any, out: Any) -> Arguments:
    """Read the arguments of a call that sends and receives; new arrays when `out` is None.

    Raises:
        KeyUseError: values or outs are missing, or the keys differ.
        SpecMismatchError: an out has another spec than the value, or can't be written.
    """
    arguments = sending(key, value)
    keys, sources = arguments.keys, arguments.sources
    if out is None:
        arguments.outs = [np.empty(source.shape, source.dtype) for source in sources]
    else:
        arguments.outs = [checked_out(name, array) for name, array in zip(keys, _matching(keys, key, out), strict=True)]
    for name, source, target in zip(keys, sources, arguments.outs, strict=True):
        expected, got = spec_of(source), spec_of(target)
        if expected != got:
            raise SpecMismatchError(
                f"key {name!r}: pushed {expected}, but out has {got}", key=name, expected=str(expected), got=str(got)
            )
    arguments.targets = _targets(arguments.outs)
    return arguments


def named(key: Keys, value: Any) -> tuple[list[Key], list[Any]]:
    """Return keys and values of a call, given as one of each or as a dict.

    Raises:
        KeyUseError: both a dict and a value are given.
    """
    if not isinstance(key, Mapping):
        return [key], [value]
    if value is not None:
        raise KeyUseError("give either a dict of keys and arrays, or one key and its array, not both")
    return list(key), list(key.values())


def _source(value: object) -> Array:
    """Return the value as an array whose memory can be sent: itself if it is contiguous and in native byte order."""
    array = np.asarray(value, order="C")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _new_out(key: Key, spec: TensorSpec | None) -> Array:
    if spec is None:
        raise KeyUseError(f"key {key!r}: pass `out`, since this worker did not initialize the key", key=key)
    return np.empty(spec.shape, spec.dtype)


def checked_out(key: Key, out: object) -> Array:
    """Return an array that can be received into.

    Raises:
        SpecMismatchError: it can't.
    """
    if not isinstance(out, np.ndarray):
        got = type(out).__name__
        raise SpecMismatchError(f"key {key!r}: out must be a NumPy array, got {got}", key=key, got=got)
    if not out.flags.writeable or not out.dtype.isnative:
        flaw = "read-only" if out.dtype.isnative else "not in native byte order"
        raise SpecMismatchError(f"key {key!r}: out is {flaw}; pass a writable array", key=key, got=flaw)
    return out


def _targets(outs: list[Array]) -> list[Array]:
    """Receive straight into contiguous arrays, into new ones otherwise."""
    return [out if out.flags.c_contiguous else np.empty(out.shape, out.dtype) for out in outs]


def _matching(keys: list[Key], key: Keys, out: Any) -> list[Any]:
    """Return the outs in the order of the keys."""
    if not isinstance(key, Mapping):
        return [out]
    if not isinstance(out, Mapping) or set(out) != set(keys):
        got = sorted(map(repr, out)) if isinstance(out, Mapping) else type(out).__name__
        raise KeyUseError(f"out must be a dict with the same keys; expected {sorted(map(repr, keys))}, got {got}")
    return [out[name] for name in keys]
