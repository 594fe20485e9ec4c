"""How a process that takes the place of a lost worker finds out where that one was.

A worker pushes each of its keys once in a step, and waits for that before the next one. So the value of every chunk
has as many pushes of it as it has made steps, or one more, of the step in which it was lost. The new process makes that
step again: it reads the values from which it was computed (`Pull.before`), which the servers keep for it, and what it
pushes a second time counts once, by its number.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.errors import MembershipError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.types import Key
    from aiokv.wire.messages import Pushes


def first_step(counts: Sequence[tuple[Key, Pushes]]) -> tuple[int, int]:
    """Return how many steps are complete everywhere, and the clock of the last one.

    Args:
        counts: what each chunk has, by its key. Keys that are never pushed do not matter.

    Raises:
        MembershipError: no step is the first one that is not complete.
    """
    most = max(made.count for _, made in counts)
    # Nobody knows whether a key is never pushed, or was not yet in the first step.
    pushed = [(key, made) for key, made in counts if made.count or most <= 1]
    behind, least = min(pushed, key=lambda each: each[1].count)
    step = least.count
    if most > step + 1:
        ahead = next(key for key, made in pushed if made.count == most)
        text = f"key {ahead!r} was pushed {most} times, but key {behind!r} {step} times by who had this worker's place"
        raise MembershipError(f"{text}: only who pushes all keys in every step can be replaced", keys=[ahead, behind])
    return step, max(made.clock for _, made in pushed if made.count == step) if step else 0
