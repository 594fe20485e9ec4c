"""What a server remembers of one chunk: its versions, its open updates and who waits for them."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from aiokv.core.effects import Apply, ApplyRows, Combine, Compensate, Effect, Fold, StoredChunk, StoredRows, Weigh
from aiokv.core.records import Record, field
from aiokv.core.server.rounds.updates import Update

if TYPE_CHECKING:
    from aiokv.core.merging import Rate
    from aiokv.core.roster import Roster
    from aiokv.core.server.rounds.decisions import Decisions
    from aiokv.core.server.rounds.open_rounds import OpenRounds
    from aiokv.core.server.rounds.reads import Reads
    from aiokv.core.server.rounds.updates import Contribution, Waiter
    from aiokv.core.stimuli import Received
    from aiokv.errors import AiokvError
    from aiokv.policy import ChunkPolicy, Gate, Policy
    from aiokv.types import Key, Rank, Slot, TensorSpec, Version
    from aiokv.wire import messages as m


NONE = -1
"""In the place of a version that is not there."""

REMEMBERED_ERRORS = 256
"""Of how many pushes to a chunk is known why their update was not made."""


class Chunk(Record, eq=False):
    """Elements [start, stop) of a key on this server, or all elements of a bundle's keys (see `bundle`).

    `group` are the ranks whose contributions make an update, all of them if it is empty. `newest` is the largest
    version that is made or open; `pushed` counts each rank's pushes that arrived, `reflected` those that the current
    value holds. `pulls` are each rank's reads that wait for its own pushes, `held` requests that can't be looked at
    while an update is under way.

    `pending` is the update that is prepared by computing norms, `gathering` says that it waits for those of other
    chunks. `reads` is there when the rule looks at what a worker had read, `rounds` when rounds are decided for all
    keys at once, `former` if those of its policy before were. `gate` holds reads back, those of `gated`; those of
    `awaiting` wait for a round.

    `previous` is the version before the current one, where the store keeps it for a process that takes the place of a
    lost one; -1 where none may. `clocks` are the number and the clock of a push of each rank: of its last one where the
    place of every lost worker is kept, else of one from which the others follow. Nothing: they are the same.

    `admitted` are the numbers of pushes from which ranks go on that have joined, and how many each had made before.

    `refused` says of the last pushes whose update could not be made why.

    `since` is the version and `before` each rank's pushes at which its policy began; `leaving` are the ranks that have
    asked for another one, so that this one waits for them no longer. `cut` is the clock of the last checkpoint that has
    its value, and `born` that of the worker that made the key.
    """

    is_dense: ClassVar[bool] = True
    """Whether the chunk has all of its elements, one after the other."""

    key: Key
    start: int
    stop: int
    spec: TensorSpec
    policy: Policy
    label: str
    group: tuple[Rank, ...] = ()
    version: Version = 0
    newest: Version = 0
    applying: bool = False
    updates: dict[Version, Update] = field(default_factory=dict)
    pulls: dict[Rank, dict[Waiter, None]] = field(default_factory=dict)
    pushed: dict[Rank, int] = field(default_factory=dict)
    reflected: dict[Rank, int] = field(default_factory=dict)
    held: list[Received] = field(default_factory=list)
    pending: Apply | None = None
    gathering: bool = False
    reads: Reads | None = None
    rounds: OpenRounds | None = None
    former: Decisions | None = None
    gate: Gate | None = None
    gated: dict[Waiter, None] = field(default_factory=dict)
    since: Version = 0
    before: dict[Rank, int] = field(default_factory=dict)
    leaving: dict[Rank, None] = field(default_factory=dict)
    awaiting: dict[Waiter, None] = field(default_factory=dict)
    refused: dict[tuple[Rank, int], AiokvError] = field(default_factory=dict)
    previous: Version = NONE
    clocks: dict[Rank, tuple[int, int]] = field(default_factory=dict)
    admitted: dict[Rank, tuple[int, int]] = field(default_factory=dict)
    cut: int = 0
    born: int = 0
    nbytes: int = 0
    """Bytes of the elements."""
    alone: list[Chunk] = field(default_factory=list)
    """A list of nothing else, for the requests that are about this chunk only: one for each would take memory."""

    def __post_init__(self) -> None:
        self.alone = [self]
        self.nbytes = (self.stop - self.start) * self.spec.itemsize
        self.gate = self.policy.gate()

    @property
    def own_rounds(self) -> ChunkPolicy:
        """The policy, of a chunk whose rounds are not decided elsewhere."""
        assert not self.policy.decides, "a decided round waits for its steps"
        # Not by `cast`, which is a call for each push.
        return self.policy  # type: ignore[return-value]

    @property
    def is_whole(self) -> bool:
        """Whether all of the key, or of the bundle's keys, is in it."""
        return self.size == self.spec.size

    @property
    def is_busy(self) -> bool:
        """Whether the store works on it, so that it has to stay as it is."""
        return self.applying and not self.gathering

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def is_named_by(self, message: m.Push | m.Pull) -> bool:
        """Tell whether a message about its first element is about this chunk, and names it as it is."""
        spec = self.spec
        same = message.stop == self.stop and message.shape == spec.shape and message.dtype == spec.dtype
        return same and self.is_dense

    def nbytes_of(self, message: m.Push | m.PushBundle | m.PushRows) -> int:
        """Return how long the part of a push's payload is that is for this chunk."""
        del message
        return self.nbytes

    def stored(self, rows: bytes, version: Version) -> StoredChunk | StoredRows:
        """Return the payload of an answer with a value that the store has."""
        del rows
        return StoredChunk(self.key, self.start, version, self.nbytes)

    def version_before(self, rank: Rank, sequence: int) -> Version:
        """Return the version from which a rank's push is computed: the current one, or the one before its round."""
        has_it = self.reflected.get(rank, 0) >= sequence
        return self.previous if has_it and self.policy.in_step and not self.policy.keeps_sum else self.version

    def completed(self, update: Update, apply: Apply, rate: Rate | None) -> Apply | ApplyRows:
        """Return what makes the next version out of an update that is complete; `rate` is for what is not folded."""
        del update, rate
        return apply

    def open(self, version: Version, contribution: Contribution, waiter: Waiter) -> Update:
        """Enter a contribution to the update that makes a version, and who waits for it; return the update."""
        update = self.updates.get(version)
        if update is None:
            update = self.updates[version] = Update(version)
            self.newest = max(self.newest, version)
        update.add(contribution)
        update.waiters[waiter] = None
        return update

    def members(self, roster: Roster) -> list[Rank]:
        """Return the ranks for which its policy may wait, ascending."""
        members = roster.members_of(self.group)
        return [rank for rank in members if rank not in self.leaving] if self.leaving else members

    def _members_of(self, update: Update, roster: Roster) -> list[Rank]:
        """Return the ranks for which its policy may wait in an update, ascending."""
        if not (roster.varies and self.policy.is_in_step(update.version - self.since)):
            return self.members(roster)
        members = roster.members_after(update.clock, self.group)
        # Who joined behind where nobody waits, and then got this policy with the others, is ahead of them.
        ahead = [rank for rank in roster.newcomers if rank not in members and self._has_come_to(update, rank, roster)]
        here = sorted([*members, *ahead]) if ahead else members
        return [rank for rank in here if rank not in self.leaving]

    def _has_come_to(self, update: Update, rank: Rank, roster: Roster) -> bool:
        """Tell whether a rank that has joined pushes this update next, whatever its clock."""
        is_next = self.has_begun(rank, roster) and self.version_of(rank, self.pushed[rank] + 1) <= update.version
        return is_next and rank in self.members(roster) and rank not in roster.leavers

    @property
    def is_next_in_step(self) -> bool:
        """Whether the next version is one contribution of each member."""
        return self.policy.is_in_step(self.version + 1 - self.since)

    def has_begun(self, rank: Rank, roster: Roster) -> bool:
        """Tell whether a rank goes on from where it counts, if it has joined."""
        return self.clocks.get(rank, (0, 0))[1] >= roster.newcomers.get(rank, 0)

    def admit(self, rank: Rank, since: int, roster: Roster, now: float) -> None:
        """Let a rank count from now on, whose first push has the clock after `since`."""
        members, in_step = self.members(roster), self.is_next_in_step
        others = [other for other in members if other != rank and self.has_begun(other, roster)]
        # It begins with the next round. Where the versions are not those of its steps it has the same number in all
        # chunks, and is where the slowest is, but not beyond the boundary.
        number = self.version if in_step and not self.since else since
        counts = [self.count(other, self.reflected.get(other, 0)) for other in others]
        count = self.version - self.since if in_step else min([since, *counts])
        self.admitted[rank] = (number, self.counted.get(rank, 0))
        self.pushed[rank] = self.reflected[rank] = number
        self.clocks[rank] = (number, since)
        if self.rounds is not None:
            self.rounds.admit(rank, since)
        else:
            self.before[rank] = number - count
        if self.reads is not None:
            self.reads.begin(rank, self.version)
        if self.gate is not None:
            self.gate.advanced(rank, count, members, now)

    def settled(self, rank: Rank) -> tuple[int, int]:
        """Return how many of a rank's pushes nobody must bring again if this server is lost, and the last one's clock.

        They are in the value, or in none. Where a worker goes on before it knows that, what it was told of is copied.
        """
        pushed, settled = self.pushed.get(rank, 0), self.reflected.get(rank, 0)
        if settled == pushed or not self.policy.waits:
            clocks = {} if self.rounds is None else self.rounds.clocks
            return pushed, clocks[rank] if rank in clocks else self.clock_at(rank, pushed)
        return settled, self.clock_at(rank, settled) if self.rounds is None else self.rounds.passed.get(rank, 0)

    def clock_at(self, rank: Rank, count: int) -> int:
        """Return the clock of a rank's push of a number, if it pushes in every step."""
        number, clock = self.clocks.get(rank, (count, count))
        return clock + count - number

    def count(self, rank: Rank, sequence: int) -> int:
        """Return which of a rank's pushes under the present policy one is."""
        return sequence - self.before.get(rank, 0)

    def version_of(self, rank: Rank, sequence: int) -> Version:
        """Return the version that a rank's push helps to make."""
        # As `count`; it is for every push.
        number = sequence - self.before.get(rank, 0) if self.before else sequence
        policy: ChunkPolicy = self.policy  # type: ignore[assignment]
        return self.since + policy.version_of(sequence=number, newest=self.newest - self.since)

    def expect(self, update: Update, roster: Roster) -> None:
        """Let an update wait for the ranks of this view, if it does not yet."""
        # A round that was decided elsewhere becomes an update when all is there.
        if update.roster is not roster and not self.policy.decides:
            version = update.version - self.since
            update.expected = self.own_rounds.expected(version=version, members=self._members_of(update, roster))
            update.roster, update.reached = roster, 0

    def leave(self, rank: Rank) -> None:
        """Take note that a rank asks for another policy: nothing comes of it under this one any longer."""
        self.leaving[rank] = None
        if self.rounds is not None:
            self.rounds.left[rank] = None
        for update in self.updates.values():
            update.roster = None

    def stay(self, rank: Rank) -> None:
        """Take note that a rank asks for another policy no longer."""
        del self.leaving[rank]
        if self.rounds is not None:
            del self.rounds.left[rank]
        for update in self.updates.values():
            update.roster = None

    @property
    def is_idle(self) -> bool:
        """Whether all that was pushed is made, or dropped."""
        return not self.updates and (self.rounds is None or not any(self.rounds.unsettled.values()))

    @property
    def counted(self) -> dict[Rank, int]:
        """The last push of each rank that is in the value.

        Behind it may be some that were dropped: when that happens differs from chunk to chunk. Nothing is in it of who
        has joined before the first push of that rank.
        """
        if self.rounds is not None:
            return self.before | self.rounds.made
        counts = dict(self.reflected)
        for rank, (number, before) in self.admitted.items():
            if counts.get(rank) == number:
                counts[rank] = before
        return {rank: number for rank, number in counts.items() if number or rank not in self.admitted}

    def has_open(self, clock: int) -> bool:
        """Tell whether something that was pushed with a clock, or an earlier one, is not made, and not dropped yet."""
        parts = [part for update in self.updates.values() for part in update.contributions.values()]
        if self.rounds is not None:
            parts += self.rounds.contributions
        return any(part.clock <= clock for part in parts)

    def follow(self, policy: Policy) -> None:
        """Go on under another policy, which knows nothing of what was pushed before."""
        assert self.is_idle, "what was pushed belongs to the policy before"
        self.policy, self.gate = policy, policy.gate()
        self.since, self.before, self.leaving = self.version, dict(self.pushed), {}

    def is_closed(self, version: Version, rank: Rank) -> bool:
        """Return True when the version is made, or being made, without the rank."""
        if version <= self.version + self.applying:
            return True
        update = self.updates.get(version)
        # As `is_past`; it is for every push.
        return update is not None and bool(update.folded) and rank <= update.folded[-1]

    def read_later(self, waiter: Waiter) -> None:
        """Let a pull wait for its rank's pushes."""
        self.pulls.setdefault(waiter.rank, {})[waiter] = None

    def forget_read(self, waiter: Waiter) -> None:
        """Let a pull wait no longer, if it does."""
        own = self.pulls.get(waiter.rank, {})
        if waiter in own:
            del own[waiter]
            if not own:
                del self.pulls[waiter.rank]

    def reading(self) -> list[Waiter]:
        """Return the pulls that wait."""
        return [waiter for own in self.pulls.values() for waiter in own]

    def has(self, rank: Rank, sequence: int) -> bool:
        """Tell whether a push of a rank has come before."""
        return 0 < sequence <= self.pushed.get(rank, 0)

    def refuse(self, update: Update, error: AiokvError) -> None:
        """Remember why an update was not made, for those of its pushes that come again."""
        for part in update.contributions.values():
            self.refused[part.rank, part.sequence] = error
        while len(self.refused) > REMEMBERED_ERRORS:
            del self.refused[next(iter(self.refused))]

    def update_with(self, rank: Rank, sequence: int) -> Update | None:
        """Return the open update that a push is in; None: it is made, or not known yet which one."""
        return next((update for update in self.updates.values() if update.has(rank, sequence)), None)

    def awaited_update(self, waiter: Waiter) -> Update | None:
        """Return the open update of this chunk whose completion the waiter waits for."""
        for update in self.updates.values():
            if not waiter.at_least:
                if waiter in update.waiters:
                    return update
                continue
            contribution = update.contributions.get(waiter.rank)
            if contribution is not None and contribution.sequence >= waiter.at_least:
                return update
        return None

    def combine(
        self, update: Update, first_missing: Rank | None, reduction: str, rate: Rate | None, lamda: float = 0.0
    ) -> list[Effect]:
        """Leave all contributions where they are until the last one is there, then make one of them. See `fold`."""
        if first_missing is not None:
            return []
        update.folded, update.unfolded = sorted(update.contributions), []
        effects: list[Effect] = []
        slots = []
        for place in update.folded:
            contribution = update.contributions[place]
            slot, contribution.slot = contribution.slot, None
            if slot is None:
                continue
            slots.append(slot)
            if rate is not None:
                effects += self._weigh(update, contribution, slot, rate)
            if lamda:
                effects += self._compensate(contribution, slot, lamda)
        if not slots:
            return []
        update.accumulator = slots[0]
        return [*effects, Combine(slots[0], slots[1:], self.spec.dtype, reduction)]

    def fold(self, update: Update, first_missing: Rank | None, rate: Rate | None, lamda: float = 0.0) -> list[Effect]:
        """Add what may be added: sums are made in rank order, so only contributions below the first missing rank.

        The first contribution becomes the accumulator as it is. Each is multiplied by the rate of its staleness first,
        then compensated with `lamda` for what was changed since its worker has read.
        """
        effects: list[Effect] = []
        for rank in update.take(first_missing):
            update.folded.append(rank)
            contribution = update.contributions[rank]
            slot, contribution.slot = contribution.slot, None
            if slot is None:
                continue
            if rate is not None:
                effects += self._weigh(update, contribution, slot, rate)
            if lamda:
                effects += self._compensate(contribution, slot, lamda)
            if update.accumulator is None:
                update.accumulator = slot
            else:
                effects.append(Fold(update.accumulator, slot, self.spec.dtype))
        return effects

    def _weigh(self, update: Update, contribution: Contribution, slot: Slot, rate: Rate) -> list[Effect]:
        factor = rate(update.version - 1 - contribution.read_version)
        return [] if factor == 1.0 else [Weigh(slot, self.spec.dtype, factor)]

    def _compensate(self, contribution: Contribution, slot: Slot, lamda: float) -> list[Effect]:
        if contribution.read is None or contribution.read == self.version:
            return []
        return [Compensate(slot, self.spec.dtype, self.key, self.start, contribution.read, lamda)]
