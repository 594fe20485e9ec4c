"""What a server sends to its standby, and which answers wait for it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.checkpoint.tensorfile import pack
from aiokv.codec import make_codec
from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.server.copies.copying import Copying
from aiokv.errors import SumOverflowError
from aiokv.types import SCHEDULER, STANDBY
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.core.copies.conftest import Asked, Node, Script, Worker, World

ONES = np.ones(3, np.float32)


def once(*asks: Callable[[Worker], Asked]) -> Callable[[Worker], Script]:
    """Return a script that asks one thing after the other."""

    def script(worker: Worker) -> Script:
        for ask in asks:
            yield [ask(worker)]

    return script


def init(worker: Worker) -> Asked:
    """Initialise a key with zeros."""
    return worker.init("w", np.zeros(3, np.float32))


def push(worker: Worker) -> Asked:
    """Push ones."""
    return worker.push("w", ONES, worker.sequences.get("w", 0))


def rule(name: str, **params: Any) -> Callable[[Worker], Asked]:
    """Return what sets an update rule."""
    return lambda worker: worker.ask(m.SetOptimizer(name, params, "sum", 60.0))


def there(node: Node | None) -> Node:
    """Return a node that is there."""
    assert node is not None
    return node


def fail_over(world: World) -> None:
    """Let the standby take the primary's place, after all that is under way."""
    world.settle()
    assert world.state == "ready"
    world.crash(world.primary)
    world.settle()


# --- which answers wait ---


def test_answers_wait_for_the_first_standby(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1, registers=False)
    world.begin(once(init))
    world.settle()
    assert not world.workers[0].attached
    world.standby = None
    world.publish()
    world.go_on()
    assert world.workers[0].attached


def test_answers_do_not_wait_for_another_standby_while_it_is_filled(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    fail_over(world)
    world.crash(there(world.standby))
    world.registers = False
    world.run(once(push, push))
    assert world.value("w").tolist() == [1, 1, 1]
    assert world.state == "expected"


def test_simulator_is_told_whose_updates_count_and_which_answers_wait(make_world: Callable[..., World]) -> None:
    """A report would else count an update twice, or call it lost with the server that has answered nobody."""
    world = make_world(0, workers=1, registers=False)
    world.settle()
    first, second = world.primary.machine, there(world.standby).machine
    assert (first.serves, first.holds_copy, first.waits_for_standby) == (True, False, True)
    assert (second.serves, second.holds_copy, second.waits_for_standby) == (False, True, False)
    world.registers, world.replaces = True, False
    world.register(there(world.standby))
    fail_over(world)
    assert (second.serves, second.holds_copy, second.waits_for_standby) == (True, False, False)


def test_what_waits_is_asked_of_a_server_whose_answers_wait(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1, registers=False)
    world.settle()
    sent = world.primary.machine.handle(st.Received(50, 7, m.GetWaiting()), now=0.0)
    assert [type(effect.message) for effect in sent if isinstance(effect, ef.Send)] == [m.Waiting]


def test_standby_that_cannot_be_reached_is_dropped(make_world: Callable[..., World]) -> None:
    """The scheduler hears of it from the server only: the process lives on behind a broken network."""
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    world.replaces = False
    world.lost = lambda node: None  # type: ignore[method-assign]
    world.crash(there(world.standby))
    begun = world.now
    world.run(once(push))
    assert world.standby is None
    assert world.now - begun >= 5.0
    assert world.value("w").tolist() == [1, 1, 1]


def test_standby_is_filled_although_its_link_ends_again_and_again(make_world: Callable[..., World]) -> None:
    """With more keys than are sent at a time."""
    world = make_world(0, workers=1)
    keys = [f"k{number}" for number in range(20)]
    world.settle()
    world.crash(there(world.standby))
    world.registers = False
    world.run(once(*(lambda worker, key=key: worker.init(key, ONES) for key in keys)))
    world.registers = True
    world.register(there(world.standby))
    for pause in range(14):
        for _ in range(pause):
            world.step()
        for peer in [peer for peer in world.primary.links if peer < STANDBY]:
            world.cut(world.primary, peer)
    fail_over(world)
    assert [world.value(key).tolist() for key in keys] == [[1, 1, 1]] * len(keys)


def test_standby_that_says_something_else_is_connected_to_again(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    (peer,) = [peer for peer in world.primary.links if peer < STANDBY]
    before = world.standby
    world.feed(world.primary, st.Received(peer, 0, m.Heartbeat()), b"")
    assert not [peer for peer in world.primary.links if peer < STANDBY]
    world.run(once(push))
    world.settle()
    assert world.standby is before
    assert world.value("w", node=world.standby).tolist() == [1, 1, 1]


def test_links_to_standbys_of_before_do_not_count(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    old = STANDBY - 99
    for stimulus in (
        st.ConnectFailed(old, "refused"),
        st.Received(old, 0, m.Replicated(99)),
        st.PeerLost(old, "reset"),
    ):
        assert world.primary.machine.handle(stimulus, now=world.now) == []
    closed = ef.Disconnect(old, "nobody waits for this connection any longer")
    assert world.primary.machine.handle(st.Connected(old), now=world.now) == [closed]


def test_server_without_standby_needs_no_link(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.replaces = False
    world.run(once(init))
    fail_over(world)
    assert world.standby is None
    closed = ef.Disconnect(STANDBY - 1, "there is no standby")
    assert world.primary.machine.handle(st.Connected(STANDBY - 1), now=world.now) == [closed]
    assert world.primary.machine.handle(st.Received(STANDBY - 1, 0, m.Done()), now=world.now) == []
    assert world.primary.machine.handle(st.PeerLost(STANDBY - 1, "reset"), now=world.now) == []
    assert world.primary.machine.handle(st.Received(77, 7, m.Replicated(1)), now=world.now) != []


# --- what it has after all ---


def test_key_goes_on_under_the_policy_that_it_has_got(make_world: Callable[..., World]) -> None:
    world = make_world(0)

    def change(worker: Worker) -> Asked:
        return worker.ask(m.SetPolicy("asp", ("w",), "bsp", (), 60.0, 0))

    world.run(once(init, rule("sgd", learning_rate=1.0), push, change))
    fail_over(world)
    world.run(once(push), once(lambda worker: worker.pull("w", (3,))))
    assert world.value("w").tolist() == [-3, -3, -3]


def test_key_of_which_only_one_chunk_has_gone_over_goes_over_when_its_workers_ask_again(
    make_world: Callable[..., World],
) -> None:
    """The server ended in the middle of what it told its standby; it has answered nobody."""
    world = make_world(0)
    places: tuple[dict[str, Any], ...] = ({"start": 0, "stop": 3}, {"start": 3, "stop": 6})

    def init_half(half: dict[str, Any]) -> Callable[[Worker], Asked]:
        return lambda worker: worker.init("w", np.zeros(3, np.float32), shape=(6,), **half)

    def change(worker: Worker) -> Asked:
        return worker.ask(m.SetPolicy("asp", ("w",), "bsp", (), 60.0, 0))

    world.run(once(*map(init_half, places), rule("sgd", learning_rate=1.0)))
    world.settle()
    assert world.state == "ready"
    world.begin(once(change))
    chunks = there(world.standby).machine._catalog.chunks
    while str(chunks["w", 0].policy) == "bsp":
        world.step()
    assert str(chunks["w", 3].policy) == "bsp"
    assert all(worker.waiting[0].answer is None for worker in world.workers)
    for peer, (_, number) in world.primary.links.items():
        if peer < STANDBY:
            world.ready[there(world.standby).name, number].clear()
    world.crash(world.primary)
    world.go_on()
    assert [str(chunk.policy) for chunk in world.primary.machine._catalog.chunks.values()] == ["asp", "asp"]
    pushes = [lambda worker, half=half: worker.push("w", ONES, shape=(6,), sequence=1, **half) for half in places]
    world.run(once(*pushes), once())
    assert [world.value("w", start).tolist() for start in (0, 3)] == [[-1, -1, -1]] * 2, "rank 1 is waited for"


def test_compressed_pushes_go_on(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    codec = {"threshold": 0.5}

    def compress(worker: Worker) -> Asked:
        return worker.ask(m.SetCompression(1, "2bit", codec, "", {}, 60.0))

    def push_coded(worker: Worker) -> Asked:
        number = worker.count("w")
        head = ("w", (3,), "float32", 0, 3, number, number - 1, True, 60.0, 0, number)
        # 2 bits for each: 0.5, -0.5 and nothing.
        return worker.ask(m.Push(*head, codec=make_codec("2bit", codec).number), CODED)

    world.run(once(init, compress, push_coded))
    expected = world.value("w").tolist()
    fail_over(world)
    world.run(once(compress, push_coded))
    assert expected == world.value("w").tolist() == [0.5, -0.5, 0.0]


CODED = np.array([0b11100000, 0, 0, 0], np.uint8)


def test_loaded_values_are_there(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    content = pack({"value": np.full(3, 7, np.float32)}, {"steps": "4"})

    def load(worker: Worker) -> Asked:
        return worker.ask(m.PutState("w", (3,), "float32", 0, 3, 60.0, "bsp"), np.frombuffer(content, np.uint8))

    world.run(once(load))
    fail_over(world)
    assert world.value("w").tolist() == [7, 7, 7]


def test_update_that_can_not_be_made_leaves_the_same_value(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    large = np.full(2, 2**62, np.int64)
    sums: list[Asked] = []

    def add(worker: Worker) -> Asked:
        sums.append(worker.push("n", large))
        return sums[-1]

    world.run(once(lambda worker: worker.init("n", np.ones(2, np.int64), "sum"), add))
    assert [asked.answer.code for asked in sums] == [SumOverflowError.code] * 2  # type: ignore[union-attr]
    fail_over(world)
    assert world.value("n", dtype="int64").tolist() == [1, 1]
    assert world.primary.machine._catalog.chunks["n", 0].version == 1


def test_updates_without_elements_count(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    nothing = np.ones(0, np.float32)

    def push_none(worker: Worker) -> Asked:
        return worker.push_rows("t", (4, 2), {})

    world.run(once(lambda worker: worker.init("e", nothing), lambda worker: worker.push("e", nothing)))
    world.run(once(lambda worker: worker.init_rows("t", (4, 2), {1: 1.0}), push_none))
    fail_over(world)
    chunks = world.primary.machine._catalog.chunks
    assert [chunks["e", 0].version, chunks["t", 0].version] == [1, 1]


@pytest.mark.parametrize("name", ["lamb", "dcasgd"])
def test_rules_that_see_more_than_the_sum(make_world: Callable[..., World], name: str) -> None:
    world = make_world(0, workers=1)
    policy = "asp" if name == "dcasgd" else "bsp"

    def begin(worker: Worker) -> Asked:
        return worker.init("w", ONES, policy)

    world.run(once(rule(name), begin, push, push))
    undisturbed = make_world(1, workers=1, replication=1)
    undisturbed.run(once(rule(name), begin, push, push))
    fail_over(world)
    assert world.value("w").tobytes() == undisturbed.value("w").tobytes()


HALF = 2**17
"""Elements of a chunk, as long as chunks may be here."""


def train_halves(worker: Worker) -> Script:
    """Push a tensor of two chunks, whose norm each of them needs."""
    whole: dict[str, Any] = {"shape": (2 * HALF,)}
    places = [whole | {"start": start, "stop": start + HALF} for start in (0, HALF)]
    values = [np.full(HALF, start + 1, np.float32) for start in (0, HALF)]
    yield [rule("lamb")(worker)]
    yield [worker.init("w", value, **place) for value, place in zip(values, places, strict=True)]
    yield [worker.push("w", value, **place, sequence=1) for value, place in zip(values, places, strict=True)]


@pytest.mark.parametrize("linked", [True, False], ids=["standby is there", "standby comes later"])
def test_standby_knows_the_norms_of_whole_tensors(make_world: Callable[..., World], linked: bool) -> None:
    """Another server may ask for them again when this one has made its update."""
    world = make_world(0, workers=1)
    if not linked:
        world.settle()
        world.crash(there(world.standby))
        world.registers = False
    world.run(train_halves)
    if not linked:
        world.registers = True
        world.register(there(world.standby))
    first = world.primary
    fail_over(world)
    assert world.primary is not first
    totals = world.primary.machine._norms.remembered("w")
    assert totals == first.machine._norms.remembered("w")
    assert [version for version, _, _ in totals] == [1]
    for start in (0, HALF):
        assert world.value("w", start).tobytes() == world.value("w", start, node=first).tobytes()


def test_process_that_takes_the_place_of_a_worker_reads_what_its_step_begins_with(
    make_world: Callable[..., World],
) -> None:
    world = make_world(0, on_worker_loss="respawn")
    world.run(once(init, rule("sgd", learning_rate=1.0), push, push))
    fail_over(world)
    earlier: list[Asked] = []

    def read(worker: Worker) -> Asked:
        earlier.append(worker.ask(m.Pull("w", (3,), "float32", 0, 3, 0, 60.0, before=2)))
        return earlier[-1]

    world.run(once(read, lambda worker: worker.ask(m.GetPushes("w", (3,), "float32", 0, 3, 60.0)), push))
    assert [np.frombuffer(asked.value, np.float32).tolist() for asked in earlier] == [[-2, -2, -2]] * 2
    assert world.value("w").tolist() == [-6, -6, -6]


def test_value_before_a_step_is_there_too_when_the_chunk_was_sent_as_a_whole(make_world: Callable[..., World]) -> None:
    """As when its place moves to another node while a lost worker's next process begins."""
    world = make_world(0, on_worker_loss="respawn")
    world.run(once(init, rule("sgd", learning_rate=1.0), push, push))
    world.settle()
    for _ in range(2):
        # The second time there is one already.
        machine = world.primary.machine
        assert isinstance(machine._replication.twin, Copying)
        machine._replication.twin.renew(machine._catalog.chunks["w", 0])
        world.feed(world.primary, st.Tick(), b"")
        world.settle()
    fail_over(world)
    earlier: list[Asked] = []

    def read(worker: Worker) -> Asked:
        earlier.append(worker.ask(m.Pull("w", (3,), "float32", 0, 3, 0, 60.0, before=2)))
        return earlier[-1]

    world.run(once(read, push))
    assert [np.frombuffer(asked.value, np.float32).tolist() for asked in earlier] == [[-2, -2, -2]] * 2
    world.settle()
    assert list(there(world.standby).store._chunks["w", 0].earlier) == [2]
    assert world.value("w", node=world.standby).tolist() == [-6, -6, -6]


def test_rows_before_a_step_are_there_too_when_the_table_was_sent_as_a_whole(make_world: Callable[..., World]) -> None:
    world, shape = make_world(0, workers=1, on_worker_loss="respawn"), (4, 2)
    earlier: list[Asked] = []

    def made(worker: Worker) -> Asked:
        return worker.init_rows("t", shape, {0: 5.0, 1: 6.0})

    def pushed(worker: Worker) -> Asked:
        return worker.push_rows("t", shape, {1: 1.0, 2: 1.0})

    def read(worker: Worker) -> Asked:
        head = ("t", shape, "float32", 0, 4, np.arange(3).tobytes(), 0, 60.0, 0)
        earlier.append(worker.ask(m.PullRows(*head, before=1)))
        return earlier[-1]

    world.run(once(made, rule("sgd", learning_rate=1.0), pushed))
    world.settle()
    world.crash(there(world.standby))
    world.settle()
    fail_over(world)
    world.run(once(read))
    assert np.frombuffer(earlier[0].value, np.float32).tolist() == [5, 5, 6, 6, 0, 0]


def test_scheduler_that_does_not_know_hears_again_that_the_standby_is_ready(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    world.state = "filling"
    world.publish()
    world.settle()
    assert world.state == "ready"


# --- who is whose standby ---


def test_server_whose_place_another_one_has_stops(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    before = world.primary
    world.promote()
    world.run(once(push))
    assert [stop.failed for stop in before.stops] == [False]
    assert world.value("w").tolist() == [1, 1, 1]


def deliver(world: World, node: Node) -> None:
    """Let what is under way come to a node, its updates be made, and the only worker be told, before anything else."""
    names = (node.name, f"{node.name} {('w', 0)}", world.workers[0].name)
    while queues := [queue for (name, _), queue in world.ready.items() if name in names and queue]:
        queues[0].popleft()()


def replaced(world: World) -> Node:
    """Let another node have the primary's place; return the one before, which knows that."""
    world.run(once(init))
    world.settle()
    before = world.primary
    world.promote()
    deliver(world, before)
    return before


def test_server_whose_place_another_one_has_counts_nothing_more(make_world: Callable[..., World]) -> None:
    """Until its driver has closed it workers may ask it who have not heard of that yet."""
    world = make_world(0, workers=1)
    before = replaced(world)
    assert before.stops
    world.begin(once(push))
    deliver(world, before)
    world.go_on()
    world.settle()
    assert world.value("w").tolist() == [1, 1, 1]


def test_server_whose_place_another_one_has_does_nothing_more(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    before = replaced(world)
    machine, link = before.machine, STANDBY - 9
    (closes,) = machine.handle(st.Connected(link), now=0.0)
    assert isinstance(closes, ef.Disconnect)
    assert closes.peer == link
    assert machine.handle(st.Tick(), now=1e9) == []
    assert machine.deadline() is None


def test_standby_ends_that_was_to_have_a_place_which_another_one_has_by_now(make_world: Callable[..., World]) -> None:
    """It had not done yet all that had come when it was to take it."""
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    world.switches = False
    world.move()
    world.settle()
    second, third = there(world.standby), there(world.tail)
    world.begin(once(push))
    while not second.machine._catalog.chunks["w", 0].applying:
        world.step()
    views = world.ready.setdefault((second.name, SCHEDULER), deque())
    world.switch()
    views.popleft()()
    assert not second.machine.serves
    world.primary, world.standby = third, None
    world.publish()
    views.popleft()()
    assert second.stops
    world.go_on()
    world.settle()
    assert not second.machine.serves
    assert world.value("w").tolist() == [1, 1, 1]


def attach(world: World, name: str, incarnation: int) -> st.Received:
    """Return what says who a server is, over a new connection to the standby."""
    return st.Received(70, 1, m.AttachStandby(0, name, incarnation, world.epoch, 5.0))


def test_only_the_primary_of_the_newest_view_fills_a_standby(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    machine = there(world.standby).machine
    for name, incarnation in (("server-9", 1), ("server-0", 9)):
        (refused,) = machine.handle(attach(world, name, incarnation), now=0.0)
        assert isinstance(refused, ef.Refuse)
        assert "is not the server whose standby" in str(refused.error)
    (refused,) = world.primary.machine.handle(attach(world, "server-0", 1), now=0.0)
    assert isinstance(refused, ef.Refuse | ef.Hold)


def test_nobody_fills_a_standby_that_is_in_no_view(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    node, world.standby = there(world.standby), None
    world.publish()
    world.settle()
    (refused,) = node.machine.handle(attach(world, "server-0", 1), now=0.0)
    assert isinstance(refused, ef.Refuse)


def test_what_comes_from_elsewhere_is_no_copy(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    node = there(world.standby)
    slot, _ = node.store.land(4)
    message = m.Replicate(99, "w", 0, 1, (), 1, 1)
    assert node.machine.handle(st.Received(70, 99, message, slot, 4), now=0.0) == [ef.Free(slot)]


def linked(world: World) -> int:
    """Return the number of the primary's connection at the standby."""
    peers: list[int] = [peer for peer, (other, _) in there(world.standby).links.items() if other is world.primary]
    return peers[0]


@pytest.mark.parametrize(("key", "has"), [("w", "version 0"), ("v", "nothing")])
def test_standby_that_can_not_follow_ends(make_world: Callable[..., World], key: str, has: str) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    node = there(world.standby)
    wrong = m.Replicate(99, key, 0, 7, ((0, 7, 6, 7),), 7, 1)
    world.feed(node, st.Received(linked(world), 99, wrong), b"")
    (stop,) = node.stops
    assert stop.failed
    assert has in stop.reason


def test_standby_that_can_not_take_a_value_ends(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    node = there(world.standby)
    head = (99, ("w",), ((3,),), (b"d",), "float32", 0, 3, "bsp", (), 0, 0, ())
    world.feed(node, st.Received(linked(world), 99, m.Copy(*head)), b"no arrays")
    world.settle()
    assert node.stops


def test_standby_ends_when_it_has_the_copy_of_another_process(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    node = there(world.standby)
    entry = world.entry()
    entry.incarnation = 9
    view = world.primary.machine._joiner.view
    assert view is not None
    later = m.View(world.epoch + 1, view.workers, (entry,), 1.0, 2**19, 2**19, 5.0, replication=2)
    world.feed(node, st.Received(SCHEDULER, 0, later), b"")
    (stop,) = node.machine.handle(attach(world, "server-0", 9), now=0.0)[1:]
    assert isinstance(stop, ef.Stop)
    assert "it was filled by server-0" in stop.reason


@pytest.mark.parametrize("seed", range(6))
def test_key_is_deleted_while_the_link_is_down_that_had_its_update(make_world: Callable[..., World], seed: int) -> None:
    world = make_world(seed, workers=1)
    world.run(once(init))
    world.settle()
    (peer,) = [peer for peer in world.primary.links if peer < STANDBY]

    def push_and_delete(worker: Worker) -> Script:
        yield [push(worker), worker.ask(m.Delete(("w",), 60.0))]

    world.begin(push_and_delete)
    copying = world.primary.machine._replication.twin
    assert isinstance(copying, Copying)
    while not copying._acks._sent:
        world.step()
    world.cut(world.primary, peer)
    world.go_on()
    world.settle()
    assert world.state == "ready"
    assert not world.primary.machine._catalog.chunks
    assert not there(world.standby).machine._catalog.chunks


def test_key_that_never_came_may_be_forgotten(make_world: Callable[..., World]) -> None:
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    told = there(world.standby).machine.handle(st.Received(linked(world), 9, m.ForgetKey(99, "v")), now=0.0)
    assert told == [ef.Send(linked(world), 0, m.Replicated(99))]


def test_process_that_has_come_back_under_a_lost_server_s_name_lets_no_worker_in(
    make_world: Callable[..., World],
) -> None:
    """It has nothing; the worker goes on with who has the place when it sees the view."""
    world = make_world(0, workers=1)
    world.run(once(init))
    world.settle()
    spare = world.make("server-0/again")
    world.publish()
    world.settle()
    attach = m.Attach(0, "worker-0", 1, world.epoch, 60.0)
    assert spare.machine.handle(st.Received(70, 1, attach), now=0.0) == []
    waiting = spare.machine.handle(st.Received(71, 7, m.GetWaiting()), now=0.0)
    assert "it does not serve its part of the keys yet" in str(waiting)
    (refused,) = spare.machine.handle(st.Tick(), now=100.0)[-1:]
    assert isinstance(refused, ef.Refuse)
    assert "did not begin to serve" in str(refused.error)
