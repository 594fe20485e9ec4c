"""How a worker changes what holds on all servers: update rules, and the policies of keys.

Every server is asked first whether it can be, since one may have a key of which this worker knows nothing; what they
all agree to they are told then. Keys go over to another policy once this worker's pushes are there, and the server that
decides hears of it when all others have done so.

While that is under way, later calls of the keys wait: so no push of one policy comes to a key of another, and none
overtakes the rule that was set before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from aiokv.core.joiner import answer_time
from aiokv.core.records import Record, field
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
    from aiokv.errors import AiokvError
    from aiokv.types import Key, Peer, TensorSpec

Asked = m.SetOptimizer | m.PutRules | m.SetPolicy
"""What is set on all servers or on none."""


class Change(Record, eq=False):
    """What `asks` say is to hold on all `servers`; later calls of the `keys` wait for it.

    It is `asked` for when all of them have agreed, and `told` when they have it. A `policy` is for the keys, `tells`
    are for the server that decides.
    """

    servers: list[Peer]
    asks: list[Asked]
    keys: list[Key]
    policy: str = ""
    tells: list[m.Switched] = field(default_factory=list)
    asked: bool = False
    told: bool = False


def policy_change(policy: str, leaving: list[Leaving], servers: list[Peer], timeout: float) -> Change:
    """Return what lets keys leave the policies that they have for another one."""
    wait = answer_time(timeout)
    asks: list[Asked] = [m.SetPolicy(policy, some.keys, some.old, some.group, wait, 0) for some in leaving]
    left = [some for some in leaving if get_policy(some.old).decides and some.old != policy]
    tells = [m.Switched(some.keys, some.old, some.group, wait) for some in left]
    return Change(servers, asks, [key for some in leaving for key in some.keys], policy, tells)


class Changing:
    """The changes that are under way.

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

    def begin(self, call: Call, change: Change) -> list[Effect]:
        """Let later calls of the keys wait, and ask the servers whether the change can be; one by itself needs not."""
        self._calls[call.number] = call
        self._turns.hold_others(call)
        trials = [structs.replace(message, trial=True) for message in change.asks]
        return self._ask(call, change.servers, trials) if len(change.servers) > 1 else []

    def _ask(self, call: Call, servers: list[Peer], messages: list[Asked]) -> list[Effect]:
        return [self._requests.send(call, peer, message) for message in messages for peer in servers]

    def go_on(self, call: Call, change: Change) -> list[Effect]:
        """Send what comes next for a change; nothing: it is over."""
        if not change.asked:
            change.asked, call.result, clock = True, None, self._directory.counts.clock
            if change.policy:
                self._directory.ask_for(change.keys)
            asks = [structs.replace(one, clock=clock) if isinstance(one, m.SetPolicy) else one for one in change.asks]
            return self._ask(call, change.servers, asks)
        if change.told:
            return []
        change.told = True
        if change.policy:
            self._directory.keys.follow(change.policy, change.keys)
        return [self._requests.send(call, LEADER, message) for message in change.tells]

    def end(self, call: Call) -> list[Key]:
        """Let a call be over, if it is such a change; return the keys whose calls have waited for that."""
        return [] if self._calls.pop(call.number, None) is None else self._turns.release(call)


def refusal(change: Change, server: str, error: AiokvError) -> AiokvError:
    """Return what a call fails with when a server refuses its change."""
    if not change.asked:
        return type(error)(f"{server} can't have that, so it holds on no server: {error.message}", **error.details)
    return error
