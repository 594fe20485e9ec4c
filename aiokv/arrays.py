"""From the arguments of a call to arrays: which keys, what is sent, and what is received into."""

from __future__ import annotations

import bisect
import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - with it NumPy knows the name "bfloat16"
import numpy as np
from numpy.typing import NDArray

from aiokv.errors import KeyUseError, NotFiniteError, SpecMismatchError
from aiokv.kernels.foreign import OnDevice, is_on_device
from aiokv.list_sums import Resident
from aiokv.types import Key, TensorSpec

if TYPE_CHECKING:
    from aiokv.codec import Codec
    from aiokv.core.stimuli import Rows
    from aiokv.list_sums import Merger
    from aiokv.staging import Staged

Array = NDArray[Any]

Keys = Key | list[Any] | tuple[Any, ...] | Mapping[Any, Any]
"""One key, a list of keys, or a dict of keys and arrays. (`Mapping` is invariant in its keys, hence Any.)"""


MAX_SPECS = 10_000
_SPECS: dict[tuple[tuple[int, ...], np.dtype[Any]], TensorSpec] = {}


@dataclass(slots=True, eq=False)
class DeviceOut:
    """An array on a device that is to get what one target receives; `rows`: those that the target has, if not all."""

    target: int
    array: OnDevice
    rows: NDArray[np.int64] | None = None


@dataclass(slots=True, eq=False)
class Arguments:
    """The arrays of a call, in the order of its keys.

    `sources` are sent. Where the caller gave several arrays for a key, those are in `lists`, by the index of the key,
    and the source is the first of them until `merge` has put their sum in its place. `targets` are received into; where
    one is not the caller's own array, `finish` copies it there: an element of `outs` is an array or a list of them.
    Those that lie on devices get their values before, by `aiokv.staging`.
    """

    keys: list[Key]
    sources: list[Any]
    targets: list[Array]
    outs: list[Any]
    single: bool
    specs: list[TensorSpec] | None = None
    """Shape and dtype of each tensor, where the arrays do not say it."""
    rows: list[Rows] = field(default_factory=list)
    """Which rows the last arrays have: those of row-sparse keys; see `aiokv.sparse`."""
    lists: dict[int, list[Any]] = field(default_factory=dict)
    row_values: list[Array] = field(default_factory=list)
    """The values of the rows that are sent; their sources are bytes."""
    squares: dict[int, float] = field(default_factory=dict)
    """The sum of the squares of what is sent, in float64, where a device has added them."""
    buffers: dict[int, memoryview] = field(default_factory=dict)
    """Answers of any length, by number."""
    device_outs: list[DeviceOut] = field(default_factory=list)
    staged: Staged | None = None
    """What is copied to these."""
    ahead: list[tuple[Array, list[int]]] = field(default_factory=list)
    """Values that had come before the call was made, each with the targets that get it."""

    @property
    def tensors(self) -> list[tuple[Key, TensorSpec]]:
        """Each key with the spec of its tensor."""
        if self.specs is not None:
            return list(zip(self.keys, self.specs, strict=True))
        arrays = self.sources or self.targets
        return [(key, spec_of(array)) for key, array in zip(self.keys, arrays, strict=True)]

    @property
    def values(self) -> list[Array]:
        """The numbers that are sent, for each key."""
        return [*self.sources[: len(self.sources) - len(self.row_values)], *self.row_values]

    @property
    def listed_nbytes(self) -> int:
        """How many bytes `merge` has to add."""
        return sum(array.nbytes for arrays in self.lists.values() for array in arrays)

    def merge(self, merger: Merger, codec: Codec | None = None, *, measures: bool = False) -> None:
        """Put the sum of each list in the place of its first array, which stays as it is.

        Args:
            merger: who makes the sums.
            codec: with which they will be encoded; where a device can do that, they are left there.
            measures: let devices add the squares of what they sum.

        Raises:
            SpecMismatchError: an array lies where it can't be summed.
            SumOverflowError: a sum of whole numbers is out of range.
        """
        numbers = list(self.lists)
        squares: dict[int, float] | None = {} if measures else None
        sums = merger.sum([self.keys[n] for n in numbers], list(self.lists.values()), codec, squares)
        self.squares = {numbers[place]: found for place, found in (squares or {}).items()}
        for number, total in zip(numbers, sums, strict=True):
            self.sources[number] = total
        self.lists = {}

    def bring(self) -> None:
        """Copy sums that were left on devices to the host's memory."""
        for index, source in enumerate(self.sources):
            if isinstance(source, Resident):
                self.sources[index] = source.to_host()
                source.release()

    @property
    def ahead_nbytes(self) -> int:
        """How many bytes `receive_ahead` has to copy."""
        return sum(array.nbytes * len(targets) for array, targets in self.ahead)

    def receive_ahead(self) -> None:
        """Copy what had come before the call was made to its targets."""
        for array, targets in self.ahead:
            for target in targets:
                self.targets[target][...] = array
        self.ahead = []

    def finish(self) -> Any:
        """Return what the caller gets: the array or list of a single key, else the list of those."""
        for target, out in zip(self.targets, self.outs, strict=True):
            if target is not out:
                for array in out if isinstance(out, list) else [out]:
                    if target is not array and isinstance(array, np.ndarray):
                        array[...] = target
        return self.outs[0] if self.single else self.outs


def landing_for(spec: TensorSpec, memory: Array) -> Arguments:
    """Return what receives one tensor before its user's call is made, in a memory of as many bytes."""
    return Arguments([], [], [memory.view(spec.dtype).reshape(spec.shape)], [], single=False)


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


def check_finite(keys: Sequence[Key], arrays: Sequence[Array]) -> None:
    """Refuse to send what is no number.

    Raises:
        NotFiniteError: names the key, the first such element and how many there are.
    """
    for key, array in zip(keys, arrays, strict=True):
        if array.dtype.kind in "biu" or np.isfinite(array).all():
            continue
        flat = array.reshape(-1)
        wrong = np.flatnonzero(~np.isfinite(flat))
        got = f"{flat[wrong[0]]} at element {wrong[0]}, and {wrong.size - 1} more"
        text = f"the gradient of key {key!r} has {got}; nothing of this call was pushed"
        raise NotFiniteError(text, key=key, expected="finite numbers", got=got)


def gather(arrays: Sequence[Array]) -> memoryview:
    """Return copies of the elements of arrays of one dtype, one array after the other."""
    # Not with `array.data`: NumPy gives no buffer of a bfloat16.
    return bytes_of(np.concatenate(arrays, axis=None))


def scatter(buffer: memoryview, arrays: Sequence[Array]) -> None:
    """Copy elements that lie one after the other into C-contiguous arrays of one dtype."""
    values = np.frombuffer(buffer, arrays[0].dtype)
    offset = 0
    for array in arrays:
        end = offset + array.size
        array.ravel()[:] = values[offset:end]
        offset = end


def sending(key: Keys, value: Any, *, lists: bool = True) -> Arguments:
    """Read the arguments of a call that sends.

    Args:
        key: one key, a list of keys, or a dict of keys and arrays.
        value: the array of the one key, or the list of theirs; for each key an array, or a list of arrays.
        lists: whether a key may have a list of arrays.

    Raises:
        KeyUseError: a value is missing, there are too many, both a dict and values are given, or a list of arrays where
            none can be.
        SpecMismatchError: the arrays of a list differ in shape or dtype.
    """
    keys, values = named(key, value)
    arguments = Arguments(keys, [], [], [], isinstance(key, str | int))
    if set(map(type, values)) == {np.ndarray}:
        # Most calls are like this, and may have very many keys.
        arguments.sources = [_source(array) for array in values]
        return arguments
    for index, array in enumerate(values):
        if parts := _on_device(array):
            if not lists and isinstance(array, list | tuple):
                raise _not_one(keys[index], array)
            _check_alike(keys[index], parts)
            # The sum takes its place.
            arguments.sources.append(np.empty(parts[0].shape, parts[0].dtype))
            arguments.lists[index] = parts
        elif not _is_list(keys[index], array):
            if array is None:
                raise KeyUseError(f"key {keys[index]!r}: a value is missing", key=keys[index])
            arguments.sources.append(_source(array))
        elif not lists:
            raise _not_one(keys[index], array)
        else:
            arrays = [_source(part) for part in array]
            _check_alike(keys[index], arrays)
            arguments.sources.append(arrays[0])
            if len(arrays) > 1:
                arguments.lists[index] = arrays
    return arguments


def receiving(key: Keys, out: Any, spec: Callable[[Key], TensorSpec | None]) -> Arguments:
    """Read the arguments of a call that receives.

    Args:
        key: one key, a list of keys, or a dict of keys and arrays.
        out: the array of the one key, or the list of theirs; for each key an array, a list of arrays which all get the
            value, or None for a new array.
        spec: what is known of a key, to make new arrays.

    Raises:
        KeyUseError: an array is missing and the key's shape is not known, or there are too many.
        SpecMismatchError: an array can't be written, or those of a list differ.
    """
    keys, given = named(key, out)
    outs = []
    for name, array in zip(keys, given, strict=True):
        outs.append(_new_out(name, spec(name)) if array is None else checked_out(name, array))
    single = isinstance(key, str | int)
    return Arguments(keys, [], _targets(outs), outs, single, device_outs=find_device_outs(outs))


def exchanging(key: Keys, value: Any, out: Any, *, lists: bool = True) -> Arguments:
    """Read the arguments of a call that sends and receives; new arrays when `out` is None.

    Raises:
        KeyUseError: values or outs are missing, or the keys differ.
        SpecMismatchError: an out has another spec than the value, or can't be written.
    """
    arguments = sending(key, value, lists=lists)
    keys, sources = arguments.keys, arguments.sources
    if out is None:
        arguments.outs = [np.empty(source.shape, source.dtype) for source in sources]
    else:
        arguments.outs = [checked_out(name, array) for name, array in zip(keys, _matching(keys, key, out), strict=True)]
    arguments.targets = _targets(arguments.outs)
    arguments.device_outs = find_device_outs(arguments.outs)
    if out is not None:
        _keep_apart(sources, arguments.targets)
    for name, source, target in zip(keys, sources, arguments.targets, strict=True):
        expected, got = spec_of(source), spec_of(target)
        if expected != got:
            raise SpecMismatchError(
                f"key {name!r}: pushed {expected}, but out has {got}", key=name, expected=str(expected), got=str(got)
            )
    return arguments


def named(key: Keys, value: Any) -> tuple[list[Key], list[Any]]:
    """Return keys and values of a call, given as one of each, as two lists or as a dict.

    Raises:
        KeyUseError: both a dict and a value are given, a key stands twice, or the lists differ in length.
    """
    if isinstance(key, Mapping):
        if value is not None:
            raise KeyUseError("give either a dict of keys and arrays, or one key and its array, not both")
        return list(key), list(key.values())
    if isinstance(key, list | tuple):
        return list(key), _one_each(list(key), value)
    return [key], [value]


def _one_each(keys: list[Key], values: Any) -> list[Any]:
    """Return the values of a list of keys."""
    if len(set(keys)) != len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        text = f"key {twice!r} stands twice in the list; for several arrays of one key give a list of them"
        raise KeyUseError(text, key=twice)
    if values is None:
        return [None] * len(keys)
    if not isinstance(values, list | tuple) or len(values) != len(keys):
        got = f"{len(values)}" if isinstance(values, list | tuple) else type(values).__name__
        text = f"{len(keys)} keys need a list of {len(keys)} arrays, one for each, got {got}"
        raise KeyUseError(text, expected=len(keys), got=got)
    return list(values)


def _on_device(value: object) -> list[Any]:
    """Return the arrays of a key that has some on a device, as one of them or in a list; none if it has not."""
    parts = value if isinstance(value, list | tuple) else [value]
    if not any(is_on_device(part) for part in parts):
        return []
    return [OnDevice(part) if is_on_device(part) else _source(part) for part in parts]


def find_device_outs(outs: list[Any]) -> list[DeviceOut]:
    """Return those arrays of outs that lie on devices."""
    found: list[DeviceOut] = []
    for number, out in enumerate(outs):
        if type(out) is not np.ndarray:
            parts = out if isinstance(out, list) else [out]
            found += [DeviceOut(number, OnDevice(part)) for part in parts if is_on_device(part)]
    return found


def _not_one(key: Key, array: Any) -> KeyUseError:
    text = f"key {key!r}: expected one array, got a list of {len(array)}"
    return KeyUseError(text, key=key, expected="an array", got="list")


def _is_list(key: Key, value: object) -> bool:
    """Say whether this is a list of arrays. A list of numbers is an array, as everywhere in NumPy."""
    if not isinstance(value, list | tuple):
        return False
    arrays = sum(hasattr(part, "__array__") and not isinstance(part, np.generic) for part in value)
    if arrays not in {0, len(value)}:
        got = ", ".join(type(part).__name__ for part in value)
        raise KeyUseError(f"key {key!r}: a list is one of arrays or one of numbers, got {got}", key=key, got=got)
    return arrays > 0


def _check_alike(key: Key, arrays: Sequence[Any]) -> None:
    expected = spec_of(arrays[0])
    for number, array in enumerate(arrays):
        got = spec_of(array)
        if got != expected:
            text = f"key {key!r}: the first array of its list is {expected}, number {number} is {got}"
            raise SpecMismatchError(text, key=key, expected=str(expected), got=str(got))


def _source(value: object) -> Array:
    """Return the value as an array whose memory can be sent: itself if it is contiguous and in native byte order."""
    array = np.asarray(value, order="C")
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _new_out(key: Key, spec: TensorSpec | None) -> Array:
    if spec is None:
        raise KeyUseError(f"key {key!r}: pass `out`, since this worker did not initialize the key", key=key)
    return np.empty(spec.shape, spec.dtype)


def checked_out(key: Key, out: Any) -> Any:
    """Return an array, or a list of them, that can be received into.

    Raises:
        SpecMismatchError: it can't.
    """
    if not isinstance(out, np.ndarray):
        if is_on_device(out):
            return out
        if isinstance(out, list | tuple) and out and all(is_array(part) for part in out):
            arrays = [checked_out(key, part) for part in out]
            _check_alike(key, [as_described(part) for part in arrays])
            return out if isinstance(out, list) else arrays
        got = type(out).__name__
        text = f"key {key!r}: out must be a NumPy array or one on a device, got {got}"
        raise SpecMismatchError(text, key=key, got=got)
    if not out.flags.writeable or not out.dtype.isnative:
        flaw = "read-only" if out.dtype.isnative else "not in native byte order"
        raise SpecMismatchError(f"key {key!r}: out is {flaw}; pass a writable array", key=key, got=flaw)
    return out


def _targets(outs: list[Any]) -> list[Array]:
    """Receive straight into contiguous arrays, into new ones otherwise; of a list, into its first array."""
    return [out if type(out) is np.ndarray and out.flags.c_contiguous else _target(out) for out in outs]


def _target(out: Any) -> Array:
    parts = out if isinstance(out, list) else [out]
    first: Array = as_described(parts[0])
    # What devices copy has to be in memory of theirs.
    if any(is_on_device(part) for part in parts) or not first.flags.c_contiguous:
        return np.empty(first.shape, first.dtype)
    return first


def is_array(value: object) -> bool:
    """Say whether something can be received into: an array of NumPy, or one on a device."""
    return isinstance(value, np.ndarray) or is_on_device(value)


def as_described(array: Any) -> Any:
    """Return an array as what has shape and dtype as NumPy has them."""
    return OnDevice(array) if is_on_device(array) else array


def _keep_apart(sources: list[Array], targets: list[Array]) -> None:
    """Put a new array in the place of each target in which a source lies, unless it is just its own source.

    A value may come while a source is still being sent; that of its own key comes only when that has been sent.
    """
    owners = {id(_owner(source)) for source in sources}
    pairs = enumerate(zip(sources, targets, strict=True))
    suspects = [i for i, (source, target) in pairs if target is not source and id(_owner(target)) in owners]
    if not suspects:
        return
    spans = sorted(map(_span, sources))
    starts = [start for start, _ in spans]
    ends = list(itertools.accumulate((end for _, end in spans), max))
    for i in suspects:
        start, end = _span(targets[i])
        before_end = bisect.bisect_left(starts, end)
        if (start, end) != _span(sources[i]) and before_end and ends[before_end - 1] > start:
            targets[i] = np.empty(targets[i].shape, targets[i].dtype)


def _owner(array: Array) -> Any:
    """Return what the array's memory belongs to: all views of an array have the same, and it costs little to ask."""
    return array if array.base is None else array.base


def _span(array: Array) -> tuple[int, int]:
    """Return the addresses between which a contiguous array lies."""
    start: int = array.__array_interface__["data"][0]
    return start, start + array.nbytes


def _matching(keys: list[Key], key: Keys, out: Any) -> list[Any]:
    """Return the outs in the order of the keys."""
    if isinstance(key, list | tuple):
        return _one_each(keys, out)
    if not isinstance(key, Mapping):
        return [out]
    if not isinstance(out, Mapping) or set(out) != set(keys):
        got = sorted(map(repr, out)) if isinstance(out, Mapping) else type(out).__name__
        raise KeyUseError(f"out must be a dict with the same keys; expected {sorted(map(repr, keys))}, got {got}")
    return [out[name] for name in keys]
