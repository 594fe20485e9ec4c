"""Whether a process of servers has too many places, and which one is to get one of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from aiokv.core.roster import natural_order

if TYPE_CHECKING:
    from collections.abc import Sequence


BALANCED = 2
"""A process that serves so many indices more than another one gives one of them to it."""


def unbalanced(places: Sequence[str], hosts: Sequence[str]) -> tuple[str, str] | None:
    """Return the process that has too many places and the one that is to get one of them, if that is so.

    Args:
        places: for each, the process that has it.
        hosts: processes that may have places.
    """
    if not hosts:
        return None
    count = Counter(places)
    few = min(hosts, key=lambda name: (count[name], natural_order(name)))
    many = max(places, key=lambda name: (count[name], natural_order(name)))
    return (many, few) if count[many] - count[few] >= BALANCED else None
