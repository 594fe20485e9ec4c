"""How an update is made, once its contributions are there: by which rule, with which norms, from which versions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import Apply, Effect, Norms, Retire, Skip, Sums
from aiokv.core.server.rounds.chunk import NONE
from aiokv.core.server.rounds.reads import Reads
from aiokv.optim import Assign

if TYPE_CHECKING:
    from aiokv.core.merging import Rate
    from aiokv.core.roster import Roster
    from aiokv.core.rules import Rules
    from aiokv.core.server.cluster_checkpoints import Checkpoints
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.tallies import Tallies
    from aiokv.core.server.rounds.updates import Contribution, Update
    from aiokv.optim import Optimizer
    from aiokv.types import Rank, Version


class Making:
    """The part of a `Coordinator` that says how updates are made.

    Args:
        rules: which rule makes an update.
        tallies: where contributions are counted.
        checkpoints: who holds on to values before they are replaced.
    """

    def __init__(self, rules: Rules, tallies: Tallies, checkpoints: Checkpoints) -> None:
        self._rules = rules
        self._tallies = tallies
        self._checkpoints = checkpoints

    def sum_up(self, chunk: Chunk, update: Update, first_missing: Rank | None) -> list[Effect]:
        """Add up what may be added; the highest place below which all is there is that of the first missing one."""
        policy = chunk.policy
        # As `_rate`; it is for every push.
        rate = None if policy.keeps_sum or policy.in_step else self._rules.merging.rate
        lamda = 0.0
        if chunk.reads is not None and not policy.in_step:
            # Contributions are compared with the value that they change.
            if first_missing is not None or chunk.applying or update.version != chunk.version + 1:
                return []
            lamda = self._compensation(update)
        # Also where the reduction was set while the round was open: a sum that is begun stays one.
        robust = None if update.folded else self._rules.merging.robust
        if robust and not policy.keeps_sum:
            return chunk.combine(update, first_missing, robust, rate, lamda)
        return chunk.fold(update, first_missing, rate, lamda)

    def _compensation(self, update: Update) -> float:
        """Return with which factor each contribution is compensated for what was changed since it was computed.

        The update does so with a single one; and a sum that was begun under another rule stays one.
        """
        is_sum = len(update.contributions) > 1 and not update.folded
        return self._rules.for_update(update.clock).compensation if is_sum else 0.0

    def _rate(self, chunk: Chunk) -> Rate | None:
        """Return what contributions are multiplied by, of their staleness; what is in step is not stale."""
        return None if chunk.policy.keeps_sum or chunk.policy.in_step else self._rules.merging.rate

    def needs_others(self, chunk: Chunk, update: Update) -> bool:
        """Tell whether an update can't be made before other servers have said something."""
        return not (chunk.is_whole or chunk.policy.keeps_sum) and bool(self._rules.at(update.clock).norm_counts)

    def begin(self, chunk: Chunk, update: Update, roster: Roster) -> list[Effect]:
        """Apply an update, or first let the norms be computed that its rule needs."""
        chunk.applying = True
        apply = self._apply(chunk, update, roster)
        # Where rounds are the same for all keys, so is the first one behind a checkpoint, whatever comes to this key.
        clock = apply.clock if chunk.rounds is None else chunk.rounds.clock_of_last(apply.clock)
        effects = self._checkpoints.before(chunk, clock)
        if not apply.rule.norm_counts:
            effects.append(chunk.completed(update, apply, self._rate(chunk)))
        else:
            chunk.pending = apply
            effects.append(self._norms_of(apply))
        return effects

    def _norms_of(self, apply: Apply) -> Norms:
        head = (apply.key, apply.start, apply.version, apply.slot)
        return Norms(*head, len(apply.norms), list(apply.norms), apply.clock, apply.rule, apply.divisor)

    def normed(self, chunk: Chunk, sums: Sums) -> list[Effect]:
        """Go on with the sums over whole tensors of one phase before an update."""
        apply = chunk.pending
        assert apply is not None, "norms are for an update"
        chunk.gathering = False
        apply.norms.append(sums)
        if len(apply.norms) < apply.rule.norm_phases:
            return [self._norms_of(apply)]
        chunk.pending = None
        return [apply]

    def skip(self, chunk: Chunk) -> list[Effect]:
        """Do without the update for which norms were computed; `applied` is to follow."""
        apply, chunk.pending, chunk.gathering = chunk.pending, None, False
        assert apply is not None, "norms are for an update"
        return [Skip(apply.key, apply.start, apply.version, apply.slot)]

    def _apply(self, chunk: Chunk, update: Update, roster: Roster) -> Apply:
        ranks: list[Rank] = []
        behind: list[Version] = []
        clock, version = 0, chunk.version
        # Not by comprehensions: where every push makes an update, each of them would be a call more.
        for place in update.folded:
            part = update.contributions[place]
            ranks.append(part.rank)
            behind.append(version - part.read_version)
            if part.clock > clock:  # noqa: PLR1730 - for every push, and `max` takes twice as long
                clock = part.clock
        if not chunk.policy.in_step:
            self._tallies.applied(ranks, behind)
        if chunk.policy.keeps_sum:
            rule: Optimizer = Assign()
            divisor = 1
        else:
            rule = self._rules.for_update(clock)
            divisor = self._rules.merging.divisor(len(ranks), len(chunk.group) or roster.world)
        apply = Apply(chunk.key, chunk.start, update.version, update.accumulator, ranks, behind, clock, rule, divisor)
        if chunk.reads is not None:
            read = part.read if len(ranks) == 1 else None
            apply.read = chunk.version if read is None else read
            update.keeps = True
        # Of a sum nobody computes anything.
        apply.keep = roster.respawns and chunk.policy.in_step and not chunk.policy.keeps_sum
        return apply

    def keep(self, chunk: Chunk, roster: Roster, *, made: bool) -> list[Effect]:
        """Take note of the value before an update, which a process may need that takes the place of a lost one."""
        if not (roster.respawns and chunk.policy.in_step) or chunk.policy.keeps_sum:
            return []
        # If it could not be made, the value is the same.
        before, chunk.previous = chunk.previous, chunk.version - 1 if made else chunk.version
        # A table keeps what its last update has changed, no more than that.
        is_over = chunk.is_dense and NONE < before < chunk.version - 1
        return [Retire(chunk.key, chunk.start, [before])] if is_over else []

    # --- what workers had read ---

    def read(self, chunk: Chunk, rank: Rank, named: Version) -> Version | None:
        """Return the version that a rank had read, if the rule looks at it; from now on such versions are kept."""
        if chunk.reads is None:
            if not (self._rules.current.reads_weight and chunk.is_dense):
                return None
            # An update that is under way keeps nothing.
            chunk.reads = Reads(chunk.version + chunk.applying)
        return chunk.reads.read(rank, named)

    def replaced(self, chunk: Chunk, update: Update, *, made: bool) -> None:
        """Take note of what became of the value before an update: it is kept, or has another number now."""
        assert chunk.reads is not None, "nobody asks otherwise"
        before = update.version - 1
        if made and update.keeps:
            chunk.reads.kept.append(before)
        elif not made:
            chunk.reads.replaced(before, update.version)
            for contribution in _open_contributions(chunk):
                if contribution.read == before:
                    contribution.read = update.version

    def retire(self, chunk: Chunk, roster: Roster) -> list[Effect]:
        """Drop the versions that no rank can refer to any longer."""
        if chunk.reads is None:
            return []
        ranks = [rank for rank in roster.members_of(chunk.group) if rank not in roster.lost]
        pending = [part.read for part in _open_contributions(chunk) if part.read is not None]
        versions = chunk.reads.retire(ranks, pending)
        return [Retire(chunk.key, chunk.start, versions)] if versions else []

    def forget_reads(self, chunk: Chunk) -> list[Effect]:
        """Drop all versions before the current one: pushes that are to come refer to none of them."""
        kept = [] if chunk.reads is None else chunk.reads.kept
        if chunk.is_dense and NONE < chunk.previous < chunk.version:
            kept = [*kept, chunk.previous]
        chunk.reads, chunk.previous = None, NONE
        return [Retire(chunk.key, chunk.start, kept)] if kept else []


def _open_contributions(chunk: Chunk) -> list[Contribution]:
    updates, found = list(chunk.updates.values()), []
    if chunk.rounds is not None:
        updates += chunk.rounds.updates.values()
        found = [one.contribution for one in chunk.rounds.undecided.values()]
    return found + [part for update in updates for part in update.contributions.values()]
