"""Weights and optimizer state of all servers: read by one worker piece by piece, and given to those of any cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from aiokv.arrays import Arguments
from aiokv.checkpoint.file_arrays import AnyArray
from aiokv.checkpoint.saving import (
    ARRAYS,
    FORMAT,
    LEFT,
    STEPS,
    Content,
    Saved,
    SavedKey,
    SavedRule,
    entry_of,
    file_head,
    tensor_name,
)
from aiokv.checkpoint.tensorfile import Shapes, bytes_of, in_order, pack, unpack
from aiokv.core import stimuli as st
from aiokv.core.keys import check_same_spec, name_keys
from aiokv.core.tables import check_sparse
from aiokv.errors import ConfigError, DataError, MembershipError, UnknownKeyError
from aiokv.wire.messages import RulesState

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence

    from aiokv.core.worker.session import Session
    from aiokv.operations import Operations
    from aiokv.types import Key, TensorSpec

Array = NDArray[Any]
Named = dict[str, AnyArray]
"""Arrays by name."""

Pieces = list[bytes | memoryview]

LONG: Final = 1 << 30
"""Stands for the bytes of work that takes seconds, such as what is done with files."""

MOST_PARTS = 256
"""So many parts of keys are asked for, or sent, at once."""

MOST_BYTES = 16 * 1024 * 1024
"""And of about so many bytes; rows are sent in parts of this size."""

STATE_FACTOR = 8
"""The state of a chunk is smaller than so many times its value: three arrays of float32 beside float16."""

VALUE, IDS = "value", "ids"


@dataclass(slots=True)
class Survey:
    """What the servers have of one key.

    `arrays` has dtype and number of elements of each, `versions` the version of each chunk by its first element or row.
    """

    record: st.KeyRecord
    updates: int
    arrays: dict[str, tuple[str, int]]
    versions: dict[int, int]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that an array has in a file."""
        (_, size), spec = self.arrays[name], self.record.spec
        if not self.record.is_sparse:
            return spec.shape if size == spec.size else (size,)
        rows = self.arrays[IDS][1]
        return (rows,) if name == IDS else (rows, size // rows if rows else spec.row_size)


@dataclass(slots=True)
class Answer:
    """What the servers have said of a part of a key."""

    arrays: dict[str, Array]
    facts: dict[str, str]
    version: int


# --- from the servers ---


async def survey(
    operations: Operations, records: Sequence[st.KeyRecord], seconds: float, *, weights: bool = True
) -> list[Survey]:
    """Return what the servers have of some keys, without the arrays. Nobody pushes meanwhile.

    Args:
        operations: the worker's calls.
        records: the keys.
        seconds: for each exchange with the servers.
        weights: not only the state of the update rule.

    Raises:
        ConfigError: chunks are too large for a message.
        DataError: of one key the servers keep different states.
    """
    session = operations._session
    parts = [st.StatePart(record, *ends) for record in records for ends in session.state_parts(record)]
    for part in parts:
        _check_size(part, operations._most_bytes)
    found = {record.key: Survey(record, 0, {}, {}) for record in records}
    for first in range(0, len(parts), MOST_PARTS):
        some = parts[first : first + MOST_PARTS]
        for part, answer in zip(some, await _read(operations, some, seconds, arrays=False), strict=True):
            _add(found[part.record.key], part, answer)
    if not weights:
        for key in found.values():
            del key.arrays[VALUE]
    return list(found.values())


def _add(found: Survey, part: st.StatePart, answer: Answer) -> None:
    arrays = msgspec.json.decode(answer.facts[ARRAYS], type=dict[str, tuple[str, int]])
    if found.versions and found.arrays.keys() != arrays.keys():
        key, names, others = found.record.key, sorted(found.arrays), sorted(arrays)
        text = f"key {key!r}: its parts have different states, {names} and {others}: push it once"
        raise DataError(text, key=key, expected=str(names), got=str(others))
    for name, (dtype, size) in arrays.items():
        found.arrays[name] = (dtype, size + found.arrays.get(name, (dtype, 0))[1])
    found.versions[part.start] = answer.version
    found.updates = max(found.updates, int(answer.facts[STEPS]))


async def stream(
    operations: Operations,
    surveys: Sequence[Survey],
    content: Content,
    seconds: float,
    write: Callable[[Pieces], Awaitable[None]],
) -> None:
    """Read all arrays and write them, in the order that they have in a file; few are in memory at once.

    Args:
        operations: the worker's calls.
        surveys: what there is.
        content: what the file has besides arrays; its keys are filled in.
        seconds: for each exchange with the servers.
        write: takes the next bytes of the file.

    Raises:
        DataError: somebody has pushed since the survey.
    """
    shapes: Shapes = {}
    whose: dict[str, tuple[Survey, str]] = {}
    for found in surveys:
        entry = msgspec.structs.asdict(entry_of(found.record))
        content.keys.append(SavedKey(**entry, updates=found.updates, names=tuple(found.arrays)))
        for name, (dtype, _) in found.arrays.items():
            tensor = tensor_name(found.record.key, name)
            shapes[tensor], whose[tensor] = (dtype, found.shape(name)), (found, name)
    await write([file_head(FORMAT, content, shapes)])
    wanted: list[tuple[Survey, st.StatePart]] = []
    nbytes = 0
    for tensor in in_order(shapes):
        found, name = whose[tensor]
        for start, stop in operations._session.state_parts(found.record):
            wanted.append((found, st.StatePart(found.record, start, stop, (name,))))
            nbytes += (stop - start) * found.record.spec.itemsize
            if len(wanted) == MOST_PARTS or nbytes >= MOST_BYTES:
                await _copy(operations, wanted, seconds, write)
                wanted, nbytes = [], 0
    if wanted:
        await _copy(operations, wanted, seconds, write)


async def _copy(
    operations: Operations,
    wanted: list[tuple[Survey, st.StatePart]],
    seconds: float,
    write: Callable[[Pieces], Awaitable[None]],
) -> None:
    pieces: Pieces = []
    answers = await _read(operations, [part for _, part in wanted], seconds)
    for (found, part), answer in zip(wanted, answers, strict=True):
        pieces.append(_piece(found, part, answer))
        left, more = part, answer
        while more.facts[LEFT] != "-1":
            # Rows that did not go in one message.
            await write(pieces)
            left = st.StatePart(part.record, int(more.facts[LEFT]), part.stop, part.names)
            (more,) = await _read(operations, [left], seconds)
            pieces = [_piece(found, left, more)]
    await write(pieces)


def _piece(found: Survey, part: st.StatePart, answer: Answer) -> memoryview:
    _check_unchanged(found, part, answer)
    (array,) = answer.arrays.values()
    return bytes_of(array)


def _check_unchanged(found: Survey, part: st.StatePart, answer: Answer) -> None:
    version = next(found.versions[start] for start in sorted(found.versions, reverse=True) if start <= part.start)
    if answer.version != version:
        key = found.record.key
        text = f"key {key!r} was pushed while it was saved: its version was {version} and is {answer.version}"
        raise DataError(text, key=key, expected=version, got=answer.version)


async def newest_rule(operations: Operations, seconds: float, *, own: bool = True) -> SavedRule:
    """Return the servers' update rule, with the clock of the newest update of all, or of this worker's newest push."""
    rules: list[RulesState] = await operations._call(lambda call: st.ReadRules(call, seconds))
    clock = max([operations._session.clock if own else 0, *(rule.clock for rule in rules)])
    return msgspec.convert(msgspec.structs.asdict(rules[0]) | {"clock": clock}, SavedRule)


async def count_updates(operations: Operations, seconds: float) -> dict[Key, int]:
    """Return how often each key was updated that this worker has initialised."""
    found = await survey(operations, operations._session.records, seconds)
    return {key.record.key: key.updates for key in found}


async def _read(
    operations: Operations, parts: list[st.StatePart], seconds: float, *, arrays: bool = True
) -> list[Answer]:
    arguments = Arguments([], [], [], [], single=False)
    versions = await operations._call(lambda call: st.ReadState(call, parts, seconds, arrays), arguments)
    contents = [unpack(arguments.buffers[number], "a server's answer") for number in range(len(parts))]
    return [Answer(*content, versions[number]) for number, content in enumerate(contents)]


# --- to the servers ---


def check(saved: Saved, session: Session, path: str, most: int) -> list[SavedKey]:
    """Compare what was saved with the keys that there are; return those that are not there and can be made.

    Raises:
        UnknownKeyError: keys are not initialised, and can't be made without their values.
        MembershipError: a key that is not there belongs to ranks that there are not.
        SpecMismatchError: one has another shape, dtype or storage.
        DataError: an array is too short or too long.
        ConfigError: chunks are too large for a message.
    """
    known = {record.key: record for record in session.records}
    for entry in saved.content.keys:
        spec = entry.spec
        if record := known.get(entry.key):
            check_same_spec(entry.key, record.spec, spec)
            check_sparse(entry.key, is_sparse=record.is_sparse, wanted=entry.sparse)
        value = saved.arrays[entry.key].get(VALUE)
        if not entry.sparse and value is not None and (value.shape, value.dtype.name) != (spec.shape, spec.dtype):
            got = f"{value.dtype}{list(value.shape)}"
            raise DataError(f"{path}: key {entry.key!r} has {got} for {spec}", path=path, expected=str(spec), got=got)
        for ends in session.state_parts(entry.record):
            _check_size(st.StatePart(entry.record, *ends), most)
    missing = [entry for entry in saved.content.keys if entry.key not in known]
    _check_missing(saved, missing, session, path)
    return missing


def _check_missing(saved: Saved, missing: list[SavedKey], session: Session, path: str) -> None:
    if without := [entry.key for entry in missing if VALUE not in saved.arrays[entry.key]]:
        names = name_keys(tuple(without))
        text = f"{path}: has the state of keys that are not initialized, but no values for them: call init for {names}"
        raise UnknownKeyError(text, key=without[0])
    for entry in missing:
        try:
            session.check_group(entry.group)
        except MembershipError as error:
            text = f"{path}: key {entry.key!r} is that of ranks {list(entry.group)}: {error.message}"
            raise MembershipError(text, key=entry.key) from error


async def put(operations: Operations, saved: Saved, missing: Iterable[SavedKey], seconds: float) -> None:
    """Let the servers go on with what was saved; it has been checked. Nobody pushes meanwhile.

    Args:
        operations: the worker's calls.
        saved: what was saved.
        missing: the keys that are to be made.
        seconds: for each exchange with the servers.

    Raises:
        OptimizerError: the servers have another rule; nothing has changed.
    """
    content = saved.content
    begins_anew = not content.rule.name and bool((await newest_rule(operations, seconds)).name)
    rules = RulesState(**msgspec.structs.asdict(content.rule))
    await operations._call(lambda call: st.WriteRules(call, rules, seconds))
    new = {entry.key for entry in missing}
    parts: list[st.StatePart] = []
    wanted: list[tuple[Named, int]] = []
    nbytes = 0
    for entry in content.keys:
        updates = 0 if begins_anew else entry.updates
        named = saved.arrays[entry.key]
        if entry.sparse:
            # Where its chunks are is looked up in these.
            named = named | {IDS: await operations._compute(partial(np.asarray, named[IDS]), LONG)}
        for part, arrays in _cut(entry, named, operations._session):
            part.creates = entry.key in new
            parts.append(part)
            wanted.append((arrays, updates))
            nbytes += _nbytes(arrays)
            if len(parts) == MOST_PARTS or nbytes >= MOST_BYTES:
                await _write(operations, parts, wanted, seconds)
                parts, wanted, nbytes = [], [], 0
    if parts:
        await _write(operations, parts, wanted, seconds)


def _packed(wanted: list[tuple[Named, int]]) -> list[Array]:
    """Read what lies in a file, and return the bytes that are sent."""
    return [np.frombuffer(pack(arrays, {STEPS: str(updates)}), np.uint8) for arrays, updates in wanted]


async def _write(
    operations: Operations, parts: list[st.StatePart], wanted: list[tuple[Named, int]], seconds: float
) -> None:
    contents = await operations._compute(partial(_packed, wanted), LONG)
    sizes = [content.nbytes for content in contents]
    arguments = Arguments([], contents, [], [], single=False)
    await operations._call(lambda call: st.WriteState(call, parts, sizes, seconds), arguments)


def _cut(entry: SavedKey, arrays: Named, session: Session) -> Iterator[tuple[st.StatePart, Named]]:
    """Yield the parts of a key and their arrays, as this cluster has cut it."""
    record, spec = entry.record, entry.spec
    for start, stop in session.state_parts(record):
        if entry.sparse:
            for low, some in _cut_rows(arrays, start, stop):
                yield st.StatePart(record, low, stop), some
            continue
        cuts: Named = {}
        for name, array in arrays.items():
            # One element for each of the key, or for each of its rows.
            width = spec.size // array.size if array.size else 1
            cuts[name] = array.reshape(-1)[start // width : stop // width]
        yield st.StatePart(record, start, stop), cuts


def _cut_rows(arrays: Named, start: int, stop: int) -> Iterator[tuple[int, Named]]:
    """Yield the rows of a chunk in parts, each with the row from which on it has all; at least one, of no rows."""
    ids = np.asarray(arrays[IDS])
    first, end = np.searchsorted(ids, [start, stop]).tolist()
    width = _nbytes(arrays) // max(1, ids.size)
    most = max(1, MOST_BYTES // max(1, width))
    low = start
    while True:
        last = min(first + most, end)
        yield low, {name: array[first:last] for name, array in arrays.items()}
        if last == end:
            return
        first, low = last, int(ids[last])


def _nbytes(arrays: Named) -> int:
    return sum(array.nbytes for array in arrays.values())


def _check_size(part: st.StatePart, most: int) -> None:
    spec: TensorSpec = part.record.spec
    nbytes = (part.stop - part.start) * spec.itemsize * STATE_FACTOR
    if not part.record.is_sparse and nbytes > most:
        got = f"{nbytes // STATE_FACTOR} bytes"
        what = f"key {part.record.key!r}: chunks of {got}"
        text = f"{what} are too large to be saved; set the scheduler's chunk_bytes to less"
        raise ConfigError(text, expected=f"at most {most // STATE_FACTOR} bytes", got=got)
