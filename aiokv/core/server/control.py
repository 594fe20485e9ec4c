"""What workers ask of a server besides pushes and pulls: rules, compression, commands, saved state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.commands import make_command
from aiokv.core.effects import Configure, Effect, Execute, Prepare, Refuse, Send
from aiokv.core.merging import Merging
from aiokv.core.rules import changed_by
from aiokv.core.server.cuts import check_cut
from aiokv.errors import AiokvError
from aiokv.optim import make_optimizer
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.compression import Codecs
    from aiokv.core.joiner import Joiner
    from aiokv.core.roster import Roster
    from aiokv.core.rules import Rules
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.cluster_checkpoints import Checkpoints
    from aiokv.core.server.rounds.deciding import Deciding
    from aiokv.core.server.rounds.tallies import Tallies
    from aiokv.core.server.saving import Saving
    from aiokv.core.stimuli import Executed, Received
    from aiokv.optim import Optimizer
    from aiokv.types import Peer, Rank

Asked = (
    m.SetOptimizer
    | m.ChangeOptimizer
    | m.GetRules
    | m.PutRules
    | m.SetCompression
    | m.GetTally
    | m.ReportLoss
    | m.Command
)
"""The requests that `Control` carries out."""


class Control:
    """The part of a `Coordinator` that deals with what holds for all keys.

    Args:
        joiner: the server's place in the cluster.
        catalog: its keys.
        rules: its update rule.
        codecs: how contributions and values may be compressed.
        saving: who reads and writes saved rules.
        tallies: what became of contributions.
        checkpoints: who takes part in those of the cluster.
        deciding: who decides rounds.
    """

    def __init__(
        self,
        joiner: Joiner,
        catalog: Catalog,
        rules: Rules,
        codecs: Codecs,
        saving: Saving,
        tallies: Tallies,
        checkpoints: Checkpoints,
        deciding: Deciding,
    ) -> None:
        self._joiner = joiner
        self._catalog = catalog
        self._rules = rules
        self._codecs = codecs
        self._saving = saving
        self._tallies = tallies
        self._checkpoints = checkpoints
        self._deciding = deciding

    def asked(self, received: Received, message: Asked, rank: Rank, roster: Roster) -> list[Effect]:
        """Do what a worker asks for.

        Raises:
            AiokvError: it can't be done; nothing has changed.
        """
        peer, request = received.peer, received.request
        match message:
            case m.SetOptimizer():
                return self._set_optimizer(peer, request, message)
            case m.ChangeOptimizer(since, params):
                return self._change_optimizer(peer, request, since, params)
            case m.GetRules():
                return self._saving.read_rules(received)
            case m.PutRules():
                return self._put_rules(received, message)
            case m.SetCompression():
                new = self._codecs.set(message, rank, roster)
                return [*map(Prepare, new), Send(peer, request, m.Done())]
            case m.ReportLoss(loss):
                self._deciding.reported(rank, loss)
                return [Send(peer, request, m.Done())]
            case m.GetTally():
                return [Send(peer, request, self._tallies.answer())]
            case _:
                return self._execute(peer, request, message.name, message.params)

    def _put_rules(self, received: Received, message: m.PutRules) -> list[Effect]:
        rule = self._make_rule(message) if message.name else None
        if message.trial:
            if rule is not None:
                changed_by(rule, message.params, message.changes)
            return [Send(received.peer, received.request, m.Done())]
        effects = self._saving.write_rules(received, message, rule)
        return self._checkpoints.loaded(message.clock) + effects

    def executed(self, stimulus: Executed) -> Effect:
        """Return the answer to a command."""
        peer, request, outcome = stimulus.peer, stimulus.request, stimulus.outcome
        if isinstance(outcome, AiokvError):
            return Refuse(peer, request, outcome)
        return Send(peer, request, m.CommandResult(outcome))

    def _set_optimizer(self, peer: Peer, request: int, message: m.SetOptimizer) -> list[Effect]:
        rule = self._make_rule(message)
        is_new = not message.trial and self._rules.set(rule, message.name, message.params, _merging(message))
        effects: list[Effect] = [Configure(rule)] if is_new else []
        return [*effects, Send(peer, request, m.Done())]

    def _make_rule(self, message: m.SetOptimizer | m.PutRules) -> Optimizer:
        """Return a rule that can update all keys that are here, and is the one that is set, if one is."""
        rule, merging = make_optimizer(message.name, message.params), _merging(message)
        merging.check(rule)
        self._rules.check(rule, merging)
        for key, dtype in self._catalog.dtypes():
            merging.check_dtype(key, dtype, rule)
            if self._catalog.is_sparse(key):
                merging.check_table(key)
        self._catalog.check_tables(rule)
        for chunk in self._catalog.chunks.values():
            if chunk.is_dense:
                check_cut(rule, chunk.key, chunk.spec, chunk.start, chunk.stop, chunk.policy)
        return rule

    def _change_optimizer(self, peer: Peer, request: int, since: int, params: dict[str, Any]) -> list[Effect]:
        rule = self._rules.changed(since, params)
        self._rules.change(since, params, rule)
        return [Send(peer, request, m.Done())]

    def _execute(self, peer: Peer, request: int, name: str, params: dict[str, Any]) -> list[Effect]:
        return [Execute(peer, request, make_command(name, params), self._joiner.number)]


def _merging(message: m.SetOptimizer | m.PutRules) -> Merging:
    return Merging(message.reduction, message.staleness_rate)
