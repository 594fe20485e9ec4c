"""A server and its standbys, with the real store, between workers and a scheduler that the rig plays.

A link keeps the order of what is sent over it, like TCP. Which link delivers next, and when an update is made, is
chosen at random, from a seed. Time stands still while anything is under way.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.joiner import Joiner
from aiokv.core.server.coordinator import Coordinator
from aiokv.kernels import get_backend
from aiokv.store.memory import ParameterStore
from aiokv.storing import copy_bytes, perform, span
from aiokv.types import SCHEDULER, STANDBY, Key, Peer, Role
from aiokv.wire import messages as m

Array = npt.NDArray[Any]
HOST = "127.0.0.1"
LIMIT = 20_000


@dataclass(eq=False)
class Node:
    """A server's machine and its memory; `links` has, by peer number, who is at the other end, and the number there."""

    name: str
    port: int
    machine: Coordinator
    store: ParameterStore
    links: dict[Peer, tuple[Any, Peer]] = field(default_factory=dict)
    held: deque[Callable[[], None]] = field(default_factory=deque)
    numbers: Any = field(default_factory=itertools.count)
    alive: bool = True
    stops: list[ef.Stop] = field(default_factory=list)


@dataclass(eq=False)
class Asked:
    """A request of a worker, and how it was answered."""

    request: int
    message: m.Message
    payload: bytes
    answer: m.Message | None = None
    value: bytes = b""


Script = Generator[list[Asked], None, None]


def rows_of(rows: dict[int, float], width: int) -> Array:
    """Return the payload of rows that are filled with numbers each."""
    values = np.repeat(np.array(list(rows.values()), np.float32), width)
    return np.concatenate([np.array(list(rows), np.int64).view(np.uint8), values.view(np.uint8)])


class Worker:
    """A worker that asks again what was not answered."""

    def __init__(self, world: World, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.name = f"worker-{rank}"
        self.state = "alive"
        self.since = 0
        self.links: dict[Peer, tuple[Any, Peer]] = {}
        self.alive = True
        self.numbers = itertools.count(2)
        self.pending: dict[int, Asked] = {}
        self.attached = False
        self.script: Script | None = None
        self.waiting: list[Asked] = []
        self.sequences: dict[Key, int] = {}
        self.clock = 0

    def ask(self, message: m.Message, payload: Array | None = None) -> Asked:
        """Send a request."""
        asked = Asked(next(self.numbers), message, b"" if payload is None else payload.tobytes())
        self.pending[asked.request] = asked
        if self.attached:
            self.world.send(self, 0, st.Received(-9, asked.request, structs.replace(message)), asked.payload)
        return asked

    def init(self, key: Key, value: Array, policy: str = "bsp", **changes: Any) -> Asked:
        """Initialise a key that is one chunk."""
        fields: dict[str, Any] = {"shape": value.shape, "dtype": value.dtype.name, "start": 0, "stop": value.size}
        fields |= {"policy": policy, "timeout": 60.0, "digest": b"d" if self.rank == 0 else b""} | changes
        return self.ask(m.Init(key, **fields), None if self.rank else value)

    def init_bundle(self, values: dict[Key, Array], policy: str = "bsp") -> Asked:
        """Initialise keys as one chunk."""
        arrays = list(values.values())
        shapes = tuple(array.shape for array in arrays)
        digests = tuple(b"d" for _ in arrays)
        message = m.InitBundle(tuple(values), shapes, arrays[0].dtype.name, policy, 60.0, (), digests)
        return self.ask(message, None if self.rank else np.concatenate([array.ravel() for array in arrays]))

    def count(self, key: Key) -> int:
        """Return the number of the next push of a key."""
        self.sequences[key] = number = self.sequences.get(key, 0) + 1
        self.clock = max(self.clock, number)
        return number

    def push(self, key: Key, value: Array, read: int = 0, **changes: Any) -> Asked:
        """Push a key, and ask for the new value."""
        number = self.count(key)
        fields: dict[str, Any] = {"shape": value.shape, "dtype": value.dtype.name, "start": 0, "stop": value.size}
        fields |= {"sequence": number, "read_version": read, "want_value": True, "timeout": 60.0, "clock": self.clock}
        return self.ask(m.Push(key, **(fields | changes)), value)

    def push_bundle(self, bundle: int, keys: list[Key], value: Array, read: int = 0) -> Asked:
        """Push all keys of a bundle, and ask for the new values."""
        number = max([self.count(key) for key in keys])
        return self.ask(m.PushBundle(bundle, number, read, True, 60.0, 0, self.clock), value)

    def init_rows(self, key: Key, shape: tuple[int, int], rows: dict[int, float], policy: str = "bsp") -> Asked:
        """Initialise a table with rows that are filled with numbers each."""
        payload, count = None if self.rank else rows_of(rows, shape[1]), len(rows) * (not self.rank)
        head = (key, shape, "float32", 0, shape[0], 0, count, count, policy)
        return self.ask(m.InitRows(*head, 60.0, (), b"d", True, {}), payload)

    def push_rows(
        self, key: Key, shape: tuple[int, int], rows: dict[int, float], read: int = 0, **changes: Any
    ) -> Asked:
        """Push some rows."""
        number, count = self.count(key), len(rows)
        head = (key, shape, "float32", 0, shape[0], 0, count, count, number, read, 60.0, 0, self.clock)
        return self.ask(m.PushRows(*head, **changes), rows_of(rows, shape[1]))

    def pull_rows(self, key: Key, shape: tuple[int, int], rows: list[int]) -> Asked:
        """Pull some rows, with all that this worker has pushed."""
        ids = np.array(rows, np.int64).tobytes()
        return self.ask(m.PullRows(key, shape, "float32", 0, shape[0], ids, self.sequences.get(key, 0), 60.0, 0))

    def pull(self, key: Key, shape: tuple[int, ...], dtype: str = "float32") -> Asked:
        """Pull a key, with all that this worker has pushed."""
        size = int(np.prod(shape))
        return self.ask(m.Pull(key, shape, dtype, 0, size, self.sequences.get(key, 0), 60.0))

    def advance(self) -> None:
        """Let the script go on to its next wait."""
        while self.script is not None and all(asked.answer is not None for asked in self.waiting):
            try:
                self.waiting = next(self.script)
            except StopIteration:
                self.script = None

    # --- links ---

    def connect(self, node: Node) -> None:
        """Say who it is to a server, and ask again."""
        self.world.close(self, 0)
        self.attached = False
        self.world.join(self, 0, node)
        attach = m.Attach(self.rank, self.name, 1, self.world.epoch, 60.0)
        self.world.send(self, 0, st.Received(-9, 1, attach), b"")

    def connect_again(self) -> None:
        """Go to the server that there is now, if it is there; else a view says where to go."""
        if self.world.primary.alive:
            self.connect(self.world.primary)

    def take(self, stimulus: st.Stimulus, payload: bytes) -> None:
        """Take in what a server says."""
        if isinstance(stimulus, st.PeerLost):
            self.attached = False
            self.world.later(self.connect_again)
            return
        assert isinstance(stimulus, st.Received)
        if stimulus.request == 1:
            if isinstance(stimulus.message, m.Done):
                self.attached = True
                for asked in self.pending.values():
                    again = st.Received(-9, asked.request, structs.replace(asked.message))
                    self.world.send(self, 0, again, asked.payload)
            return
        asked = self.pending.pop(stimulus.request)
        asked.answer, asked.value = stimulus.message, payload
        self.advance()


class World:
    """A server, its standbys, and workers; whoever crashes stays so.

    Args:
        seed: of what comes first.
        workers: how many there are.
        registers: whether nodes that are to be standbys do so.
        settings: further fields of views.
    """

    def __init__(self, seed: int, *, workers: int = 2, registers: bool = True, **settings: Any) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.epoch = 0
        self.settings = {"replication": 2} | settings
        self.registers = registers
        self.timed: list[tuple[float, Callable[[], None]]] = []
        """What happens at a time."""
        self.ready: dict[tuple[str, Peer], deque[Callable[[], None]]] = {}
        self.nodes: dict[int, Node] = {}
        self._lives = itertools.count(1)
        self._order = itertools.count()
        self.steps = 0
        self.workers = [Worker(self, rank) for rank in range(workers)]
        self.replaces = True
        """Whether there is a process for another standby when one is lost."""
        self.standby: Node | None = None
        self.state = ""
        self.tail: Node | None = None
        """The standby of the standby, while the place moves."""
        self.switches = True
        """Whether it does so when all have everything."""
        self.tail_state = ""
        self.primary = self.make("server-0")
        self.hire()
        self.publish()
        for worker in self.workers:
            worker.connect(self.primary)

    # --- members ---

    def make(self, name: str = "") -> Node:
        """Start a node that joins."""
        number = next(self._lives)
        port = 9000 + number
        name = name or f"standby/{number}"
        joiner = Joiner(role=Role.SERVER, name=name, incarnation=number, scheduler=(HOST, 1), advertised=(HOST, port))
        node = Node(name, port, Coordinator(joiner), ParameterStore(get_backend("reference")))
        self.nodes[port] = node
        self.feed(node, st.Join(0, 30.0), b"")
        self.feed(node, st.Connected(SCHEDULER), b"")
        return node

    def hire(self) -> None:
        """Let another node be the standby: it has not registered yet."""
        self.standby, self.state = self.make(), "expected"
        node = self.standby
        self.later(partial(self.register, node))

    def register(self, node: Node) -> None:
        """Let the standby be known to all."""
        if self.registers and self.standby is node and self.state == "expected" and node.alive:
            self.state = "filling"
            self.publish()

    def move(self) -> None:
        """Begin to let another node have the place: the standby gets one of its own."""
        if self.standby is None or self.state != "ready" or self.tail is not None or not self.primary.alive:
            return
        self.tail, self.tail_state = self.make(), "expected"
        self.publish()
        self.later(partial(self.register_tail, self.tail))

    def register_tail(self, node: Node) -> None:
        """Let the standby's own one be known to all."""
        if self.tail is node and node.alive and self.tail_state == "expected":
            self.tail_state = "filling"
            self.publish()
        elif self.standby is node:
            self.register(node)

    def switch(self) -> None:
        """Let the primary give its place to its standby, which has one itself."""
        assert self.standby is not None, "it takes the place"
        self.primary, self.standby, self.state = self.standby, self.tail, self.tail_state
        self.tail = None
        self.publish()
        self.connect_workers()

    def connect_workers(self) -> None:
        """Let the workers go over to the primary."""
        for worker in self.workers:
            if worker.alive:
                self.later(worker.connect_again)

    def entry(self) -> m.ServerEntry:
        """Return what the view says of the only server."""
        standby = None
        if self.standby is not None:
            standby = self._entry_of(self.standby, self.state)
            standby.standby = None if self.tail is None else self._entry_of(self.tail, self.tail_state)
        me = self.primary
        return m.ServerEntry(0, me.name, me.machine._joiner.incarnation, HOST, me.port, "alive", "", standby, "q")

    def _entry_of(self, node: Node, state: str) -> m.StandbyEntry:
        address = (0, "", 0) if state == "expected" else (node.machine._joiner.incarnation, HOST, node.port)
        return m.StandbyEntry(node.name, "p", *address, state)

    def publish(self) -> None:
        """Let the scheduler tell everybody the next view."""
        self.epoch += 1
        workers = tuple(m.WorkerEntry(one.rank, one.name, 1, one.state, "", one.since) for one in self.workers)
        view = m.View(self.epoch, workers, (self.entry(),), 1.0, 2**19, 2**19, 5.0, **self.settings)
        for node in self.nodes.values():
            if node.alive:
                self.put(node, SCHEDULER, st.Received(SCHEDULER, 0, view), b"")

    def lost(self, node: Node) -> None:
        """Let the scheduler find that a node is lost."""
        if node is self.standby:
            self.standby = None
            self.drop_tail()
            if self.replaces:
                self.hire()
            self.publish()
        elif node is self.tail:
            self.tail = None
            self.publish()
        elif node is self.primary:
            assert self.state == "ready", "nobody can take its place"
            self.promote()

    def evict(self, worker: Worker) -> None:
        """Let a worker die, and the others go on without it."""
        self.close(worker, 0)
        worker.alive, worker.script, worker.waiting, worker.state = False, None, [], "evicted"
        self.publish()

    def promote(self) -> None:
        """Let the standby take the place of the primary, and another one that of the standby."""
        assert self.standby is not None, "there is one"
        self.primary, self.standby, self.state = self.standby, self.tail, self.tail_state
        self.tail = None
        if self.standby is None and self.replaces:
            self.hire()
        self.publish()
        self.connect_workers()

    def told(self, node: Node, message: m.Message) -> None:
        """Take in what a node tells the scheduler."""
        match message:
            case m.StandbyReady(0, name) if node is self.primary:
                if self.standby is not None and self.standby.name == name:
                    self.state = "ready"
                    self.publish()
                elif self.tail is not None and self.tail.name == name:
                    self.tail_state = "ready"
                    (self.switch if self.switches else self.publish)()
            case m.DropStandby(0, name):
                if node is self.primary and self.standby is not None and self.standby.name == name:
                    self.standby = None
                    self.drop_tail()
                    self.publish()
                elif node is self.standby and self.tail is not None and self.tail.name == name:
                    self.drop_tail()
                    self.publish()

    def drop_tail(self) -> None:
        """Let the standby's own one end, if there is one."""
        node, self.tail = self.tail, None
        if node is not None:
            self.put(node, SCHEDULER, st.Received(SCHEDULER, 0, m.Stop("nobody needs it")), b"")

    # --- what happens ---

    def begin(self, *scripts: Callable[[Worker], Script]) -> None:
        """Let workers begin with scripts, the last one all who are left."""
        for worker in self.workers:
            worker.script = scripts[min(worker.rank, len(scripts) - 1)](worker)
            worker.advance()

    def run(self, *scripts: Callable[[Worker], Script]) -> None:
        """Let workers run scripts to their end."""
        self.begin(*scripts)
        self.go_on()

    def go_on(self, steps: int = LIMIT) -> None:
        """Let so many things happen, or less, until all scripts are over."""
        for _ in range(steps):
            if not any(worker.script for worker in self.workers):
                return
            self.step()
        if steps == LIMIT:
            pytest.fail("going round in circles")

    def settle(self) -> None:
        """Let happen all that is under way."""
        for _ in range(LIMIT):
            if not any(self.ready.values()) and not self.timed:
                return
            self.step()

    def step(self) -> None:
        """Let one thing happen: a delivery, or time to pass."""
        self.steps += 1
        for due in [each for each in self.timed if each[0] <= self.now]:
            self.timed.remove(due)
            self.later(due[1])
        queues = [queue for queue in self.ready.values() if queue]
        if queues:
            self.random.choice(queues).popleft()()
            return
        wanted = {node.port: node.machine.deadline() for node in self.nodes.values() if node.alive}
        times = [time for time in wanted.values() if time is not None]
        self.now = max(self.now, min([*times, *(time for time, _ in self.timed)]))
        for node in list(self.nodes.values()):
            time = wanted.get(node.port)
            if node.alive and time is not None and time <= self.now:
                self.feed(node, st.Tick(), b"")

    def later(self, action: Callable[[], None]) -> None:
        """Let something happen at any time."""
        self.ready[f"later-{next(self._order)}", 0] = deque([action])

    def feed(self, node: Node, stimulus: st.Stimulus, payload: bytes) -> None:
        """Give a stimulus to a server, and perform what it wants."""
        if not node.alive:
            return
        if isinstance(stimulus, st.Received | st.PeerLost) and stimulus.peer != SCHEDULER:
            if stimulus.peer not in node.links:
                return
            if isinstance(stimulus, st.PeerLost):
                del node.links[stimulus.peer]
        if isinstance(stimulus, st.Received):
            if payload:
                stimulus.slot, view = node.store.land(len(payload))
                view[:] = payload
                stimulus.nbytes = len(payload)
            stimulus.span = span(node.store, stimulus.message, stimulus.slot)
        effects = node.machine.handle(stimulus, now=self.now)
        node.machine.validate()
        for effect in effects:
            self.perform(node, effect)

    def perform(self, node: Node, effect: ef.Effect) -> None:
        """Perform one effect of a server."""
        match effect:
            case ef.Send(peer, _, message) if peer == SCHEDULER:
                self.later(partial(self.told, node, message))
            case ef.Send() | ef.Refuse():
                self.send_answer(node, effect)()
            case ef.Hold(answer):
                node.held.append(self.send_answer(node, answer))
            case ef.LetGo(count):
                for _ in range(count):
                    node.held.popleft()()
            case ef.Connect(peer, _, port, delay):
                if peer < STANDBY:
                    self.timed.append((self.now + delay, partial(self.connect, node, peer, self.nodes[port])))
            case ef.Disconnect(peer):
                self.close(node, peer)
            case ef.Stop():
                node.stops.append(effect)
                # Its driver closes it some time later.
                self.later(partial(self.crash, node))
            case ef.Complete() | ef.Fail() | ef.Log():
                pass
            case _:
                self.perform_stored(node, effect)

    def perform_stored(self, node: Node, effect: ef.Effect) -> None:
        """Perform an effect on a server's memory."""
        match effect:
            case ef.Apply() | ef.ApplyRows() | ef.Norms() | ef.Decode():
                # Each chunk's updates take their own time.
                about = effect.update if isinstance(effect, ef.ApplyRows) else effect
                where = (0, about.slot) if isinstance(about, ef.Decode) else (about.key, about.start)
                queue = self.ready.setdefault((f"{node.name} {where}", 0), deque())
                queue.append(partial(self.make_update, node, effect))
            case ef.Restore():
                # What is sent next has the new value.
                done = perform(node.store, effect)
                assert done is not None
                self.later(partial(self.feed, node, done, b""))
            case _:
                assert perform(node.store, effect) is None

    def make_update(self, node: Node, effect: ef.Effect) -> None:
        """Perform an effect that has taken its time."""
        if node.alive:
            done = perform(node.store, effect)
            assert done is not None
            self.feed(node, done, b"")

    def send_answer(self, node: Node, effect: ef.Send | ef.Refuse) -> Callable[[], None]:
        """Make a message with its payload as it is now; return what sends it."""
        if isinstance(effect, ef.Refuse):
            error = effect.error
            message: m.Message = m.Error(error.code, error.message, error.details)
            return partial(self.send, node, effect.peer, st.Received(-9, effect.request, message), b"")
        payload = b"" if effect.payload is None else self.bytes_of(node.store, effect.payload)
        return partial(self.send, node, effect.peer, st.Received(-9, effect.request, effect.message), payload)

    def bytes_of(self, store: ParameterStore, payload: ef.Payload) -> bytes:
        """Return what a payload refers to."""
        match payload:
            case ef.StoredChunk(key, start, version):
                value = store.acquire(key, start, version)
                content = value.buffer.tobytes()
                store.release(value)
                return content
            case ef.StoredChunks(chunks):
                return b"".join(self.bytes_of(store, chunk) for chunk in chunks)
            case ef.StoredRows(key, start, version, rows):
                return store.get_rows(key, start, version, rows).tobytes()
            case ef.StoredSum(slot):
                view, release = store.lend(slot)
                # It is sent some time later, and must be the same then.
                content = bytes(view)
                self.later(partial(self.sent, view, content, release))
                return content
            case ef.StoredSlots(slots):
                return bytes(store.joined(slots))
            case ef.StoredCopy():
                return copy_bytes(store, payload)
            case _:
                raise AssertionError(payload)

    def sent(self, view: memoryview, content: bytes, release: Callable[[], None]) -> None:
        """Find that nobody has written over what was being sent."""
        assert bytes(view) == content
        release()

    # --- links ---

    def connect(self, node: Node, peer: Peer, other: Node) -> None:
        """Open a server's link to its standby."""
        if not node.alive:
            return
        if not other.alive:
            self.put(node, peer, st.ConnectFailed(peer, "connection refused"), b"")
            return
        self.join(node, peer, other)
        self.put(node, peer, st.Connected(peer), b"")

    def join(self, end: Any, peer: Peer, node: Node) -> None:
        """Make a link to a server."""
        there = next(node.numbers)
        end.links[peer], node.links[there] = (node, there), (end, peer)

    def put(self, end: Any, peer: Peer, stimulus: st.Stimulus, payload: bytes) -> None:
        """Let a stimulus come to one end of a link."""
        link = end.links.get(peer)

        def deliver() -> None:
            if peer != SCHEDULER and link is not None and end.links.get(peer) is not link:
                return
            if isinstance(end, Worker):
                if isinstance(stimulus, st.PeerLost):
                    del end.links[peer]
                end.take(stimulus, payload)
            else:
                self.feed(end, stimulus, payload)

        self.ready.setdefault((end.name, peer), deque()).append(deliver)

    def send(self, end: Any, peer: Peer, stimulus: st.Received, payload: bytes) -> None:
        """Put something on a link, if it is still there."""
        other, there = end.links.get(peer, (None, 0))
        # What is sent before an end is noticed is lost.
        if other is not None and other.links.get(there) == (end, peer):
            stimulus.peer = there
            self.put(other, there, stimulus, payload)

    def close(self, end: Any, peer: Peer) -> None:
        """Close a link: the other side hears of it after all that was sent."""
        other, there = end.links.pop(peer, (None, 0))
        if other is not None and other.links.get(there) == (end, peer):
            self.put(other, there, st.PeerLost(there, "closed"), b"")

    def cut(self, end: Any, peer: Peer) -> None:
        """Let a link end: each side gets only the beginning of what is under way."""
        if peer not in end.links:
            return
        other, there = end.links[peer]
        if other.links.get(there) != (end, peer):
            # It has ended already at the other side, which has another link of that number now.
            self.put(end, peer, st.PeerLost(peer, "connection reset"), b"")
            return
        for one, number in ((end, peer), (other, there)):
            queue = self.ready.setdefault((one.name, number), deque())
            for _ in range(self.random.randint(0, len(queue))):
                queue.pop()
            self.put(one, number, st.PeerLost(number, "connection reset"), b"")

    def crash(self, node: Node) -> None:
        """Let a node end in the middle of what it sends; the scheduler finds that some time later."""
        if not node.alive:
            return
        for peer in list(node.links):
            other, there = node.links[peer]
            # Who has gone over to another node has a new link of that number.
            if other.links.get(there) == (node, peer):
                queue = self.ready.get((other.name, there), deque())
                for _ in range(self.random.randint(0, len(queue))):
                    queue.pop()
            self.close(node, peer)
        node.alive = False
        self.later(partial(self.lost, node))

    # --- what came of it ---

    def value(self, key: Key, start: int = 0, dtype: str = "float32", node: Node | None = None) -> Array:
        """Return what a node has of a chunk: the primary, if nobody else is named."""
        node = node or self.primary
        version = node.machine._catalog.chunks[key, start].version
        value = node.store.acquire(key, start, version)
        copy = value.buffer.view(dtype).copy()
        node.store.release(value)
        return copy


@pytest.fixture(scope="session")
def make_world() -> type[World]:
    """A server with a standby, and workers."""
    return World
