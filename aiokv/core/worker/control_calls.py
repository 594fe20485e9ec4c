"""A worker's calls besides pushes and pulls: update rules, policies, compression, commands, saved state, deletion."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from aiokv.core import stimuli as st
from aiokv.core.compression import make_compression
from aiokv.core.effects import URGENT, Complete, Effect, ForgetResiduals
from aiokv.core.joiner import answer_time
from aiokv.core.keys import check_key, name_keys
from aiokv.core.roster import LEADER
from aiokv.core.rules import check_changes
from aiokv.core.worker.call import Call
from aiokv.core.worker.changing import Change, policy_change
from aiokv.core.worker.state_parts import read_states, write_states
from aiokv.errors import CodecError
from aiokv.optim import make_optimizer
from aiokv.policy import get_policy
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.core.compression import Compression
    from aiokv.core.server_links import ServerLinks
    from aiokv.core.worker.calls import Calls
    from aiokv.core.worker.directory import Directory
    from aiokv.core.worker.participation import Participation
    from aiokv.core.worker.standing import Standing

ControlCall = (
    st.DeleteKeys
    | st.ConfigureOptimizer
    | st.AdjustOptimizer
    | st.SendCommand
    | st.ReadTallies
    | st.ReportLoss
    | st.ChangePolicy
    | st.AwaitRound
    | st.ConfigureCompression
    | st.RestoreResiduals
    | st.SavingCall
)
"""The calls that `ControlCalls` carries out."""


class ControlCalls:
    """The part of a `Session` that deals with what holds for all keys, or for what is known of them.

    Args:
        standing: whether it is a member.
        links: its connections to servers.
        calls: what it has asked.
        directory: what is known of the keys.
        participation: its rank.
    """

    def __init__(
        self, standing: Standing, links: ServerLinks, calls: Calls, directory: Directory, participation: Participation
    ) -> None:
        self._standing = standing
        self._links = links
        self._calls = calls
        self._directory = directory
        self._participation = participation
        self._changes = 0
        """How often it was changed."""
        self.changing: tuple[int, Compression] | None = None
        """The call that changes it, and to what."""

    def called(self, stimulus: ControlCall, now: float) -> list[Effect]:
        """Begin a call.

        Raises:
            AiokvError: it can't be; nothing has changed.
        """
        match stimulus:
            case st.DeleteKeys():
                return self._delete(stimulus, now)
            case st.ConfigureOptimizer():
                return self._set_optimizer(stimulus, now)
            case st.AdjustOptimizer():
                return self._change_optimizer(stimulus, now)
            case st.SendCommand():
                return self._command(stimulus, now)
            case st.ReadTallies() | st.ReportLoss():
                return self._tell_or_ask(stimulus, now)
            case st.ChangePolicy():
                return self._change_policy(stimulus, now)
            case st.AwaitRound():
                return self._await_round(stimulus, now)
            case st.ConfigureCompression():
                return self._set_compression(stimulus, now)
            case st.RestoreResiduals(call, keys, timeout):
                self._standing.check_ready(Call(call, "restore of residuals", timeout))
                self._calls.encodings.owe(keys)
                return [Complete(call)]
            case _:
                return self._save_or_load(stimulus, now)

    def _ask_servers(self, call: Call, message: m.Message, priority: int, now: float) -> list[Effect]:
        """Send the same message to all servers."""
        self._calls.enter(call, now)
        return [self._calls.requests.send(call, peer, message, priority) for peer in self._links.servers]

    def _ask_all(self, call: Call, make: Callable[[float], m.Message], now: float) -> list[Effect]:
        self._standing.check_ready(call)
        return self._ask_servers(call, make(answer_time(call.timeout)), 0, now)

    # --- keys ---

    def _delete(self, stimulus: st.DeleteKeys, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"delete of {name_keys(tuple(stimulus.keys))}", stimulus.timeout)
        self._standing.check_ready(call)
        self._directory.forget(stimulus.keys)
        self._calls.encodings.forget(stimulus.keys)
        forget: list[Effect] = [ForgetResiduals(stimulus.keys)]
        if self._participation.rank != 0:
            return [*forget, Complete(call.number)]
        message = m.Delete(tuple(stimulus.keys), answer_time(call.timeout), self._directory.counts.clock)
        return forget + self._ask_servers(call, message, 0, now)

    def _change_policy(self, stimulus: st.ChangePolicy, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"set_policy {stimulus.policy!r}", stimulus.timeout)
        self._standing.check_ready(call)
        policy = str(get_policy(stimulus.policy))
        leaving = self._directory.keys.leaving(policy, stimulus.keys, self._participation.rank)
        if not leaving:
            return [Complete(call.number)]
        call.change = policy_change(policy, leaving, list(self._links.servers), call.timeout)
        return self._calls.change(call, now)

    def _tell_or_ask(self, stimulus: st.ReadTallies | st.ReportLoss, now: float) -> list[Effect]:
        if isinstance(stimulus, st.ReadTallies):
            return self._ask_all(Call(stimulus.call, "reading of tallies", stimulus.timeout), m.GetTally, now)
        call = Call(stimulus.call, "report of the loss", stimulus.timeout)
        self._standing.check_ready(call)
        message = m.ReportLoss(stimulus.loss, answer_time(call.timeout))
        self._calls.enter(call, now)
        # Urgent, so that no push overtakes it that is made afterwards.
        return [self._calls.requests.send(call, LEADER, message)]

    def _await_round(self, stimulus: st.AwaitRound, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"wait for a round of key {stimulus.key!r}", stimulus.timeout)
        self._standing.check_ready(call)
        key = check_key(stimulus.key)
        server, newest = self._directory.newest(key)
        if stimulus.newer_than is not None:
            newest = stimulus.newer_than
        message = m.AwaitRound(key, newest, answer_time(call.timeout))
        self._calls.enter(call, now)
        return [self._calls.requests.send(call, server, message)]

    # --- rules and commands ---

    def _set_optimizer(self, stimulus: st.ConfigureOptimizer, now: float) -> list[Effect]:
        name, params, merging = stimulus.name, stimulus.params, stimulus.merging
        call = Call(stimulus.call, f"set_optimizer {name!r}", stimulus.timeout)
        self._standing.check_ready(call)
        rule = make_optimizer(name, params)
        merging.check(rule)
        message = m.SetOptimizer(
            name, dict(params), merging.reduction, answer_time(call.timeout), merging.staleness_rate
        )
        # Like a push of no special priority, so that it does not overtake those that were made before.
        return self._set_rule(call, message, now)

    def _set_rule(self, call: Call, message: m.SetOptimizer | m.PutRules, now: float) -> list[Effect]:
        """Set a rule on all servers or, if one has a key that can't have it, on none."""
        servers = list(self._links.servers)
        if len(servers) == 1:
            return self._ask_servers(call, message, 0, now)
        call.change = Change(servers, [message], self._directory.keys.here)
        return self._calls.change(call, now)

    def _change_optimizer(self, stimulus: st.AdjustOptimizer, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"change of {', '.join(stimulus.params)}", stimulus.timeout)
        self._standing.check_ready(call)
        check_changes(stimulus.params)
        call.result = since = self._calls.next_clock() if stimulus.since is None else stimulus.since
        message = m.ChangeOptimizer(since, dict(stimulus.params), answer_time(call.timeout))
        # It says when it counts, so it may overtake; and no push of that round may overtake it.
        return self._ask_servers(call, message, URGENT, now)

    def _command(self, stimulus: st.SendCommand, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"command {stimulus.name!r}", stimulus.timeout, result={})
        self._standing.check_ready(call)
        message = m.Command(stimulus.name, dict(stimulus.params), answer_time(call.timeout))
        # Like a push of no special priority, so that it is carried out after those that were made before.
        return self._ask_servers(call, message, 0, now)

    # --- compression ---

    def _set_compression(self, stimulus: st.ConfigureCompression, now: float) -> list[Effect]:
        call = Call(stimulus.call, f"compression with {stimulus.name or None!r}", stimulus.timeout)
        self._standing.check_ready(call)
        wanted = make_compression(stimulus.name, stimulus.params, stimulus.pull_name, stimulus.pull_params)
        if self.changing is not None and self._calls.is_open(self.changing[0]):
            raise CodecError(f"{call.what}: another change is under way")
        if wanted == self._calls.compression:
            return [Complete(call.number)]
        self.changing = (call.number, wanted)
        push, pull = (("", {}) if codec is None else (codec.name, codec.params) for codec in (wanted.push, wanted.pull))
        message = m.SetCompression(self._changes + 1, *push, *pull, answer_time(call.timeout))
        return self._ask_servers(call, message, URGENT, now)

    def changed(self, changing: tuple[int, Compression], effects: list[Effect]) -> list[Effect]:
        """Compress as all servers know it by now, if that is so; what was called before goes as it was to go then."""
        if Complete(changing[0]) in effects:
            self._calls.compression = changing[1]
            self._changes += 1
            self.changing = None
        return effects

    # --- saving and loading ---

    def _save_or_load(self, stimulus: st.SavingCall, now: float) -> list[Effect]:
        match stimulus:
            case st.ReadState() | st.WriteState():
                return self._exchange_state(stimulus, now)
            case st.ReadRules(call, timeout):
                return self._ask_all(Call(call, "reading of the update rule", timeout), m.GetRules, now)
            case st.WriteRules(call, rules, timeout):
                return self._write_rules(Call(call, "loading of the update rule", timeout), rules, now)
            case st.Adopt(call, records):
                self._directory.adopt(records)
                return [Complete(call)]
            case _:
                self._directory.counts.resume(stimulus.clock, stimulus.updates)
                return [Complete(stimulus.call)]

    def _write_rules(self, call: Call, rules: m.RulesState, now: float) -> list[Effect]:
        self._standing.check_ready(call)
        return self._set_rule(call, m.PutRules(**structs.asdict(rules), timeout=answer_time(call.timeout)), now)

    def _exchange_state(self, stimulus: st.ReadState | st.WriteState, now: float) -> list[Effect]:
        verb = "saving" if isinstance(stimulus, st.ReadState) else "loading"
        call = Call(stimulus.call, verb, stimulus.timeout)
        self._standing.check_ready(call)
        wait = answer_time(call.timeout)
        if isinstance(stimulus, st.ReadState):
            return self._calls.send(call, read_states(self._directory.layout, stimulus, wait), now)
        return self._calls.send(call, write_states(self._directory.layout, stimulus, wait), now)
