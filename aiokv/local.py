"""The store without a network: one worker and one server in this process, synchronously.

The same `Session`, `Coordinator` and `ParameterStore` as in a cluster; only the wire between them is a queue. So rules,
errors and results are the same, and a program tried with `local` runs on a cluster unchanged.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

from aiokv.arrays import Arguments, bytes_of, gather, scatter
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.coordinator import Coordinator
from aiokv.core.joiner import Joiner
from aiokv.core.session import Session
from aiokv.errors import ClosedError
from aiokv.kernels import get_backend
from aiokv.kvstore import KVStore
from aiokv.operations import Operations
from aiokv.store.memory import ParameterStore
from aiokv.storing import perform, span
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
    """

    type = "local"

    def __init__(self, *, backend: str = "reference") -> None:
        self._worker = _LocalWorker(backend)

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

    def close(self, *, timeout: float | None = None) -> None:
        """Forget all values. Can be called twice."""
        self._worker.closed = True


class _LocalWorker(Operations):
    """The worker and the server; a call moves messages between them until nothing is left to do."""

    def __init__(self, backend: str) -> None:
        self.closed = False
        self._store = ParameterStore(get_backend(backend))
        self._session = Session(_joiner(Role.WORKER, "worker"), policy="bsp")
        self._coordinator = Coordinator(_joiner(Role.SERVER, "server"))
        self._now = 0.0
        self._queue: deque[tuple[Session | Coordinator, st.Stimulus]] = deque()
        self._calls = itertools.count()
        self._ended: dict[int, ef.Complete | ef.Fail] = {}
        self._arguments = Arguments([], [], [], [], single=False)
        self._queue.append((self._coordinator, st.Received(SCHEDULER, 0, VIEW)))
        self._move(st.Join(next(self._calls), CALL_SECONDS))

    def _seconds(self, timeout: float | None) -> float:
        return CALL_SECONDS

    async def _call(self, make: Callable[[int], st.Stimulus], arguments: Arguments | None = None) -> Any:
        if self.closed:
            raise ClosedError("this store is closed")
        number = next(self._calls)
        if arguments is not None:
            self._arguments = arguments
        self._move(make(number))
        end = self._wait(number)
        if isinstance(end, ef.Fail):
            raise end.error
        return end.result

    def _move(self, stimulus: st.Stimulus) -> None:
        """Give a stimulus to the session and go on until nothing is left to do."""
        self._queue.append((self._session, stimulus))
        while self._queue:
            machine, stimulus = self._queue.popleft()
            for effect in machine.handle(stimulus, now=self._now):
                self._perform(machine, effect)

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
            case ef.Release() | ef.Log():
                pass
            case _:
                done = perform(self._store, effect)
                if done is not None:
                    self._queue.append((self._coordinator, done))

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
            rows = span(self._store, send.message, slot)
            received = st.Received(SERVER, send.request, send.message, slot, payload.nbytes, rows)
            self._queue.append((self._coordinator, received))
            return
        payload = self._stored(send.payload)
        self._receive(self._session.landing(send.request, payload.nbytes), payload)
        self._queue.append((self._session, st.Received(SERVER, send.request, send.message, None, payload.nbytes)))

    def _sent(self, payload: ef.Payload | None) -> memoryview:
        sources = self._arguments.sources
        match payload:
            case ef.CallMemory(_, tensor, start, stop):
                return bytes_of(sources[tensor])[start:stop]
            case ef.CallTensors(_, tensors):
                return gather([sources[tensor] for tensor in tensors])
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
            case ef.StoredChunks(chunks):
                return memoryview(b"".join(self._stored(chunk) for chunk in chunks))
            case _:
                return memoryview(b"")

    def _receive(self, memory: ef.CallMemory | ef.CallTensors | None, payload: memoryview) -> None:
        targets = self._arguments.targets
        match memory:
            case ef.CallMemory(_, tensor, start, stop):
                bytes_of(targets[tensor])[start:stop] = payload
            case ef.CallTensors(_, tensors):
                scatter(payload, [targets[tensor] for tensor in tensors])


def _joiner(role: Role, name: str) -> Joiner:
    return Joiner(role=role, name=name, incarnation=1, scheduler=NOWHERE, advertised=NOWHERE)
