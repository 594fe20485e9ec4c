"""What must hold after a run, looked at from outside: the state machines are not asked."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.types import Key
    from sim.record import Run, Token, UpdateRecord, WorkerRecord

Chunks = dict[tuple["Key", int], list["UpdateRecord"]]


def find_violations(run: Run) -> list[str]:
    """Return what does not hold in a run, in sentences; nothing when all is well.

    - Versions of a chunk go up by one, and time does not run backwards.
    - Every gradient whose push was answered is in exactly one update of every chunk, and none is in two.
    - An update names the ranks whose gradients it holds, in ascending order, each once.
    - bsp: update r holds push r of every worker that still took part, at staleness 0.
    - asp: an update holds one gradient, as stale as the versions made since its worker's last push.
    - A worker's busy and waiting times add up to its elapsed time.
    """
    chunks: Chunks = {}
    for update in run.updates:
        chunks.setdefault((update.key, update.start), []).append(update)
    found: list[str] = []
    for (key, start), updates in chunks.items():
        where = f"key {key!r} from element {start}"
        found += [f"{where}: {text}" for text in _check_versions(updates)]
        found += [f"{where}: {text}" for text in _check_gradients(run, updates)]
        rule = _RULES.get(run.policy)
        if rule is not None:
            found += [f"{where}: {text}" for text in rule(run, updates)]
    if not chunks and any(step.answered for worker in run.workers for step in worker.steps):
        found.append("pushes were answered, but no update was made")
    for worker in run.workers:
        found += [f"{worker.name}: {text}" for text in _check_time(worker)]
    return found


def _check_versions(updates: list[UpdateRecord]) -> list[str]:
    found = []
    for number, update in enumerate(updates, start=1):
        if update.version != number:
            found.append(f"update {number} made version {update.version}")
    for before, update in itertools.pairwise(updates):
        if update.time < before.time:
            found.append(f"version {update.version} was made before version {before.version}")
    return found


def _check_gradients(run: Run, updates: list[UpdateRecord]) -> list[str]:
    found = []
    ranks = {worker.name: worker.rank for worker in run.workers}
    used: Counter[Token] = Counter()
    for update in updates:
        used.update(update.tokens)
        if [ranks[name] for name, _ in update.tokens] != update.ranks:
            found.append(f"version {update.version} holds {update.tokens}, but names the ranks {update.ranks}")
        if sorted(set(update.ranks)) != update.ranks:
            found.append(f"version {update.version} was summed in the order {update.ranks}")
    found += [
        f"push {number} of {name} was applied {count} times" for (name, number), count in used.items() if count > 1
    ]
    for worker in run.workers:
        answered = sum(step.answered for step in worker.steps)
        for number in range(1, answered + 1):
            if (worker.name, number) not in used:
                found.append(f"push {number} of {worker.name} was answered, but is in no update")
    steps = {worker.name: len(worker.steps) for worker in run.workers}
    found += [f"push {number} of {name} was applied, but never made" for name, number in used if number > steps[name]]
    return found


def _check_bsp(run: Run, updates: list[UpdateRecord]) -> list[str]:
    found = []
    for update in updates:
        early = [name for name, number in update.tokens if number != update.version]
        if early:
            found.append(f"version {update.version} holds pushes of other rounds, by {early}")
        if any(update.staleness):
            found.append(f"version {update.version} has gradients of staleness {update.staleness}")
        for worker in run.workers:
            gone = (worker.error is not None or worker.struck) and worker.ended <= update.time
            if worker.rank not in update.ranks and not gone:
                found.append(f"version {update.version} was made without {worker.name}")
    return found


def _check_asp(run: Run, updates: list[UpdateRecord]) -> list[str]:
    found = []
    last: dict[int, int] = {}
    for update in updates:
        if len(update.ranks) != 1:
            found.append(f"version {update.version} holds {len(update.ranks)} gradients")
            continue
        [rank], [staleness] = update.ranks, update.staleness
        expected = update.version - 1 - last.get(rank, 0)
        if staleness != expected:
            found.append(
                f"version {update.version} says staleness {staleness}, but {expected} versions were made between"
            )
        last[rank] = update.version
    return found


def _check_time(worker: WorkerRecord) -> list[str]:
    found = []
    busy = math.fsum(step.computed - step.start for step in worker.steps)
    wait = math.fsum(step.end - step.computed for step in worker.steps)
    elapsed = worker.ended - worker.begun
    if not math.isclose(busy + wait, elapsed, rel_tol=1e-9, abs_tol=1e-9):
        found.append(f"{busy:g} s busy and {wait:g} s waiting are not {elapsed:g} s elapsed")
    if any(not step.start <= step.computed <= step.end for step in worker.steps):
        found.append("a step ends before it begins")
    return found


_RULES: dict[str, Callable[[Run, list[UpdateRecord]], list[str]]] = {"bsp": _check_bsp, "asp": _check_asp}
