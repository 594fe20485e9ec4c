"""The async client: `Session` behind connections to the scheduler and the servers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any, Self, TypeVar

import msgspec
import numpy as np

from aiokv.arrays import Arguments, Array, bytes_of, gather, landing_for, scatter
from aiokv.checkpoint.cluster_files import residuals_name, write_own
from aiokv.checkpoint.residual_journal import ResidualJournal
from aiokv.checkpoint.residuals import residual_file
from aiokv.compressing import Compressor, Job
from aiokv.config import Config, load_config
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.joiner import Joiner
from aiokv.core.worker.session import Session
from aiokv.errors import AiokvError, ClosedError, ClusterFullError, ProtocolError
from aiokv.kernels import backend_for, devices_for
from aiokv.list_sums import Merger
from aiokv.net.driver import Driver, Log, make_incarnation, make_name
from aiokv.net.memory import TURN_BYTES
from aiokv.net.server import Server
from aiokv.net.sigterm import OnSigterm, check_thread
from aiokv.operations import Operations
from aiokv.training.guard import Guard
from aiokv.types import Peer, Role
from aiokv.wire.limits import DEFAULT_LIMITS
from aiokv.wire.messages import Value
from aiokv.wire.receiver import Frame, Head, Landing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import TracebackType

    from aiokv.net.link import AnyLink
    from aiokv.staging import Staged
    from aiokv.types import Key

T = TypeVar("T")

REJOIN_PAUSE = 0.2
"""Seconds after which a worker asks again whether there is another cluster."""


class Client(Driver, Operations):
    """A worker of the cluster, for any asyncio program. Made by `aiokv.connect`; see `aiokv.operations.Operations`."""

    def __init__(self, config: Config, *, policy: str, device: str = "cpu", log: Log | None = None) -> None:
        super().__init__(config, log)
        self._policy, self._device = policy, device
        self._merger = Merger(backend_for(device), devices_for(device))
        self._guard = Guard(
            check_finite=config.check_finite, max_norm=config.max_norm, max_norm_ratio=config.max_norm_ratio
        )
        self._name = make_name(config, Role.WORKER)
        self._shard: Server | None = None
        joiner = Joiner(
            role=Role.WORKER,
            name=self._name,
            incarnation=make_incarnation(),
            scheduler=(config.scheduler_host, config.scheduler_port),
            advertised=("", 0),
        )
        limits: dict[str, Any] = {"max_open_pushes": config.max_open_pushes, "call_timeout": config.call_timeout}
        self._session = Session(joiner, policy=policy, **limits)
        self._calls = itertools.count()
        self._futures: dict[int, asyncio.Future[Any]] = {}
        self._arguments: dict[int, Arguments] = {}
        self._landed: dict[tuple[Peer, int], memoryview] = {}
        self._keeping: dict[int, list[int]] = {}
        """Tensors of calls that have ended, which may have to be sent again."""
        self._kept: dict[int, dict[int, Array]] = {}
        """Copies of these."""
        self._compressor = Compressor("reference" if config.backend == "reference" else "auto")
        self._encoding: dict[int, asyncio.Task[None]] = {}
        """Tasks whose threads read a call's arrays."""
        self._writing: dict[asyncio.Task[None], None] = {}
        """Tasks whose threads write what is left of gradients, or begin copies to devices."""
        self._copying: dict[Staged, bool] = {}
        """What calls receive for arrays on devices; True while a thread is about to begin copies of what has come."""
        self._open = False
        self._sigterm: OnSigterm | None = None
        self._preparing = asyncio.Lock()
        """Held by the call whose arrays are made ready; the others wait in their order."""

        self._most_bytes = DEFAULT_LIMITS.max_payload_bytes
        self._checkpoint_folder = config.checkpoint_folder
        if config.residual_folder:
            self._journal = ResidualJournal(config.residual_folder, config.cluster, self._name, self.note_from_thread)

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
        self._open = True
        timeout = self.config.join_timeout
        try:
            if self.config.colocate:
                await self._start_shard()
            await self._call(lambda call: st.Join(call, timeout))
            if self.config.leave_on_sigterm:
                self._sigterm = OnSigterm(self.plan_leave_soon)
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
        await _ended([task])
        return task.result()

    async def _prepare(self, function: Callable[[], T], nbytes: int) -> T:
        async with self._preparing:
            return await self._use(function, nbytes)

    def _seconds(self, timeout: float | None) -> float:
        return self.config.call_timeout if timeout is None else timeout

    async def _call(self, make: Callable[[int], st.Stimulus], arguments: Arguments | None = None) -> Any:
        if not self._open:
            raise ClosedError("this client is not connected: use `async with`, or call start()")
        number = next(self._calls)
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        if arguments is not None:
            self._arguments[number] = arguments
            if arguments.staged is not None:
                self._copying[arguments.staged] = False
        try:
            self.feed(make(number))
            return await future
        except asyncio.CancelledError:
            self.feed(st.Cancel(number))
            await self._settle(number)
            raise
        except AiokvError:
            await self._settle(number)
            raise
        finally:
            self._futures.pop(number, None)
            self._arguments.pop(number, None)
            if arguments is not None and arguments.staged is not None:
                del self._copying[arguments.staged]

    async def _settle(self, call: int) -> None:
        """Wait until nobody reads from the call's arrays any longer; cut a link whose peer has stopped to read."""
        await self._encoded(call)
        copying = self._copy(call)
        try:
            # Copying 100 MB at once would hold the loop for long.
            for _ in copying:
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            for _ in copying:
                pass
            raise
        for link in list(self._links.values()):
            if link.holds(call):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self.config.death_timeout):
                        await link.drained()
                        continue
                link.abort()

    def _copy(self, call: int) -> Iterator[None]:
        """Copy what is still to be sent of a call, or may have to be sent again, a part with each step."""
        kept: dict[int, Array] = {}
        for tensor in self._keeping.get(call, ()):
            source = bytes_of(self._arguments[call].sources[tensor])
            kept[tensor] = np.empty(source.nbytes, np.uint8)
            for begin in range(0, source.nbytes, TURN_BYTES):
                kept[tensor].data[begin : begin + TURN_BYTES] = source[begin : begin + TURN_BYTES]
                yield
        if call in self._keeping:
            # From here on nothing more is sent from the caller's arrays.
            self._kept[call] = kept
        for link in list(self._links.values()):
            while link.detach(call, TURN_BYTES):
                yield

    def _sources(self, call: int) -> Sequence[Array] | dict[int, Array]:
        """Return what a call sends: its caller's arrays, or copies of those that the caller has back."""
        kept = self._kept.get(call) if self._kept else None
        return self._arguments[call].sources if kept is None else kept

    async def _encoded(self, *calls: int) -> None:
        """Wait until no thread reads from the arrays of calls, of all if none is given. A thread can't be stopped."""
        await _ended([task for call, task in self._encoding.items() if not calls or call in calls])

    def _encode(self, effect: ef.Encode) -> None:
        job = self._compressor.begin(effect, self._arguments[effect.call].sources, self.rank)
        if job.waits or job.nbytes > TURN_BYTES or self._journal is not None:
            task = self._encoding[effect.call] = self._loop.create_task(self._encode_aside(job))
            task.add_done_callback(lambda _: self._encoding.pop(effect.call))
            return
        job.run()
        self.feed(self._compressor.finish(job))

    async def _write_residuals(self, effect: ef.WriteResiduals, state: dict[Key, dict[str, Any]]) -> None:
        """Write in a thread what was left of gradients at the clock of a checkpoint."""
        clock, rank = effect.clock, self.rank
        pieces = residual_file(state, rank, effect.place.rpartition("/")[2], None)
        folder, name = self._checkpoint_folder, residuals_name(rank)
        written = await asyncio.to_thread(write_own, effect.place, name, pieces, folder)
        self.feed(st.PartWritten(clock, *written))

    async def _encode_aside(self, job: Job) -> None:
        """Encode in a thread: the loop must not wait for it."""
        await asyncio.to_thread(job.run)
        if self._journal is not None and job.error is None:
            await asyncio.to_thread(self._journal.write, job, self.rank)
        self.feed(self._compressor.finish(job))

    def _fail(self, call: int, error: AiokvError) -> None:
        future = self._futures.get(call)
        if future is not None and not future.done():
            self.note("debug", f"failed.{type(error).__name__}", f"a call has failed: {error}", error.details)
            future.set_exception(error)

    def land(self, link: AnyLink, head: Head) -> Landing:
        """Receive straight into the caller's array, or nowhere when it does not wait any longer."""
        memory = self._session.landing(head.request, head.payload_nbytes)
        if isinstance(memory, ef.CallMemory):
            target = self._arguments[memory.call].targets[memory.tensor]
            return Landing(bytes_of(target)[memory.start : memory.stop], None)
        landing = Landing(memoryview(bytearray(head.payload_nbytes)), None)
        if isinstance(memory, ef.CallBuffer):
            self._arguments[memory.call].buffers[memory.number] = landing.view
        elif memory is not None:
            self._landed[link.peer, head.request] = landing.view
        return landing

    def frames_received(self, link: AnyLink, frames: list[Frame]) -> None:
        """Give tensors that came together to their arrays, unless their caller has stopped waiting."""
        for frame in frames:
            buffer = self._landed.pop((link.peer, frame.request), None)
            if buffer is None and not (self._copying and frame.nbytes):
                continue
            memory = self._session.landing(frame.request, frame.nbytes)
            if isinstance(memory, ef.CallTensors) and buffer is not None:
                targets = self._arguments[memory.call].targets
                scatter(buffer, [targets[tensor] for tensor in memory.tensors])
            elif isinstance(memory, ef.Replica) and isinstance(frame.message, Value) and buffer is not None:
                try:
                    self._update(memory, frame.message.codec, buffer)
                except ProtocolError as error:
                    link.refuse(error)
                    return
            if self._copying:
                self._begin_copies(memory.target if isinstance(memory, ef.Replica) else memory)
        super().frames_received(link, frames)

    def _begin_copies(self, memory: object) -> None:
        """Let devices copy what has come for their arrays, while the rest is coming."""
        if not isinstance(memory, ef.CallMemory | ef.CallTensors):
            return
        arguments = self._arguments[memory.call]
        staged = arguments.staged
        if staged is None:
            return
        if isinstance(memory, ef.CallMemory):
            came = [staged.landed(memory.tensor, memory.start, memory.stop)]
        else:
            came = [staged.landed(tensor, 0, arguments.targets[tensor].nbytes) for tensor in memory.tensors]
        # One thread begins whatever has come until it gets to it.
        if any(came) and not self._copying[staged]:
            self._copying[staged] = True
            task = self._loop.create_task(self._copy_landed(staged))
            self._writing[task] = None
            task.add_done_callback(self._writing.pop)

    async def _copy_landed(self, staged: Staged) -> None:
        await asyncio.to_thread(staged.begin)
        if staged in self._copying:
            self._copying[staged] = False

    def _update(self, replica: ef.Replica, codec: int, payload: memoryview) -> None:
        targets = [] if replica.target is None else self._arguments[replica.target.call].targets
        self._compressor.receive(replica, codec, payload, targets)

    def link_down(self, link: AnyLink, reason: str, error: AiokvError | None) -> None:
        """Forget what was only partly received."""
        for name in [name for name in self._landed if name[0] == link.peer]:
            del self._landed[name]
        super().link_down(link, reason, error)

    def _memory(self, payload: ef.Payload) -> tuple[memoryview, Callable[[], None] | None]:
        if isinstance(payload, ef.CallTensors):
            sources = self._sources(payload.call)
            return gather([sources[tensor] for tensor in payload.tensors]), None
        if isinstance(payload, ef.EncodedParts):
            return self._compressor.memory(payload), None
        assert isinstance(payload, ef.CallMemory), "a worker sends what its user gave"
        source = self._sources(payload.call)[payload.tensor]
        return bytes_of(source)[payload.start : payload.stop], None

    def _perform_own(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Complete(call, result):
                future = self._futures.get(call)
                if future is not None and not future.done():
                    future.set_result(result)
            case ef.Fail(call, error):
                self._fail(call, error)
            case ef.Discard(call):
                self._keeping.pop(call, None)
                self._kept.pop(call, None)
            case ef.Allocate(call, spec):
                self._arguments[call] = landing_for(spec)
            case ef.Deliver(call, ahead, tensors):
                [array] = self._arguments.pop(ahead).targets
                self._arguments[call].ahead.append((array, tensors))
            case ef.Deallocate(call):
                del self._arguments[call]
            case ef.Release(call, receiving, keeps):
                if keeps:
                    self._keeping[call] = keeps
                for peer, request in receiving:
                    if peer in self._links:
                        self._links[peer].discard(request)
            case _:
                self._perform_encoding(effect)

    def _perform_encoding(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Encode():
                self._encode(effect)
            case ef.Settle():
                self._compressor.settle(effect)
            case ef.ForgetResiduals(keys):
                self._compressor.forget(keys)
            case ef.KeepResiduals(clock, keys):
                self._compressor.keep(clock, keys)
            case ef.WriteResiduals(clock):
                work = self._write_residuals(effect, self._compressor.take(clock))
                task = self._loop.create_task(work)
                self._writing[task] = None
                task.add_done_callback(self._writing.pop)
            case _:
                super()._perform_own(effect)


async def _ended(tasks: list[asyncio.Task[Any]]) -> None:
    """Wait for tasks to end, even when this is cancelled meanwhile."""
    cancelled: asyncio.CancelledError | None = None
    while any(not task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        for task in tasks:
            # Nobody else asks for it.
            if not task.cancelled():
                task.exception()
        raise cancelled


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
