"""What compression has left of a worker's gradients after each step, in files, for a process that takes its place.

A worker that is killed in step s is replaced by one that makes step s again: it has to add to its gradients what was
left after the step before. So what is left is written before a payload is sent, and that of the step before stays: two
files for each key, which outlive the process, in a folder of its machine.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aiokv.checkpoint.files import checksum
from aiokv.checkpoint.residuals import residual_file, state_of
from aiokv.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from aiokv.compressing import Job
    from aiokv.telemetry import Note
    from aiokv.types import Key, Rank


class ResidualJournal:
    """The files of one worker. `write` is called by threads, for no key by two at a time.

    Args:
        folder: where they are; it is made if need be.
        cluster: of which the worker is.
        name: of the worker.
        note: what takes note of what is lost; threads call it too.
    """

    def __init__(self, folder: str, cluster: str, name: str, note: Note) -> None:
        self._folder = Path(folder)
        self._stem = f"aiokv-residuals-{_digest(f'{cluster}/{name}')}"
        self._note = note
        self._before = 0
        self._counts: dict[Key, int] = {}
        self._fails = False

    def begin(self, keys: Iterable[Key], rank: Rank, step: int) -> dict[Key, dict[str, Any]]:
        """Go on after a step; return what was left of keys then, see `aiokv.compressing.Kept.state`.

        Args:
            keys: those of the worker.
            rank: of the worker.
            step: how many steps it has made; with 0 a new job begins, and nothing is left.
        """
        self._before, self._counts = step, {}
        self._folder.mkdir(parents=True, exist_ok=True)
        if not step:
            for path in self._folder.glob(f"{self._stem}-*"):
                path.unlink()
        found: dict[Key, dict[str, Any]] = {}
        for key in keys:
            path = self._path(key, step)
            if not step or not path.exists():
                continue
            try:
                found |= state_of(path.read_bytes(), str(path), rank, str(step))
            except DataError as error:
                text = f"what compression has left of key {key!r} before step {step} is lost: {error}"
                self._note("warning", "residuals_lost", text, {"key": key, "step": step})
        return found

    def write(self, job: Job, rank: Rank) -> None:
        """Write what a job that has encoded tensors has left of them, before they are sent."""
        if self._fails:
            return
        try:
            for key, kept in job.kept:
                self._write(key, kept.state(), rank)
        except OSError as error:
            # Training goes on; who takes this worker's place finds nothing, and says so.
            self._fails = True
            text = f"what compression leaves of gradients is not kept any longer: {error}"
            self._note("warning", "residuals_not_kept", text, {"folder": str(self._folder), "reason": str(error)})

    def _write(self, key: Key, state: dict[str, Any], rank: Rank) -> None:
        count = self._counts[key] = self._counts.get(key, self._before) + 1
        content = b"".join(residual_file({key: state}, rank, str(count), None))
        path = self._path(key, count)
        aside = path.with_suffix(".tmp")
        aside.write_bytes(content + checksum(content))
        os.replace(aside, path)

    def _path(self, key: Key, count: int) -> Path:
        return self._folder / f"{self._stem}-{_digest(repr(key))}.{count % 2}"


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
