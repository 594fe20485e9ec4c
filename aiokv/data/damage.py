"""How files that are damaged, or of another format, are reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.errors import DataError

if TYPE_CHECKING:
    import os


def damaged(path: str | os.PathLike[str], offset: int, *, expected: str, got: str) -> DataError:
    """Return the error for a file that holds something else than its format says.

    Args:
        path: the file.
        offset: the byte at which it goes wrong.
        expected: what should be there.
        got: what is there.
    """
    return DataError(
        f"{path!s} is damaged at byte {offset}: expected {expected}, got {got}",
        path=str(path),
        offset=offset,
        expected=expected,
        got=got,
    )
