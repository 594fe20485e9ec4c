"""A checkpoint of the cluster, read by a server: the parts of all servers, put together as it has to have them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from aiokv.checkpoint import files
from aiokv.checkpoint.cluster_files import NAME, OpenPart, SavedChunk, open_part, read_manifest
from aiokv.checkpoint.files import CHECKSUM_BYTES, checksum
from aiokv.checkpoint.residuals import inherited, state_of, sum_of
from aiokv.checkpoint.snapshot import IDS
from aiokv.core.keys import BUNDLE_START
from aiokv.core.stimuli import CheckpointRead
from aiokv.errors import DataError
from aiokv.wire.messages import RulesState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.checkpoint.tensorfile import Array
    from aiokv.core.effects import WantedChunk
    from aiokv.core.saved_state import ChunkState
    from aiokv.types import Key, Rank


class Reading:
    """A checkpoint whose heads are read. Any thread may use it.

    Args:
        place: its folder.
        folder: where that has to be; see `aiokv.checkpoint.files.find`.

    Raises:
        DataError: it is damaged.
    """

    def __init__(self, place: str, folder: str = "") -> None:
        manifest = read_manifest(place, folder)
        parts = [open_part(place, file, folder) for file in manifest.parts]
        self._chunks: list[tuple[OpenPart, SavedChunk]] = []
        """The parts of keys, each with the file that it is in."""
        for part in parts:
            self._chunks += [(part, chunk) for chunk in part.content.chunks]
        rules = RulesState(**msgspec.structs.asdict(parts[0].content.rule))
        states: list[ChunkState] = [chunk for _, chunk in self._chunks]
        rounds = [one for part in parts for one in part.content.rounds]
        self.stimulus = CheckpointRead(manifest.clock, rules, states, manifest.workers, rounds=rounds)
        """What the state machine wants to know of it."""

    def arrays(self, wanted: WantedChunk) -> tuple[dict[str, Array], int]:
        """Return the arrays of a chunk by name, put together from its sources, and how many updates its state has seen.

        Raises:
            DataError: a source is damaged.
        """
        sources = [self._chunks[number] for number in wanted.sources]
        if wanted.start != BUNDLE_START:
            sources.sort(key=lambda source: source[1].start)
        updates = max(chunk.updates for _, chunk in sources)
        # Of parts without a state yet the others have one that has just begun.
        names = min((list(chunk.arrays) for _, chunk in sources), key=len)
        pieces = [_cut({name: part.read(chunk, name) for name in names}, chunk, wanted) for part, chunk in sources]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in names}, updates

    def all_arrays(self, chunks: Iterable[WantedChunk]) -> list[tuple[dict[str, Array], int]]:
        """Return what `arrays` returns of each of the chunks."""
        return [self.arrays(chunk) for chunk in chunks]


def read_residuals(place: str, rank: Rank, workers: int, step: int, folder: str = "") -> dict[Key, dict[str, Any]]:
    """Return what compression had left of gradients after a step, for a worker to go on with.

    That is nothing if a checkpoint is of another step.

    Args:
        place: the checkpoint's folder. It is there as long as a worker may have to go on with its step; once all have
            made more, it may be deleted as an old one, so then it is not even looked for.
        rank: of the worker.
        workers: how many there are; see `aiokv.checkpoint.residuals` for another number than there was.
        step: how many steps the worker has made.
        folder: where that has to be; see `aiokv.checkpoint.files.find`.

    Raises:
        DataError: it is damaged.
    """
    name = NAME.fullmatch(place.rpartition("/")[2])
    if name is not None and int(name[2]) != step:
        return {}
    manifest = read_manifest(place, folder)
    if manifest.clock != step:
        return {}
    states = []
    for each in inherited(sorted(manifest.residuals), rank, workers):
        file = manifest.residuals[each]
        url = f"{place}/{file.name}"
        data = files.read(url, folder)
        if checksum(data[:-CHECKSUM_BYTES]).hex() != file.checksum:
            raise DataError(f"{url}: is damaged", path=url, expected=file.checksum)
        states.append(state_of(data, url, each, place.rpartition("/")[2]))
    return sum_of(states)


def _cut(arrays: dict[str, Array], chunk: SavedChunk, wanted: WantedChunk) -> dict[str, Array]:
    """Return what a part of a key has of a chunk that is wanted; all, if that is one of several keys."""
    if wanted.start == BUNDLE_START:
        return {name: array.reshape(-1) for name, array in arrays.items()}
    if chunk.sparse:
        first, last = np.searchsorted(arrays[IDS], [wanted.start, wanted.stop]).tolist()
        return {name: array[first:last] for name, array in arrays.items()}
    low, high = max(wanted.start, chunk.start), min(wanted.stop, chunk.stop)
    size = chunk.stop - chunk.start
    cuts = {}
    for name, array in arrays.items():
        # One element for each of the part, or for each of its rows.
        width = size // array.size if array.size else 1
        cuts[name] = array.reshape(-1)[(low - chunk.start) // width : (high - chunk.start) // width]
    return cuts
