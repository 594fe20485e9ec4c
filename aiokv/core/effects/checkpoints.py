"""What servers and the scheduler want done for checkpoints of the cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.records import Record, field

if TYPE_CHECKING:
    from aiokv.core.saved_state import ChunkState, RoundsState
    from aiokv.optim import Optimizer
    from aiokv.types import Key, Rank, Version
    from aiokv.wire.messages import CheckpointFile, RulesState


class Snapshot(Record):
    """Hold on to the chunk's value and to a copy of its state as they are now, for the checkpoint of `clock`.

    `states` are, for each key that lies in it, what else is to be saved.
    """

    clock: int
    key: Key
    start: int
    version: Version
    states: list[ChunkState]


class DropSnapshots(Record):
    """Let go of all that is held for the checkpoint of a clock."""

    clock: int


class WriteSnapshots(Record):
    """Write all that is held for the checkpoint of a clock to the folder `place`, and let go; ends in `PartWritten`.

    It is the part of server number `index`. Nothing else waits for that. `rounds` are those that this server decides.
    """

    clock: int
    place: str
    index: int
    rules: RulesState
    rounds: list[RoundsState] = field(default_factory=list)


class ReadCheckpoint(Record):
    """Read what the checkpoint in the folder `place` has, without the arrays; ends in `CheckpointRead`."""

    place: str


class WantedChunk(Record):
    """Elements, or rows, [start, stop) of a key whose value is to be made of parts of others.

    Or, of keys that are one chunk, all of each, one after the other. `sources` are numbers of those that were read. The
    value gets this `version`; it has about so many bytes.
    """

    key: Key
    start: int
    stop: int
    version: Version
    rule: Optimizer
    sources: list[int]
    nbytes: int


class LoadSnapshots(Record):
    """Put what was read of a checkpoint into chunks that are there; ends in `SnapshotsLoaded`."""

    place: str
    chunks: list[WantedChunk]


class WriteManifest(Record):
    """Complete a checkpoint whose parts are written, by writing what it is made of; ends in `ManifestWritten`.

    `parts` are those of the servers, in their order, `residuals` those of workers, with their ranks.
    """

    clock: int
    place: str
    workers: int
    parts: list[CheckpointFile]
    residuals: list[tuple[Rank, CheckpointFile]]


class RemoveCheckpoints(Record):
    """Delete checkpoints, complete or not, in these folders."""

    places: list[str]
