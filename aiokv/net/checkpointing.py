"""What a server does for the checkpoints of the cluster: it writes what it holds, or reads its part, in threads."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from aiokv.checkpoint.cluster_files import part_name, part_pieces, write_own
from aiokv.checkpoint.cluster_reading import Reading
from aiokv.checkpoint.saving import SavedRule
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import AiokvError, DataError
from aiokv.net.driver import BUSY_SECONDS
from aiokv.net.memory import TURN_BYTES
from aiokv.store.snapshots import Snapshots

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from aiokv.core.saved_state import ChunkState
    from aiokv.store.memory import ParameterStore

MOST_BYTES = 16 * 1024 * 1024
"""So much is read in a thread before it is put into the store."""

OnCheckpoint = ef.Snapshot | ef.DropSnapshots | ef.WriteSnapshots | ef.ReadCheckpoint | ef.LoadSnapshots
"""The effects that `CheckpointFiles` performs."""


class CheckpointFiles:
    """The driver of what a server holds for checkpoints, and of their files.

    Args:
        store: the server's memory.
        folder: where files have to be; see `aiokv.checkpoint.files.find`.
        feed: gives a stimulus to the state machine.
        is_busy: whether a thread works on the store, so that nothing else may.
    """

    def __init__(
        self,
        store: ParameterStore,
        folder: str,
        feed: Callable[[st.Stimulus], None],
        is_busy: Callable[[], bool],
    ) -> None:
        self._store = store
        self._is_busy = is_busy
        self._folder = folder
        self._feed = feed
        self._snapshots: Snapshots[ChunkState] = Snapshots(store)
        self._reading: Reading | None = None
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._copying = False
        """Whether a task copies what is held."""

    def perform(self, effect: OnCheckpoint) -> None:
        """Perform an effect; what takes long goes on in a thread."""
        match effect:
            case ef.Snapshot(clock, key, start, version, states):
                self._snapshots.hold(clock, key, start, version, states)
                if self._snapshots.is_copying and not self._copying:
                    self._copying = True
                    self._begin(self._copy())
            case ef.DropSnapshots(clock):
                self._snapshots.release(clock)
            case ef.WriteSnapshots():
                self._begin(self._write(effect))
            case ef.ReadCheckpoint(place):
                self._begin(self._read(place))
            case ef.LoadSnapshots(_, chunks):
                self._begin(self._load(chunks))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def close(self) -> None:
        """Wait until no thread is at work: it can't be stopped."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _copy(self) -> None:
        """Copy tables, a little in each turn of the loop; a thread could not while they are updated."""
        while self._snapshots.is_copying:
            if self._is_busy():
                await asyncio.sleep(BUSY_SECONDS)
                continue
            self._snapshots.copy_some(TURN_BYTES)
            await asyncio.sleep(0)
        self._copying = False

    async def _write(self, effect: ef.WriteSnapshots) -> None:
        clock = effect.clock
        there: asyncio.Future[AiokvError | None] = asyncio.get_running_loop().create_future()
        self._snapshots.when_ready(clock, there.set_result)
        missing = await there
        if missing is not None:
            self._feed(st.PartWritten(clock, None, missing.message))
            self._snapshots.release(clock)
            return
        rule = msgspec.convert(msgspec.structs.asdict(effect.rules), SavedRule)
        # What they are is asked in the thread.
        held = ((one.state, one.updates, one.arrays()) for one in self._snapshots.held(clock))
        name, pieces = part_name(effect.index), part_pieces(clock, rule, held, effect.rounds)
        written = await asyncio.to_thread(write_own, effect.place, name, pieces, self._folder)
        self._snapshots.release(clock)
        self._feed(st.PartWritten(clock, *written))

    async def _read(self, place: str) -> None:
        try:
            self._reading = await asyncio.to_thread(Reading, place, self._folder)
        except AiokvError as error:
            self._feed(st.CheckpointRead(0, None, [], 0, error))
        else:
            self._feed(self._reading.stimulus)

    async def _load(self, chunks: list[ef.WantedChunk]) -> None:
        reading, self._reading = self._reading, None
        assert reading is not None, "its heads were read"
        error: AiokvError | None = None
        try:
            for some in _batches(chunks):
                read = await asyncio.to_thread(reading.all_arrays, some)
                for chunk, (arrays, updates) in zip(some, read, strict=True):
                    self._store.restore(chunk.key, chunk.start, chunk.start, arrays, updates, chunk.rule)
                    self._store.keep(chunk.key, chunk.start, chunk.version)
        except AiokvError as refused:
            error = refused
        except (KeyError, ValueError) as failed:
            error = DataError(f"the checkpoint can't be understood: {failed}")
        self._feed(st.SnapshotsLoaded(error))


def _batches(chunks: list[ef.WantedChunk]) -> list[list[ef.WantedChunk]]:
    """Put chunks together so that a thread has enough to do, and not too much is in memory twice."""
    batches: list[list[ef.WantedChunk]] = [[]]
    nbytes = 0
    for chunk in chunks:
        batches[-1].append(chunk)
        nbytes += chunk.nbytes
        if nbytes >= MOST_BYTES:
            batches.append([])
            nbytes = 0
    return batches
