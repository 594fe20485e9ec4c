"""The async client: `Session` behind connections to the scheduler and the servers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec

from aiokv.addresses import format_address
from aiokv.checkpoint.residual_journal import ResidualJournal
from aiokv.config import Config, load_config
from aiokv.core import stimuli as st
from aiokv.core.joiner import Joiner
from aiokv.core.worker.session import Session
from aiokv.errors import AiokvError, ClosedError, ClusterFullError
from aiokv.kernels import backend_for, devices_for
from aiokv.list_sums import Merger
from aiokv.net.calls import CallDriver, ended
from aiokv.net.driver import Log, make_incarnation, make_name
from aiokv.net.dropped import cut, in_loop, tell_of_dropped, where_made
from aiokv.net.memory import TURN_BYTES
from aiokv.net.server import Server
from aiokv.net.sigterm import OnSigterm, check_thread
from aiokv.net.tether import weakly
from aiokv.operations import Operations
from aiokv.training.guard import Guard
from aiokv.types import Role
from aiokv.wire.limits import DEFAULT_LIMITS

if TYPE_CHECKING:
    import traceback
    from collections.abc import Callable
    from types import TracebackType


T = TypeVar("T")

REJOIN_PAUSE = 0.2
"""Seconds after which a worker asks again whether there is another cluster."""


class Client(CallDriver, Operations):
    """A worker of the cluster, for any asyncio program. Made by `aiokv.connect`; see `aiokv.operations.Operations`."""

    def __init__(self, config: Config, *, policy: str, device: str = "cpu", log: Log | None = None) -> None:
        self._name = make_name(config, Role.WORKER)
        joiner = Joiner(
            role=Role.WORKER,
            name=self._name,
            incarnation=make_incarnation(),
            scheduler=(config.scheduler_host, config.scheduler_port),
            advertised=("", 0),
        )
        limits: dict[str, Any] = {"max_open_pushes": config.max_open_pushes, "call_timeout": config.call_timeout}
        super().__init__(config, Session(joiner, policy=policy, **limits), log)
        self._policy, self._device = policy, device
        self._merger = Merger(backend_for(device), devices_for(device))
        self._guard = Guard(
            check_finite=config.check_finite, max_norm=config.max_norm, max_norm_ratio=config.max_norm_ratio
        )
        self._made_at: traceback.StackSummary | None = None
        self._shard: Server | None = None
        self._sigterm: OnSigterm | None = None
        self._preparing = asyncio.Lock()
        """Held by the call whose arrays are made ready; the others wait in their order."""

        self._most_bytes = DEFAULT_LIMITS.max_payload_bytes
        if config.residual_folder:
            note = weakly(self.note_from_thread)
            self._journal = ResidualJournal(config.residual_folder, config.cluster, self._name, note)

    # --- life ---

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Leaving in good order tells the others to go on without this worker. After an error they must hear of a loss.
        await (self.close() if error is None else self.abort())

    async def start(self) -> None:
        """Join the cluster; waits until all of its members are there, and for a scheduler that is not there, or ends.

        Raises:
            JoinTimeoutError: the cluster is not complete within `Config.join_timeout`; names what is missing.
            ClusterFullError: all places are taken.
            HandshakeError: another cluster, token or protocol version.
            ConfigError: `Config.leave_on_sigterm` is set, and this is not the main thread.
        """
        if self.config.leave_on_sigterm:
            check_thread()
        self._start(self._session)
        self._made_at = where_made(self._loop)
        self._open = True
        timeout = self.config.join_timeout
        try:
            if self.config.colocate:
                await self._start_shard()
            await self._call(lambda call: st.Join(call, timeout))
            if self.config.leave_on_sigterm:
                self._sigterm = OnSigterm(weakly(self.plan_leave_soon))
        except BaseException:
            self._open = False
            await self._close_links()
            await self._close_shard(wait=0.0)
            raise

    def plan_leave_soon(self) -> None:
        """Let the client call `plan_leave`; may be called by any thread, and by handlers of signals."""
        with contextlib.suppress(RuntimeError):
            # Unless its loop is closed.
            self._loop.call_soon_threadsafe(self._plan_leave)

    def _plan_leave(self) -> None:
        if self._open:
            self.note("info", "leaves_soon", f"{self._name} is asked to end, and is about to leave", {})
            self.feed(st.PlanLeave(next(self._calls)))

    def _ignore_sigterm(self) -> None:
        sigterm, self._sigterm = self._sigterm, None
        if sigterm is not None:
            sigterm.close()

    async def close(self, *, timeout: float | None = None) -> None:
        """Leave the cluster in good order: later rounds do not wait for this worker. Pending calls fail.

        Args:
            timeout: seconds to wait for the scheduler's answer; `Config.death_timeout` when not given.
        """
        await self._leave(self.config.death_timeout if timeout is None else timeout, drains=False)

    async def leave(self, *, timeout: float | None = None) -> None:
        """Leave the cluster when all that was pushed counts; from now on nothing else can be called.

        Args:
            timeout: seconds to wait for that and for the scheduler's answer; `Config.call_timeout` when not given. What
                is not answered by then fails.
        """
        await self._leave(self._seconds(timeout), drains=True)

    async def _leave(self, seconds: float, *, drains: bool, moves_on: bool = False) -> None:
        if not self._open:
            return
        self._ignore_sigterm()
        try:
            await self._call(lambda call: st.Depart(call, seconds, drains, moves_on))
        except AiokvError as error:
            self.note("warning", "left_unheard", f"left without a word to the scheduler: {error}", error.details)
        finally:
            self._open = False
            await self._encoded()
            await asyncio.gather(*self._writing, return_exceptions=True)
            await self._close_links()
            # The others may still need what lies here.
            await self._close_shard(wait=self.config.join_timeout)

    async def _start_shard(self) -> None:
        """Host a server in this process and loop, reached without the network."""
        config = self.config
        name = f"{self._name}-shard"
        shard = Server(msgspec.structs.replace(config, role=Role.SERVER, name=name, colocate=False))
        self._shard = shard
        await shard.start()
        self.neighbours[shard.advertised] = shard

    async def _close_shard(self, *, wait: float) -> None:
        """Close the hosted server when the job is over, or after `wait` seconds."""
        shard, self._shard = self._shard, None
        if shard is None:
            return
        try:
            if wait:
                async with asyncio.timeout(wait):
                    await shard.wait_stopped()
        except TimeoutError:
            text = f"{self._name} closes its shard while other workers are still there"
            self.note("warning", "shard_closed_early", text, {"node": self._name})
        finally:
            await shard.close()

    async def abort(self) -> None:
        """Close all connections without leaving in good order: the others will see this worker as lost."""
        self._open = False
        self._ignore_sigterm()
        for call in list(self._futures):
            self._fail(call, ClosedError("the client was closed while the call was pending"))
        await self._encoded()
        await asyncio.gather(*self._writing, return_exceptions=True)
        await self._close_links()
        await self._close_shard(wait=0.0)

    async def rejoin(self) -> Client:
        """Leave, and join the cluster that comes after this one at the same address: this one has lost its servers.

        The scheduler of this one ends when all workers have left, or are lost; then it and the servers are started
        again, by whatever started them before. When it is gone already, nobody is told that this worker leaves.

        Returns:
            Another client with the same settings and name, which has joined.

        Raises:
            ClusterFullError: other workers have not left this one within `Config.join_timeout`.
            JoinTimeoutError: the other is not complete within `Config.join_timeout` after that.
        """
        await self._leave(self.config.death_timeout, drains=False, moves_on=True)
        until = self._loop.time() + self.config.join_timeout
        config = msgspec.structs.replace(self.config, name=self._name)
        while True:
            client = Client(config, policy=self._policy, device=self._device)
            try:
                await client.start()
            except ClusterFullError:
                # The scheduler of before still waits for the others to leave.
                if self._loop.time() >= until:
                    raise
                await asyncio.sleep(REJOIN_PAUSE)
            else:
                return client

    def __del__(self) -> None:
        if not self._open:
            return
        # Who is told of it may keep it.
        self._open, self._closed = False, True
        self._ignore_sigterm()
        links = [*self._links.values(), *self._others]
        in_loop(self._loop, cut, self._timer, list(self._connecting), links, self._shard)
        text = f"{self.description} was dropped before it was closed, so the others see it as lost: "
        tell_of_dropped(self, text + "use `async with`, or await `close()`", self._loop, self._made_at)

    @property
    def description(self) -> str:
        """Name and cluster, for people."""
        where = format_address(self.config.scheduler_host, self.config.scheduler_port)
        return f"client {self._name!r} of the cluster at {where}"

    @property
    def pending(self) -> int:
        """How many requests are not answered yet, those of cancelled calls included."""
        return self._session.pending

    # --- calls ---

    async def _compute(self, function: Callable[[], T], nbytes: int) -> T:
        return await asyncio.to_thread(function) if nbytes > TURN_BYTES else function()

    async def _use(self, function: Callable[[], T], nbytes: int) -> T:
        if nbytes <= TURN_BYTES:
            return function()
        task = asyncio.create_task(asyncio.to_thread(function))
        await ended([task])
        return task.result()

    async def _prepare(self, function: Callable[[], T], nbytes: int) -> T:
        async with self._preparing:
            return await self._use(function, nbytes)

    def _seconds(self, timeout: float | None) -> float:
        return self.config.call_timeout if timeout is None else timeout


def connect(
    scheduler: str | None = None,
    *,
    policy: str = "bsp",
    device: str = "cpu",
    config: Config | None = None,
    log: Log | None = None,
    **settings: Any,
) -> Client:
    """Return a client, to be used with `async with`: entering joins the cluster, leaving leaves it.

    Args:
        scheduler: address of the scheduler as `host:port`; from the environment when not given.
        policy: how pushes become updates, and who waits for whom: "bsp" (sync rounds), "asp" (each push at once) or any
            other that is registered, with its options, such as "ssp:3"; see `docs/policies.md`.
        device: where arrays that a call gives for one key are summed: "cpu", or "cuda".
        config: all settings; when given, nothing is read from the environment.
        log: where stimuli and effects are recorded, if they are.
        settings: fields of `Config` that win over the environment, such as `token`, `name` or `call_timeout`.

    Raises:
        ConfigError: settings that can't work, or this machine has no such device.
        MissingExtraError: the device's packages are not installed.
        PolicyError: unknown policy.
    """
    return Client(config or load_config(scheduler=scheduler, **settings), policy=policy, device=device, log=log)
