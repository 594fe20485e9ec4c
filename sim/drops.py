"""Which pushes are in no update, as the servers' answers say, and when a gradient is too old to be in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.policy import get_policy
from aiokv.policy.kofn import Backup, KBatchSync, KSync
from aiokv.policy.quorum import Quorum
from aiokv.policy.ringmaster import Ringmaster
from aiokv.wire import messages as m
from sim.record import DropRecord

if TYPE_CHECKING:
    import simpy

    from aiokv.types import Peer, Version
    from sim.record import Run, UpdateRecord
    from sim.tokens import Token


def lifetime(policy: str) -> int | None:
    """Return after how many newer updates a gradient is dropped on arrival; None: never, as far as is known."""
    rule = get_policy(policy)
    if isinstance(rule, KSync | Backup | KBatchSync | Quorum):
        return 1
    return rule.r if isinstance(rule, Ringmaster) else None


class Drops:
    """Watches the pushes to one server and their answers. Keys whose rounds are decided for all are in no bundle.

    Args:
        run: is told of pushes that are dropped.
        node: the server's name.
    """

    def __init__(self, run: Run, node: str) -> None:
        self._run = run
        self._node = node
        self._asked: dict[tuple[Peer, int], tuple[Token, m.Push]] = {}

    def arrived(self, peer: Peer, request: int, message: m.Message, worker: str) -> None:
        """Take note of a message to the server."""
        if isinstance(message, m.Push):
            self._asked[peer, request] = (worker, message.sequence), message

    def sent(self, peer: Peer, request: int, message: m.Message, now: float) -> DropRecord | None:
        """Take note of a message from the server; return what it has dropped."""
        asked = self._asked.pop((peer, request), None)
        if asked is None or not isinstance(message, (m.Done, m.Value)) or not message.dropped:
            return None
        token, push = asked
        drop = DropRecord(now, push.key, push.start, token, message.dropped, push.read_version, self._node)
        self._run.drops.append(drop)
        self._run.dropped.setdefault(token, message.dropped)
        return drop


class Expiry:
    """Tells workers at once when what they compute has become too old to count.

    No message of the servers says so yet: this looks at the updates as they are made, and its notice takes no time.

    Args:
        env: the simulated time.
        lifetime: so many newer updates are too many.
    """

    def __init__(self, env: simpy.Environment, lifetime: int) -> None:
        self._env = env
        self._lifetime = lifetime
        self._newest: Version = 0
        self._waiting: dict[Version, simpy.Event] = {}

    def made(self, update: UpdateRecord) -> None:
        """Take note of an update; the first of a round counts, whatever its chunk."""
        if update.version > self._newest:
            self._newest = update.version
            event = self._waiting.pop(update.version, None)
            if event is not None:
                event.succeed()

    def of(self, read: Version) -> simpy.Event:
        """Return what happens when a gradient that is computed at a version has become too old."""
        last = read + self._lifetime
        event = self._waiting.get(last) or self._env.event()
        if last <= self._newest:
            event.succeed()
        else:
            self._waiting[last] = event
        return event
