"""Server processes die, and their standbys take over: nothing fails, and the bits are those of an undisturbed run."""

from __future__ import annotations

from collections import deque
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as hs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.joiner import Joiner
from aiokv.core.scheduler.membership import Membership
from aiokv.core.server.coordinator import Coordinator
from aiokv.kernels import get_backend
from aiokv.store.memory import ParameterStore
from aiokv.storing import copy_bytes, perform
from aiokv.types import STANDBY, Role
from tests.core.together.conftest import HOST, Cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from aiokv.types import Key
    from tests.core.together.conftest import Array, Node, Script, User

SHAPES: dict[Key, tuple[int, ...]] = {"big": (7, 5), "other": (20,), "small": (3,), "tiny": (2,)}
"""Chunks have 16 bytes here: the first two lie on all servers, in several chunks on each."""

STEPS = 4
SEEDS = hs.integers(0, 2**32)


class Memory:
    """A server's memory, with the rules as they are."""

    def __init__(self) -> None:
        self.store = ParameterStore(get_backend("reference"))

    def land(self, payload: bytes) -> int:
        """Keep what arrived and return its slot."""
        slot, view = self.store.land(len(payload))
        view[:] = payload
        return slot


class Replicated(Cluster):
    """A cluster with standbys, whose server processes may die when each index has one that is ready."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.ports: dict[int, str] = {}
        self.processes: dict[str, str] = {}
        """In which process a node of servers is, by the name of the node with which it began."""
        self.held: dict[str, deque[Callable[[], None]]] = {}
        self.unmade: dict[tuple[str, Key, int], ef.Apply] = {}
        """The updates that are to be made, by node and chunk."""
        self.deaths: list[tuple[int, int]] = []
        """After how many deliveries since all standbys are ready processes are to die, and whose primary is there.

        An index that there is not stands for links to standbys, which end instead.
        """
        self.died: list[str] = []
        self.waited = 0
        super().__init__(seed, breaks=0, replication=2, **settings)
        for node in self.nodes.values():
            if isinstance(node.machine, Coordinator):
                self.processes[node.name] = node.name

    def make_store(self) -> Memory:
        """Return a new server's memory."""
        return Memory()

    def name_at(self, port: int) -> str:
        """Return who listens at a port."""
        return self.ports.get(port) or super().name_at(port)

    # --- deaths ---

    @property
    def is_safe(self) -> bool:
        """Whether each index has a standby that is ready."""
        scheduler = self.nodes["scheduler"].machine
        assert isinstance(scheduler, Membership)
        view = scheduler._cluster.view
        return view is not None and all(
            entry.standby is not None
            and entry.standby.state == "ready"
            and self.nodes[entry.name].alive
            and self.nodes[entry.standby.name].alive
            for entry in view.servers
        )

    def step(self) -> None:
        """Let one thing happen; a process may die before."""
        if self.deaths and self.is_safe:
            self.waited += 1
            if self.waited >= self.deaths[0][0]:
                self.waited = 0
                self.lose(self.deaths.pop(0)[1])
        super().step()

    def lose(self, index: int) -> None:
        """Let the process die that has the primary of an index, or links to standbys end."""
        scheduler = self.nodes["scheduler"].machine
        assert isinstance(scheduler, Membership)
        assert scheduler._cluster.view is not None
        if index >= len(scheduler._cluster.view.servers):
            for node in list(self.nodes.values()):
                for peer in [peer for peer in node.links if node.alive and peer < STANDBY]:
                    self.break_link(node, peer)
            return
        process = self.processes[scheduler._cluster.view.servers[index].name]
        self.died.append(process)
        for name in [name for name, where in self.processes.items() if where == process]:
            if self.nodes[name].alive:
                self.kill(name, cut=True)

    # --- effects ---

    def perform(self, node: Node, effect: ef.Effect) -> None:
        """Perform one effect."""
        match effect:
            case ef.Hold(answer):
                self.held.setdefault(node.name, deque()).append(self.prepared(node, answer))
            case ef.LetGo(count):
                for _ in range(count):
                    self.held[node.name].popleft()()
            case ef.StartNode(index, name):
                self.start(self.processes[node.name], index, name)
            case ef.Stop() if isinstance(node.machine, Coordinator) and node.alive:
                super().perform(node, effect)
                self.kill(node.name)
            case _:
                super().perform(node, effect)

    def prepared(self, node: Node, answer: ef.Send | ef.Refuse) -> Callable[[], None]:
        """Make an answer as it is now; return what sends it."""
        if isinstance(answer, ef.Refuse):
            return partial(super().perform, node, answer)
        stimulus = st.Received(-9, answer.request, answer.message)
        return partial(self.send, node, answer.peer, stimulus, self.bytes_of(node, answer.payload))

    def start(self, process: str, index: int, name: str) -> None:
        """Start a standby in a process."""
        port = 9500 + len(self.ports)
        self.ports[port] = name
        joiner = Joiner(
            role=Role.SERVER,
            name=name,
            incarnation=1,
            scheduler=(HOST, 9091),
            advertised=(HOST, port),
            standby=index,
        )
        self.processes[name] = process
        self.add(name, Coordinator(joiner))
        self.stores[name] = self.make_store()
        self.feed(self.nodes[name], st.Join(next(self._calls), 30.0))

    def perform_store(self, node: Node, store: Any, effect: ef.Effect) -> None:
        """Perform an effect on a server's memory; an update is made later, and until then the value stays."""
        done: st.Stimulus | None
        if isinstance(effect, ef.Apply):
            done = st.Applied(effect.key, effect.start, effect.version)
            self.unmade[node.name, effect.key, effect.start] = effect
        else:
            done = perform(store.store, effect)
        if done is not None:
            self.ready.setdefault((node.name, -100), deque()).append((node, done, None))

    def deliver(self, node: Node, stimulus: st.Stimulus, payload: bytes | None) -> None:
        """Give a stimulus to a node, or make the update that it is about."""
        if isinstance(stimulus, st.Applied) and node.alive:
            effect = self.unmade.pop((node.name, stimulus.key, stimulus.start))
            done = perform(self.stores[node.name].store, effect)
            assert done is not None, "it ends in a stimulus"
            stimulus = done
        super().deliver(node, stimulus, payload)

    def bytes_of(self, node: Node, payload: ef.Payload | None) -> bytes | None:
        """Return what a payload refers to."""
        match payload:
            case ef.StoredChunk(key, start, version):
                store = self.stores[node.name].store
                value = store.acquire(key, start, version)
                content: bytes = value.buffer.tobytes()
                store.release(value)
                return content
            case ef.StoredSum(slot):
                return self.lent(node, slot)
            case ef.StoredSlots(slots):
                return b"".join(self.lent(node, slot) for slot in slots)
            case ef.StoredCopy():
                return copy_bytes(self.stores[node.name].store, payload)
            case _:
                return super().bytes_of(node, payload)

    def lent(self, node: Node, slot: int) -> bytes:
        """Return what is in a slot."""
        view, release = self.stores[node.name].store.lend(slot)
        content = bytes(view)
        release()
        return content


def numbers(shape: tuple[int, ...]) -> Array:
    """Return 0, 1, 2 ... in an array."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def trained(cluster: Cluster, rule: str, *, waits: bool, policy: str = "bsp") -> dict[int, dict[Key, Array]]:
    """Let all workers train; return what each rank reads in the end."""
    finals: dict[int, dict[Key, Array]] = {}

    def train(user: User) -> Script:
        assert (yield user.join()) is None
        values = {key: numbers(shape) + np.float32(1) for key, shape in SHAPES.items()}
        assert (yield user.transfer("init", values, policy=policy)) is None
        assert (yield user.optimizer(rule)) is None
        calls = []
        for step in range(STEPS):
            gradients = {
                key: np.float32(0.1) * numbers(shape) + np.float32(user.rank - step) for key, shape in SHAPES.items()
            }
            calls.append(user.transfer("push", gradients))
            if waits:
                assert (yield calls[-1]) is None
        for call in calls:
            assert (yield call) is None
        assert (yield user.transfer("pull", values)) is None
        finals[user.rank] = values
        yield user.leave()

    cluster.run(train)
    return finals


DEATHS = hs.lists(hs.tuples(hs.integers(1, 250), hs.integers(0, 3)), min_size=1, max_size=3)


@pytest.mark.parametrize("rule", ["sgd", "lamb", "lans"])
@settings(max_examples=20)
@given(seed=SEEDS, deaths=DEATHS, waits=hs.booleans())
def test_bits_are_those_of_an_undisturbed_run(rule: str, seed: int, deaths: list[tuple[int, int]], waits: bool) -> None:
    """Also where the norms of a tensor come from chunks of all servers, and are added up by the one that dies."""
    check_bits(rule, "bsp", seed, deaths, waits=waits)


@pytest.mark.parametrize("policy", ["round_robin", "k_sync:2"])
@settings(max_examples=10)
@given(seed=SEEDS, deaths=DEATHS)
def test_rounds_stay_as_they_were_decided(policy: str, seed: int, deaths: list[tuple[int, int]]) -> None:
    """Also when the server dies that decides the rounds of all keys.

    Where workers take turns, rank 0 may read before the last turn of rank 1.
    """
    readers = [1] if policy == "round_robin" else [0, 1]
    check_bits("sgd", policy, seed, deaths, waits=True, readers=readers)


@cache
def undisturbed(rule: str, policy: str) -> dict[int, dict[Key, Array]]:
    """Return what is trained while nothing happens."""
    return trained(Replicated(0, servers=3, workers=2), rule, waits=True, policy=policy)


def check_bits(
    rule: str, policy: str, seed: int, deaths: list[tuple[int, int]], *, waits: bool, readers: Sequence[int] = (0, 1)
) -> None:
    """Check that what is trained while servers die has the bits of an undisturbed run, for those who read all of it."""
    expected = undisturbed(rule, policy)
    cluster = Replicated(seed, servers=3, workers=2)
    cluster.deaths = deaths
    finals = trained(cluster, rule, waits=waits, policy=policy)
    for rank in readers:
        for key, array in finals[rank].items():
            np.testing.assert_array_equal(array, expected[1][key], err_msg=str(key))


OFTEN = hs.lists(hs.tuples(hs.integers(1, 60), hs.sampled_from([3, 3, 3, 0, 1, 2])), min_size=1, max_size=8)


@pytest.mark.parametrize("rule", ["lamb", "lans"])
@pytest.mark.parametrize("policy", ["k_batch_sync:2", "k_batch_async:2"])
@settings(max_examples=15)
@given(seed=SEEDS, ends=OFTEN, waits=hs.booleans())
@example(seed=186, ends=[(15, 0), (50, 3), (59, 3), (1, 0)], waits=False)
def test_norms_are_added_up_although_links_to_standbys_end(
    rule: str, policy: str, seed: int, ends: list[tuple[int, int]], waits: bool
) -> None:
    """Workers have gone on whose pushes are in the sum, and can't be sent any longer.

    A server whose standby lacks them would hold back what the others need to make the same update, as they do.
    """
    cluster = Replicated(seed, servers=3, workers=2)
    cluster.deaths = ends
    finals = trained(cluster, rule, waits=waits, policy=policy)
    assert sorted(finals) == [0, 1]
    for node in cluster.nodes.values():
        if isinstance(node.machine, Coordinator) and node.machine.serves and node.alive:
            for chunk in node.machine._catalog.chunks.values():
                assert chunk.reflected == {0: STEPS, 1: STEPS}, "each push is in the value, once"
