"""Weights and optimizer state of all servers: collected by one worker, and given to the servers of any cluster."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from aiokv.arrays import Arguments
from aiokv.core import stimuli as st
from aiokv.core.keys import check_same_spec
from aiokv.core.rows import check_sparse
from aiokv.errors import ConfigError, DataError, UnknownKeyError
from aiokv.saving import LEFT, STEPS, Saved, SavedKey, SavedRule, pack, unpack
from aiokv.types import TensorSpec
from aiokv.wire.messages import RulesState

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.core.session import Session
    from aiokv.operations import Operations
    from aiokv.types import Key

Array = NDArray[Any]

MOST_PARTS = 256
"""So many parts of keys are asked for, or sent, at once."""

MOST_BYTES = 16 * 1024 * 1024
"""Rows are sent in parts of about this size."""

STATE_FACTOR = 8
"""The state of a chunk is smaller than so many times its value: three arrays of float32 beside float16."""

VALUE, IDS = "value", "ids"


@dataclass(slots=True)
class Found:
    """What one chunk, or some of its rows, had."""

    arrays: dict[str, Array]
    updates: int


# --- from the servers ---


async def collect(operations: Operations, seconds: float, *, weights: bool) -> Saved:
    """Return what the servers have of all keys that this worker has initialised. Nobody pushes meanwhile.

    Args:
        operations: the worker's calls.
        seconds: for each exchange with the servers.
        weights: not only the state of the update rule.

    Raises:
        ConfigError: chunks are too large for a message.
    """
    session = operations._session
    rule = await newest_rule(operations, seconds)
    parts = [st.StatePart(key, *ends) for key in session.keys for ends in session.state_parts(key)]
    for part in parts:
        _check_size(part, session, operations._most_bytes)
    found: dict[Key, list[Found]] = {key: [] for key in session.keys}
    left = deque(parts)
    while left:
        some = [left.popleft() for _ in range(min(MOST_PARTS, len(left)))]
        rest = []
        for part, (arrays, facts) in zip(some, await _read(operations, some, seconds), strict=True):
            found[part.key].append(Found(arrays, int(facts[STEPS])))
            if facts[LEFT] != "-1":
                rest.append(st.StatePart(part.key, int(facts[LEFT]), part.stop))
        left.extendleft(reversed(rest))
    saved = Saved(rule, [], {})
    for key, pieces in found.items():
        join = partial(_join, key, _spec(session, key), pieces, sparse=session.is_sparse(key))
        arrays = await operations._compute(join, _nbytes(*(piece.arrays for piece in pieces)))
        if not weights:
            del arrays[VALUE]
        spec, updates = _spec(session, key), max(piece.updates for piece in pieces)
        saved.keys.append(SavedKey(key, spec.shape, spec.dtype, session.is_sparse(key), updates, tuple(arrays)))
        saved.arrays[key] = arrays
    return saved


async def newest_rule(operations: Operations, seconds: float, *, own: bool = True) -> SavedRule:
    """Return the servers' update rule, with the clock of the newest update of all, or of this worker's newest push."""
    rules: list[RulesState] = await operations._call(lambda call: st.ReadRules(call, seconds))
    clock = max([operations._session.clock if own else 0, *(rule.clock for rule in rules)])
    return msgspec.convert(msgspec.structs.asdict(rules[0]) | {"clock": clock}, SavedRule)


async def count_updates(operations: Operations, seconds: float) -> dict[Key, int]:
    """Return how often each key was updated that this worker has initialised."""
    session = operations._session
    parts = [st.StatePart(key, *ends) for key in session.keys for ends in session.state_parts(key)]
    counts = dict.fromkeys(session.keys, 0)
    for first in range(0, len(parts), MOST_PARTS):
        some = parts[first : first + MOST_PARTS]
        for part, (_, facts) in zip(some, await _read(operations, some, seconds, arrays=False), strict=True):
            counts[part.key] = max(counts[part.key], int(facts[STEPS]))
    return counts


async def _read(
    operations: Operations, parts: list[st.StatePart], seconds: float, *, arrays: bool = True
) -> list[tuple[dict[str, Array], dict[str, str]]]:
    arguments = Arguments([], [], [], [], single=False)
    await operations._call(lambda call: st.ReadState(call, parts, seconds, arrays), arguments)
    contents = [arguments.buffers[number] for number in range(len(parts))]
    nbytes = sum(content.nbytes for content in contents)
    return await operations._compute(
        lambda: [unpack(bytes(content), "a server's answer") for content in contents], nbytes
    )


def _join(key: Key, spec: TensorSpec, pieces: list[Found], *, sparse: bool) -> dict[str, Array]:
    """Return the arrays of a whole key."""
    names = sorted(pieces[0].arrays)
    for piece in pieces:
        if sorted(piece.arrays) != names:
            text = f"key {key!r}: its parts have different states, {names} and {sorted(piece.arrays)}: push it once"
            raise DataError(text, key=key, expected=str(names), got=str(sorted(piece.arrays)))
    joined = {name: np.concatenate([piece.arrays[name] for piece in pieces]) for name in names}
    if sparse:
        order = np.argsort(joined[IDS])
        return {name: array[order] for name, array in joined.items()}
    return {name: array.reshape(spec.shape) if array.size == spec.size else array for name, array in joined.items()}


# --- to the servers ---


def check(saved: Saved, session: Session, path: str, most: int) -> None:
    """Compare what was saved with the keys that there are.

    Raises:
        UnknownKeyError: a key is not initialised.
        SpecMismatchError: one has another shape, dtype or storage.
        DataError: an array is too short or too long.
        ConfigError: chunks are too large for a message.
    """
    for entry in saved.keys:
        key, spec = entry.key, session.spec(entry.key)
        if spec is None:
            raise UnknownKeyError(f"{path}: has key {key!r}, which is not initialized: call init first", key=key)
        check_same_spec(key, spec, TensorSpec(entry.shape, entry.dtype))
        check_sparse(key, is_sparse=session.is_sparse(key), wanted=entry.sparse)
        value = saved.arrays[key].get(VALUE)
        if not entry.sparse and value is not None and (value.shape, value.dtype.name) != (spec.shape, spec.dtype):
            got = f"{value.dtype}{list(value.shape)}"
            raise DataError(f"{path}: key {key!r} has {got} for {spec}", path=path, expected=str(spec), got=got)
        for ends in session.state_parts(key):
            _check_size(st.StatePart(key, *ends), session, most)


async def put(operations: Operations, saved: Saved, seconds: float) -> None:
    """Let the servers go on with what was saved; it has been checked. Nobody pushes meanwhile.

    Args:
        operations: the worker's calls.
        saved: what was saved.
        seconds: for each exchange with the servers.

    Raises:
        OptimizerError: the servers have another rule; nothing has changed.
    """
    session = operations._session
    if not saved.rule.name and (await newest_rule(operations, seconds)).name:
        # Their rule begins anew.
        for entry in saved.keys:
            entry.updates = 0
    rules = RulesState(**msgspec.structs.asdict(saved.rule))
    await operations._call(lambda call: st.WriteRules(call, rules, seconds))
    parts: list[st.StatePart] = []
    contents: list[Array] = []
    for entry in saved.keys:
        for part, arrays in _cut(entry, saved.arrays[entry.key], session):
            parts.append(part)
            packed = await operations._compute(partial(pack, arrays, {STEPS: str(entry.updates)}), _nbytes(arrays))
            contents.append(np.frombuffer(packed, np.uint8))
            if len(parts) == MOST_PARTS:
                await _write(operations, parts, contents, seconds)
                parts, contents = [], []
    if parts:
        await _write(operations, parts, contents, seconds)


async def _write(operations: Operations, parts: list[st.StatePart], contents: list[Array], seconds: float) -> None:
    sizes = [content.nbytes for content in contents]
    arguments = Arguments([], contents, [], [], single=False)
    await operations._call(lambda call: st.WriteState(call, parts, sizes, seconds), arguments)


def _cut(
    entry: SavedKey, arrays: dict[str, Array], session: Session
) -> Iterator[tuple[st.StatePart, dict[str, Array]]]:
    """Yield the parts of a key and their arrays, as this cluster has cut it."""
    key, spec = entry.key, _spec(session, entry.key)
    for start, stop in session.state_parts(key):
        if entry.sparse:
            for low, some in _cut_rows(arrays, start, stop):
                yield st.StatePart(key, low, stop), some
            continue
        cuts = {}
        for name, array in arrays.items():
            # One element for each of the key, or for each of its rows.
            width = spec.size // array.size if array.size else 1
            cuts[name] = array.reshape(-1)[start // width : stop // width]
        yield st.StatePart(key, start, stop), cuts


def _cut_rows(arrays: dict[str, Array], start: int, stop: int) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield the rows of a chunk in parts, each with the row from which on it has all; at least one, of no rows."""
    first, end = np.searchsorted(arrays[IDS], [start, stop]).tolist()
    width = sum(array.nbytes for array in arrays.values()) // max(1, arrays[IDS].size)
    most = max(1, MOST_BYTES // max(1, width))
    low = start
    while True:
        last = min(first + most, end)
        yield low, {name: array[first:last] for name, array in arrays.items()}
        if last == end:
            return
        first, low = last, int(arrays[IDS][last])


def _nbytes(*named: dict[str, Array]) -> int:
    return sum(array.nbytes for arrays in named for array in arrays.values())


def _spec(session: Session, key: Key) -> TensorSpec:
    spec = session.spec(key)
    assert spec is not None, "it is one of the session's keys"
    return spec


def _check_size(part: st.StatePart, session: Session, most: int) -> None:
    nbytes = (part.stop - part.start) * _spec(session, part.key).itemsize * STATE_FACTOR
    if not session.is_sparse(part.key) and nbytes > most:
        got = f"{nbytes // STATE_FACTOR} bytes"
        text = f"key {part.key!r}: chunks of {got} are too large to be saved; set the scheduler's chunk_bytes to less"
        raise ConfigError(text, expected=f"at most {most // STATE_FACTOR} bytes", got=got)
