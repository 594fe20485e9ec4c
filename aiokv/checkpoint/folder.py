"""The checkpoints in a folder: which there are, which of them are whole, and from which one a job goes on."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from aiokv.checkpoint import files
from aiokv.checkpoint.cluster_files import (
    MANIFEST,
    NAME,
    Manifest,
    ManifestFile,
    check_files,
    read_manifest,
    write_manifest,
)
from aiokv.core.scheduler.checkpoint_keeper import CheckpointPlan
from aiokv.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.config import Config
    from aiokv.core.effects import WriteManifest
    from aiokv.telemetry import Note
    from aiokv.wire.messages import CheckpointFile

LATEST = "latest"
"""Stands for the newest complete checkpoint of the own folder, if there is one."""


@dataclass(slots=True, frozen=True)
class Found:
    """A checkpoint in a folder. Without a manifest it was never completed; with a `problem` it is damaged."""

    place: str
    name: str
    manifest: Manifest | None
    problem: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether it was completed, and no damage is known."""
        return self.manifest is not None and not self.problem

    @property
    def run(self) -> int:
        """How often a job had been started in the folder."""
        match = NAME.fullmatch(self.name)
        return int(match[1]) if match else 0

    @property
    def clock(self) -> int:
        """The clock of the updates that it has."""
        match = NAME.fullmatch(self.name)
        return int(match[2]) if match else 0


def absolute(folder: str) -> str:
    """Return a folder as all nodes of this machine understand it, wherever they were started."""
    is_url = "://" in folder or "::" in folder
    return folder.rstrip("/") if is_url or not folder else os.path.abspath(folder)


def find_checkpoints(folder: str) -> list[Found]:
    """Return all checkpoints in a folder, complete or not, the oldest first; none if there is no such folder.

    The folder may be that of a checkpoint itself.

    Raises:
        DataError: the folder can't be read.
    """
    place = folder.rstrip("/")
    name = place.rpartition("/")[2]
    if NAME.fullmatch(name):
        return [_look(place, name)]
    try:
        system, path = files.find(folder)
        system.invalidate_cache()
        names = [str(each).rstrip("/").rpartition("/")[2] for each in system.ls(path, detail=False)]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{folder}: can't be read: {error}", path=folder) from error
    return [_look(f"{place}/{name}", name) for name in sorted(names) if NAME.fullmatch(name)]


def _look(place: str, name: str) -> Found:
    try:
        system, path = files.find(f"{place}/{MANIFEST}")
        if not system.exists(path):
            return Found(place, name, None)
        return Found(place, name, read_manifest(place))
    except (OSError, DataError) as error:
        return Found(place, name, None, str(error))


def verified(found: Found) -> Found:
    """Return a checkpoint with what is found when all of its files are read."""
    if found.manifest is not None and not found.problem:
        try:
            check_files(found.place, found.manifest)
        except DataError as error:
            return Found(found.place, found.name, found.manifest, error.message)
    return found


def newest_complete(folder: str, note: Note) -> Found | None:
    """Return the newest whole checkpoint in a folder, with all of its files read; None: there is none.

    Damaged ones are passed over, and noted.

    Raises:
        DataError: there are some, and all are damaged; or the folder can't be read.
    """
    damaged: list[Found] = []
    for each in reversed(find_checkpoints(folder)):
        found = verified(each)
        if found.is_complete:
            return found
        if found.problem:
            damaged.append(found)
            text = f"the checkpoint {found.place} can't be used, an earlier one is looked for: {found.problem}"
            note("error", "checkpoint_damaged", text, {"place": found.place, "reason": found.problem})
    if damaged:
        text = f"no checkpoint in {folder} can be used; the newest one: {damaged[0].problem}"
        raise DataError(text, path=damaged[0].place)
    return None


def make_plan(config: Config, note: Note) -> CheckpointPlan:
    """Return what the scheduler does about checkpoints: look what there is, and from which one to go on.

    Raises:
        ConfigError: there is no such checkpoint.
        DataError: all that there are, are damaged; or what is named is not in the checkpoint_folder, if that is set.
    """
    folder = absolute(config.checkpoint_folder)
    wants = bool(config.checkpoint_every or config.checkpoint_seconds)
    if not (wants or config.resume):
        return CheckpointPlan()
    found = find_checkpoints(folder) if folder else []
    resumed = _find_resumed(config.resume, folder, note)
    return CheckpointPlan(
        folder=folder if wants else "",
        run=1 + max((each.run for each in found), default=0),
        every=config.checkpoint_every,
        seconds=config.checkpoint_seconds,
        keep=config.checkpoint_keep,
        names=tuple(each.name for each in found if each.is_complete),
        torn=tuple(each.name for each in found if each.manifest is None and not each.problem),
        resume="" if resumed is None else resumed.place,
        clock=0 if resumed is None else resumed.clock,
    )


def _find_resumed(resume: str, folder: str, note: Note) -> Found | None:
    if not resume:
        return None
    place = folder if resume == LATEST else absolute(resume)
    if folder:
        # The servers would find out later.
        files.find(f"{place}/{MANIFEST}", folder)
    found = newest_complete(place, note)
    if found is not None:
        note("info", "", f"going on from the checkpoint {found.place} of round {found.clock}", {})
    elif resume == LATEST:
        text = f"there is no complete checkpoint in {place}: the job begins anew"
        note("warning", "no_checkpoint", text, {"place": place})
    else:
        raise ConfigError(f"resume: there is no complete checkpoint in {place}", key="resume", got=resume)
    return found


def complete(effect: WriteManifest, folder: str) -> None:
    """Write the manifest of a checkpoint, if its files are where the manifest says.

    Raises:
        DataError: it can't be written, or nodes have written elsewhere: to a folder of the same name on their machine.
    """
    for file in (*effect.parts, *(file for _, file in effect.residuals)):
        _check_there(f"{effect.place}/{file.name}", file.nbytes, folder)
    parts = [_file(file) for file in effect.parts]
    residuals = {rank: _file(file) for rank, file in effect.residuals}
    now = datetime.now(UTC).isoformat(timespec="seconds")
    write_manifest(effect.place, Manifest(effect.clock, now, effect.workers, parts, residuals), folder)


def _check_there(url: str, nbytes: int, folder: str) -> None:
    found: int | Exception
    try:
        system, path = files.find(url, folder)
        found = system.size(path)
    except (OSError, ValueError, ImportError) as error:
        found = error
    if found != nbytes:
        text = f"{url}, which a node has written, is not there for the scheduler"
        hint = "checkpoint_folder has to be a place that all nodes reach"
        raise DataError(f"{text}: {hint} (expected {nbytes} bytes, got {found})", path=url)


def _file(file: CheckpointFile) -> ManifestFile:
    return ManifestFile(file.name, file.nbytes, file.checksum, file.head_nbytes, file.head_checksum)


def remove(places: Iterable[str], folder: str, note: Note) -> None:
    """Delete checkpoints, first what makes them complete. What can't be deleted stays, and is noted."""
    for place in places:
        try:
            system, path = files.find(f"{place}/{MANIFEST}", folder)
            if system.exists(path):
                system.rm(path)
            home = path.rpartition("/")[0]
            if NAME.fullmatch(home.rpartition("/")[2]) and system.exists(home):
                system.rm(home, recursive=True)
        except (OSError, ValueError, ImportError, DataError) as error:
            text = f"the old checkpoint {place} can't be deleted: {error}"
            note("warning", "checkpoint_not_deleted", text, {"place": place, "reason": str(error)})
