"""The calls of a worker, as its user makes them, whatever carries them out.

Each is written once, in the part that deals with its subject: `values`, `members`, `servers`, `compression`. What takes
several of these, to save and to go on, is here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiokv.checkpoint import calls, reseeding, snapshot
from aiokv.core import stimuli as st
from aiokv.operations.compression import CompressionOperations
from aiokv.operations.servers import ServerOperations
from aiokv.operations.values import ValueOperations

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiokv.checkpoint.reseeding import Reseeded
    from aiokv.types import Key

__all__ = ["Operations"]


class Operations(ValueOperations, ServerOperations, CompressionOperations):
    """What a worker can do.

    Every call takes one key with its array, a list of keys with a list of arrays, or a dict of them, and `timeout` in
    seconds (default: `Config.call_timeout`). Where a key has one array it may have a list of them, one for each device:
    what is pushed is their sum, made in the order of the list, low precisions in float32; what is received goes to all
    of them. Arrays may lie on the devices that the store uses; see `docs/device.md`. Many calls may be in flight at
    once. A call that is cancelled or times out gives its arrays back at once; what it pushed still counts. Do not
    change an array while a call uses it.

    All methods raise:
        ClosedError: the client is not connected.
        CallTimeoutError: the deadline passed; the message names the missing ranks, key and round, or node.
        WorkerLostError, ServerLostError, SchedulerLostError: a member that the call needs is gone.
    """

    async def resume_step(self, *, timeout: float | None = None) -> int:
        """Return how many steps this worker has made already, and go on from there: 0 in a new job.

        For a process that takes the place of a lost one (`on_worker_loss = "respawn"`), that goes on with a checkpoint
        (`aiokv run --resume`), or that joins a running job (`max_workers`): there it returns how many steps the others
        have made, and they wait for this worker from the next one on. Its program begins as it always does, up to its
        `init`, and then asks::

            for step in range(await kv.resume_step(), steps):
                ...

        What is read before the first push is what that step was computed from. In sync rounds the step is made again
        with the same bits, and what had been pushed of it counts once. Only a worker that pushes all its keys in every
        step, and waits for that before the next step, can go on.

        Raises:
            UnknownKeyError: no key is initialised.
            MembershipError: this worker has pushed already, or who was in its place has pushed some keys more often.
            PolicyError: a key has a policy with which nobody can join a running job.
            CallTimeoutError: the others have not come to the end of a step in time; names them.
            DataError: what compression had left of this worker's gradients is damaged in the checkpoint.
        """
        seconds = self._seconds(timeout)
        step = int(await self._call(lambda call: st.GoOn(call, seconds)))
        await self._resume_compression(step)
        return step

    async def save(
        self,
        url: calls.Url,
        *,
        keys: calls.Keys = None,
        facts: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Write weights, optimizer state and update rule to one file. Every worker calls it, and waits for the others.

        Rank 0 does the work, a few parts of tensors at a time; nobody pushes meanwhile. The file is written aside and
        then gets its name, so that there is always a whole one. It is a safetensors file with a checksum. A worker that
        compresses writes what is left of its gradients beside it, to `url` and ".rank" and its rank.

        Args:
            url: a path, or an address that fsspec knows, such as "s3://bucket/name".
            keys: one key, or those that are saved; all when not given.
            facts: what else is to be kept, as JSON, such as the epoch; those of rank 0.
            timeout: seconds, for each wait of a worker for the others, and for each exchange with the servers.

        Raises:
            DataError: a file can't be written, or somebody has pushed meanwhile. It is raised on all workers, as are
                the others below, and the file of before is still there.
            UnknownKeyError: a key is not initialised.
            ConfigError: the scheduler's `chunk_bytes` makes chunks that are too large for a message with their state,
                or there are too many facts.
            BarrierTimeoutError: names the ranks that did not come.
            MembershipError: rank 0 has finished, and does not come.
            CallTimeoutError: another worker's caller has cancelled its call.
        """
        await calls.save(self, url, keys, self._seconds(timeout), weights=True, facts=facts)

    async def load(
        self,
        url: calls.Url,
        *,
        keys: calls.Keys = None,
        check: Callable[[dict[str, Any]], object] | None = None,
        timeout: float | None = None,
    ) -> dict[str, Any]:
        """Go on with what `save` has written, in this cluster or another one, with any number of servers and workers.

        Every worker calls it, and waits for the others; rank 0 does the work. Keys that are not initialised are made as
        they were, others that are not in the file stay as they are. The update rule of the file is set too, with the
        changes of its parameters, and schedules go on where they were. Values that were pulled before are those of
        before. Compression goes on with what was left; see `aiokv.checkpoint.residuals` for another number of workers.

        Args:
            url: as for `save`.
            keys: one key, or those that are loaded; all in the file when not given.
            check: is called with the facts on every worker; when it raises, nothing has changed.
            timeout: as for `save`.

        Returns:
            The facts that `save` was given.

        Raises:
            DataError: a file is missing, damaged or not one of `save`; nothing has changed. It is raised on all
                workers, as are the others below.
            UnknownKeyError: a key is not in the file, or its values are not and it is not initialised either; nothing
                has changed.
            SpecMismatchError: of a key in the file; nothing has changed.
            MembershipError: a key that is not initialised belongs to ranks that there are not, or rank 0 does not come;
                nothing has changed.
            OptimizerError: another update rule is set; nothing has changed.
            ConfigError: as for `save`.
            BarrierTimeoutError, CallTimeoutError: as for `save`.
        """
        return await calls.load(self, url, keys, self._seconds(timeout), weights=True, check=check)

    async def save_optimizer_states(
        self, url: calls.Url, *, keys: calls.Keys = None, timeout: float | None = None
    ) -> None:
        """Write what `save` writes, without the weights."""
        await calls.save(self, url, keys, self._seconds(timeout), weights=False, facts=None)

    async def load_optimizer_states(
        self, url: calls.Url, *, keys: calls.Keys = None, timeout: float | None = None
    ) -> None:
        """Go on with the optimizer state of a file, of `save` too; the weights stay. See `load`."""
        await calls.load(self, url, keys, self._seconds(timeout), weights=False, check=None)

    async def reseed(self, values: Mapping[Any, Any], step: int, *, timeout: float | None = None) -> Reseeded:
        """Go on in a new cluster after all servers of the one before were lost, with the weights that workers have.

        Every worker calls it, and waits for the others, in the place of `init`. The keys are made, with the weights of
        the rank that has made the most steps, which all workers then read. Rounds and schedules go on behind that
        step. The state of the update rule begins anew, which is logged as a warning; set the rule as in a new job.

        Args:
            values: this worker's weights, as a dict of arrays; what the servers have is read into them.
            step: how many steps this worker has made: of so many rounds the weights are. 0 in a new process.
            timeout: seconds, for each wait of a worker for the others, and for each exchange with the servers.

        Returns:
            The step after which the job goes on, and the rank whose weights these are.

        Raises:
            SpecMismatchError: the keys are there, and others.
            BarrierTimeoutError, CallTimeoutError: as for `save`.
        """
        return await reseeding.reseed(self, values, step, self._seconds(timeout))

    async def update_counts(self, *, timeout: float | None = None) -> dict[Key, int]:
        """Return how many updates each key has seen with its optimizer state: the t of Adam, for the last of them.

        Of all keys that this worker has initialised.
        """
        return await snapshot.count_updates(self, self._seconds(timeout))
