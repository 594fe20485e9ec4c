"""What all control messages have in common."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, array_like=True, gc=False, forbid_unknown_fields=True):
    """Base of all control messages."""
