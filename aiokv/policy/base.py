"""What a synchronisation policy answers. One small class a rule; no I/O, no clock, no arrays."""

from __future__ import annotations

import abc
import dataclasses
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.types import Rank, Round, Version


class Token(NamedTuple):
    """A worker's step: all that it pushes at one clock."""

    rank: Rank
    clock: int


@dataclasses.dataclass(frozen=True)
class Policy(abc.ABC):
    """Says which contributions make an update, and which reads wait.

    A policy is a frozen dataclass: its fields are its options, and `str` gives the text by which `get_policy` makes it.
    It keeps no state of its own. What has some is made by it: a `Decider` or a `Gate`.
    """

    name: ClassVar[str]
    keeps_sum: ClassVar[bool] = False
    """The sum of the contributions becomes the value, whatever update rule is set."""

    per_push: ClassVar[bool] = False
    """Each push is an update of its own, in an order that may differ from chunk to chunk."""

    in_step: ClassVar[bool] = False
    """Every update is one contribution of each member, and none is stale."""

    decides: ClassVar[bool] = False
    """Whether it is a `RoundPolicy`."""

    has_phases: ClassVar[bool] = False
    """What it does depends on how many updates were made under it."""

    in_turn: ClassVar[bool] = False
    """Its rounds are one step each, of all members in turn, so that these go in step."""

    admits: ClassVar[bool] = False
    """Whether a worker can join while training goes on."""

    sends_ahead: ClassVar[bool] = False
    """Servers send fresh values to workers that read a key, without waiting until they pull."""

    waits: ClassVar[bool] = True
    """A push is answered when its update is made; otherwise only the one that closes the round waits for that, and the
    others are answered when they have arrived.
    """

    def __str__(self) -> str:
        return ":".join([self.name, *(str(getattr(self, field.name)) for field in dataclasses.fields(self))])

    @property
    def is_plain(self) -> bool:
        """Whether chunks need nothing but their versions for it, so that small keys can be one chunk together."""
        return isinstance(self, ChunkPolicy) and self.gate() is None

    @property
    def per_step(self) -> bool:
        """Whether each step of a worker makes a round of its own, or is dropped, so that nobody waits for others."""
        return False

    def is_in_step(self, version: Version) -> bool:
        """Tell whether the update that makes a version is one contribution of each member.

        Args:
            version: the version, counted from 1 since the policy began.
        """
        del version
        return self.in_step

    def meets(self, version: Version) -> bool:
        """Tell whether workers wait for all others, by their numbers of steps, in the update that makes a version.

        Args:
            version: as in `is_in_step`.
        """
        return self.is_in_step(version) or self.in_turn or self.gate() is not None

    def gate(self) -> Gate | None:
        """Return what decides which reads of one chunk wait; None: none does."""
        return None


class ChunkPolicy(Policy):
    """A policy that every server can follow alone, chunk by chunk: all come to the same result."""

    @abc.abstractmethod
    def version_of(self, *, sequence: int, newest: Version) -> Version:
        """Return the version that a rank's push number `sequence` helps to make.

        Args:
            sequence: the rank's pushes of this key, counted from 1.
            newest: the largest version that is made or being made of the chunk.
        """

    @abc.abstractmethod
    def expected(self, *, version: Version, members: Sequence[Rank]) -> Sequence[Rank]:
        """Return the ranks for which an update waits, ascending; it is complete when each of them has contributed.

        It is asked once for an update and a view, not at every contribution: with many workers that would be most of
        a server's time.

        Args:
            version: the version that the update makes.
            members: ranks of the current view that have not left, ascending; may be returned as it is.
        """


class RoundPolicy(Policy):
    """A policy whose rounds depend on who comes first, so one server decides each round, once for all keys."""

    decides: ClassVar[bool] = True
    admits: ClassVar[bool] = True

    @abc.abstractmethod
    def decider(self) -> Decider:
        """Return what decides the rounds of all keys that have this policy and one group."""


@dataclasses.dataclass(slots=True)
class Closed:
    """A round is closed: it is made of these steps, ascending."""

    round: Round
    tokens: list[Token]


@dataclasses.dataclass(slots=True)
class Dropped:
    """A step is in no round, and why: "late" (its round was closed without it) or "stale"."""

    token: Token
    reason: str


Decision = Closed | Dropped


class Decider(abc.ABC):
    """Puts workers' steps into rounds, in the order in which they come.

    `members` are always the ranks of the current view that have not left, ascending, those included that are lost.
    Those are left out that push keys under this policy no longer. Once there are no members nothing more is to come, so
    what is open makes a round.
    """

    def __init__(self) -> None:
        self.round: Round = 0
        """The last round that is closed."""

    @abc.abstractmethod
    def arrived(self, token: Token, read: Round, members: Sequence[Rank], now: float) -> list[Decision]:
        """Take in a step.

        Args:
            token: the step.
            read: the last round in the values that it was computed from.
            members: the ranks that count.
            now: the time in seconds.
        """

    def reported(self, rank: Rank, loss: float) -> None:
        """Take note of the loss that a worker has measured, before the step of which it is comes."""
        del rank, loss

    def changed(self, members: Sequence[Rank], now: float) -> list[Decision]:
        """Look again, because the members are others."""
        del members, now
        return []

    def deadline(self) -> float | None:
        """Return the time at which `due` wants to be called."""
        return None

    def due(self, members: Sequence[Rank], now: float) -> list[Decision]:
        """Look again, because it is that time."""
        del members, now
        return []

    def known(self) -> dict[Rank, int]:
        """Return what `resume` needs to know of ranks besides what was decided."""
        return {}

    def resume(
        self, number: Round, last: Sequence[Token], known: Mapping[Rank, int], accepted: Sequence[Token] = ()
    ) -> None:
        """Go on behind the last round that another has closed; other steps that are in none will come again.

        Args:
            number: the last round; 0: there is none.
            last: its steps.
            known: what the other one has `known` behind it.
            accepted: steps that are in no round yet, in their order, on which workers have gone on. There are none
                where pushes wait for their round, see `Policy.waits`.
        """
        del last, known, accepted
        self.round = number

    @abc.abstractmethod
    def missing(self, members: Sequence[Rank]) -> list[Rank]:
        """Return the ranks whose next step may close the open round, ascending."""

    def needed(self, members: Sequence[Rank]) -> int:
        """Return how many of the missing ranks have to come for the open round to close."""
        del members
        return 1


class Gate(abc.ABC):
    """Says which ranks may read a chunk, from how often each has pushed it."""

    @abc.abstractmethod
    def advanced(self, rank: Rank, count: int, members: Sequence[Rank], now: float) -> bool:
        """Take note that a rank's push number `count` is in the value; False: nobody may read because of that."""

    def may_read(self, rank: Rank, members: Sequence[Rank]) -> bool:
        """Return True when a rank waits for nobody; a gate of many ranks can know that without looking at each."""
        return not self.waits_for(rank, members)

    @abc.abstractmethod
    def waits_for(self, rank: Rank, members: Sequence[Rank]) -> list[Rank]:
        """Return the ranks that have to push before this one may read, ascending; none: it may read."""

    def changed(self, members: Sequence[Rank]) -> None:
        """Take note that the members are others."""
        del members
