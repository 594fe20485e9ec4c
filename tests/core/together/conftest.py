"""A whole cluster in one process: all machines joined by fake links, and a script for each worker's user.

A link keeps the order of what is sent over it, like TCP; which link delivers next is chosen at random, from a seed.
Time stands still while anything is under way, so that only those who wait in vain wait at all.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.joiner import Joiner
from aiokv.core.scheduler.cluster_plan import ClusterPlan
from aiokv.core.scheduler.membership import Membership
from aiokv.core.server.coordinator import Coordinator
from aiokv.core.worker.row_parts import cut_rows
from aiokv.core.worker.session import Session
from aiokv.errors import AiokvError
from aiokv.store.table import span_of
from aiokv.types import SCHEDULER, Key, Peer, Piece, Role, TensorSpec
from aiokv.wire import messages as m

Array = npt.NDArray[np.float32]
Script = Generator[int, AiokvError | None, None]
"""What a worker's user does: yields a call to wait for, gets None or the call's error."""

Rows = dict[int, Array]
WIDTH = 2
"""Elements per row of the tables."""

HOST = "127.0.0.1"
LIMIT = 20_000
"""Deliveries after which a cluster counts as going round in circles."""


@dataclass(eq=False)
class Node:
    """A machine and its connections: peer number -> (node, peer number there)."""

    name: str
    machine: Membership | Coordinator | Session
    links: dict[Peer, tuple[Node, Peer]] = field(default_factory=dict)
    alive: bool = True
    numbers: Any = field(default_factory=itertools.count)
    stops: list[ef.Stop] = field(default_factory=list)


NOWHERE = Node("nowhere", Membership(ClusterPlan(1, 1, 0.5, 2.0, 16, 64), incarnation=1, started=0.0), alive=False)

USED = np.zeros(0, np.float32)
"""In the place of an array that its user has back."""

BREAKS = 0.02
"""How likely it is that a connection ends before the next delivery."""


class Store:
    """A server's memory, with the rule w += sum; times the squares of the weight's norm where the rule has norms."""

    def __init__(self) -> None:
        self.slots: dict[int, Array] = {}
        self.chunks: dict[tuple[Key, int], dict[int, Array]] = {}
        self.tables: dict[tuple[Key, int], dict[int, Rows]] = {}
        self.pieces: dict[tuple[Key, int], list[Piece]] = {}
        self.totals: dict[tuple[Key, int], list[list[ef.Sums]]] = {}
        """The norms of every update, by key and version, from each chunk."""
        self._numbers = itertools.count()

    def land(self, payload: bytes) -> int:
        """Keep what arrived and return its slot."""
        slot = next(self._numbers)
        self.slots[slot] = np.frombuffer(payload, np.float32).copy()
        return slot

    def take(self, slot: int | None) -> Array:
        """Use up a slot."""
        return np.zeros(0, np.float32) if slot is None else self.slots.pop(slot)

    def take_rows(self, slot: int | None, width: int) -> Rows:
        """Use up a slot with rows."""
        payload = self.take(slot).view(np.uint8)
        middle = payload.size // (8 + 4 * width) * 8
        values = payload[middle:].view(np.float32).reshape(-1, width)
        return dict(zip(payload[:middle].view(np.int64).tolist(), values, strict=True))

    def apply_rows(self, update: ef.Apply, slots: list[int], factors: list[float]) -> st.Applied:
        """Make the next version of a table whose rows have two elements."""
        assert not factors, "no rule here has a staleness rate"
        versions = self.tables[update.key, update.start]
        value = versions[update.version] = dict(versions[update.version - 1])
        for slot in slots:
            for row, values in self.take_rows(slot, WIDTH).items():
                value[row] = value.get(row, np.zeros(WIDTH, np.float32)) + values
        return st.Applied(update.key, update.start, update.version)

    def apply(self, effect: ef.Apply) -> st.Applied:
        """Make the next version."""
        versions = self.chunks[effect.key, effect.start]
        total = self.take(effect.slot)
        if effect.norms:
            pieces = self.pieces[effect.key, effect.start]
            for i, piece in enumerate(pieces):
                self.totals.setdefault((piece.key, effect.version), []).append([[phase[i]] for phase in effect.norms])
            squares = [sum(phase[i][0] for phase in effect.norms) for i in range(len(pieces))]
            total = total * np.repeat(np.array(squares, np.float32), [piece.size for piece in pieces])
        versions[effect.version] = versions[effect.version - 1] + total
        return st.Applied(effect.key, effect.start, effect.version)

    def norms(self, effect: ef.Norms) -> st.Normed:
        """Return the sums of squares of each key in a chunk: of the weight, however many the rule wants."""
        versions = self.chunks[effect.key, effect.start]
        sums, offset = [], 0
        for piece in self.pieces[effect.key, effect.start]:
            weight = versions[effect.version - 1][offset : offset + piece.size]
            squares = float(np.sum(np.float64(weight) ** 2))
            sums.append((squares,) * effect.rule.norm_counts[effect.phase])
            offset += piece.size
        return st.Normed(effect.key, effect.start, effect.version, effect.phase, sums)


class Cluster:
    """A scheduler, servers and workers, each worker with its user's script."""

    may_break = 0

    def __init__(
        self,
        seed: int,
        *,
        workers: int = 3,
        servers: int = 2,
        policy: str = "bsp",
        max_open_pushes: int | None = None,
        breaks: int | None = None,
        **plan: Any,
    ) -> None:
        self.breaks = self.may_break if breaks is None else breaks
        """How many connections to servers, of workers and of other servers, may still end for no reason."""
        self.random = random.Random(seed)
        self.policy = policy
        self.now = 0.0
        self.ready: dict[tuple[str, Peer], deque[tuple[Node, st.Stimulus | None, bytes | None]]] = {}
        self.later: list[tuple[float, Node, Peer, str]] = []
        """Connections to be opened: when, from where, under which number, and to whom."""
        self.stores: dict[str, Any] = {}
        self.calls: dict[tuple[str, int], list[Array]] = {}
        self.waiting: dict[str, int] = {}
        self.results: dict[tuple[str, int], Any] = {}
        self.outcomes: dict[tuple[str, int], AiokvError | None] = {}
        self.released: dict[tuple[str, int], bytes] = {}
        self.scripts: dict[str, Script] = {}
        self.lives: dict[str, int] = {}
        self.nodes: dict[str, Node] = {}
        self._calls = itertools.count()
        machine = Membership(ClusterPlan(workers, servers, 0.5, 2.0, 16, 64, **plan), incarnation=1, started=0.0)
        self.add("scheduler", machine)
        for index in range(servers):
            joiner = self.joiner(Role.SERVER, index)
            self.add(joiner.name, Coordinator(joiner))
            self.stores[joiner.name] = self.make_store()
            self.feed(self.nodes[joiner.name], st.Join(next(self._calls), 30.0))
        most = max_open_pushes or self.random.choice([1, 2, 16])
        for index in range(workers):
            joiner = self.joiner(Role.WORKER, index)
            self.add(joiner.name, Session(joiner, policy=policy, max_open_pushes=most))

    def make_store(self) -> Any:
        """Return a new server's memory."""
        return Store()

    def joiner(self, role: Role, index: int) -> Joiner:
        """Return a node's joiner, of a later process each time; servers listen at port 9000 + index."""
        advertised = (HOST, 9000 + index) if role is Role.SERVER else ("", 0)
        name = f"{role}-{index}"
        life = self.lives[name] = self.lives.get(name, 0) + 1
        return Joiner(role=role, name=name, incarnation=life, scheduler=(HOST, 9091), advertised=advertised)

    def add(self, name: str, machine: Any) -> None:
        """Put a node in."""
        self.nodes[name] = Node(name, machine)

    # --- the users ---

    def run(self, script: Callable[[User], Script], *others: Callable[[User], Script]) -> None:
        """Let every worker run a script, the first ones the given others, until all scripts are over."""
        workers = [node for node in self.nodes.values() if isinstance(node.machine, Session)]
        for number, node in enumerate(workers):
            chosen = others[number] if number < len(others) else script
            self.scripts[node.name] = chosen(User(self, node))
            self.advance(node.name, None)
        for _ in range(LIMIT):
            if not self.scripts:
                return
            self.step()
        pytest.fail(f"going round in circles; still running: {', '.join(self.scripts)}")

    def settle(self) -> None:
        """Deliver all that is under way."""
        while any(self.ready.values()):
            self.step()

    def advance(self, name: str, error: AiokvError | None) -> None:
        """Let a script go on to its next wait."""
        try:
            while True:
                call = self.scripts[name].send(error)
                if (name, call) not in self.outcomes:
                    self.waiting[name] = call
                    return
                error = self.outcomes[name, call]
        except StopIteration:
            self.scripts.pop(name, None)

    # --- the world ---

    def step(self) -> None:
        """Let one thing happen: a delivery, or time to pass to the next deadline."""
        for connection in [each for each in self.later if each[0] <= self.now]:
            self.later.remove(connection)
            self.connect(*connection[1:])
        queues = [queue for queue in self.ready.values() if queue]
        if queues and self.breaks and self.random.random() < BREAKS:
            self.break_any()
        if queues:
            node, stimulus, payload = self.random.choice(queues).popleft()
            if stimulus is not None:
                self.deliver(node, stimulus, payload)
            return
        deadlines = {node.name: node.machine.deadline() for node in self.nodes.values() if node.alive}
        due = {name: time for name, time in deadlines.items() if time is not None}
        self.now = max(self.now, min([*due.values(), *(each[0] for each in self.later)]))
        for name, time in due.items():
            if time <= self.now and self.nodes[name].alive:
                self.feed(self.nodes[name], st.Tick())

    def deliver(self, node: Node, stimulus: st.Stimulus, payload: bytes | None) -> None:
        """Give a stimulus to a node, its payload to its memory."""
        if not node.alive:
            return
        if isinstance(stimulus, st.Received | st.PeerLost) and stimulus.peer not in node.links:
            return
        if isinstance(stimulus, st.PeerLost):
            del node.links[stimulus.peer]
        if isinstance(stimulus, st.Received) and isinstance(stimulus.message, m.PullRows):
            stimulus.span = span_of(np.frombuffer(stimulus.message.rows, np.int64))
        if isinstance(stimulus, st.Received) and payload:
            stimulus.nbytes = len(payload)
            if isinstance(stimulus.message, m.InitRows | m.PushRows):
                stimulus.span = span_of(np.frombuffer(payload[: 8 * stimulus.message.count], np.int64))
            if node.name in self.stores:
                stimulus.slot = self.stores[node.name].land(payload)
            else:
                self.land(node, stimulus, payload)
        self.feed(node, stimulus)

    def land(self, node: Node, stimulus: st.Received, payload: bytes) -> None:
        """Write an answer's payload into the array that waits for it."""
        assert isinstance(node.machine, Session)
        place = node.machine.landing(stimulus.request, len(payload))
        if place is None:
            return
        assert not isinstance(place, ef.Replica), "nothing is compressed here"
        assert (node.name, place.call) not in self.released, "the caller has its memory back"
        arrays = self.calls[node.name, place.call]
        if isinstance(place, ef.CallMemory):
            array = arrays[place.tensor]
            array.reshape(-1).view(np.uint8)[place.start : place.stop] = np.frombuffer(payload, np.uint8)
            return
        assert isinstance(place, ef.CallTensors), "nothing is saved here"
        for tensor in place.tensors:
            array = arrays[tensor]
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(payload[: array.nbytes], np.uint8)
            payload = payload[array.nbytes :]

    def feed(self, node: Node, stimulus: st.Stimulus) -> None:
        """Give a stimulus to a node and perform what it wants."""
        effects = node.machine.handle(stimulus, now=self.now)
        node.machine.validate()
        for effect in effects:
            self.perform(node, effect)

    def perform(self, node: Node, effect: ef.Effect) -> None:
        """Perform one effect."""
        match effect:
            case ef.Connect(peer, _, port, delay):
                name = self.name_at(port)
                self.later = [each for each in self.later if each[1:3] != (node, peer)]
                self.later.append((self.now + delay, node, peer, name))
            case ef.Send(peer, request, message, payload):
                self.send(node, peer, st.Received(-9, request, message), self.bytes_of(node, payload))
            case ef.Refuse(peer, request, error):
                self.send(node, peer, st.Received(-9, request, m.Error(error.code, error.message, error.details)))
            case ef.Disconnect(peer, reason):
                self.close(node, peer, reason)
            case ef.Stop():
                node.stops.append(effect)
            case ef.Complete(call, result):
                self.results[node.name, call] = result
                self.end(node, call, None)
            case ef.Fail(call, error):
                self.end(node, call, error)
            case ef.Release(call, _, keeps):
                self.released[node.name, call] = b""
                arrays = self.calls[node.name, call]
                # The user writes over the others.
                kept = [array.copy() if tensor in keeps else USED for tensor, array in enumerate(arrays)]
                self.calls[node.name, call] = kept
            case ef.Discard(call):
                del self.calls[node.name, call]
            case ef.Log() | ef.ForgetResiduals():
                pass
            case _:
                self.perform_store(node, self.stores[node.name], effect)

    def perform_store(self, node: Node, store: Store, effect: ef.Effect) -> None:
        """Perform an effect on a server's memory."""
        match effect:
            case ef.Install(key, start, _, _, slot, lying):
                store.chunks[key, start] = {0: store.take(slot)}
                store.pieces[key, start] = lying
            case ef.Fold(target, source):
                store.slots[target] += store.slots.pop(source)
            case ef.Free(slot):
                store.take(slot)
            case ef.Apply():
                applied = store.apply(effect)
                # Each chunk's updates take their own time.
                self.ready.setdefault((node.name, -100 - effect.start), deque()).append((node, applied, None))
            case ef.InstallRows(key, start, slot=slot):
                store.tables[key, start] = {0: store.take_rows(slot, WIDTH)}
            case ef.ApplyRows(update, slots, factors):
                applied = store.apply_rows(update, slots, factors)
                self.ready.setdefault((node.name, -100 - update.start), deque()).append((node, applied, None))
            case ef.JoinRows(slot, parts, row_bytes):
                pieces = [store.take_rows(part, row_bytes // 4) for part in parts]
                rows = {row: values for piece in pieces for row, values in piece.items()}
                ids = np.array(list(rows), np.int64).view(np.float32)
                store.slots[slot] = np.concatenate([ids, *rows.values()])
            case ef.Split(slot, parts):
                whole = store.take(slot)
                for part, nbytes in parts:
                    store.slots[part], whole = whole[: nbytes // 4].copy(), whole[nbytes // 4 :]
                assert not whole.size
            case ef.Divide(key, start, parts):
                self.divide(store, key, start, parts)
            case _:
                self.perform_rule(node, store, effect)

    def perform_rule(self, node: Node, store: Store, effect: ef.Effect) -> None:
        """Perform an effect that only some update rules need."""
        match effect:
            case ef.Retire(key, start, versions):
                for retired in versions:
                    del store.chunks[key, start][retired]
            case ef.Skip(key, start, version, slot):
                store.take(slot)
                store.chunks[key, start][version] = store.chunks[key, start][version - 1]
            case ef.Norms():
                normed = store.norms(effect)
                self.ready.setdefault((node.name, -100 - effect.start), deque()).append((node, normed, None))
            case ef.Forget(key, start):
                del store.chunks[key, start], store.pieces[key, start]
            case ef.Configure():
                pass
            case _:
                raise AssertionError(effect)

    def divide(self, store: Store, key: Key, start: int, parts: list[tuple[Key, int]]) -> None:
        """Make chunks of the keys of a bundle."""
        versions = store.chunks.pop((key, start))
        newest = max(versions)
        offset = 0
        for name, size in parts:
            assert (name, 0) not in store.chunks
            store.chunks[name, 0] = {newest: versions[newest][offset : offset + size].copy()}
            store.pieces[name, 0] = [Piece(name, 0, size)]
            offset += size
        assert offset == versions[newest].size

    def bytes_of(self, node: Node, payload: ef.Payload | None) -> bytes | None:
        """Return what a payload refers to."""
        match payload:
            case ef.CallTensors(call, tensors, nbytes):
                whole = b"".join(self.calls[node.name, call][tensor].tobytes() for tensor in tensors)
                assert len(whole) == nbytes
                return whole
            case ef.StoredRows(key, start, version, wanted, nbytes):
                table = self.stores[node.name].tables[key, start][version]
                zeros = np.zeros(WIDTH, np.float32)
                found = [table.get(row, zeros).tobytes() for row in np.frombuffer(wanted, np.int64).tolist()]
                assert sum(map(len, found)) == nbytes
                return b"".join(found)
            case ef.StoredChunks(chunks):
                return b"".join(self.bytes_of(node, chunk) or b"" for chunk in chunks)
            case ef.CallMemory(call, tensor, start, stop):
                return self.calls[node.name, call][tensor].tobytes()[start:stop]
            case ef.StoredChunk(key, start, version, nbytes):
                value: bytes = self.stores[node.name].chunks[key, start][version].tobytes()
                assert len(value) == nbytes
                return value
            case _:
                return None

    def name_at(self, port: int) -> str:
        """Return who listens at a port."""
        return "scheduler" if port == 9091 else f"server-{port - 9000}"

    def connect(self, node: Node, peer: Peer, name: str) -> None:
        """Open a connection, unless the other side is dead. Nothing is heard of the one before under that number."""
        self.ready.pop((node.name, peer), None)
        other = self.nodes[name]
        if not other.alive:
            failed = st.ConnectFailed(peer, "connection refused")
            self.ready.setdefault((node.name, peer), deque()).append((node, failed, None))
            return
        there = next(other.numbers)
        node.links[peer], other.links[there] = (other, there), (node, peer)
        self.ready.setdefault((node.name, peer), deque()).append((node, st.Connected(peer), None))

    def break_any(self) -> None:
        """Let a connection to a server end: of what is under way each side gets only the beginning."""
        workers = [node for node in self.nodes.values() if isinstance(node.machine, Session) and node.alive]
        links = [(node, peer) for node in workers for peer in node.links if peer != SCHEDULER]
        servers = [node for node in self.nodes.values() if isinstance(node.machine, Coordinator) and node.alive]
        own = [(node, peer) for node in servers for peer in node.links if peer < SCHEDULER]
        # There are few of these, and as much may go wrong over them.
        links = own if own and self.random.random() < 0.5 else links
        if links:
            self.breaks -= 1
            self.break_link(*self.random.choice(links))

    def break_link(self, node: Node, peer: Peer) -> None:
        """Let a connection end."""
        other, there = node.links[peer]
        for end, number in ((node, peer), (other, there)):
            if not end.alive:
                continue
            queue = self.ready.setdefault((end.name, number), deque())
            for _ in range(self.random.randint(0, len(queue))):
                queue.pop()
            queue.append((end, st.PeerLost(number, "connection reset"), None))
            # What is sent before it is noticed is lost.
            end.links[number] = NOWHERE, 0

    def send(self, node: Node, peer: Peer, stimulus: Any, payload: bytes | None = None) -> None:
        """Put something on a link, if it is still there."""
        if peer in node.links:
            other, there = node.links[peer]
            if other.links.get(there) != (node, peer):
                # The other side has closed it.
                return
            stimulus.peer = there
            self.ready.setdefault((other.name, there), deque()).append((other, stimulus, payload))

    def close(self, node: Node, peer: Peer, reason: str) -> None:
        """Close a connection: the other side hears of it after all that was sent."""
        self.send(node, peer, st.PeerLost(-9, reason))
        node.links.pop(peer, None)

    def end(self, node: Node, call: int, error: AiokvError | None) -> None:
        """Keep a call's outcome, and let a script that waits for it go on."""
        assert (node.name, call) not in self.outcomes, "a call ends once"
        self.outcomes[node.name, call] = error
        if self.waiting.get(node.name) == call:
            del self.waiting[node.name]
            self.advance(node.name, error)

    def kill_after(self, name: str, deliveries: int) -> None:
        """Let a node die after so many deliveries, in the middle of what it sends."""
        original, count = self.deliver, itertools.count()

        def deliver(node: Node, stimulus: st.Stimulus, payload: bytes | None) -> None:
            if next(count) == deliveries:
                self.kill(name, cut=True)
            original(node, stimulus, payload)

        self.deliver = deliver  # type: ignore[method-assign]

    def kill(self, name: str, *, quietly: bool = False, cut: bool = False) -> None:
        """Let a node die.

        Args:
            name: whose.
            quietly: its connections stay open, as when its machine hangs.
            cut: what it had sent last over each of its connections gets lost.
        """
        node = self.nodes[name]
        for other, there in node.links.values() if cut else ():
            queue = self.ready.get((other.name, there), deque())
            for _ in range(self.random.randint(0, len(queue))):
                queue.pop()
        for peer in [] if quietly else list(node.links):
            self.close(node, peer, "connection reset")
        node.alive = False
        self.scripts.pop(name, None)


class User:
    """What a worker's user sees."""

    def __init__(self, cluster: Cluster, node: Node) -> None:
        self.cluster = cluster
        self.node = node

    @property
    def rank(self) -> int:
        """The worker's rank."""
        assert isinstance(self.node.machine, Session)
        return self.node.machine.rank

    def _feed(self, make: Callable[[int], st.Stimulus], arrays: list[Array] | None = None) -> int:
        number = next(self.cluster._calls)
        self.cluster.calls[self.node.name, number] = arrays or []
        self.cluster.feed(self.node, make(number))
        return number

    def join(self) -> int:
        """Begin to join."""
        return self._feed(lambda call: st.Join(call, 30.0))

    def transfer(self, operation: str, arrays: dict[Key, Array], timeout: float = 10.0, policy: str = "") -> int:
        """Begin to init, push, pull or pushpull."""
        tensors = [(key, TensorSpec(array.shape, "float32")) for key, array in arrays.items()]
        values = list(arrays.values())
        options = st.KeyOptions(policy, digests=tuple(b"of " + array.tobytes()[:8] for array in values))
        return self._feed(
            lambda call: st.Transfer(call, st.Operation(operation), tensors, timeout, options=options), values
        )

    def transfer_rows(self, operation: str, shape: tuple[int, int], rows: Any, timeout: float = 10.0) -> int:
        """Begin to init or push rows of the table "table", or to pull them into a float32 array.

        Args:
            operation: "init", "push" or "pull".
            shape: of the table.
            rows: a dict of rows to send, or a pair of row ids and the array for their values.
            timeout: seconds.
        """
        assert isinstance(self.node.machine, Session)
        spec = TensorSpec(shape, "float32")
        ids = np.array(sorted(rows if isinstance(rows, dict) else rows[0]), np.int64)
        bounds = [*self.node.machine.row_bounds("table", spec), shape[0]]
        cuts = np.searchsorted(ids, bounds)
        counts = np.diff(cuts).tolist()
        if isinstance(rows, dict):
            pieces: list[bytes] = []
            begin = 0
            for count in counts:
                for size in cut_rows(count, spec):
                    piece = ids[begin : begin + size]
                    pieces += [piece.tobytes(), *(np.float32(rows[row]).tobytes() for row in piece.tolist())]
                    begin += size
            array, wanted = np.frombuffer(b"".join(pieces), np.float32), b""
        else:
            array, wanted = rows[1], ids.tobytes()
        tensors: list[tuple[Key, TensorSpec]] = [("table", spec)]
        what, sent, options = st.Operation(operation), [st.Rows(counts, wanted)], st.KeyOptions(digests=(b"rows",))
        return self._feed(lambda call: st.Transfer(call, what, tensors, timeout, rows=sent, options=options), [array])

    def optimizer(self, name: str) -> int:
        """Begin to set the update rule."""
        return self._feed(lambda call: st.ConfigureOptimizer(call, name, {}, 10.0))

    def set_policy(self, policy: str, *keys: Key) -> int:
        """Begin to change the policy of keys, or of all."""
        return self._feed(lambda call: st.ChangePolicy(call, policy, list(keys), 10.0))

    @property
    def dropped(self) -> int:
        """How many of this worker's contributions count nowhere."""
        assert isinstance(self.node.machine, Session)
        return sum(self.node.machine.dropped.values())

    def barrier(self) -> int:
        """Arrive at a barrier."""
        return self._feed(lambda call: st.EnterBarrier(call, "b", 10.0))

    def go_on(self) -> int:
        """Begin to ask where the process was that had this worker's place before."""
        return self._feed(lambda call: st.GoOn(call, 10.0))

    def members(self, step: int) -> int:
        """Begin to ask who counts in a step."""
        return self._feed(lambda call: st.AskMembers(call, step, 10.0))

    def result(self, call: int) -> Any:
        """Return what a call has returned."""
        return self.cluster.results[self.node.name, call]

    def leave(self) -> int:
        """Begin to leave."""
        return self._feed(lambda call: st.Depart(call, 5.0))

    def cancel(self, call: int) -> None:
        """Stop waiting for a call."""
        self.cluster.feed(self.node, st.Cancel(call))


class Flaky(Cluster):
    """A cluster in which connections to servers end for no reason."""

    may_break = 6


@pytest.fixture(scope="session", params=[Cluster, Flaky], ids=["connections live", "connections end"])
def make_cluster(request: pytest.FixtureRequest) -> type[Cluster]:
    """A cluster of any size, under any policy; that connections are made again changes nothing."""
    chosen: type[Cluster] = request.param
    return chosen
