"""Which function computes the checksums of frames."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from aiokv.errors import MissingExtraError

if TYPE_CHECKING:
    from aiokv.wire.frames import Checksum


def load_checksum(name: str) -> Checksum | None:
    """Return what computes the checksum of this name; None for "off".

    Args:
        name: "off", or "crc32c": the Castagnoli CRC of RFC 3720, which processors have an instruction for.

    Raises:
        MissingExtraError: its package is not installed.
    """
    if name == "off":
        return None
    try:
        from crc32c import crc32c  # noqa: PLC0415 - only who asks for it needs the package
    except ImportError:
        text = "checksum 'crc32c' needs the package crc32c: pip install 'aiokv[checksum]'"
        raise MissingExtraError(text) from None
    return cast("Checksum", crc32c)
