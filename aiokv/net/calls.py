"""The calls of a client: what is sent from their arrays, what lands in them, and how long they are in use."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.arrays import Arguments, Array, bytes_of, gather, landing_for, scatter
from aiokv.checkpoint.cluster_files import residuals_name, write_own
from aiokv.checkpoint.residuals import residual_file
from aiokv.compressing import Compressor, Job
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import AiokvError, ClosedError, ProtocolError
from aiokv.net.driver import Driver, Log
from aiokv.net.memory import TURN_BYTES
from aiokv.net.tether import Tether
from aiokv.store.pool import Pool
from aiokv.wire.messages import Value
from aiokv.wire.receiver import Frame, Head, Landing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from aiokv.checkpoint.residual_journal import ResidualJournal
    from aiokv.config import Config
    from aiokv.core.worker.session import Session
    from aiokv.net.link import AnyLink
    from aiokv.staging import Staged
    from aiokv.types import Key, Peer


class CallDriver(Driver):
    """Moves a worker's session, and the bytes of its calls.

    Args:
        config: the worker's settings.
        session: its decisions.
        log: where stimuli and effects are recorded, if they are.
    """

    _open = False

    def __init__(self, config: Config, session: Session, log: Log | None) -> None:
        super().__init__(config, log)
        self._session = session
        self._tether = Tether(self)
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
        self._pool = Pool()
        """Memory for values that come before they are asked for."""
        self._journal: ResidualJournal | None = None
        self._checkpoint_folder = config.checkpoint_folder

    @property
    def _owner(self) -> Tether:
        return self._tether

    async def _call(self, make: Callable[[int], st.Stimulus], arguments: Arguments | None = None) -> Any:
        if not self._open:
            raise ClosedError("this client is not connected: use `async with`, or call start()")
        number = next(self._calls)
        future = self._futures[number] = asyncio.get_running_loop().create_future()
        self._tether.hold()
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
            if not self._futures:
                self._tether.let_go()
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
        await ended([task for call, task in self._encoding.items() if not calls or call in calls])

    def _encode(self, effect: ef.Encode) -> None:
        job = self._compressor.begin(effect, self._arguments[effect.call].sources, self._session.rank)
        if job.waits or job.nbytes > TURN_BYTES or self._journal is not None:
            task = self._encoding[effect.call] = self._loop.create_task(self._encode_aside(job))
            task.add_done_callback(lambda _: self._encoding.pop(effect.call))
            return
        job.run()
        self.feed(self._compressor.finish(job))

    async def _write_residuals(self, effect: ef.WriteResiduals, state: dict[Key, dict[str, Any]]) -> None:
        """Write in a thread what was left of gradients at the clock of a checkpoint."""
        clock, rank = effect.clock, self._session.rank
        pieces = residual_file(state, rank, effect.place.rpartition("/")[2], None)
        folder, name = self._checkpoint_folder, residuals_name(rank)
        written = await asyncio.to_thread(write_own, effect.place, name, pieces, folder)
        self.feed(st.PartWritten(clock, *written))

    async def _encode_aside(self, job: Job) -> None:
        """Encode in a thread: the loop must not wait for it."""
        await asyncio.to_thread(job.run)
        if self._journal is not None and job.error is None:
            await asyncio.to_thread(self._journal.write, job, self._session.rank)
        self.feed(self._compressor.finish(job))

    def _reuse(self, arrays: list[Array]) -> None:
        """Keep memory for values that come ahead of their calls: fresh memory costs page faults."""
        for array in arrays:
            self._pool.give(array.reshape(-1).view(np.uint8))

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
                self._arguments[call] = landing_for(spec, self._pool.take(spec.nbytes))
            case ef.Deliver(call, ahead, tensors):
                [array] = self._arguments.pop(ahead).targets
                self._arguments[call].ahead.append((array, tensors))
            case ef.Deallocate(call):
                self._reuse(self._arguments.pop(call).targets)
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


async def ended(tasks: list[asyncio.Task[Any]]) -> None:
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
