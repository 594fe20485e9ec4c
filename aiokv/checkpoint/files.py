"""Files at any address that fsspec knows: written aside, ended with a checksum, and then given their name."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import threading
from typing import TYPE_CHECKING, Any, BinaryIO

from aiokv.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BLOCK_BYTES = 1 << 20
"""So much is read at once to compute a checksum."""

CHECKSUM_BYTES = 32
"""Of the BLAKE2b of all bytes before it, with which a file ends."""


class Aside:
    """A file that is written beside the one of its name, and takes its place at the end: who reads finds either.

    `write`, `seal` and `publish` take as long as the disk or the network needs, and may be called in any thread, one
    after the other. When the caller stops waiting, one of them may still be under way: after `stop` it ends soon, and
    deletes what was written.

    Args:
        url: a path, or an address that fsspec knows.
        folder: where it has to be; see `find`.
        ends_with_checksum: whether the checksum is written behind all else.
    """

    def __init__(self, url: str, folder: str = "", *, ends_with_checksum: bool = True) -> None:
        self._url = url
        self._folder = folder
        self._ends_with_checksum = ends_with_checksum
        self._lock = threading.Lock()
        self._over = False
        self._digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        self._checksum = b""
        self._files: Any = None
        self._path = self._aside = ""
        self._file: Any = None

    @property
    def checksum(self) -> bytes:
        """The BLAKE2b of what was written, once it is sealed."""
        return self._checksum

    def stop(self) -> None:
        """Let nothing more be written, and the file of before keep its name. Does not wait."""
        self._over = True

    def write(self, pieces: Iterable[bytes | memoryview]) -> None:
        """Write pieces of bytes, one after the other; nothing after `stop`.

        Raises:
            DataError: the disk is full, or what else there is.
        """
        with self._working():
            self._write(pieces)

    def seal(self) -> None:
        """Write the checksum, and see to it that all is on the disk.

        Raises:
            DataError: as for `write`.
        """
        with self._working():
            self._checksum = self._digest.digest()
            self._write([self._checksum] if self._ends_with_checksum else [])
            if not self._over and self._is_local:
                self._file.flush()
                os.fsync(self._file.fileno())
            if not self._over:
                self._file.close()

    def publish(self) -> None:
        """Give the sealed file its name, unless it was stopped.

        Raises:
            DataError: as for `write`.
        """
        with self._working():
            if self._over:
                return
            if self._is_local:
                os.replace(self._aside, self._path)
            else:
                self._files.mv(self._aside, self._path)
            self._file = None

    def drop(self) -> None:
        """Delete what is written aside, if it has no other name by now. Who is still at work does it in the end."""
        self._over = True
        self._clean()

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        try:
            with self._lock:
                yield
        except (OSError, ValueError, ImportError) as error:
            raise DataError(f"{self._url}: can't be written: {error}", path=self._url) from error
        finally:
            # Whoever has stopped this meanwhile could not clean up.
            if self._over:
                self._clean()

    def _clean(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            file, self._file = self._file, None
            if file is not None:
                with contextlib.suppress(OSError, ValueError):
                    file.close()
                with contextlib.suppress(OSError):
                    self._files.rm(self._aside)
        finally:
            self._lock.release()

    def _write(self, pieces: Iterable[bytes | memoryview]) -> None:
        for piece in pieces:
            if self._over:
                return
            if self._file is None:
                self._open()
            self._digest.update(piece)
            self._file.write(piece)

    def _open(self) -> None:
        self._files, self._path = find(self._url, self._folder)
        self._aside = f"{self._path}.tmp-{secrets.token_hex(8)}"
        self._file = self._files.open(self._aside, "wb")

    @property
    def _is_local(self) -> bool:
        return "file" in _protocols(self._files)


def write(url: str, pieces: Iterable[bytes | memoryview]) -> bytes:
    """Write a file, aside at first; return its checksum.

    Raises:
        DataError: it can't be written; the file of before is still there.
    """
    file = Aside(url)
    try:
        file.write(pieces)
        file.seal()
        file.publish()
    finally:
        file.drop()
    return file.checksum


def read(url: str, folder: str = "") -> bytes:
    """Return the content of a file, which has to be in a folder if one is given; see `find`.

    Raises:
        DataError: it can't be read.
    """
    try:
        files, path = find(url, folder)
        with files.open(path, "rb") as file:
            return bytes(file.read())
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{url}: can't be read: {error}", path=url) from error


class Reader:
    """A file that is read in parts, in any thread, one after the other. What takes its name meanwhile is not seen.

    Args:
        file: the open file.
        url: where it is, for errors.
    """

    def __init__(self, file: BinaryIO, url: str) -> None:
        self._file = file
        self._url = url
        self.nbytes = file.seek(0, os.SEEK_END)
        """How long it is."""

    def read(self, start: int, stop: int) -> bytes:
        """Return some bytes; fewer if the file ends before.

        Raises:
            DataError: it can't be read.
        """
        try:
            self._file.seek(start)
            return bytes(self._file.read(stop - start))
        except (OSError, ValueError) as error:
            raise DataError(f"{self._url}: can't be read: {error}", path=self._url) from error

    def checksum(self, stop: int) -> bytes:
        """Return the BLAKE2b of all bytes before a place, of which few are in memory at once.

        Raises:
            DataError: as for `read`.
        """
        digest = hashlib.blake2b(digest_size=CHECKSUM_BYTES)
        for start in range(0, stop, BLOCK_BYTES):
            digest.update(self.read(start, min(stop, start + BLOCK_BYTES)))
        return digest.digest()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_reader(url: str, folder: str = "") -> Reader:
    """Open a file, which has to be in a folder if one is given; see `find`.

    Raises:
        DataError: it can't be read.
    """
    try:
        files, path = find(url, folder)
        return Reader(files.open(path, "rb"), url)
    except (OSError, ValueError, ImportError) as error:
        raise DataError(f"{url}: can't be read: {error}", path=url) from error


def checksum(content: bytes | memoryview) -> bytes:
    """Return what a file has to end with whose other bytes these are."""
    return hashlib.blake2b(content, digest_size=CHECKSUM_BYTES).digest()


def find(url: str, folder: str = "") -> tuple[Any, str]:
    """Return the file system of a file, and the path there.

    Args:
        url: a path, or an address that fsspec knows.
        folder: the file has to be in this folder, which may be an address too, and relative paths begin there; links
            are followed before that is decided. Empty: it may be anywhere.

    Raises:
        DataError: it is not in the folder.
    """
    import fsspec  # noqa: PLC0415 - importing it reads what all installed packages say of themselves

    if not folder:
        files, path = fsspec.url_to_fs(url)
        return files, path
    is_relative = "::" not in url and "://" not in url and not os.path.isabs(url)
    files, path = fsspec.url_to_fs(f"{folder.rstrip('/')}/{url}" if is_relative else url)
    homes, home = fsspec.url_to_fs(folder)
    if "file" in _protocols(files):
        path, home = os.path.realpath(path), os.path.realpath(home)
    if "::" in url or _protocols(files) != _protocols(homes) or not _is_below(path, home):
        raise DataError(
            f"{url}: is not in the folder {folder}, and files may be nowhere else", path=url, expected=folder
        )
    return files, path


def _protocols(files: Any) -> tuple[str, ...]:
    protocol = files.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)


def _is_below(path: str, folder: str) -> bool:
    parts, start = (re.split(r"[/\\]", name.rstrip("/\\")) for name in (path, folder))
    return ".." not in parts and parts[: len(start)] == start and len(parts) > len(start)
