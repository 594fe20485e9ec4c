"""The store without a network: one worker and one server in this process, synchronously.

The same `Session`, `Coordinator` and `ParameterStore` as in a cluster; only the wire between them is a queue. So rules,
errors and results are the same, and a program tried with `local` runs on a cluster unchanged.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from aiokv import device_storing
from aiokv.arrays import Arguments, bytes_of, gather, landing_for, scatter
from aiokv.commands import ServerInfo, run
from aiokv.compressing import Compressor
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.joiner import Joiner
from aiokv.core.server.coordinator import Coordinator
from aiokv.core.worker.session import Session
from aiokv.errors import AiokvError, ClosedError, OptimizerError
from aiokv.kernels import devices_for, get_backend
from aiokv.kvstore import KVStore, Updater
from aiokv.list_sums import Merger
from aiokv.local_devices import LocalDevices
from aiokv.operations import Operations
from aiokv.store.memory import ParameterStore
from aiokv.storing import perform, span, state_bytes
from aiokv.telemetry import Counters, Profile, take_note
from aiokv.training.guard import Guard
from aiokv.types import SCHEDULER, Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

T = TypeVar("T")

CALL_SECONDS = 1.0
"""Time stands still here; a call has to have a limit all the same."""

SERVER = 0
WORKER = 0
NOWHERE = ("local", 0)

VIEW = m.View(
    epoch=1,
    workers=(m.WorkerEntry(0, "worker", 1),),
    servers=(m.ServerEntry(0, "server", 1, *NOWHERE),),
    heartbeat=1.0,
    death_timeout=2.0,
    chunk_bytes=1 << 62,
    split_bytes=1 << 62,
)


class LocalStore(KVStore):
    """A store with one worker: every push is a round of its own. Not for use by several threads at once.

    Args:
        backend: who does the arithmetic; see `aiokv.kernels.get_backend`.
        check_finite: refuse to push NaN and infinities.
        max_norm, max_norm_ratio: refuse to push gradients with a larger norm; see `aiokv.training.guard.Guard`.

    Raises:
        ConfigError: no such backend, or a limit that can't be.
    """

    type = "local"

    def __init__(
        self,
        *,
        backend: str = "reference",
        check_finite: bool = False,
        max_norm: float = 0.0,
        max_norm_ratio: float = 0.0,
    ) -> None:
        self._worker = _LocalWorker(backend)
        self._worker._guard = Guard(check_finite=check_finite, max_norm=max_norm, max_norm_ratio=max_norm_ratio)

    @property
    def _operations(self) -> Operations:
        return self._worker

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        # It never waits for anything, so its first step is its last one.
        try:
            coroutine.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        raise AssertionError("a local call has waited")

    def set_updater(self, updater: Updater) -> None:
        """Let a function make the updates. See `KVStore.set_updater`."""
        self._worker.set_updater(updater)

    def close(self, *, timeout: float | None = None) -> None:
        """Forget all values. Can be called twice."""
        self._worker.close()


class _LocalWorker(Operations):
    """The worker and the server; a call moves messages between them until nothing is left to do."""

    def __init__(self, backend: str) -> None:
        self.closed = False
        adder = get_backend(backend)
        self._merger = Merger(adder, devices_for(backend))
        self._devices = LocalDevices() if backend == "cuda" else None
        self._store = ParameterStore(adder) if self._devices is None else self._devices.store
        self._updater: Updater | None = None
        self._has_rule = False
        self._counters = Counters()
        self._profile = Profile()
        self._session = Session(_joiner(Role.WORKER, "worker"), policy="bsp")
        self._coordinator = Coordinator(_joiner(Role.SERVER, "server"))
        self._now = 0.0
        self._queue: deque[tuple[Session | Coordinator, st.Stimulus]] = deque()
        self._done: list[st.Stimulus] = []
        self._calls = itertools.count()
        self._ended: dict[int, ef.Complete | ef.Fail] = {}
        self._arguments: dict[int, Arguments] = {}
        self._compressor = Compressor("reference" if backend == "reference" else "auto")
        self._queue.append((self._coordinator, st.Received(SCHEDULER, 0, VIEW)))
        self._move(st.Join(next(self._calls), CALL_SECONDS))

    def close(self) -> None:
        """Forget all values. Can be called twice."""
        self.closed = True
        if self._devices is not None:
            self._devices.close()

    def _seconds(self, timeout: float | None) -> float:
        return CALL_SECONDS

    def set_updater(self, updater: Updater) -> None:
        if self._has_rule:
            raise OptimizerError("a store has an update rule or an updater, and this one has a rule already")
        self._updater = updater

    async def _ready(self, operation: st.Operation, arguments: Arguments) -> None:
        if self._updater is not None and arguments.rows:
            raise OptimizerError("an updater makes updates of whole arrays: set a rule for row-sparse keys")
        await super()._ready(operation, arguments)
        if self._updater is not None and arguments.sources:
            arguments.bring()
            # Without a rule the store takes what is pushed as the new value.
            pairs = zip(arguments.keys, arguments.sources, strict=True)
            arguments.sources = [await self._updated(key, source) for key, source in pairs]

    async def _updated(self, key: Any, received: Any) -> Any:
        """Return the new value that the user's function makes of a key's own one; it may write into what it gets."""
        assert self._updater is not None, "somebody set it"
        stored = await self.pull(key, np.empty_like(received))
        self._updater(key, received.copy(), stored)
        return stored

    async def _call(self, make: Callable[[int], st.Stimulus], arguments: Arguments | None = None) -> Any:
        if self.closed:
            raise ClosedError("this store is closed")
        number = next(self._calls)
        if arguments is not None:
            self._arguments[number] = arguments
        stimulus = make(number)
        if self._updater is not None and isinstance(stimulus, st.ConfigureOptimizer):
            raise OptimizerError("a store has an update rule or an updater, and this one has an updater already")
        self._move(stimulus)
        end = self._wait(number)
        self._arguments.pop(number, None)
        if isinstance(end, ef.Fail):
            raise end.error
        self._has_rule = self._has_rule or isinstance(stimulus, st.ConfigureOptimizer)
        return end.result

    def _move(self, stimulus: st.Stimulus) -> None:
        """Give a stimulus to the session and go on until nothing is left to do."""
        self._queue.append((self._session, stimulus))
        while self._queue or self._await_devices():
            machine, stimulus = self._queue.popleft()
            begin = time.perf_counter() if self._profile.running and machine is self._coordinator else 0.0
            for effect in machine.handle(stimulus, now=self._now):
                self._perform(machine, effect)
            # The server hears first of what came of its effects, or it would not know its own state.
            self._queue.extendleft((self._coordinator, done) for done in reversed(self._done))
            self._done.clear()
            if begin:
                self._profile.add(stimulus, begin, time.perf_counter())

    def _await_devices(self) -> bool:
        """Wait until the server is to hear of something that devices have done; False: they do nothing."""
        while self._devices is not None and not self._done and self._devices.step():
            pass
        self._queue.extend((self._coordinator, done) for done in self._done)
        self._done.clear()
        return bool(self._queue)

    def _wait(self, number: int) -> ef.Complete | ef.Fail:
        """Return the end of a call; what does not end by itself, as there is nobody else, ends by its deadline."""
        while number not in self._ended:
            times = [machine.deadline() for machine in (self._session, self._coordinator)]
            self._now = min(time for time in times if time is not None)
            self._queue.append((self._coordinator, st.Tick()))
            self._move(st.Tick())
        return self._ended.pop(number)

    def _perform(self, machine: Session | Coordinator, effect: ef.Effect) -> None:
        match effect:
            case ef.Send():
                self._deliver(machine, effect)
            case ef.Refuse(_, request, error):
                answer = m.Error(error.code, error.message, error.details)
                self._queue.append((self._session, st.Received(SERVER, request, answer)))
            case ef.Connect(peer):
                self._queue.append((machine, st.Connected(peer)))
            case ef.Complete(call) | ef.Fail(call):
                self._ended[call] = effect
            case ef.Encode():
                job = self._compressor.begin(effect, self._arguments[effect.call].sources, self.rank)
                job.run()
                self._queue.append((self._session, self._compressor.finish(job)))
            case ef.Settle():
                self._compressor.settle(effect)
            case ef.ForgetResiduals(keys):
                self._compressor.forget(keys)
            case ef.Allocate(call, spec):
                self._arguments[call] = landing_for(spec, np.empty(spec.nbytes, np.uint8))
            case ef.Deliver(call, ahead, tensors):
                [array] = self._arguments.pop(ahead).targets
                self._arguments[call].ahead.append((array, tensors))
            case ef.Deallocate(call):
                del self._arguments[call]
            case ef.Release() | ef.Discard() | ef.Log():
                pass
            case _:
                self._perform_stored(effect)

    def _perform_stored(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Execute(peer, request, command, index):
                counters, staleness = dict(self._counters), dict(self._store.staleness)
                info = ServerInfo("server", index, counters, staleness, self._profile)
                self._queue.append((self._coordinator, st.Executed(peer, request, run(command, info))))
            case ef.Prepare(codec):
                self._store.prepare(codec, self._compressor.backend)
            case _:
                if self._devices is None:
                    done = perform(self._store, effect)
                else:
                    done = device_storing.perform(self._devices.store, effect, self._end)
                if done is not None:
                    self._end(done)

    def note(self, level: str, event: str, text: str, facts: dict[str, Any]) -> None:
        """Write a line for the operator, and count it. See `aiokv.telemetry.take_note`."""
        take_note(self._counters, level, event, text, facts)

    def _end(self, done: st.Stimulus) -> None:
        """Take note of what came of an effect."""
        self._counters["updates"] += isinstance(done, st.Applied)
        self._done.append(done)

    def _deliver(self, sender: Session | Coordinator, send: ef.Send) -> None:
        if send.peer == SCHEDULER:
            # There is none, and no other worker that a barrier would have to wait for.
            answers: dict[type[m.Message], m.Message] = {m.Register: VIEW, m.Heartbeat: m.Heartbeat()}
            answer = answers.get(type(send.message), m.Done())
            self._queue.append((sender, st.Received(SCHEDULER, send.request, answer)))
            return
        if sender is self._session:
            payload = self._sent(send.payload)
            slot = None
            if payload.nbytes:
                slot, view = self._store.land(payload.nbytes)
                view[:] = payload
                if self._devices is not None and isinstance(send.message, m.Push) and not send.message.codec:
                    self._devices.store.arrived(slot, send.message.key, send.message.start)
            rows = span(self._store, send.message, slot)
            received = st.Received(SERVER, send.request, send.message, slot, payload.nbytes, rows)
            self._queue.append((self._coordinator, received))
            return
        sent = None
        try:
            read = None if self._devices is None or send.payload is None else self._devices.read(send.payload)
            payload, sent = (self._stored(send.payload), None) if read is None else read
        except AiokvError as error:
            self._perform(sender, ef.Refuse(send.peer, send.request, error))
            return
        memory = self._session.landing(send.request, payload.nbytes)
        if isinstance(memory, ef.Replica) and isinstance(send.message, m.Value):
            targets = [] if memory.target is None else self._arguments[memory.target.call].targets
            self._compressor.receive(memory, send.message.codec, payload, targets)
        else:
            self._receive(memory, payload)
        if sent is not None:
            sent()
        self._queue.append((self._session, st.Received(SERVER, send.request, send.message, None, payload.nbytes)))

    def _sent(self, payload: ef.Payload | None) -> memoryview:
        match payload:
            case ef.CallMemory(call, tensor, start, stop):
                return bytes_of(self._arguments[call].sources[tensor])[start:stop]
            case ef.CallTensors(call, tensors):
                sources = self._arguments[call].sources
                return gather([sources[tensor] for tensor in tensors])
            case ef.EncodedParts():
                return self._compressor.memory(payload)
            case _:
                return memoryview(b"")

    def _stored(self, payload: ef.Payload | None) -> memoryview:
        match payload:
            case ef.StoredChunk(key, start, version):
                value = self._store.acquire(key, start, version)
                self._store.release(value)
                return value.buffer.data
            case ef.StoredRows(key, start, version, rows):
                return bytes_of(self._store.get_rows(key, start, version, rows))
            case ef.StoredDifference(key, start, version, _, peer, codec):
                return self._store.difference(key, start, version, peer, codec)
            case ef.StoredChunks(chunks):
                return memoryview(b"".join(self._stored(chunk) for chunk in chunks))
            case ef.StoredState():
                return memoryview(state_bytes(self._store, payload))
            case _:
                return memoryview(b"")

    def _receive(
        self, memory: ef.CallMemory | ef.CallTensors | ef.CallBuffer | ef.Replica | None, payload: memoryview
    ) -> None:
        match memory:
            case ef.CallMemory(call, tensor, start, stop):
                bytes_of(self._arguments[call].targets[tensor])[start:stop] = payload
            case ef.CallTensors(call, tensors):
                targets = self._arguments[call].targets
                scatter(payload, [targets[tensor] for tensor in tensors])
            case ef.CallBuffer(call, number):
                self._arguments[call].buffers[number] = payload


def _joiner(role: Role, name: str) -> Joiner:
    return Joiner(role=role, name=name, incarnation=1, scheduler=NOWHERE, advertised=NOWHERE)
