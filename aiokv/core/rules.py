"""Which update rule makes which update of a server, and how the contributions are merged."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.core.merging import Merging
from aiokv.errors import OptimizerError
from aiokv.optim import Assign, Optimizer, make_optimizer, rule_to_params
from aiokv.wire.messages import RulesState

if TYPE_CHECKING:
    from collections.abc import Mapping

Changes = tuple[tuple[int, dict[str, Any]], ...]
"""New parameters by the clock that they begin with, in its order."""

CHANGEABLE = ("clip_gradient", "learning_rate", "lr_mult", "rescale_grad", "schedule", "wd", "wd_mult")
"""Parameters of a rule that may change while it is used: what it keeps for each weight does not depend on them."""


def check_changes(params: Mapping[str, Any]) -> None:
    """Refuse parameters that can't change while a rule is used.

    Raises:
        OptimizerError: names the one that can't.
    """
    for param in params:
        if param not in CHANGEABLE:
            known = ", ".join(CHANGEABLE)
            text = f"parameter {param!r} can't change while the rule is used; these can: {known}"
            raise OptimizerError(text, expected=known, got=param)


def changed_by(
    rule: Optimizer, saved: Mapping[str, Any], changes: Changes
) -> tuple[dict[str, Any], list[tuple[int, Optimizer]]]:
    """Return the newest parameters of a rule, and what it is by the clock from which on it is that.

    Args:
        rule: what it was at first.
        saved: its parameters then.
        changes: what has become of them.

    Raises:
        OptimizerError: a change can't be.
    """
    params, rules = dict(saved), [(0, rule)]
    for since, changed in changes:
        check_changes(changed)
        params |= changed
        rules.append((since, make_optimizer(rule.name, params)))
    return params, rules


class Rules:
    """The rule that was set, and what became of its parameters, by the clock of the update from which on it counts.

    The clock of an update is the largest of its contributors', so it is the same for all chunks of a key, on whatever
    server they are: a change takes effect at the same round everywhere.
    """

    def __init__(self) -> None:
        self._name = ""
        self._params: dict[str, Any] = {}
        self._rules: list[tuple[int, Optimizer]] = [(0, Assign())]
        self._changes: dict[int, Mapping[str, Any]] = {}
        self.merging = Merging()
        """What becomes of contributions."""
        self.newest = 0
        """The clock of the newest update."""
        self.revision = 0
        """How often something besides that has changed."""

    @property
    def is_set(self) -> bool:
        """Whether a rule was set."""
        return bool(self._name)

    @property
    def current(self) -> Optimizer:
        """The rule with the newest parameters."""
        return self._rules[-1][1]

    def check(self, rule: Optimizer, merging: Merging) -> None:
        """Refuse another rule than the one that is set.

        Raises:
            OptimizerError: it is another one.
        """
        first = self._rules[0][1]
        if self.is_set and (first, self.merging) != (rule, merging):
            expected, got = f"{first}, {self.merging}", f"{rule}, {merging}"
            raise OptimizerError(
                f"the servers have {expected}, not {got}: set the same rule everywhere", expected=expected, got=got
            )

    def set(self, rule: Optimizer, name: str, params: Mapping[str, Any], merging: Merging) -> bool:
        """Use a rule; return False when it is the one that is set already.

        Raises:
            OptimizerError: another one is set.
        """
        self.check(rule, merging)
        if self.is_set:
            return False
        self._name, self._params, self.merging = name, dict(params), merging
        self._rules = [(0, rule)]
        self.revision += 1
        return True

    def saved(self, until: int | None = None) -> RulesState:
        """Return all that is known, as plain data; or what was known when updates up to a clock were made."""
        rules = dict(self._rules)
        plain = {since: rule_to_params(rules[since]) for since in self._changes}
        changes = tuple(
            (since, {param: plain[since][param] for param in params})
            for since, params in self._changes.items()
            if until is None or since <= until + 1
        )
        params = rule_to_params(self._rules[0][1]) if self.is_set else {}
        reduction, rate = self.merging.reduction, self.merging.staleness_rate
        clock = self.newest if until is None else min(self.newest, until)
        return RulesState(self._name, params, reduction, changes, clock, rate)

    def resume(self, rule: Optimizer, saved: Mapping[str, Any], merging: Merging, changes: Changes) -> bool:
        """Use a rule, and forget what has become of it but these changes; return whether it is set only now.

        Raises:
            OptimizerError: another one is set, or a change can't be; nothing has changed.
        """
        params, rules = changed_by(rule, saved, changes)
        is_new = self.set(rule, rule.name, saved, merging)
        self._params, self._rules, self._changes = params, rules, dict(changes)
        self.revision += 1
        return is_new

    def restore(self, state: RulesState) -> Optimizer | None:
        """Use what `saved` has returned; return the rule if it is set only now.

        Raises:
            OptimizerError: another one is set, or a change can't be; nothing has changed.
        """
        if not state.name:
            return None
        rule = make_optimizer(state.name, state.params)
        is_new = self.resume(rule, state.params, Merging(state.reduction, state.staleness_rate), state.changes)
        return rule if is_new else None

    def changed(self, since: int, params: Mapping[str, Any]) -> Optimizer:
        """Return what the rule would be with some parameters changed.

        Raises:
            OptimizerError: no rule is set, a parameter can't be or can't change, or not for float32 whatever the keys
                are, updates of that clock are made already, or a change for a later one is known.
        """
        check_changes(params)
        if not self.is_set:
            raise OptimizerError("no update rule is set: call set_optimizer first")
        if since <= self.newest and self._changes.get(since) != params:
            raise OptimizerError(
                f"updates of round {self.newest} are made already: a change can't begin with round {since}",
                expected=f"a round after {self.newest}",
                got=since,
            )
        if since < self._rules[-1][0] or self._changes.get(since, params) != params:
            known = self._rules[-1][0]
            raise OptimizerError(
                f"from round {known} on {self._changes[known]} holds: {dict(params)} can't begin with round {since}",
                expected=f"a round after {known}",
                got=since,
            )
        rule = make_optimizer(self._name, self._params | dict(params))
        if _fits_float32(self.current):
            # A server without a key of that precision must not use what one with such a key can't.
            rule.check_precision("float32")
        return rule

    def change(self, since: int, params: Mapping[str, Any], rule: Optimizer) -> None:
        """Use what `changed` has returned from that clock on."""
        if since not in self._changes:
            self._changes[since] = dict(params)
            self._params |= params
            self._rules.append((since, rule))
            self.revision += 1

    def for_update(self, clock: int) -> Optimizer:
        """Return the rule for an update that is about to be made."""
        self.newest = max(self.newest, clock)
        return self.at(clock)

    def at(self, clock: int) -> Optimizer:
        """Return the rule for an update of this clock."""
        since, newest = self._rules[-1]
        if since <= clock:
            return newest
        return next(rule for since, rule in reversed(self._rules) if since <= clock)


def _fits_float32(rule: Optimizer) -> bool:
    try:
        rule.check_precision("float32")
    except OptimizerError:
        return False
    return True
