"""The store without a network: one worker and one server in this process, synchronously.

The same `Session`, `Coordinator` and `ParameterStore` as in a cluster; only the wire between them is a queue. So rules,
errors and results are the same, and a program tried with `local` runs on a cluster unchanged.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import TYPE_CHECKING, Any, Self

from aiokv.arrays import Arguments, Keys, bytes_of, exchanging, gather, receiving, scatter, sending
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.coordinator import Coordinator
from aiokv.core.joiner import Joiner
from aiokv.core.session import Session
from aiokv.errors import ClosedError
from aiokv.kernels import get_backend
from aiokv.store.memory import ParameterStore
from aiokv.types import SCHEDULER, Role
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

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


class LocalStore:
    """A store with one worker: every push is a round of its own. Not for use by several threads at once.

    Args:
        backend: who does the arithmetic; see `aiokv.kernels.get_backend`.
    """

    type = "local"

    def __init__(self, *, backend: str = "reference") -> None:
        self._store = ParameterStore(get_backend(backend))
        self._session = Session(_joiner(Role.WORKER, "worker"), policy="bsp")
        self._coordinator = Coordinator(_joiner(Role.SERVER, "server"))
        self._queue: deque[tuple[Session | Coordinator, st.Stimulus]] = deque()
        self._calls = itertools.count()
        self._results: dict[int, Exception | None] = {}
        self._arguments = Arguments([], [], [], [], single=False)
        self._closed = False
        self._queue.append((self._coordinator, st.Received(SCHEDULER, 0, VIEW)))
        self._call(lambda call: st.Join(call, 1.0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close()

    @property
    def rank(self) -> int:
        """Always 0."""
        return self._session.rank

    @property
    def num_workers(self) -> int:
        """Always 1."""
        return self._session.num_workers

    def init(self, key: Keys, value: Any = None, *, timeout: float | None = None) -> None:
        """Create keys. See `aiokv.Client.init`."""
        self._transfer(st.Operation.INIT, sending(key, value))

    def push(self, key: Keys, value: Any = None, *, priority: int = 0, timeout: float | None = None) -> None:
        """Update keys. See `aiokv.Client.push`."""
        self._transfer(st.Operation.PUSH, sending(key, value))

    def pull(self, key: Keys, out: Any = None, *, priority: int = 0, timeout: float | None = None) -> Any:
        """Read keys. See `aiokv.Client.pull`."""
        return self._transfer(st.Operation.PULL, receiving(key, out, self._session.spec))

    def pushpull(
        self, key: Keys, value: Any = None, *, out: Any = None, priority: int = 0, timeout: float | None = None
    ) -> Any:
        """Update keys and read the new values. See `aiokv.Client.pushpull`."""
        return self._transfer(st.Operation.PUSHPULL, exchanging(key, value, out))

    def barrier(self, name: str = "", *, timeout: float | None = None) -> None:
        """Return at once: every worker is here."""
        self._check_open()

    def set_optimizer(self, name: str, *, timeout: float | None = None, **params: bool | int | float | str) -> None:
        """Set the update rule. See `aiokv.Client.set_optimizer`."""
        self._check_open()
        self._call(lambda call: st.ConfigureOptimizer(call, name, params, 1.0))

    def close(self, *, timeout: float | None = None) -> None:
        """Forget all values. Can be called twice."""
        self._closed = True

    # --- inside ---

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this local store is closed")

    def _transfer(self, operation: st.Operation, arguments: Arguments) -> Any:
        self._check_open()
        self._arguments = arguments
        self._call(lambda call: st.Transfer(call, operation, arguments.tensors, 1.0))
        return arguments.finish() if arguments.targets else None

    def _call(self, make: Callable[[int], st.Stimulus]) -> None:
        """Give a call to the session and move messages until nothing is left to do; then it is complete."""
        number = next(self._calls)
        self._queue.append((self._session, make(number)))
        while self._queue:
            machine, stimulus = self._queue.popleft()
            for effect in machine.handle(stimulus, now=0.0):
                self._perform(machine, effect)
        error = self._results.pop(number)
        if error is not None:
            raise error

    def _perform(self, machine: Session | Coordinator, effect: ef.Effect) -> None:
        match effect:
            case ef.Send():
                self._deliver(machine, effect)
            case ef.Refuse(_, request, error):
                answer = m.Error(error.code, error.message, error.details)
                self._queue.append((self._session, st.Received(SERVER, request, answer)))
            case ef.Connect(peer):
                self._queue.append((machine, st.Connected(peer)))
            case ef.Complete(call):
                self._results[call] = None
            case ef.Fail(call, error):
                self._results[call] = error
            case ef.Release() | ef.Log():
                pass
            case _:
                self._perform_on_store(effect)

    def _perform_on_store(self, effect: ef.Effect) -> None:
        store = self._store
        match effect:
            case ef.Install(key, start, dtype, size, slot):
                store.install(key, start, dtype, size, slot)
            case ef.Apply(key, start, version, slot):
                store.apply(key, start, version, slot)
                self._queue.append((self._coordinator, st.Applied(key, start, version)))
            case ef.Configure(optimizer):
                store.configure(optimizer)
            case ef.Free(slot):
                store.free(slot)
            case ef.Split(slot, parts):
                store.split(slot, parts)
            case ef.Divide(key, start, chunks):
                store.divide(key, start, chunks)
            case _:
                raise TypeError(f"one worker and one server do not need {effect!r}")

    def _deliver(self, sender: Session | Coordinator, send: ef.Send) -> None:
        if send.peer == SCHEDULER:
            # The only word to a scheduler that is not there is `Register`.
            self._queue.append((sender, st.Received(SCHEDULER, 0, VIEW)))
            return
        if sender is self._session:
            payload = self._sent(send.payload)
            slot = None
            if payload.nbytes:
                slot, view = self._store.land(payload.nbytes)
                view[:] = payload
            self._queue.append(
                (self._coordinator, st.Received(SERVER, send.request, send.message, slot, payload.nbytes))
            )
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
