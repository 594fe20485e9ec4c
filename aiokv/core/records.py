"""The base of what the state machines keep and exchange."""

from __future__ import annotations

from msgspec import Struct, field

__all__ = ["Record", "field"]


class Record(Struct):
    """A few named values. It is a `Struct`, since for each message several are made, and those are made in C.

    Records are never decoded, so the types in their annotations need not be there at run time.
    """
