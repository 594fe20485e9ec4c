"""What the workers and the model live through in a run: its events without the messages by which they came about.

Two policies are the same on a cluster when these are, line by line. The trace (`sim.trace`) differs even then, because
it also has what state machines say to each other.
"""

from __future__ import annotations

import hashlib
import itertools
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from aiokv.types import Key, Version
    from sim.record import Run, UpdateRecord
    from sim.tokens import Token

Line = tuple[Any, ...]
"""Seconds, who it was ("model" or a worker's name), what happened, and the details."""

_ENCODER = msgspec.json.Encoder()


def history(run: Run, *, unit: float = 1.0) -> list[str]:
    """Return the events of a run that is over, in the order of time; those of one time in the order of their texts.

    They are, for each step of a worker:

    - `begins`: with the versions of all chunks that its gradient was computed from, if the gradient reached a server;
    - `pushes`, or `abandons`, when it has computed;
    - `goes on`, with the reason if its gradient was dropped, or `fails`;

    and for each chunk `makes`: a version, and the gradients that are in it and not in the version before.

    Args:
        run: what happened.
        unit: seconds that count as one.
    """
    seen = _seen(run, lambda key, start, version: version)
    made = (
        (update.time, "model", "makes", update.key, update.start, update.version, update.tokens)
        for update in run.updates
    )
    return _texts(itertools.chain(_of_workers(run, seen), made), unit)


def history_by_clock(run: Run, *, unit: float = 1.0) -> list[str]:
    """Return the events of a run as `history` does, without the number of updates that it takes to apply a clock.

    Clock c is push number c of every worker that makes so many. What a gradient was computed from is said by how many
    pushes of each worker are in it, by rank, and the model's events are `completes`: it has all pushes up to a clock,
    which are those that are named on top of those of the clock before. So `bsp`, which makes one update of a clock, and
    `ssp:0`, which makes one of each gradient, have equal events.

    Args:
        run: as for `history`; none of its gradients was dropped, and no chunk was divided.
        unit: seconds that count as one.
    """
    places = _by_place(run)
    contents = {place: _contents(run, updates) for place, updates in places.items()}
    completed = (line for place, updates in places.items() for line in _clocks(run, place, updates))
    seen = _seen(run, lambda key, start, version: contents[key, start][version])
    return _texts(itertools.chain(_of_workers(run, seen), completed), unit)


def digest_of_history(lines: Iterable[str]) -> str:
    """Return the SHA-256 of events, in hexadecimal."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _texts(lines: Iterable[Line], unit: float) -> list[str]:
    texts = [(time, _ENCODER.encode((time / unit, *rest)).decode()) for time, *rest in lines]
    return [text for _, text in sorted(texts)]


def _by_place(run: Run) -> dict[tuple[Key, int], list[UpdateRecord]]:
    places: dict[tuple[Key, int], list[UpdateRecord]] = {}
    for update in run.updates:
        places.setdefault((update.key, update.start), []).append(update)
    return places


def _seen(run: Run, content: Callable[[Key, int, Version], Any]) -> dict[Token, list[Any]]:
    """Return what each gradient was computed from, chunk by chunk.

    Args:
        run: what happened.
        content: returns what stands for a version of a chunk.
    """
    read: dict[Token, dict[tuple[Key, int], Version]] = {}
    for update in run.updates:
        for token, staleness in zip(update.tokens, update.staleness, strict=True):
            read.setdefault(token, {})[update.key, update.start] = update.version - 1 - staleness
    for drop in run.drops:
        read.setdefault(drop.token, {})[drop.key, drop.start] = drop.read
    return {
        token: sorted((str(key), start, content(key, start, version)) for (key, start), version in places.items())
        for token, places in read.items()
    }


def _of_workers(run: Run, seen: dict[Token, list[Any]]) -> Iterator[Line]:
    for worker in run.workers:
        name, number = worker.name, 0
        for step in worker.steps:
            if step.cancelled:
                yield step.start, name, "begins", number + 1
                yield step.computed, name, "abandons", number + 1
            else:
                number = step.number or number + 1
                token = (name, number)
                yield step.start, name, "begins", number, seen.get(token)
                yield step.computed, name, "pushes", number
                yield step.end, name, "goes on" if step.answered else "fails", number, run.dropped.get(token, "")


def _contents(run: Run, updates: list[UpdateRecord]) -> list[list[int]]:
    """Return for each version of a chunk how many pushes of each worker it has, by rank."""
    counts = dict.fromkeys((worker.name for worker in run.workers), 0)
    contents = [list(counts.values())]
    for update in updates:
        for name, number in update.tokens:
            counts[name] = number
        contents.append(list(counts.values()))
    return contents


def _clocks(run: Run, place: tuple[Key, int], updates: list[UpdateRecord]) -> Iterator[Line]:
    """Yield when the value of a chunk has had all pushes up to each clock, and what came with that clock."""
    clock = 1
    for update, content in zip(updates, _contents(run, updates)[1:], strict=True):
        while needed := [worker for worker in run.workers if worker.last_push >= clock]:
            if min(content[worker.rank] for worker in needed) < clock:
                break
            yield update.time, "model", "completes", *place, clock, [(worker.name, clock) for worker in needed]
            clock += 1
