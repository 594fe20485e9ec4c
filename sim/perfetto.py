"""A run as a trace for ui.perfetto.dev or chrome://tracing, with arrows push -> apply -> pull.

The format is "Trace Event Format" (Google, 2016); times are microseconds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from sim.record import Run

WORKERS, SERVERS = 1, 2
MAX_ARROWS: Final = 50_000
"""A viewer needs long for more; later gradients have no arrows."""


def trace(run: Run) -> bytes:
    """Return the events of a run as JSON."""
    ranks = {worker.name: rank for rank, worker in enumerate(run.workers)}
    servers = {name: number for number, name in enumerate(run.scenario.servers)}
    events: list[dict[str, Any]] = []
    for worker in run.workers:
        thread = ranks[worker.name]
        for number, step in enumerate(worker.steps, start=1):
            args = {"step": number, "answered": step.answered, "cancelled": step.cancelled}
            events.append(_slice(WORKERS, thread, "compute", step.start, step.computed, args))
            events.append(_slice(WORKERS, thread, "push and pull", step.computed, step.end, args))
    arrows = 0
    # A viewer takes events of one moment in their order, and an arrow ends in the newest slice: that of the pull must
    # not be over, nor the arrow end before it has begun.
    ends: list[dict[str, Any]] = []
    pushed = {worker.name: worker.pushed for worker in run.workers}
    for update in run.updates:
        server = servers.get(update.node, 0)
        made: dict[str, Any] = {
            "key": update.key,
            "version": update.version,
            "ranks": update.ranks,
            "staleness": update.staleness,
        }
        events.append(_slice(SERVERS, server, f"apply {update.key}", update.time, update.time, made))
        for name, number in update.tokens:
            steps = pushed[name]
            if arrows < MAX_ARROWS and number <= len(steps):
                arrows += 1
                step = steps[number - 1]
                events.append(_arrow("s", WORKERS, ranks[name], step.computed, arrows))
                events.append(_arrow("t", SERVERS, server, update.time, arrows))
                if step.answered:
                    end = _arrow("f", WORKERS, ranks[name], step.end, arrows)
                    (ends if step.end > update.time else events).append(end)
    names = [_name(WORKERS, "workers"), _name(SERVERS, "servers")]
    names += [_thread(WORKERS, number, name) for name, number in ranks.items()]
    names += [_thread(SERVERS, number, name) for name, number in servers.items()]
    return msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": [*names, *ends, *events]})


def _name(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}}


def _thread(process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(process: int, thread: int, name: str, start: float, end: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
    return {"ph": "X", "cat": "aiokv", "name": name, "pid": process, "tid": thread, **times, "args": args}


def _arrow(phase: str, process: int, thread: int, time: float, number: int) -> dict[str, Any]:
    event = {
        "ph": phase,
        "cat": "gradient",
        "name": "gradient",
        "id": number,
        "pid": process,
        "tid": thread,
        "ts": 1e6 * time,
    }
    # An arrow ends in the slice that is there, not in the next one that begins.
    return event | {"bp": "e"} if phase == "f" else event
