"""A server: `Coordinator` and `ParameterStore` behind a listening socket. The only place where the two meet."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import structs

from aiokv import device_storing, plugins
from aiokv.addresses import format_address, is_wildcard
from aiokv.arrays import bytes_of
from aiokv.codec.formats import warm_up
from aiokv.commands import ServerInfo, run
from aiokv.config import Config, load_config
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.joiner import Joiner
from aiokv.core.server.coordinator import Coordinator
from aiokv.errors import AiokvError, NotFiniteError
from aiokv.kernels import Backend, engine_for, get_backend
from aiokv.kernels.work import has_kernel
from aiokv.net.arrivals import Arrivals
from aiokv.net.checkpointing import CheckpointFiles, OnCheckpoint
from aiokv.net.driver import BUSY_SECONDS, Log, make_incarnation, make_name
from aiokv.net.holdings import Holdings
from aiokv.net.memory import TURN_BYTES
from aiokv.net.node import Node, local_host_towards
from aiokv.net.outbox import Outbox
from aiokv.net.siblings import Siblings
from aiokv.optim import PRECISIONS, Assign, Optimizer
from aiokv.store.device import DeviceStore
from aiokv.store.host_work import do_on_host
from aiokv.store.memory import ParameterStore
from aiokv.storing import begin_rows, compute_rows, copy_bytes, cost_of_rows, finish_rows, perform, span, state_bytes
from aiokv.types import Peer, Role
from aiokv.wire.receiver import Frame, Head, Landing

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.codec import Codec
    from aiokv.net.link import AnyLink
    from aiokv.net.outbox import Made

JOIN_CALL = 0
LEAVE_CALL = 1

FIRST = "reference"
"""The backend of "auto" until another one is compiled: it is there at once, and takes little memory."""


class Server(Node):
    """Holds a part of the parameters, sums what workers push, and updates.

        async with aiokv.Server(scheduler="127.0.0.1:9091") as server:
            await server.wait_stopped()

    Args:
        config: all settings; from the environment when not given.
        log: where stimuli and effects are recorded, if they are.
        standby: index of the server of whose parameters this one is to hold a copy; -1: of none.
        settings: fields of `Config`, or `scheduler` as `host:port`; they win over the environment.

    Raises:
        ConfigError: settings that can't work, or a plug-in can't be imported.
    """

    _slow = frozenset({ef.ApplyRows, ef.JoinRows, ef.StoredRows})

    def __init__(
        self, config: Config | None = None, *, log: Log | None = None, standby: int = -1, **settings: Any
    ) -> None:
        super().__init__(config or load_config(role=Role.SERVER, **settings), log)
        plugins.load(self.config.plugins)
        self.name = make_name(self.config, Role.SERVER)
        self.advertised = ("", 0)
        """Host and port under which the others reach this server, once it is started."""
        self.siblings = Siblings(self, lambda name: self.feed(st.NodeEnded(name)))
        """Other servers' standbys, in this process."""
        self._standby = standby
        self._store = _make_store(self.config)
        self._arrivals: Arrivals | None = None
        self._outbox: Outbox | None = None
        if isinstance(self._store, DeviceStore):
            self._arrivals = Arrivals(self._store)
            self._outbox = Outbox(self._store, self._send_now, self._memory, self._cut)
        self._holdings = Holdings(self._store, self.config.max_held_bytes, self.config.max_held_bytes_each)
        self._checkpoints = CheckpointFiles(self._store, self.config.checkpoint_folder, self.feed, lambda: self.busy)
        self._cost = 0
        """What has been done with rows in this turn of the loop; see `aiokv.storing.cost_of_rows`."""
        self._held: deque[Callable[[], None]] = deque()
        """What sends answers that wait until the standby has what they say."""
        self._warming: asyncio.Task[None] | None = None
        self._commands: dict[asyncio.Task[None], None] = {}
        self._preparing: dict[asyncio.Task[None], None] = {}

    async def start(self) -> None:
        """Listen, and begin to join. See `Node.start`."""
        config = self.config
        if isinstance(self._store, DeviceStore):
            loop = asyncio.get_running_loop()
            self._store.start(lambda events: _call_soon(loop, self._reported, events))
        config.check_token()
        await self._listen(config.bind_host, config.bind_port)
        scheduler = (config.scheduler_host, config.scheduler_port)
        local = await local_host_towards(*scheduler) if is_wildcard(self.host) else self.host
        joiner = Joiner(
            role=Role.SERVER,
            name=self.name,
            incarnation=make_incarnation(),
            scheduler=scheduler,
            advertised=(config.advertised_host(self.host, local), config.advertise_port or self.port),
            standby=self._standby,
        )
        self.advertised = joiner.advertised
        self._start(Coordinator(joiner))
        self.feed(st.Join(JOIN_CALL, config.join_timeout))

    def leave(self) -> bool:
        """Stay until other servers have all that this process serves, and end then. See `Node.leave`."""
        self.feed(st.Depart(LEAVE_CALL, self.config.call_timeout))
        return True

    @property
    def store(self) -> ParameterStore:
        """The server's memory."""
        return self._store

    def land(self, link: AnyLink, head: Head) -> Landing:
        """Give the payload a slot of its own, unless there are too many of them.

        Raises:
            OverloadedError: there are.
        """
        slot, view = self._holdings.land(link.peer, head.payload_nbytes)
        return Landing(view, slot)

    def frames_received(self, link: AnyLink, frames: list[Frame]) -> None:
        """Make stimuli of whole frames; those of a connection that was closed here are forgotten."""
        if self._links.get(link.peer) is not link:
            for frame in frames:
                if frame.slot is not None:
                    self._store.free(frame.slot)
            return
        super().frames_received(link, frames)

    def _received(self, peer: Peer, frame: Frame) -> st.Received:
        if self._arrivals is not None:
            self._arrivals.received(peer, frame)
        rows = span(self._store, frame.message, frame.slot)
        return st.Received(peer, frame.request, frame.message, frame.slot, frame.nbytes, rows)

    def link_down(self, link: AnyLink, reason: str, error: Any) -> None:
        """Forget a payload that is only partly here: a chunk counts when all of it has arrived."""
        if link.pending_slot is not None:
            self._store.free(link.pending_slot)
        if self._arrivals is not None:
            self._arrivals.gone(link.peer)
        super().link_down(link, reason, error)

    def _memory(self, payload: ef.Payload) -> tuple[memoryview, Callable[[], None] | None]:
        if isinstance(payload, ef.StoredChunks):
            return memoryview(b"".join(self._copy(chunk) for chunk in payload.chunks)), None
        if isinstance(payload, ef.StoredRows):
            return self._rows_of(payload), None
        if isinstance(payload, ef.StoredDifference):
            named = payload.key, payload.start, payload.version
            return self._store.difference(*named, payload.peer, payload.codec), None
        if isinstance(payload, ef.StoredState):
            return memoryview(state_bytes(self._store, payload)), None
        if isinstance(payload, ef.StoredSum):
            return self._store.lend(payload.slot)
        if isinstance(payload, ef.StoredSlots):
            return self._store.joined(payload.slots), None
        if isinstance(payload, ef.StoredCopy):
            return memoryview(copy_bytes(self._store, payload)), None
        assert isinstance(payload, ef.StoredChunk), "a server sends what it stores"
        value = self._store.acquire(payload.key, payload.start, payload.version)
        return value.buffer.data, functools.partial(self._store.release, value)

    def _send(self, effect: ef.Send, made: memoryview | None = None, sent: Callable[[], None] | None = None) -> None:
        """Send a message, with a payload that may have to come from a device first."""
        if self._arrivals is not None:
            self._arrivals.answered(effect)
        if made is None and self._outbox is not None and self._outbox.takes(effect):
            return
        super()._send(effect, made, sent)

    def _send_now(self, effect: ef.Send | ef.Refuse, made: Made | None = None) -> None:
        """Send what has come from a device, maybe between two stimuli."""
        if isinstance(effect, ef.Refuse):
            super()._perform(effect)
        else:
            super()._send(effect, *(made or ()))
        self._flush_soon()

    def _cut(self, peer: Peer, error: AiokvError) -> None:
        """End the link to the standby: over the next one it gets as a whole what it lacks."""
        self.note("warning", "standby_not_told", f"{self.name} can't copy to its standby: {error}", error.details)
        if peer in self._links:
            self._links[peer].abort()

    def _flush_soon(self) -> None:
        """Send what has come from a device between two stimuli."""
        if not self._pumping:
            self.feed()

    def _reported(self, events: list[tuple[int, AiokvError | None]]) -> None:
        """Take in what devices have done, one after the other: the machine hears of each before the next one."""
        assert isinstance(self._store, DeviceStore), "it has an engine"
        if self.busy:
            # What is decided must find the versions that the machine knows.
            self._loop.call_later(BUSY_SECONDS, self._reported, events)
            return
        for number, (event, error) in enumerate(events):
            self._store.completed(event, error)
            if self.busy:
                self._loop.call_later(BUSY_SECONDS, self._reported, events[number + 1 :])
                return

    def _later(self, stimulus: st.Applied | st.Normed) -> None:
        """Take in what came of an effect on a device."""
        self._done.append(stimulus)
        self.feed()

    def _deferred(self, effect: ef.Effect) -> Callable[[], Callable[[], None]] | None:
        """Compute what has to do with many rows in a thread: to draw the first values of 100,000 takes a while."""
        cost = cost_of_rows(self._store, effect)
        if not self._cost:
            self._loop.call_soon(self._begin_turn)
        self._cost += cost
        if self._cost <= TURN_BYTES:
            return None
        if isinstance(effect, ef.ApplyRows | ef.JoinRows):
            begin_rows(self._store, effect)
        return functools.partial(self._compute_rows, effect)

    def _begin_turn(self) -> None:
        self._cost = 0

    def _compute_rows(self, effect: ef.Effect) -> Callable[[], None]:
        """Compute what an effect has to do with rows; return what performs it. It runs in a thread."""
        if isinstance(effect, ef.ApplyRows | ef.JoinRows):
            return functools.partial(self._finish_rows, effect, compute_rows(self._store, effect))
        assert isinstance(effect, ef.Send), "rows are joined, updated or sent"
        assert isinstance(effect.payload, ef.StoredRows), "only rows have a cost"
        return functools.partial(self._send, effect, self._rows_of(effect.payload))

    def _finish_rows(self, effect: ef.ApplyRows | ef.JoinRows, applied: st.Applied | None) -> None:
        self._end(effect, finish_rows(self._store, effect, applied))

    def _rows_of(self, payload: ef.StoredRows) -> memoryview:
        return bytes_of(self._store.get_rows(payload.key, payload.start, payload.version, payload.rows))

    def _warm_up(self, optimizer: Optimizer) -> None:
        """Compile what the rule needs in a thread; meanwhile the server goes on with what it has.

        All backends give the same bits, so it does not matter in the middle of which round the faster one is there.
        """
        if isinstance(self._store, DeviceStore) and not isinstance(optimizer, Assign) and not has_kernel(optimizer):
            text = f"no device kernel for optimizer {optimizer.name!r}: its updates are copied to the host and back"
            self.note("warning", "no_device_kernel", text, {"optimizer": optimizer.name})
        if self.config.backend == "auto" and not isinstance(optimizer, Assign) and self._warming is None:
            self._warming = self._loop.create_task(self._use_compiled(optimizer))

    async def _use_compiled(self, optimizer: Optimizer) -> None:
        try:
            backend = await asyncio.to_thread(_compiled, optimizer, self._store.dtypes() or ["float32"])
        except AiokvError as error:
            self.note("info", "", f"{self.name} updates with NumPy: {error}", {})
            return
        self._store.use(backend)

    def _prepare(self, codec: Codec) -> None:
        """Compile what the codec needs in a thread; meanwhile NumPy decodes it, with the same bits."""
        if self.config.backend != "reference":
            task = self._loop.create_task(self._decode_compiled(codec))
            self._preparing[task] = None
            task.add_done_callback(self._preparing.pop)

    async def _decode_compiled(self, codec: Codec) -> None:
        try:
            await asyncio.to_thread(warm_up, codec, "float32", "cpu")
        except AiokvError as error:
            self.note("info", "", f"{self.name} decodes with NumPy: {error}", {})
            return
        self._store.prepare(codec, "cpu")

    async def close(self) -> None:
        """Stop listening and close all connections. See `Node.close`."""
        if self._warming is not None:
            # A thread can't be stopped; it takes a second or two at most.
            await asyncio.gather(self._warming, return_exceptions=True)
        await asyncio.gather(*self._commands, *self._preparing, return_exceptions=True)
        # In this order: from then on no more of them are started.
        await asyncio.gather(super().close(), self.siblings.close())
        await self._checkpoints.close()
        if isinstance(self._store, DeviceStore):
            await asyncio.to_thread(self._store.close)

    async def _execute(self, effect: ef.Execute) -> None:
        """Run a command in a thread: it may take its time, and the server's loop may not."""
        counters, staleness = dict(self.counters), dict(self._store.staleness)
        info = ServerInfo(self.name, effect.index, counters, staleness, self.profile)
        outcome = await asyncio.to_thread(run, effect.command, info)
        self.feed(st.Executed(effect.peer, effect.request, outcome))

    def _copy(self, chunk: ef.StoredChunk) -> bytes:
        value = self._store.acquire(chunk.key, chunk.start, chunk.version)
        copy = value.buffer.tobytes()
        self._store.release(value)
        return copy

    def _perform_own(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Configure(optimizer):
                self._perform_stored(effect)
                self._warm_up(optimizer)
            case ef.Execute():
                task = self._loop.create_task(self._execute(effect))
                self._commands[task] = None
                task.add_done_callback(self._commands.pop)
            case ef.Prepare(codec):
                self._perform_stored(effect)
                self._prepare(codec)
            case ef.StartNode(index, name):
                # A copy is in the host's memory, wherever this server's own values are: there it can't lack room for
                # what its server has made.
                own = {"name": name, "bind_port": 0, "advertise_port": 0, "device": "cpu"}
                self.siblings.start(name, Server(structs.replace(self.config, **own), standby=index))
            case _ if isinstance(effect, OnCheckpoint):
                self._checkpoints.perform(effect)
            case ef.Hold(answer):
                self._hold(answer)
            case ef.LetGo(count):
                for _ in range(count):
                    self._held.popleft()()
            case ef.Stop():
                self._stop(effect)
            case ef.Complete():
                where = format_address(*self.advertised)
                self.note("info", "", f"{self.name} is a member of the cluster, at {where}", {})
            case ef.Fail(_, error):
                self._stop(ef.Stop(str(error), failed=True))
            case _:
                self._perform_stored(effect)

    def _hold(self, answer: ef.Send | ef.Refuse) -> None:
        """Let an answer wait, with the value that it has now."""
        if isinstance(answer, ef.Refuse):
            self._held.append(functools.partial(super()._perform, answer))
        elif answer.payload is None:
            self._held.append(functools.partial(super()._send, answer))
        elif self._outbox is None or not self._outbox.holds(answer, self._held):
            try:
                memory, sent = self._memory(answer.payload)
            except NotFiniteError as error:
                self._hold(ef.Refuse(answer.peer, answer.request, error))
                return
            self._held.append(functools.partial(super()._send, answer, memory, sent))

    def _perform_stored(self, effect: ef.Effect) -> None:
        if isinstance(self._store, DeviceStore):
            self._end(effect, device_storing.perform(self._store, effect, self._later))
        else:
            self._end(effect, perform(self._store, effect))

    def _end(self, effect: ef.Effect, stimulus: st.Stimulus | None) -> None:
        self.counters["updates"] += isinstance(effect, ef.Apply | ef.ApplyRows)
        if stimulus is not None:
            self._done.append(stimulus)

    def _perform(self, effect: ef.Effect) -> None:
        try:
            super()._perform(effect)
        except NotFiniteError as error:
            # The payload of a `Send` could not be made.
            assert isinstance(effect, ef.Send), "only values that are sent are compressed"
            super()._perform(ef.Refuse(effect.peer, effect.request, error))


def _make_store(config: Config) -> ParameterStore:
    """Return the memory that the settings want."""
    backend = get_backend(FIRST if config.backend == "auto" else config.backend)
    if config.device == "cpu":
        return ParameterStore(backend)
    return DeviceStore(backend, engine_for(config.device, functools.partial(do_on_host, backend=backend)))


def _call_soon(loop: asyncio.AbstractEventLoop, take: Callable[[Any], None], events: Any) -> None:
    """Hand events from the engine's thread to the loop, unless it is over."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(take, events)


def _compiled(optimizer: Optimizer, dtypes: list[str]) -> Backend:
    """Return the compiled backend, ready for the first update."""
    backend = get_backend("cpu")
    for dtype in dtypes:
        if dtype in PRECISIONS:
            backend.warm_up(optimizer, dtype)
        else:
            # Keys that are only summed may hold what no rule can update.
            backend.accumulate(np.ones(1, dtype), np.ones(1, dtype))
    return backend
