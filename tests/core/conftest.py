"""What the tests of the state machines share: partial matches, and a rig for each machine that plays all of its peers.

Every rig validates its machine after each stimulus, and fails when a request or a call is answered twice.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.joiner import Joiner
from aiokv.core.scheduler.cluster_plan import ClusterPlan
from aiokv.core.scheduler.membership import Membership
from aiokv.core.server.coordinator import Coordinator
from aiokv.core.worker.session import Session
from aiokv.errors import AiokvError, RoundTimeoutError, WorkerLostError
from aiokv.types import SCHEDULER, Key, Peer, Rank, Role, Slot, TensorSpec, Version
from aiokv.wire import messages as m

T = TypeVar("T")

ADDRESS = ("127.0.0.1", 9091)
COUNTED = (RoundTimeoutError, WorkerLostError)


class Like:
    """Equal to every object of the class whose named fields are equal, or alike."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, cls: type, **fields: Any) -> None:
        self.cls = cls
        self.fields = fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, self.cls) and all(getattr(other, name) == value for name, value in self.fields.items())

    def __repr__(self) -> str:
        return f"{self.cls.__name__}({', '.join(f'{name}={value!r}' for name, value in self.fields.items())}, ...)"


def only(effects: list[ef.Effect], kind: type[T]) -> list[T]:
    """Return the effects of one class."""
    return [effect for effect in effects if isinstance(effect, kind)]


@dataclass(eq=False)
class Asked:
    """A request of a peer, and how it was answered."""

    peer: Peer
    request: int
    answer: m.Message | AiokvError | None = None
    payload: Any = None

    def take(self, effect: ef.Send | ef.Refuse) -> None:
        """Keep the answer; there is only one."""
        assert self.answer is None, f"answered {self.answer}, and then {effect}"
        self.answer = effect.error if isinstance(effect, ef.Refuse) else effect.message
        self.payload = effect.payload if isinstance(effect, ef.Send) else None

    @property
    def pending(self) -> bool:
        """Whether there is no answer yet."""
        return self.answer is None

    @property
    def error(self) -> AiokvError:
        """The error with which the request was refused."""
        assert isinstance(self.answer, AiokvError), self.answer
        return self.answer


def views_entries(names: list[str], states: dict[Rank, tuple[str, str]]) -> tuple[m.WorkerEntry, ...]:
    """Return the workers of a view; those without a state are alive."""
    return tuple(m.WorkerEntry(rank, name, 1, *states.get(rank, ("alive", ""))) for rank, name in enumerate(names))


class Server:
    """A coordinator with attached workers and a store that knows one number per chunk, with the rule w += sum.

    Worker r is peer 10 + r. A slot holds the number that was pushed; it is used once, or the rig fails.
    """

    def __init__(
        self,
        workers: int = 3,
        policy: str = "bsp",
        *,
        attach: bool = True,
        index: int = 0,
        servers: int = 1,
        chunk_bytes: int = 2**19,
        settings: dict[str, Any] | None = None,
    ) -> None:
        joiner = Joiner(
            role=Role.SERVER,
            name=f"server-{index}",
            incarnation=1,
            scheduler=ADDRESS,
            advertised=("127.0.0.1", 9000 + index),
        )
        self.machine = Coordinator(joiner)
        self.policy = policy
        self.now = 0.0
        self.epoch = 0
        self.names = [f"worker-{rank}" for rank in range(workers)]
        self.states: dict[Rank, tuple[str, str]] = {}
        self.servers: dict[int, tuple[str, str]] = dict.fromkeys(range(servers), ("alive", ""))
        self.nodes: dict[int, tuple[str, int, str, int]] = {
            number: (f"server-{number}", 1, "127.0.0.1", 9000 + number) for number in range(servers)
        }
        """Name, incarnation, host and port of the server with an index."""
        self.settings = settings or {}
        """Further fields of views."""
        self.chunk_bytes = chunk_bytes
        """Also what a tensor has to have at least to be cut over all servers."""
        self.effects: list[ef.Effect] = []
        self.asked: dict[tuple[Peer, int], Asked] = {}
        self.servers_at: set[Peer] = set()
        """Connections that other servers have opened, played by the test: what is sent there is in `effects` only."""
        self.slots: dict[Slot, Any] = {}
        """A number, or rows with a number each."""
        self.values: dict[tuple[Key, int], dict[Version, Any]] = {}
        self.kept: dict[tuple[Key, int], list[Version]] = {}
        """Versions before the current one that the store has to keep."""
        self.hold = False
        """With `hold`, updates take until `finish` is called."""
        self.applying: list[ef.Apply] = []
        self.hold_decoding = False
        """With it, payloads are decoded when `decode` is called."""
        self.decoding: list[tuple[Slot, np.float32]] = []
        self.applied_rows: dict[tuple[Key, int], list[Slot]] = {}
        """The slots of updates of row-sparse chunks that are in `applying`."""
        self.pushed: dict[tuple[Rank, Key], int] = {}
        self.restore_error: AiokvError | None = None
        """What the store says of the next states that it gets."""
        self.bundle_size = 0
        """Elements of the payload of a bundle's message."""
        self._numbers = itertools.count(100)
        if attach:
            self.handle(st.Join(0, 10.0))
            self.handle(st.Connected(SCHEDULER))
            self.publish()
            for rank in range(workers):
                assert self.attach(rank).answer == m.Done()

    # --- stimuli ---

    def handle(self, stimulus: st.Stimulus) -> list[ef.Effect]:
        """Give one stimulus, perform what comes of it, and return that."""
        effects = self.machine.handle(stimulus, now=self.now)
        self.effects += effects
        for effect in effects:
            self._perform(effect)
        self.machine.validate()
        self._check_slots()
        while self.decoding and not self.hold_decoding:
            self.decode()
        while self.applying and not self.hold:
            self.finish()
        return effects

    def decode(self, error: AiokvError | None = None) -> list[ef.Effect]:
        """Carry out the oldest decoding, or find its payload malformed."""
        target, number = self.decoding.pop(0)
        if error is None:
            self.slots[target] = number
        return self.handle(st.Decoded(target, error))

    def publish(self, epoch: int | None = None) -> list[ef.Effect]:
        """Let the scheduler send the next view."""
        self.epoch = self.epoch + 1 if epoch is None else epoch
        servers = tuple(m.ServerEntry(index, *self.nodes[index], *state) for index, state in self.servers.items())
        workers = views_entries(self.names, self.states)
        view = m.View(self.epoch, workers, servers, 2.0, self.chunk_bytes, self.chunk_bytes, 10.0, **self.settings)
        return self.handle(st.Received(SCHEDULER, 0, view))

    def lose(self, rank: Rank, reason: str = "connection closed") -> list[ef.Effect]:
        """Let the scheduler say that a worker is lost."""
        self.states[rank] = ("lost", reason)
        return self.publish()

    def evict(self, rank: Rank, reason: str = "connection closed") -> list[ef.Effect]:
        """Let the scheduler say that the others go on without a worker."""
        self.states[rank] = ("evicted", reason)
        return self.publish()

    def leave(self, rank: Rank) -> list[ef.Effect]:
        """Let the scheduler say that a worker has left."""
        self.states[rank] = ("left", "left in good order")
        return self.publish()

    def lose_peer(self, rank: Rank) -> list[ef.Effect]:
        """Let a worker's connection end."""
        return self.handle(st.PeerLost(10 + rank, "connection reset"))

    def attach(self, rank: Rank, *, peer: Peer | None = None, **changes: Any) -> Asked:
        """Let a worker say who it is."""
        fields: dict[str, Any] = {
            "rank": rank,
            "name": f"worker-{rank}",
            "incarnation": 1,
            "epoch": self.epoch,
            "timeout": 5.0,
        }
        return self.ask(rank, m.Attach(**(fields | changes)), peer=peer)

    def ask(
        self,
        rank: Rank,
        message: m.Message,
        value: float | None = None,
        *,
        peer: Peer | None = None,
        length: int | None = None,
    ) -> Asked:
        """Send a message of a worker, with a payload when `value` is given: that of float32, or of any length."""
        asked = Asked(10 + rank if peer is None else peer, next(self._numbers))
        self.asked[asked.peer, asked.request] = asked
        slot, nbytes = None, 0
        if value is not None:
            size = message.stop - message.start if isinstance(message, m.Init | m.Push) else self.bundle_size
            slot, nbytes = next(self._numbers), 4 * size if length is None else length
            self.slots[slot] = np.float32(value)
        self.handle(st.Received(asked.peer, asked.request, message, slot, nbytes))
        return asked

    def init(self, key: Key = "w", value: float = 0.0, *, rank: Rank = 0, **changes: Any) -> Asked:
        """Let a worker initialise one chunk: one element, unless `changes` say otherwise."""
        fields: dict[str, Any] = {"shape": (1,), "dtype": "float32", "start": 0, "stop": 1}
        fields |= {"policy": self.policy, "timeout": 5.0, "digest": b"" if rank else repr(value).encode()} | changes
        empty = fields["stop"] == fields["start"]
        return self.ask(rank, m.Init(key=key, **fields), None if rank or empty else value)

    def push(self, rank: Rank, value: float = 1.0, *, key: Key = "w", **changes: Any) -> Asked:
        """Let a worker push one number."""
        number = self.pushed.get((rank, key), 0) + 1
        fields: dict[str, Any] = {"shape": (1,), "dtype": "float32", "start": 0, "stop": 1, "sequence": number}
        fields |= {"read_version": 0, "want_value": False, "timeout": 5.0, "clock": number} | changes
        empty = fields["stop"] == fields["start"]
        asked = self.ask(rank, m.Push(key=key, **fields), None if empty else value)
        if not isinstance(asked.answer, AiokvError) or isinstance(asked.answer, COUNTED):
            # One that comes again is not another one.
            self.pushed[rank, key] = max(number - 1, fields["sequence"])
        return asked

    def pull(self, rank: Rank, *, key: Key = "w", **changes: Any) -> Asked:
        """Let a worker pull, at a version that holds its last push."""
        fields: dict[str, Any] = {"shape": (1,), "dtype": "float32", "start": 0, "stop": 1}
        fields |= {"at_least": self.pushed.get((rank, key), 0), "timeout": 5.0} | changes
        return self.ask(rank, m.Pull(key=key, **fields))

    def ask_rows(self, rank: Rank, message: m.Message, rows: dict[int, float] | None = None, **facts: Any) -> Asked:
        """Send a message with a payload of rows of one float32 each; `facts` are what else the stimulus says of it."""
        asked = Asked(10 + rank, next(self._numbers))
        self.asked[asked.peer, asked.request] = asked
        slot = None
        if rows:
            slot = next(self._numbers)
            self.slots[slot] = dict(rows)
        span = (min(rows), max(rows)) if rows else None
        received = st.Received(asked.peer, asked.request, message, slot, 12 * len(rows or ()), span)
        self.handle(structs.replace(received, **facts))
        return asked

    def init_rows(
        self, rows: dict[int, float] | None = None, *, key: Key = "t", rank: Rank = 0, **changes: Any
    ) -> Asked:
        """Let a worker initialise a table of 10 rows of one element."""
        count = len(rows or ())
        fields: dict[str, Any] = {"shape": (10,), "dtype": "float32", "start": 0, "stop": 10, "first": 0}
        fields |= {"count": count, "total": count, "policy": self.policy, "timeout": 5.0, "group": ()}
        fields |= {"digest": repr(rows).encode(), "lazy": True, "initializer": {}} | changes
        return self.ask_rows(rank, m.InitRows(key=key, **fields), rows)

    def push_rows(
        self, rank: Rank, rows: dict[int, float], *, key: Key = "t", facts: dict[str, Any] | None = None, **changes: Any
    ) -> Asked:
        """Let a worker push some rows."""
        number = self.pushed.get((rank, key), 0) + 1
        fields: dict[str, Any] = {"shape": (10,), "dtype": "float32", "start": 0, "stop": 10, "first": 0}
        fields |= {"count": len(rows), "total": len(rows), "sequence": number, "read_version": 0, "timeout": 5.0}
        fields |= {"priority": 0, "clock": number} | changes
        asked = self.ask_rows(rank, m.PushRows(key=key, **fields), rows, **(facts or {}))
        is_whole = fields["first"] + fields["count"] == fields["total"]
        if is_whole and (not isinstance(asked.answer, AiokvError) or isinstance(asked.answer, COUNTED)):
            self.pushed[rank, key] = max(number - 1, fields["sequence"])
        return asked

    def pull_rows(self, rank: Rank, *rows: int, key: Key = "t", **changes: Any) -> Asked:
        """Let a worker pull some rows, at a version that holds its last push."""
        fields: dict[str, Any] = {"shape": (10,), "dtype": "float32", "start": 0, "stop": 10}
        fields |= {"rows": struct.pack(f"{len(rows)}q", *rows), "at_least": self.pushed.get((rank, key), 0)}
        fields |= {"timeout": 5.0, "priority": 0} | changes
        span = (min(rows), max(rows)) if rows else None
        return self.ask_rows(rank, m.PullRows(key=key, **fields), span=span)

    def tick(self, now: float) -> list[ef.Effect]:
        """Let time pass."""
        self.now = now
        return self.handle(st.Tick())

    def finish(self) -> list[ef.Effect]:
        """Carry out the oldest update that is to be applied."""
        apply = self.applying.pop(0)
        if (apply.key, apply.start) in self.applied_rows:
            return self._finish_rows(apply)
        versions = self.values[apply.key, apply.start]
        total = np.float32(0) if apply.slot is None else self.slots.pop(apply.slot)
        assert apply.version == max(versions) + 1
        versions[apply.version] = versions[apply.version - 1] + total
        kept = self.kept.setdefault((apply.key, apply.start), [])
        if apply.read is not None:
            assert apply.read in (*kept, apply.version - 1), "the store has it no longer"
            kept.append(apply.version - 1)
        elif apply.keep:
            kept.append(apply.version - 1)
        return self.handle(st.Applied(apply.key, apply.start, apply.version))

    def _finish_rows(self, update: ef.Apply) -> list[ef.Effect]:
        versions = self.values[update.key, update.start]
        assert update.version == max(versions) + 1
        value = versions[update.version] = dict(versions[update.version - 1])
        for slot in self.applied_rows.pop((update.key, update.start)):
            for row, number in self.slots.pop(slot).items():
                value[row] = value.get(row, np.float32(0)) + np.float32(number)
        return self.handle(st.Applied(update.key, update.start, update.version))

    # --- what came of it ---

    def value(self, key: Key = "w", start: int = 0) -> float:
        """Return the newest value of a chunk."""
        versions = self.values[key, start]
        return float(versions[max(versions)])

    def seen(self, kind: type[T]) -> list[T]:
        """Return all effects of one class so far."""
        return only(self.effects, kind)

    def _perform(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Send(peer, request) | ef.Refuse(peer, request) if self._is_worker(peer):
                asked = self.asked[peer, request]
                asked.take(effect)
                if isinstance(asked.payload, ef.StoredChunk):
                    asked.payload = self._read(asked.payload)
                elif isinstance(asked.payload, ef.StoredRows):
                    asked.payload = self._read_rows(asked.payload)
                elif isinstance(asked.payload, ef.StoredChunks):
                    asked.payload = [self._read(chunk) for chunk in asked.payload.chunks]
            case ef.Install(key, start, _, size, slot, pieces):
                assert (key, start) not in self.values
                assert sum(piece.size for piece in pieces) == size
                self.values[key, start] = {0: np.float32(0) if slot is None else self.slots.pop(slot)}
            case ef.Fold(target, source):
                assert target not in self._applied_slots(), "the sum is being applied"
                self.slots[target] += self.slots.pop(source)
            case ef.Combine(target, sources, _, reduction):
                assert reduction == "median"
                self.slots[target] = np.float32(np.median([self.slots.pop(slot) for slot in (target, *sources)]))
            case ef.Apply():
                self.applying.append(effect)
            case ef.Free(slot):
                del self.slots[slot]
            case ef.Split(slot, parts):
                number = self.slots.pop(slot)
                self.slots |= {part: number for part, _ in parts}
            case ef.Divide(key, start, chunks):
                versions = self.values.pop((key, start))
                self.values |= {(name, 0): dict(versions) for name, _ in chunks}
                kept = self.kept.pop((key, start), [])
                self.kept |= {(name, 0): list(kept) for name, _ in chunks}
            case _:
                self._perform_rare(effect)

    def _is_worker(self, peer: Peer) -> bool:
        return peer > SCHEDULER and peer not in self.servers_at

    def _perform_rare(self, effect: ef.Effect) -> None:
        match effect:
            case ef.Restore(peer, request, key, start, _, _, slot):
                number = self.slots.pop(slot)
                if self.restore_error is None:
                    versions = self.values[key, start]
                    versions[max(versions)] = number
                self.handle(st.Restored(peer, request, self.restore_error))
            case ef.Compensate(slot, _, key, start, before, lamda):
                assert slot not in self._applied_slots(), "the sum is being applied"
                assert before in self.kept[key, start]
                versions, gradient = self.values[key, start], self.slots[slot]
                self.slots[slot] += (
                    np.float32(lamda) * gradient * gradient * (versions[max(versions)] - versions[before])
                )
            case ef.Weigh(slot, _, factor):
                assert slot not in self._applied_slots(), "the sum is being applied"
                self.slots[slot] *= np.float32(factor)
            case ef.Norms(slot=slot):
                assert slot is None or slot in self.slots
            case ef.Skip(key, start, version, slot):
                if slot is not None:
                    del self.slots[slot]
                self.values[key, start][version] = self.values[key, start][version - 1]
            case ef.Retire(key, start, retired):
                for version in retired:
                    self.kept[key, start].remove(version)
            case _:
                self._perform_rows(effect)

    def _perform_rows(self, effect: ef.Effect) -> None:
        match effect:
            case ef.InstallRows(key, start, slot=slot):
                assert (key, start) not in self.values
                self.values[key, start] = {0: {} if slot is None else self.slots.pop(slot)}
            case ef.ApplyRows(update, slots, factors):
                self.applying.append(update)
                self.applied_rows[update.key, update.start] = slots
                for slot, factor in zip(slots, factors, strict=bool(factors)):
                    self.slots[slot] = {row: number * factor for row, number in self.slots[slot].items()}
            case ef.Decode(slot, target):
                self.decoding.append((target, np.float32(0) if slot is None else self.slots.pop(slot)))
            case ef.JoinRows(slot, parts):
                self.slots[slot] = {row: number for part in parts for row, number in self.slots.pop(part).items()}
            case _:
                pass

    def _read_rows(self, at: ef.StoredRows) -> list[float]:
        rows = struct.unpack(f"{len(at.rows) // 8}q", at.rows)
        assert at.nbytes == 4 * len(rows)
        return [float(self.values[at.key, at.start][at.version].get(row, 0)) for row in rows]

    def _read(self, at: ef.StoredChunk) -> float:
        return float(self.values[at.key, at.start][at.version])

    def _applied_slots(self) -> list[Slot | None]:
        """Return the slots of updates that are under way; no chunk has two of them."""
        assert len({(update.key, update.start) for update in self.applying}) == len(self.applying)
        slots: list[Slot | None] = [update.slot for update in self.applying]
        return slots + [slot for slots in self.applied_rows.values() for slot in slots]

    def _check_slots(self) -> None:
        """Fail when a slot is lost: neither used, nor freed, nor held for an open update."""
        held: list[Slot | None] = [*self._applied_slots(), *self.machine._exchanges._tables.open_slots]
        for chunk in self.machine._catalog.chunks.values():
            for update in chunk.updates.values():
                held += [update.accumulator, *(part.slot for part in update.contributions.values())]
            held += [] if chunk.rounds is None else chunk.rounds.slots
            held += [received.slot for received in chunk.held]
        held += self.machine._whole.slots
        for behind in self.machine._decoding.behind.values():
            held += [one.slot for one in behind if isinstance(one, st.Received)]
        assert set(self.slots) == {slot for slot in held if slot is not None}


@dataclass(eq=False)
class Call:
    """A call of a worker's user: what was sent for it, and how it ended."""

    number: int
    sends: list[ef.Send] = field(default_factory=list)
    outcome: str | AiokvError | None = None
    released: ef.Release | None = None

    def end(self, outcome: str | AiokvError) -> None:
        """Keep the outcome; there is only one."""
        assert self.outcome is None, f"ended with {self.outcome}, and then with {outcome}"
        self.outcome = outcome

    @property
    def error(self) -> AiokvError:
        """The error with which the call failed."""
        assert isinstance(self.outcome, AiokvError), self.outcome
        return self.outcome

    @property
    def messages(self) -> list[Any]:
        """The messages that were sent."""
        return [send.message for send in self.sends]


class Worker:
    """A session whose scheduler and servers are played by hand. Unless told otherwise, it has joined."""

    def __init__(
        self,
        *,
        rank: Rank = 0,
        workers: int = 2,
        servers: int = 2,
        policy: str = "bsp",
        chunk_bytes: int = 2**19,
        split_bytes: int = 2**16,
        max_open_pushes: int = 16,
        join: bool = True,
        settings: dict[str, Any] | None = None,
        call_timeout: float = 60.0,
    ) -> None:
        joiner = Joiner(role=Role.WORKER, name=f"worker-{rank}", incarnation=1, scheduler=ADDRESS, advertised=("", 0))
        limits: dict[str, Any] = {"max_open_pushes": max_open_pushes, "call_timeout": call_timeout}
        self.machine = Session(joiner, policy=policy, **limits)
        self.now = 0.0
        self.effects: list[ef.Effect] = []
        self.calls: dict[int, Call] = {}
        self._sizes = (chunk_bytes, split_bytes)
        self._names = [f"worker-{number}" for number in range(workers)]
        self.nodes = {number: (f"server-{number}", 1, "127.0.0.1", 9000 + number) for number in range(servers)}
        """Name, incarnation, host and port of the server with an index."""
        self._settings = settings or {}
        self._epoch = 0
        if join:
            joined = self.call(st.Join, timeout=10.0)
            self.handle(st.Connected(SCHEDULER))
            self.publish()
            for server in range(servers):
                (attach,) = only(self.handle(st.Connected(server)), ef.Send)
                self.answer(attach)
            assert joined.outcome == "done"

    def handle(self, stimulus: st.Stimulus) -> list[ef.Effect]:
        """Give one stimulus and return what comes of it."""
        effects = self.machine.handle(stimulus, now=self.now)
        self.effects += effects
        for effect in effects:
            match effect:
                case ef.Complete(call):
                    self.calls[call].end("done")
                case ef.Fail(call, error):
                    self.calls[call].end(error)
                case ef.Release(call) if call in self.calls:
                    assert self.calls[call].outcome is None, "released first, then failed"
                    self.calls[call].released = effect
                case _:
                    pass
        self.machine.validate()
        return effects

    def view(self, **states: tuple[str, str]) -> m.View:
        """Return the next view; `states` are states and reasons of servers, as `server_1=("lost", "...")`."""
        self._epoch += 1
        entries = tuple(
            m.ServerEntry(index, *node, *states.get(f"server_{index}", ("alive", "")))
            for index, node in self.nodes.items()
        )
        names = views_entries(self._names, {})
        return m.View(self._epoch, names, entries, 2.0, *self._sizes, 10.0, **self._settings)

    def publish(self, **states: tuple[str, str]) -> list[ef.Effect]:
        """Let the scheduler send the next view."""
        return self.handle(st.Received(SCHEDULER, 0, self.view(**states)))

    def lose_server(self, index: int, reason: str = "connection reset") -> list[ef.Effect]:
        """Let a server be lost: its connection ends, and the scheduler says so."""
        self.handle(st.PeerLost(index, reason))
        return self.publish(**{f"server_{index}": ("lost", reason)})

    def call(self, stimulus: Any, **fields: Any) -> Call:
        """Make a call and return it with what was sent for it."""
        call = self.calls[len(self.calls)] = Call(len(self.calls))
        call.sends = only(self.handle(stimulus(call.number, **fields)), ef.Send)
        return call

    def transfer(
        self, operation: str, *keys: Any, shape: tuple[int, ...] = (2, 3), dtype: str = "float32", timeout: float = 10.0
    ) -> Call:
        """Init, push, pull or pushpull keys of one shape; the key "w" unless others are given."""
        tensors = [(key, TensorSpec(shape, dtype)) for key in keys or ("w",)]
        return self.call(st.Transfer, operation=st.Operation(operation), tensors=tensors, timeout=timeout)

    def transfer_rows(
        self, operation: str, *rows: st.Rows, key: Key = "t", shape: tuple[int, ...] = (10, 2), **fields: Any
    ) -> Call:
        """Init, push or pull row-sparse keys of one shape, one for each of the given rows: "t", "t1", "t2" ..."""
        spec = TensorSpec(shape, "float32")
        tensors = [(f"{key}{number or ''}", spec) for number in range(len(rows))]
        fields = {"timeout": 10.0, "tensors": tensors, "rows": list(rows)} | fields
        return self.call(st.Transfer, operation=st.Operation(operation), **fields)

    def answer(self, send: ef.Send, message: m.Message | None = None, nbytes: int | None = None) -> list[ef.Effect]:
        """Answer one message: with what was asked for, unless told otherwise."""
        if message is None:
            asks = isinstance(send.message, m.Pull | m.PullBundle | m.PullRows)
            asks = asks or getattr(send.message, "want_value", False)
            message = m.Value(1) if asks else m.Done(1)
            if isinstance(send.message, m.InitBundle):
                message = m.Bundled(0)
        if nbytes is None:
            pending = self.machine._calls.requests.get(send.request)
            nbytes = pending.part.nbytes if pending and pending.part else 0
        return self.handle(st.Received(send.peer, send.request, message, None, nbytes))

    def refuse(self, send: ef.Send, error: AiokvError) -> list[ef.Effect]:
        """Answer one message with an error."""
        return self.answer(send, m.Error(error.code, error.message, error.details), 0)

    def agree(self, call: Call) -> Call:
        """Let all servers say that what a call wants to set can be; what it has sent is what is to be set then."""
        assert all(message.trial for message in call.messages)
        call.sends = [
            each for send in call.sends for each in self.answer(send, m.Done(), 0) if isinstance(each, ef.Send)
        ]
        return call

    def finish(self, call: Call) -> Call:
        """Answer all that was sent for a call."""
        for send in call.sends:
            self.answer(send)
        return call

    def tick(self, now: float) -> list[ef.Effect]:
        """Let time pass."""
        self.now = now
        return self.handle(st.Tick())


class Scheduler:
    """A membership whose nodes are played by hand."""

    def __init__(self, workers: int = 2, servers: int = 1, **settings: Any) -> None:
        incarnation = settings.pop("incarnation", 1)
        plan = ClusterPlan(workers, servers, 0.5, 2.0, 2**19, 2**16, **settings)
        self.machine = Membership(plan, incarnation=incarnation, started=0.0)
        self.now = 0.0
        self.peers: dict[str, Peer] = {}
        self.asked: dict[tuple[Peer, int], Asked] = {}
        self.views: dict[str, list[m.View]] = {}
        self.effects: list[ef.Effect] = []
        self._numbers = itertools.count()

    def handle(self, stimulus: st.Stimulus) -> list[ef.Effect]:
        """Give one stimulus and return what comes of it."""
        effects = self.machine.handle(stimulus, now=self.now)
        self.effects += effects
        names = {peer: name for name, peer in self.peers.items()}
        for effect in effects:
            match effect:
                case ef.Send(peer, _, m.View() as view) if peer in names:
                    self.views[names[peer]].append(view)
                case ef.Send(peer, request) | ef.Refuse(peer, request) if (peer, request) in self.asked:
                    self.asked[peer, request].take(effect)
                case _:
                    pass
        self.machine.validate()
        return effects

    def ask(self, name: str, message: m.Message) -> Asked:
        """Send a message of a node; its first one opens a connection."""
        if name not in self.peers:
            self.peers[name] = next(self._numbers)
        peer = self.peers[name]
        self.views.setdefault(name, [])
        asked = Asked(peer, 1 + len(self.asked))
        self.asked[peer, asked.request] = asked
        self.handle(st.Received(peer, asked.request, message))
        return asked

    def plan_of(self, view: m.View) -> m.View:
        """Return a view of a cluster whose settings are those of this scheduler."""
        plan = self.machine._plan
        return structs.replace(view, on_worker_loss=plan.on_worker_loss, replication=plan.replication)

    def ask_again(self, name: str, before: Asked, message: m.Message) -> Asked:
        """Send a message of a node again over its new connection, under the number that it had."""
        asked = Asked(self.peers[name], before.request)
        self.asked[asked.peer, asked.request] = asked
        self.handle(st.Received(asked.peer, asked.request, message))
        return asked

    def register(
        self,
        name: str,
        role: Role | None = None,
        *,
        timeout: float = 10.0,
        incarnation: int = 1,
        again: bool = False,
        epoch: int = 0,
        number: int = 0,
        standby: int = -1,
        founder: int = 1,
    ) -> Asked:
        """Let a node ask for its place; its role is the beginning of its name unless given.

        With `again` it does so over another connection; it has had its place before if it knows an `epoch`.
        """
        role = role or Role(name.partition("-")[0])
        if again:
            del self.peers[name]
        address, known = ("127.0.0.1", 9000), (number, epoch, standby, founder if epoch else 0)
        return self.ask(name, m.Register(role, name, incarnation, *address, timeout, *known))

    def form(self, *names: str) -> None:
        """Let nodes register, in this order."""
        for name in names:
            assert self.register(name).answer is None

    def barrier(self, name: str, barrier: str = "b", *, timeout: float = 5.0) -> Asked:
        """Let a node arrive at a barrier."""
        return self.ask(name, m.Barrier(barrier, timeout))

    def drop(self, name: str, reason: str = "connection closed") -> list[ef.Effect]:
        """Let a node's connection end."""
        return self.handle(st.PeerLost(self.peers[name], reason))

    def tick(self, now: float) -> list[ef.Effect]:
        """Let time pass."""
        self.now = now
        return self.handle(st.Tick())

    def beat(self, *names: str) -> None:
        """Let nodes say that they are alive."""
        for name in names:
            self.handle(st.Received(self.peers[name], 0, m.Heartbeat()))


@pytest.fixture
def like() -> type[Like]:
    """Partial matches."""
    return Like


@pytest.fixture
def make_server() -> type[Server]:
    """A server's rig with any number of workers, under any policy."""
    return Server


@pytest.fixture
def server() -> Server:
    """A server with three attached workers."""
    return Server()


@pytest.fixture
def make_worker() -> type[Worker]:
    """A worker's rig in any cluster."""
    return Worker


@pytest.fixture
def worker() -> Worker:
    """Worker 0 of two, joined, with two servers."""
    return Worker()


@pytest.fixture
def make_scheduler() -> type[Scheduler]:
    """A scheduler's rig for any cluster."""
    return Scheduler


@pytest.fixture
def scheduler() -> Scheduler:
    """A scheduler of two workers and one server, who have all joined."""
    rig = Scheduler()
    rig.form("worker-0", "worker-1", "server-0")
    return rig
