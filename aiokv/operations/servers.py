"""The calls of a worker that tell the servers what to do: update rule, policies and commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.commands import plain
from aiokv.commands.registry import check_name
from aiokv.core import stimuli as st
from aiokv.core.merging import Merging
from aiokv.errors import CommandError
from aiokv.operations.base import BaseOperations

if TYPE_CHECKING:
    from aiokv.types import Key

PROFILE_ACTIONS = ("start", "stop", "resume", "dump")


class ServerOperations(BaseOperations):
    """The part of `Operations` that says what servers do."""

    # --- update rule ---

    async def set_optimizer(
        self,
        /,
        name: str,
        *,
        reduction: str = "sum",
        staleness_rate: str = "1",
        timeout: float | None = None,
        **params: Any,
    ) -> None:
        """Set the servers' update rule, for all keys. Every worker may call it with the same rule.

        It is set on all servers or, when one of them has a key that can't be updated so, on none.

        Without a rule the servers assign: the new value is the sum of a round's pushes, in async the last push.

        Args:
            name: of the rule, such as "assign", "sgd" or "adam"; see `aiokv.optim`.
            reduction: "sum" of the contributions; "mean": that divided by their number; "mean_of_world": by the number
                of workers of the key's group, or of the whole cluster, whether they still contribute or not; "median"
                or "trimmed_mean" of each element: one worker that is far off does little harm.
            staleness_rate: what each contribution is multiplied by before that: "1", "1/max(1,tau)" or "1/(1+tau)",
                where tau is how many versions old the value is that it was computed from. Under "bsp" it is 0. For
                keys of floats.
            timeout: seconds.
            params: the rule's parameters.

        Raises:
            OptimizerError: unknown rule, reduction or staleness rate, wrong parameter, a key that can't be updated
                so, or another rule is set.
        """
        seconds, merging = self._seconds(timeout), Merging(reduction, staleness_rate)
        await self._call(lambda call: st.ConfigureOptimizer(call, name, params, seconds, merging))

    async def change_optimizer(
        self, /, *, since: int | None = None, timeout: float | None = None, **params: Any
    ) -> int:
        """Change parameters of the update rule, from one round on, the same on all servers.

        Every worker may call it, with the same values and at the same place of its program.

        Args:
            since: the first round that the change is for; the next one that this worker pushes when not given. A
                round is counted by the most pushes of any key that a contributor has made.
            timeout: seconds.
            params: new values of `learning_rate`, `wd`, `rescale_grad`, `clip_gradient`, `lr_mult`, `wd_mult` or
                `schedule`.

        Returns:
            The first round that the change is for.

        Raises:
            OptimizerError: no rule is set, a wrong parameter, or the round is over already.
        """
        seconds = self._seconds(timeout)
        first: int = await self._call(lambda call: st.AdjustOptimizer(call, params, since, seconds))
        return first

    async def set_learning_rate(
        self, learning_rate: float, *, since: int | None = None, timeout: float | None = None
    ) -> int:
        """Change the learning rate, from one round on, the same on all servers. See `change_optimizer`."""
        return await self.change_optimizer(since=since, timeout=timeout, learning_rate=learning_rate)

    # --- policies ---

    async def set_policy(self, policy: str, *keys: Key, timeout: float | None = None) -> None:
        """Let keys follow another synchronisation policy. Every worker of their group calls it before the same step.

        What was pushed before follows the old policy, which waits for nobody any longer who has called this; what is
        pushed afterwards follows the new one, which counts anew. It returns when all servers have the new policy. A
        worker that joins with a later step learns the policy, and calls this for the last change before that.
        Other calls of the keys that this worker makes meanwhile wait for it. After an error the servers may go over
        all the same once the others call; until this worker has called it again, its pushes of the keys are refused.

        Args:
            policy: its text, such as "asp" or "ssp:3"; see `docs/policies.md`.
            keys: those that change; all of this worker's that are not of policy "sum" when none is given.
            timeout: seconds.

        Raises:
            PolicyError: unknown policy, another worker asks for another one, or it is to or from "sum".
            OptimizerError: the update rule can't be used under it.
            UnknownKeyError: this worker has not initialised a key.
            MembershipError: this worker is not in a key's group.
            BarrierTimeoutError: names the ranks that did not call it.
        """
        seconds = self._seconds(timeout)
        await self._call(lambda call: st.ChangePolicy(call, policy, list(keys), seconds))

    async def report_loss(self, loss: float, *, timeout: float | None = None) -> None:
        """Say which loss this worker has measured, for policies that go by it: "adasync".

        It counts for the rounds of what is pushed afterwards, so it is called before the push of the same step; it may
        be called for some of the steps only. What is not finite is not counted.

        Args:
            loss: such as the mean over the batch, or over the last batches.
            timeout: seconds.
        """
        seconds = self._seconds(timeout)
        await self._call(lambda call: st.ReportLoss(call, float(loss), seconds))

    # --- the servers themselves ---

    async def send_command_to_servers(
        self, name: str, params: Any = None, *, timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Let every server run a command. See `aiokv.commands`.

        It is sent behind the pushes that were made before, and not repeated: what a command does is done once.

        Args:
            name: of the command, such as "statistics".
            params: its parameters: a dict, a `msgspec.Struct`, or nothing.
            timeout: seconds.

        Returns:
            What it has returned, by the servers' numbers.

        Raises:
            CommandError: unknown command, wrong parameter, or it failed on a server.
        """
        check_name(name)
        data = {} if params is None else plain(name, params)
        seconds = self._seconds(timeout)
        answers = await self._call(lambda call: st.SendCommand(call, name, data, seconds))
        return [answers[index] for index in sorted(answers)]

    async def profile_servers(
        self, action: str, *, path: str = "profile.json", timeout: float | None = None
    ) -> list[dict[str, Any]]:
        """Let the servers record what they do, and write it down as traces for Chrome's viewer.

        Args:
            action: "start" a recording, "stop" it for a while, "resume" it, or "dump" it.
            path: for "dump": where on the servers' machines; server 0 writes "server0_profile.json" beside it.
            timeout: seconds.

        Returns:
            For each server what it says, such as the path of its file.

        Raises:
            CommandError: unknown action, or a file can't be written.
        """
        if action not in PROFILE_ACTIONS:
            known = ", ".join(PROFILE_ACTIONS)
            raise CommandError(f"unknown action {action!r}; known: {known}", expected=known, got=repr(action))
        params = {"path": path} if action == "dump" else {}
        return await self.send_command_to_servers(f"profiler.{action}", params, timeout=timeout)
