"""A call whose pushes count together, and what is kept until it is known whether it does; see `whole_calls`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.records import Record, field

if TYPE_CHECKING:
    from collections.abc import Hashable

    from aiokv.core.server.answers import AnyPush
    from aiokv.core.server.parked import RequestName
    from aiokv.core.stimuli import Received
    from aiokv.types import Incarnation, Key, Rank

LATE = "late"
GONE = "gone"

Verdict = str
"""Why a call does not count: not all of it has come in time, or its worker is gone. Empty: it counts."""

CallName = tuple["Rank", "Incarnation", int]
"""A call: the worker's rank and incarnation, and its number there."""


class Aside(Record, eq=False):
    """A push that waits for the rest of its call.

    `due` is when it has waited too long; None: nobody is there to be told, or is told already. `is_late` is set from
    then on: it waits only until is decided that its call does not count. It is for `keys`, of elements of a `dtype`.
    """

    received: Received
    message: AnyPush
    due: float | None
    keys: tuple[Key, ...] = ()
    dtype: str = ""
    is_late: bool = False

    @property
    def name(self) -> RequestName:
        """The request."""
        return self.received.peer, self.received.request


class WholeCall(Record, eq=False):
    """What is here of a call of which is not known yet whether it counts.

    `asked` is set once the deciding server was told that all of it is here, or with `gives_up`, that it will not be.
    `after` are the calls of which it said that they have to be decided first. With `copying` that waits until a standby
    has the pushes. `resumed` says that the server in whose place this one is may have told it.
    """

    name: CallName
    parts: int
    servers: int
    keys: dict[Key, None] = field(default_factory=dict)
    pushes: dict[Hashable, Aside] = field(default_factory=dict)
    after: dict[int, None] = field(default_factory=dict)
    copying: bool = False
    resumed: bool = False
    asked: bool = False
    gives_up: bool = False
    ended: bool = False
    verdict: Verdict | None = None

    @property
    def is_here(self) -> bool:
        """Whether all that comes to this server has come."""
        return len(self.pushes) == self.parts


class Behind(Record, eq=False):
    """A request that has to come after pushes of these calls, and when it has waited too long."""

    rank: Rank
    received: Received
    due: float
    calls: list[WholeCall]


class Gathering(Record, eq=False):
    """On the deciding server: on which of so many servers a call is, and who has asked.

    `after` are calls of the worker that have to be decided first, because they push some of its keys before it.
    """

    servers: int = 0
    here: dict[int, None] = field(default_factory=dict)
    after: dict[int, None] = field(default_factory=dict)
    askers: list[RequestName] = field(default_factory=list)
