"""How a worker moves keys to another policy: it asks all servers once its pushes are there, then the one that decides.

While that is under way, later calls of the keys wait, so that no push of one policy comes to a key of another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.joiner import answer_time
from aiokv.core.records import Record
from aiokv.core.roster import LEADER
from aiokv.policy import get_policy
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.effects import Effect
    from aiokv.core.worker.call import Call
    from aiokv.core.worker.directory import Directory
    from aiokv.core.worker.parts import Leaving
    from aiokv.core.worker.requests import Requests
    from aiokv.core.worker.turns import Turns
    from aiokv.types import Key, Peer, TensorSpec


class Change(Record, eq=False):
    """Another policy for keys: `asked` of the servers, and `told` to the one that decides when all have it."""

    policy: str
    leaving: list[Leaving]
    servers: list[Peer]
    asked: bool = False
    told: bool = False

    @property
    def keys(self) -> list[Key]:
        """All keys."""
        return [key for some in self.leaving for key in some.keys]

    def asks(self, timeout: float, clock: int) -> list[m.Message]:
        """Return what each server is asked for, behind the pushes up to a clock."""
        wait = answer_time(timeout)
        return [m.SetPolicy(self.policy, some.keys, some.old, some.group, wait, clock) for some in self.leaving]

    def tells(self, timeout: float) -> list[m.Message]:
        """Return what tells the server that decides rounds which keys have left them, if there are any."""
        wait = answer_time(timeout)
        left = [some for some in self.leaving if get_policy(some.old).decides and some.old != self.policy]
        return [m.Switched(some.keys, some.old, some.group, wait) for some in left]


class Changing:
    """The changes of policies that are under way.

    Args:
        directory: what is known of the keys.
        requests: by which servers are asked.
        turns: which calls wait.
    """

    def __init__(self, directory: Directory, requests: Requests, turns: Turns) -> None:
        self._directory = directory
        self._requests = requests
        self._turns = turns
        self._calls: dict[int, Call] = {}
        """They are the first that wait, under each of their keys."""

    def __bool__(self) -> bool:
        return bool(self._calls)

    def __contains__(self, number: int) -> bool:
        return number in self._calls

    def tensors(self, change: Change) -> list[tuple[Key, TensorSpec]]:
        """Return the keys of a change with their specs."""
        specs = [(key, self._directory.keys.spec(key)) for key in change.keys]
        return [(key, spec) for key, spec in specs if spec is not None]

    def begin(self, call: Call, change: Change) -> None:
        """Let later calls of the keys wait."""
        self._directory.ask_for(change.keys)
        self._calls[call.number] = call
        self._turns.hold_others(call)

    def go_on(self, call: Call, change: Change) -> list[Effect]:
        """Send what comes next for a change; nothing: it is over."""
        if not change.asked:
            change.asked, call.result = True, None
            asks = change.asks(call.timeout, self._directory.counts.clock)
            return [self._requests.send(call, peer, message) for message in asks for peer in change.servers]
        if change.told:
            return []
        change.told = True
        self._directory.keys.follow(change.policy, change.keys)
        return [self._requests.send(call, LEADER, message) for message in change.tells(call.timeout)]

    def end(self, call: Call) -> list[Key]:
        """Let a call be over, if it is such a change; return the keys whose calls have waited for that."""
        return [] if self._calls.pop(call.number, None) is None else self._turns.release(call)
