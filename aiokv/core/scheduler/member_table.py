"""The nodes that have registered: over which connections they are reached, and until when they are waited for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.deadlines import Deadlines, earliest
from aiokv.core.effects import Effect, Refuse, Send
from aiokv.types import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.scheduler.members import Member
    from aiokv.types import Peer

MAX_ANSWERED = 64
"""So many answers to a member are kept, in case that its connection ends before it has them."""


class MemberTable:
    """All nodes that the scheduler knows.

    Args:
        unbound: is told of connections that are a member's no longer.
    """

    def __init__(self, unbound: Callable[[Peer], None]) -> None:
        self._unbound = unbound
        self.by_name: dict[str, Member] = {}
        self.by_peer: dict[Peer, Member] = {}
        """Those that are connected."""
        self.workers: dict[str, Member] = {}
        self.servers: dict[str, Member] = {}
        """Those that serve; lost ones are among them."""
        self.joining: Deadlines[Peer] = Deadlines()
        """When those give up that wait until the cluster is complete."""
        self.silent: Deadlines[Peer] = Deadlines()
        """When those are lost that say nothing more."""
        self.away: Deadlines[str] = Deadlines()
        """Names of workers whose place is kept."""
        self.parted: Deadlines[str] = Deadlines()
        """Names of members whose connection has ended, and which may make another one."""

    def deadline(self) -> float | None:
        """Return the time at which somebody has been waited for too long."""
        return earliest(self.joining.next(), self.silent.next(), self.away.next(), self.parted.next())

    # --- who is there ---

    def of(self, role: Role) -> dict[str, Member]:
        """Return the members of a role that count, by name: all workers, and the servers that serve."""
        return self.workers if role is Role.WORKER else self.servers

    def ordered(self, role: Role) -> list[Member]:
        """Return the members of a role that count, by their numbers."""
        return sorted(self.of(role).values(), key=lambda member: member.number)

    def others(self, member: Member) -> list[Member]:
        """Return the other workers for which rounds wait, and that may still come."""
        return [one for one in self.workers.values() if one.state in {"alive", "away"} and one is not member]

    # --- who comes and goes ---

    def add(self, member: Member, *, counts: bool) -> None:
        """Take in a node, which may be one of those that count for its role."""
        self.by_name[member.name] = member
        if counts:
            self.of(member.role)[member.name] = member

    def remove(self, member: Member) -> None:
        """Let the member's place be free again: the cluster has never been complete."""
        del self.by_name[member.name]
        self.of(member.role).pop(member.name, None)

    def bind(self, member: Member, until: float) -> None:
        """Reach a member over its connection from now on; it is lost if it says nothing more until a time."""
        member.connected = True
        self.by_peer[member.peer] = member
        self.silent.add(member.peer, until)

    def unbind(self, member: Member) -> None:
        """Take out the connection of a member."""
        member.connected = False
        self.by_peer.pop(member.peer, None)
        self.silent.discard(member.peer)
        self.joining.discard(member.peer)
        self._unbound(member.peer)

    def drop(self, member: Member, state: str, reason: str) -> None:
        """Take note what has become of a member that is here no longer."""
        member.state, member.reason = state, reason
        self.parted.discard(member.name)
        self.unbind(member)

    # --- what they were answered ---

    def remember(self, answers: list[Effect]) -> list[Effect]:
        """Keep what members are answered, until they have had it for sure."""
        for answer in answers:
            assert isinstance(answer, Send | Refuse), "calls end in nothing else"
            answered = self.by_peer[answer.peer].answered
            answered[answer.request] = answer
            if len(answered) > MAX_ANSWERED:
                del answered[next(iter(answered))]
        return answers

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        assert all(self.by_name[member.name] is member for member in self.by_peer.values())
        assert all(member.is_here and member.connected for member in self.by_peer.values())
        assert self.parted.holds({one.name for one in self.by_name.values() if one.is_here and not one.connected})
        assert self.away.holds({member.name for member in self.by_name.values() if member.state == "away"})
        for role in (Role.WORKER, Role.SERVER):
            here = self.of(role)
            assert all(self.by_name[name] is member and member.role is role for name, member in here.items())
