"""Between the scheduler and all others: who is there, who joins, who holds copies, and who waits for whom."""

from __future__ import annotations

from typing import Any

from aiokv.types import Role
from aiokv.wire.messages.base import Message

# --- membership: between the scheduler and all others ---


class Register(Message):
    """A node asks for its place. Answered by a `View` when the cluster is complete, or by an `Error`.

    One that has its place already names its `number`, rank or index, and `epoch` and `founder` of the newest view that
    it knows: its connection has ended, or the scheduler was started again.

    Unless `standby` is -1 the node is to hold a copy of the server with that index, as `HostStandby` said.
    """

    role: Role
    name: str
    incarnation: int
    host: str
    port: int
    timeout: float
    number: int = -1
    epoch: int = 0
    standby: int = -1
    founder: int = 0


class WorkerEntry(Message):
    """One worker of a view.

    `state` is "alive", "finished" (here, but without contributions from now on), "left" (in good order), "lost" (with
    the reason), "evicted" (the others go on without it), "away": its process is gone, its place is kept for the next
    one, and what waits for it waits on; or "joining": it is here, but the others do not wait for it yet.

    In rounds it counts from the first clock after `since` on: 0 for a worker of the beginning, and for one that is
    joining and of which that is not known yet. One that is about to leave counts up to the clock `until`; 0: it stays.
    """

    rank: int
    name: str
    incarnation: int
    state: str = "alive"
    reason: str = ""
    since: int = 0
    until: int = 0


class StandbyEntry(Message):
    """The node that holds a copy of a server's parameters, and takes its place when it is lost.

    `state` is "expected" (it has not registered yet, so its address is not known), "filling" (the server copies what it
    has) or "ready". `process` is the name of the node whose process it is in.

    While a place moves, the standby has one of its own, to which all goes on that comes to it.
    """

    name: str
    process: str
    incarnation: int = 0
    host: str = ""
    port: int = 0
    state: str = "expected"
    standby: StandbyEntry | None = None


class ServerEntry(Message):
    """One server of a view and the address under which workers reach it. `state` as in `WorkerEntry`.

    `process` is the name of the node whose process it is in; empty: it is in its own.
    """

    index: int
    name: str
    incarnation: int
    host: str
    port: int
    state: str = "alive"
    reason: str = ""
    standby: StandbyEntry | None = None
    process: str = ""


class View(Message):
    """Who belongs to the cluster, and the settings that all members share.

    `on_worker_loss` is what becomes of the others when a worker is lost: "fail", "shrink" or "respawn".

    `checkpoint_at` is the clock of the cluster checkpoint that is due next, see `CheckpointAt`; 0: none is asked for
    yet. They are in the folder `checkpoints`, and `run` is in their names. `resume` is the folder of the one with which
    the servers begin.

    `replication` is on how many servers every parameter is: with 2 each has a standby.

    `declared` is how many workers the cluster has begun with; 0: as many as there are in `workers`.

    `barriers` is how many have been opened.

    `founder` is the incarnation of the scheduler that has formed the cluster. Others that were started again since go
    on with it; two clusters differ in it, also when one has come after the other at the same address.

    `told` is the newest clock of which a worker that has finished or left was told who counts in it.
    """

    epoch: int
    workers: tuple[WorkerEntry, ...]
    servers: tuple[ServerEntry, ...]
    heartbeat: float
    chunk_bytes: int
    split_bytes: int
    death_timeout: float
    on_worker_loss: str = "fail"
    checkpoint_at: int = 0
    checkpoints: str = ""
    run: int = 0
    resume: str = ""
    replication: int = 1
    declared: int = 0
    barriers: int = 0
    founder: int = 0
    told: int = 0


class GetView(Message):
    """The scheduler was started again and asks a node for the newest view that it knows. Answered by that `View`."""


class Heartbeat(Message):
    """I am alive. The scheduler answers each with one of its own."""


class Barrier(Message):
    """Answer when every worker of the group has sent this name; an empty group is all of them.

    The answer is `Met`. `after` is the number of the last opening of this barrier that the worker has passed, or before
    which nobody waited for it.
    """

    name: str
    timeout: float
    group: tuple[int, ...] = ()
    said: dict[str, Any] | None = None
    after: int = 0


class Opened(Message):
    """I have passed a barrier, whose last opening that I know of has this number; what each rank has `said` there."""

    name: str
    group: tuple[int, ...]
    number: int
    said: tuple[tuple[int, dict[str, Any]], ...] = ()


class Finish(Message):
    """I contribute no more, but stay: no round and no barrier waits for me. Answered `Done`.

    `told` is the newest clock of which I was told who counts in it, so that this stays as it was.
    """

    told: int = 0


class PlanLeave(Message):
    """I am about to leave, and have gone to a clock. Answered `Done` behind a view that says up to which one I count.

    If it does not say so (`WorkerEntry.until`), nobody relies on me, and I may go at once.
    """

    clock: int


class Leave(Message):
    """I leave in good order. Answered `Done`; the others do not wait for me.

    If it is `early`, my work is not done: where too few are left they wait for somebody in my place. `told` is as in
    `Finish`.
    """

    early: bool = False
    told: int = 0


class Stop(Message):
    """The scheduler tells a server that the job is over."""

    reason: str


# --- workers that join and leave while training goes on; see `core.scheduler.admission` ---


class Enter(Message):
    """Let me count, from a boundary between rounds on. Answered `Entered` when all others are past that."""

    timeout: float


class Entered(Message):
    """You count in all rounds after a clock."""

    clock: int


class Boundary(Message):
    """The scheduler asks servers and workers whether a rank that joins may count in all rounds after a clock; or the
    workers whether one of them may count up to it only. Answered `BoundaryClock`.

    Who says so does nothing beyond that clock before there is another view, or another boundary. One whose clock is 0
    says that nobody is to join, or to leave.
    """

    clock: int
    rank: int


class BoundaryClock(Message):
    """The newest clock that this node has gone to; it is beyond the one that was asked for if that is too early.

    A `reason` says why nobody can join at all. A server says whether with any of its keys a worker `waits` for others.
    """

    clock: int
    newest: int
    reason: str = ""
    waits: bool = False


class Passed(Message):
    """A worker has begun with what comes after a boundary, and has answers to all that it had pushed before it."""

    clock: int


# --- standbys, between the scheduler and the servers; see `core.scheduler.standbys` ---


class HostStandby(Message):
    """From the scheduler: start a node with this name in your process, which registers as the standby of an index."""

    index: int
    name: str


class StandbyReady(Message):
    """To the scheduler: the standby with this name has all that this server has, and every answer waits for it.

    It may be the standby's own.
    """

    index: int
    name: str


class DropStandby(Message):
    """To the scheduler: the standby with this name can't be reached. A view without it says that it counts no more.

    From the server, or from the standby if it is its own.
    """

    index: int
    name: str


class LeaveServer(Message):
    """This process of servers wants to end. Answered `Done` when others serve all that it had."""


# --- who looks on ---


class GetWaiting(Message):
    """For what does each request wait that you have not answered? From anybody who knows the token."""


class WaitingCall(Message):
    """A request that waits: whose it is (empty: not known), what it is about, why it is not answered, and since when.

    `ranks` are those that it waits for. `seconds` is how long it has waited.
    """

    who: str
    what: str
    reason: str
    seconds: float
    ranks: tuple[int, ...] = ()
    key: str | int | None = None
    round: int | None = None


class MemberState(Message):
    """A member as the scheduler knows it. `number` is its rank or index, -1 before it has one.

    `seconds` is how long ago it was last heard.
    """

    role: Role
    number: int
    name: str
    state: str
    reason: str
    host: str
    port: int
    seconds: float


class Waiting(Message):
    """The answer to `GetWaiting`, and how often what has happened there; only a scheduler knows the members."""

    epoch: int
    calls: tuple[WaitingCall, ...]
    members: tuple[MemberState, ...] = ()
    counters: dict[str, int] = {}
