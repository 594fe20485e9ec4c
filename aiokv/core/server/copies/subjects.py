"""What the messages of a server to its standby are about: chunks, and all else that is sent as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.types import Key

Subject = tuple["Key", int]
"""A chunk, by key and first element; or one of the following."""

GONE = -2
"""In the place of a first element: the key is no more."""

TOTALS = -4
"""The same: totals of the key, which this server has added up for others too."""

SETTINGS: Subject = ("", -3)
"""All that is not in chunks, besides the following."""

DECISIONS: Subject = ("", -5)
"""What was decided about workers' steps."""

CALLS: Subject = ("", -6)
"""Pushes of calls that count as a whole, and what was decided about these."""


def subject_of(message: m.Message) -> Subject:
    """Return what a message to a standby is about."""
    match message:
        case m.Replicate() | m.CopyDropped() | m.CopyContribution():
            return message.key, message.start
        case m.Copy(keys=keys, start=start):
            return keys[0], start
        case m.ForgetKey(key=key):
            return key, GONE
        case m.CopyTotals(key=key):
            return key, TOTALS
        case m.CopySettings():
            return SETTINGS
        case m.CopyDecisions():
            return DECISIONS
        case _:
            assert isinstance(message, m.CopyPush | m.CopySettled), "all others are above"
            return CALLS
