"""A worker's calls in a step of training: it pushes, pulls, meets the others, and says when it contributes no more."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core import stimuli as st
from aiokv.core.deadlines import check_timeout
from aiokv.core.effects import Complete, Effect
from aiokv.core.joiner import answer_time
from aiokv.core.worker.call import Call
from aiokv.errors import ConfigError, MembershipError
from aiokv.initializers import make_initializer
from aiokv.policy import get_policy
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.worker.calls import Calls
    from aiokv.core.worker.directory import Directory
    from aiokv.core.worker.participation import Participation
    from aiokv.core.worker.standing import Standing

StepCall = st.Transfer | st.EnterBarrier | st.Finish
"""The calls that `StepCalls` carries out."""

MAX_PRIORITY = 1_000_000


def check_priority(priority: object) -> None:
    """Refuse what is no priority.

    Raises:
        ConfigError: not a whole number within the limits.
    """
    if type(priority) is bool or not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        expected = f"a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
        raise ConfigError(f"priority must be {expected}, got {priority!r}", expected=expected, got=repr(priority))


class StepCalls:
    """The part of a `Session` that begins these calls.

    Args:
        standing: whether it is a member.
        calls: what it has asked.
        directory: what is known of the keys.
        participation: its rank, and the others'.
    """

    __slots__ = ("_calls", "_directory", "_finished", "_participation", "_standing")

    def __init__(
        self,
        standing: Standing,
        calls: Calls,
        directory: Directory,
        participation: Participation,
    ) -> None:
        self._standing = standing
        self._calls = calls
        self._directory = directory
        self._participation = participation
        self._finished = False

    @property
    def may_begin(self) -> bool:
        """Whether a push or pull may be begun without looking whether this worker may."""
        return self._standing.is_ready and not self._finished and not self._participation.is_new

    def called(self, stimulus: StepCall, now: float) -> list[Effect]:
        """Begin a call.

        Raises:
            AiokvError: it can't be; nothing has changed.
        """
        match stimulus:
            case st.Transfer():
                return self.transfer(stimulus, now)
            case st.EnterBarrier():
                return self._enter_barrier(stimulus, now)
            case _:
                return self._finish(stimulus, now)

    def transfer(self, stimulus: st.Transfer, now: float, *, is_allowed: bool = False) -> list[Effect]:
        """Begin a push, a pull or an init.

        Args:
            stimulus: what is wanted.
            now: the time in seconds.
            is_allowed: it is no init, and `may_begin` is true.

        Raises:
            AiokvError: it can't be; nothing has changed.
        """
        call = Call(stimulus.call, stimulus.operation, stimulus.timeout, 0, stimulus.tensors, stimulus)
        if is_allowed:
            check_timeout(call.timeout)
        else:
            self._standing.check_ready(call)
        check_priority(stimulus.priority)
        call.tensors = self._directory.check(stimulus.tensors, len(stimulus.rows))
        if is_allowed:
            return self._calls.transfer(call, now)
        if self._finished or self._participation.is_new or stimulus.operation is st.Operation.INIT:
            self._check_options(call, stimulus)
        if stimulus.operation is st.Operation.INIT:
            return self._calls.init(call, now, rank=self._participation.rank)
        return self._calls.transfer(call, now)

    def _check_options(self, call: Call, transfer: st.Transfer) -> None:
        operation, options = transfer.operation, transfer.options
        if self._finished and operation in {st.Operation.PUSH, st.Operation.PUSHPULL}:
            raise MembershipError(f"{call.what}: this worker has finished; nobody waits for its contributions")
        if self._participation.is_new and operation in {st.Operation.PUSH, st.Operation.PUSHPULL}:
            text = f"{call.what}: this worker joins a running job: call resume_step before the first push"
            raise MembershipError(text)
        if operation is not st.Operation.INIT:
            return
        if options.policy:
            get_policy(options.policy)
        for _, spec in transfer.tensors[len(transfer.tensors) - len(transfer.rows) :]:
            make_initializer(options.initializer, spec.dtype)
        options.group = self._participation.roster.check_group(options.group)
        rank = self._participation.rank
        if options.group and rank not in options.group:
            ranks = list(options.group)
            raise MembershipError(f"{call.what}: its group is ranks {ranks}; rank {rank} is none of them")

    def _enter_barrier(self, stimulus: st.EnterBarrier, now: float) -> list[Effect]:
        name, timeout = stimulus.name, stimulus.timeout
        call = Call(stimulus.call, f"barrier {name!r}", timeout)
        after = self._calls.meetings.last(name, stimulus.group)
        message = m.Barrier(name, answer_time(timeout), stimulus.group, stimulus.said, after)
        if stimulus.leaves:
            # Lost servers may be just what the others are to hear of.
            self._standing.check_open(call)
            return [*self._calls.ask_scheduler(None, message), Complete(call.number)]
        self._standing.check_ready(call)
        self._calls.enter(call, now)
        return self._calls.ask_scheduler(call, message)

    def _finish(self, stimulus: st.Finish, now: float) -> list[Effect]:
        call = Call(stimulus.call, "finish", stimulus.timeout)
        self._standing.check_ready(call)
        self._finished = True
        call.last = m.Finish(self._participation.crossing.told)
        return self._calls.finish(call, now)
