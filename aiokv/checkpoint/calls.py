"""Saving and loading as calls that all workers make together: each does its part, and all hear how it went."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.checkpoint import files, saving, snapshot
from aiokv.checkpoint.residuals import inherited, merged, rank_url, residual_file
from aiokv.checkpoint.snapshot import LONG
from aiokv.core import stimuli as st
from aiokv.errors import (
    AiokvError,
    CallTimeoutError,
    ConfigError,
    DataError,
    MembershipError,
    UnknownKeyError,
    from_code,
)
from aiokv.types import Key

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from aiokv.operations import Operations
    from aiokv.types import Rank

Said = dict[str, Any]
Url = str | os.PathLike[str]
Keys = Key | Collection[Key] | None
"""One key, or some; None: all."""

MOST_KEYS = 2000
"""So many keys are named in one message."""

MOST_FACTS = 64 * 1024
"""Bytes of what a user may add to a file, in JSON: every worker is told it."""


async def together(
    operations: Operations, name: str, seconds: float, work: Callable[[], Awaitable[Said]]
) -> dict[Rank, Said]:
    """Do this worker's part of something, wait for the others, and return what all have to say.

    Args:
        operations: the worker's calls.
        name: of the barrier.
        seconds: to wait for the others.
        work: the part; what it returns is told to all workers.

    Raises:
        AiokvError: what `work` has raised here; otherwise what it has raised on the first other rank.
        BarrierTimeoutError: names the ranks that did not come.
    """

    met = False
    try:
        said = await work()
        met = True
        answers = await operations._call(lambda call: st.EnterBarrier(call, name, seconds, (), said))
    except BaseException as error:
        # The others hear of it, unless they were what was waited for and it is them who do not come.
        if not (met and isinstance(error, Exception)):
            told = _told(error, operations.rank)
            with contextlib.suppress(AiokvError):
                await operations._call(lambda call: st.EnterBarrier(call, name, seconds, (), told, leaves=True))
        raise
    answers = {operations.rank: said} | (answers or {})
    for rank in sorted(answers):
        if "error" in answers[rank]:
            raise from_code(*answers[rank]["error"])
    return answers


def _told(error: BaseException, rank: Rank) -> Said:
    """Return what the other workers are told of an error."""
    if not isinstance(error, Exception):
        error = CallTimeoutError(f"rank {rank} has given up: its caller did not wait any longer", ranks=[rank])
    elif not isinstance(error, AiokvError):
        error = DataError(f"rank {rank} could not go on: {type(error).__name__}: {error}", ranks=[rank])
    return {"error": [error.code, error.message, error.details]}


def _of_root(said: dict[Rank, Said], root: Rank = 0) -> Said:
    """Return what the rank has said that has what is saved or loaded.

    Raises:
        MembershipError: it takes no part.
    """
    if root not in said:
        text = f"rank {root} has finished or left, and did not come: it is the worker that saves and loads"
        raise MembershipError(text, ranks=[root])
    return said[root]


def _as_list(keys: Keys) -> list[Key] | None:
    return [keys] if isinstance(keys, str | int) else None if keys is None else list(keys)


# --- saving ---


async def save(
    operations: Operations,
    url: Url,
    keys: Keys,
    seconds: float,
    *,
    weights: bool,
    facts: Mapping[str, Any] | None,
) -> None:
    """Save; see `aiokv.operations.Operations.save`."""
    url, keys = os.fspath(url), _as_list(keys)
    aside: list[files.Aside] = []
    folder = operations._checkpoint_folder

    async def announce() -> Said:
        encoded = msgspec.json.encode(dict(facts or {}))
        if len(encoded) > MOST_FACTS:
            text = f"facts of {len(encoded)} bytes in JSON are too many: they are for a few numbers and names"
            raise ConfigError(text, expected=f"at most {MOST_FACTS} bytes", got=len(encoded))
        has_left = any(keys is None or key in keys for key in operations._compressor.keys)
        # Rank 0 does not know the keys of groups that it is not in; the first rank of each names them.
        foreign = [record for record in operations._session.records if operations.rank in record.options.group[:1]]
        named = [msgspec.to_builtins(saving.entry_of(record)) for record in foreign]
        return {"id": secrets.token_hex(16), "residuals": has_left, "keys": named}

    async def write() -> Said:
        if operations.rank == 0:
            aside.append(files.Aside(url, folder))
            await _write(operations, aside[-1], content, _wanted(operations, said, keys), seconds, weights=weights)
        if operations.rank in content.residuals:
            aside.append(files.Aside(rank_url(url, operations.rank), folder))
            pieces = residual_file(await operations.compression_state(), operations.rank, content.id, keys)
            await operations._compute(lambda: aside[-1].write(pieces), LONG)
        for file in aside:
            await operations._compute(file.seal, LONG)
        return {}

    async def publish() -> Said:
        for file in aside:
            await operations._compute(file.publish, LONG)
        return {}

    said = await together(operations, f"aiokv: save {url}", seconds, announce)
    save_id = _of_root(said)["id"]
    # Words that were left at a barrier of an earlier call are none at this one's.
    place = f"{url} {save_id}"
    residuals = tuple(rank for rank in sorted(said) if said[rank]["residuals"])
    rule = saving.SavedRule("", {}, "sum", (), 0)
    content = saving.Content(save_id, operations.num_workers, residuals, dict(facts or {}), rule, [])
    try:
        await together(operations, f"aiokv: write {place}", seconds, lambda: _or_stop(aside, write))
        await together(operations, f"aiokv: name {place}", seconds, lambda: _or_stop(aside, publish))
    except BaseException:
        await operations._compute(partial(_drop, aside), LONG)
        raise


def _drop(aside: list[files.Aside]) -> None:
    for file in aside:
        file.drop()


async def _or_stop(aside: list[files.Aside], work: Callable[[], Awaitable[Said]]) -> Said:
    """Do some work; if it ends otherwise, tell the thread that may still write."""
    try:
        return await work()
    except BaseException:
        for file in aside:
            file.stop()
        raise


def _wanted(operations: Operations, said: dict[Rank, Said], keys: Collection[Key] | None) -> list[st.KeyRecord]:
    """Return the keys that are to be saved.

    Raises:
        UnknownKeyError: one of them is not there.
    """
    records = {record.key: record for record in operations._session.records}
    for rank in sorted(said):
        entries = msgspec.convert(said[rank]["keys"], list[saving.KeyEntry])
        records |= {entry.key: entry.record for entry in entries}
    if keys is None:
        return list(records.values())
    for key in keys:
        if key not in records:
            raise UnknownKeyError(f"key {key!r} is not initialized: it can't be saved", key=key)
    return [records[key] for key in dict.fromkeys(keys)]


async def _write(
    operations: Operations,
    file: files.Aside,
    content: saving.Content,
    records: list[st.KeyRecord],
    seconds: float,
    *,
    weights: bool,
) -> None:
    """Write all of rank 0's file but the checksum."""
    content.rule = await snapshot.newest_rule(operations, seconds)
    surveys = await snapshot.survey(operations, records, seconds, weights=weights)

    async def write(pieces: snapshot.Pieces) -> None:
        await operations._compute(lambda: file.write(pieces), LONG)

    await snapshot.stream(operations, surveys, content, seconds, write)


# --- loading ---


async def load(
    operations: Operations,
    url: Url,
    keys: Keys,
    seconds: float,
    *,
    weights: bool,
    check: Callable[[dict[str, Any]], object] | None,
) -> dict[str, Any]:
    """Load; see `aiokv.operations.Operations.load`."""
    url = os.fspath(url)
    with contextlib.closing(Loading(operations, url, _as_list(keys), seconds, weights=weights)) as loading:
        head = _of_root(await together(operations, f"aiokv: load {url}", seconds, loading.look))
        facts: dict[str, Any] = head["facts"]
        place = loading.place = f"{url} {head['call']}"

        async def prepare() -> Said:
            if check is not None:
                check(facts)
            await loading.read_residuals(head)
            return {}

        await together(operations, f"aiokv: check {place}", seconds, prepare)
        await together(operations, f"aiokv: put {place}", seconds, loading.put)
        await loading.go_on()
        return facts


class Loading:
    """A load that is under way on one worker.

    Args:
        operations: the worker's calls.
        url: of rank 0's file.
        keys: which are loaded; None: all in the file.
        seconds: for each exchange with the others.
        weights: not only the state of the update rule.
        root: the rank that has what is loaded.
    """

    def __init__(
        self,
        operations: Operations,
        url: str,
        keys: Collection[Key] | None,
        seconds: float,
        *,
        weights: bool,
        root: Rank = 0,
    ) -> None:
        self._operations = operations
        self._url = url
        self._keys = keys
        self._seconds = seconds
        self._weights = weights
        self._root = root
        self._reader: files.Reader | None = None
        self._saved: saving.Saved | None = None
        self._missing: list[saving.SavedKey] = []
        self._residuals: dict[Key, dict[str, Any]] = {}
        self.place = url
        """In the names of barriers, once it is known which call this is."""

    async def look(self) -> Said:
        """Read and check rank 0's file; tell the others what they need of it."""
        operations = self._operations
        if operations.rank != 0:
            return {}
        folder = operations._checkpoint_folder
        self._reader = await operations._compute(lambda: files.open_reader(self._url, folder), LONG)
        saved = await operations._compute(partial(saving.open_saved, self._reader, self._url), LONG)
        self.take(saved)
        content = saved.content
        return {
            "call": secrets.token_hex(16),
            "id": content.id,
            "workers": content.workers,
            "residuals": content.residuals,
            "facts": content.facts,
        }

    def close(self) -> None:
        """Close rank 0's file."""
        if self._reader is not None:
            self._reader.close()

    def take(self, saved: saving.Saved) -> None:
        """Let this be what is loaded, by the worker that has it.

        Raises:
            AiokvError: it can't be; see `aiokv.checkpoint.snapshot.check`.
        """
        self._select(saved)
        self._missing = snapshot.check(saved, self._operations._session, self._url, self._operations._most_bytes)
        self._saved = saved

    def _select(self, saved: saving.Saved) -> None:
        content = saved.content
        if not self._weights:
            for arrays in saved.arrays.values():
                arrays.pop(snapshot.VALUE, None)
        if self._keys is None:
            return
        entries = {entry.key: entry for entry in content.keys}
        for key in self._keys:
            if key not in entries:
                raise UnknownKeyError(f"{self._url}: has no key {key!r}", key=key)
        content.keys = [entries[key] for key in dict.fromkeys(self._keys)]

    async def read_residuals(self, head: Said) -> None:
        """Read what workers had left of their gradients, for this rank to go on with."""
        operations = self._operations
        ranks = inherited(head["residuals"], operations.rank, operations.num_workers)
        if not ranks:
            return
        urls = [rank_url(self._url, each) for each in ranks]
        folder = operations._checkpoint_folder
        read = [await operations._compute(partial(files.read, url, folder), LONG) for url in urls]
        self._residuals = merged(self._url, dict(zip(ranks, read, strict=True)), head["id"], self._keys)

    async def put(self) -> Said:
        """Let the servers go on with what rank 0 has read."""
        if self._saved is not None:
            await snapshot.put(self._operations, self._saved, self._missing, self._seconds)
        return {}

    async def go_on(self) -> None:
        """Go on from what the servers have now."""
        operations, seconds = self._operations, self._seconds
        loaded = await self._adopt()
        rule = await snapshot.newest_rule(operations, seconds, own=False)
        updates = await snapshot.count_updates(operations, seconds)
        await operations._call(lambda call: st.Resume(call, rule.clock, updates))
        operations._compressor.forget(loaded)
        if self._residuals:
            await operations.restore_compression_state(self._residuals)

    async def _adopt(self) -> list[Key]:
        """Let all workers know the keys that were made; return all that were loaded."""
        operations, rank = self._operations, self._operations.rank
        known = {record.key for record in operations._session.records}
        keys = [] if self._saved is None else self._saved.content.keys
        loaded: list[Key] = []

        async def name() -> Said:
            # There may be more than go in one message.
            some = [saving.entry_of(entry.record) for entry in keys[len(loaded) : len(loaded) + MOST_KEYS]]
            more = len(loaded) + len(some) < len(keys)
            return {"keys": [msgspec.to_builtins(entry) for entry in some], "more": more}

        more = True
        while more:
            answers = await together(operations, f"aiokv: keys {self.place}", self._seconds, name)
            said = _of_root(answers, self._root)
            entries, more = msgspec.convert(said["keys"], list[saving.KeyEntry]), said["more"]
            records = [each.record for each in entries if each.key not in known and rank in (each.group or (rank,))]
            await operations._call(partial(_adopting, records))
            loaded += [entry.key for entry in entries]
        return loaded


def _adopting(records: list[st.KeyRecord], call: int) -> st.Stimulus:
    return st.Adopt(call, records)
