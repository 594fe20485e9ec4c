"""Who may be in the cluster: which place a worker gets, and what becomes of that of one which is gone.

These are tables, without a state of their own; `docs/elastic.md` shows them.
"""

from __future__ import annotations

import enum


class Place(enum.Enum):
    """What a worker gets that registers with a cluster which is complete already."""

    SUCCESSION = "the rank of a worker that is away, or of an earlier process; it goes on where that one was"
    RETURN = "the rank that its name had; it counts from a boundary between rounds on"
    NEW = "a rank of its own; it counts from a boundary between rounds on"
    FULL = "none: as many workers are there as may be"
    TAKEN = "none: its name is that of a member"


def place_of(state: str | None, *, on_worker_loss: str, in_use: int, most: int) -> Place:
    """Return what a worker gets.

    Args:
        state: of the member that has its name, as in a view; None: there is none.
        on_worker_loss: as in a view.
        in_use: how many workers count in rounds, or are about to. Who is away counts only with "respawn"; otherwise
            anybody may take its place.
        most: how many there may be; 0: none is taken in.
    """
    if on_worker_loss == "respawn" and state in {"alive", "away"}:
        return Place.SUCCESSION
    if state == "away":
        return Place.FULL if 0 < most <= in_use else Place.SUCCESSION
    if state in {"alive", "finished", "lost"} or (state is not None and not most):
        return Place.TAKEN
    if state == "joining":
        return Place.RETURN
    if in_use >= most:
        return Place.FULL
    return Place.NEW if state is None else Place.RETURN


def state_of_gone(state: str, *, on_worker_loss: str, others: int, least: int) -> str:
    """Return the state of a worker whose process is gone without a word.

    Args:
        state: before.
        on_worker_loss: as in a view.
        others: how many other workers are alive or away.
        least: with fewer the job does not go on.
    """
    if state == "finished":
        # Nobody waits for a worker that has finished, so its end harms nobody.
        return "left"
    if state == "joining":
        # It has pushed nothing yet.
        return "evicted"
    if state != "alive" or on_worker_loss == "fail":
        return "lost"
    if on_worker_loss == "respawn" or 0 < others < least:
        return "away"
    return "evicted"


def state_of_leaver(state: str, *, early: bool, others: int, least: int) -> str:
    """Return the state of a worker that leaves in good order.

    Args:
        state: before.
        early: its work is not done, and somebody may take its place.
        others: how many other workers are alive or away.
        least: with fewer the job does not go on.
    """
    return "away" if early and state == "alive" and 0 < others < least else "left"
