"""Policies under which workers go on before their push is in a value: what a standby has of such pushes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.server.copies.followed_pushes import FollowedPushes
from aiokv.core.server.copies.standby import Standby
from aiokv.core.server.rounds.chunk import Chunk
from aiokv.core.server.rounds.updates import Contribution
from aiokv.policy import get_policy
from aiokv.types import STANDBY, TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.core.copies.conftest import Asked, Node, Script, Worker, World

ONES = np.ones(3, np.float32)
TABLE = (10, 2)


def script(*asks: Callable[[Worker], list[Asked]]) -> Callable[[Worker], Script]:
    """Return a script that asks for one thing after the other."""

    def run(worker: Worker) -> Script:
        for ask in asks:
            yield ask(worker)

    return run


def push(value: float, **changes: Any) -> Callable[[Worker], list[Asked]]:
    """Return what pushes a number, computed from the first value."""
    return lambda worker: [worker.push("w", ONES * np.float32(value), **changes)]


def start(world: World, policy: str) -> None:
    """Make a key of zeros from which every round is subtracted, and wait for the standby."""

    def rule(worker: Worker) -> list[Asked]:
        return [worker.ask(m.SetOptimizer("sgd", {"learning_rate": 1.0}, "sum", 60.0))]

    world.run(script(lambda worker: [worker.init("w", np.zeros(3, np.float32), policy)], rule))
    world.settle()
    assert world.state == "ready"


def there(world: World) -> Node:
    """Return the standby."""
    assert world.standby is not None
    return world.standby


def fail_over(world: World) -> None:
    """Let the standby take the primary's place, after all that is under way."""
    world.settle()
    assert world.state == "ready"
    world.crash(world.primary)
    world.settle()


def test_push_that_was_answered_is_in_the_round_that_the_next_server_closes(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    start(world, "k_batch_async:3")
    world.run(script(push(1), push(10)), script())
    assert world.value("w").tolist() == [0, 0, 0], "the round is open"
    fail_over(world)
    world.run(script(), script(push(100)))
    assert world.value("w").tolist() == [-111, -111, -111]
    world.settle()
    assert not there(world).store._slots
    assert not world.primary.store._slots


def test_what_is_open_is_on_the_standby_of_a_standby(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    start(world, "k_batch_async:3")
    world.run(script(push(1), push(10)), script())
    fail_over(world)
    fail_over(world)
    world.run(script(), script(push(100)))
    assert world.value("w").tolist() == [-111, -111, -111]


def test_what_is_open_is_on_a_standby_that_is_new(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    start(world, "k_batch_sync:3")
    world.run(script(push(1), push(10)), script())
    world.settle()
    world.crash(there(world))
    fail_over(world)
    world.run(script(), script(push(100)))
    assert world.value("w").tolist() == [-111, -111, -111]


def test_push_that_comes_again_counts_once(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    start(world, "k_batch_async:3")
    world.run(script(push(1)), script())
    fail_over(world)
    world.workers[0].sequences["w"] = world.workers[0].clock = 0
    world.run(script(push(1)), script())
    world.run(script(), script(push(10), push(100)))
    assert world.value("w").tolist() == [-111, -111, -111]


def test_push_for_a_round_that_is_closed_is_still_late(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    start(world, "k_batch_sync:2")
    world.run(script(push(1), push(10)), script())
    fail_over(world)
    world.begin(script(), script(push(100)))
    world.go_on()
    assert world.workers[1].waiting[0].answer == m.Value(1, dropped="late", round=1)
    assert world.value("w").tolist() == [-11, -11, -11]


@pytest.mark.parametrize("seed", range(25))
def test_whenever_the_server_is_lost_every_push_counts_once(make_world: Callable[..., World], seed: int) -> None:
    world = make_world(seed)
    start(world, "k_batch_async:4")
    # Each number is a bit of its own.
    scripts = [script(*(push(2.0 ** (2 * number + rank)) for number in range(6))) for rank in (0, 1)]
    world.begin(*scripts)
    world.go_on(world.random.randint(5, 120))
    world.crash(world.primary)
    world.go_on()
    assert world.value("w").tolist() == [-4095] * 3
    world.settle()
    assert world.value("w", node=there(world)).tolist() == [-4095] * 3
    assert not there(world).store._slots


@pytest.mark.parametrize("seed", range(6))
def test_what_was_on_a_link_that_has_ended_comes_again(make_world: Callable[..., World], seed: int) -> None:
    world = make_world(seed)
    start(world, "k_batch_async:3")
    (peer,) = [peer for peer in world.primary.links if peer < STANDBY]
    world.begin(script(push(1), push(10)), script())
    world.go_on(world.random.randint(1, 8))
    world.cut(world.primary, peer)
    world.go_on()
    fail_over(world)
    world.run(script(), script(push(100)))
    assert world.value("w").tolist() == [-111, -111, -111]


def test_push_to_a_key_that_is_deleted_is_kept_no_longer(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    start(world, "k_batch_async:3")
    world.run(script(push(1)), script())
    world.settle()
    assert len(there(world).store._slots) == 1
    world.run(script(lambda worker: [worker.ask(m.Delete(("w",), 60.0))]), script())
    world.settle()
    assert not there(world).store._slots


def test_rows_are_kept_too(make_world: Callable[..., World]) -> None:
    world = make_world(0)

    def init(worker: Worker) -> list[Asked]:
        return [worker.init_rows("t", TABLE, {1: 0.0}, "k_batch_async:2")]

    world.run(script(init))
    world.settle()
    world.run(script(lambda worker: [worker.push_rows("t", TABLE, {1: 1.0, 4: 2.0})]), script())
    fail_over(world)
    world.run(script(), script(lambda worker: [worker.push_rows("t", TABLE, {4: 8.0})]))
    asked: list[Asked] = []

    def read(worker: Worker) -> list[Asked]:
        asked.append(worker.pull_rows("t", TABLE, [1, 4]))
        return asked[-1:]

    world.run(script(read), script())
    assert np.frombuffer(asked[0].value, np.float32).tolist() == [1, 1, 10, 10]


def test_worker_that_is_started_again_goes_on_behind_what_is_open(make_world: Callable[..., World]) -> None:
    world = make_world(0, on_worker_loss="respawn")
    start(world, "k_batch_async:3")
    world.run(script(push(1), push(10)), script())
    fail_over(world)
    asked: list[Asked] = []

    def count(worker: Worker) -> list[Asked]:
        asked.append(worker.ask(m.GetPushes("w", (3,), "float32", 0, 3, 60.0)))
        return asked[-1:]

    world.run(script(count), script())
    assert asked[0].answer == m.Pushes(2, 2, "k_batch_async:3")


def test_pushes_of_calls_are_kept_with_these(make_world: Callable[..., World]) -> None:
    world = make_world(0, on_worker_loss="shrink")
    start(world, "k_batch_async:3")
    world.run(script(push(1, whole=m.Whole(1, 1, 1)), push(10, whole=m.Whole(2, 1, 1))), script())
    world.settle()
    twin = there(world).machine._replication.twin
    assert isinstance(twin, Standby)
    assert not twin.pushes._kept
    world.crash(world.primary)
    world.evict(world.workers[0])
    world.settle()
    world.run(script(), script(push(100, whole=m.Whole(1, 1, 1))))
    assert world.value("w").tolist() == [-111, -111, -111]


def test_push_to_a_key_that_is_not_here_is_no_copy(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    start(world, "bsp")
    node = there(world)
    twin = node.machine._replication.twin
    assert isinstance(twin, Standby)
    assert twin.peer is not None
    message = m.CopyContribution(99, "v", 0, 0, 1, 0, 1, 12)
    world.feed(node, st.Received(twin.peer, 99, message), ONES.tobytes())
    assert "key 'v': a push of rank 0 is to be kept, but it is not here" in node.stops[0].reason
    assert not node.store._slots


def test_push_that_is_handed_on_before_its_key_is_left_to_what_comes_with_that(
    make_world: Callable[..., World],
) -> None:
    world = make_world(0)
    start(world, "bsp")
    node = there(world)
    twin = node.machine._replication.twin
    assert isinstance(twin, Standby)
    assert twin.peer is not None
    twin._fills = True
    world.feed(node, st.Received(twin.peer, 99, m.CopyContribution(99, "v", 0, 0, 1, 0, 1, 12)), ONES.tobytes())
    assert not node.stops
    assert not node.store._slots


def test_push_that_was_decoded_to_a_higher_precision_is_taken_for_that(make_world: Callable[..., World]) -> None:
    world = make_world(0)
    half = np.zeros(3, np.float16)
    world.run(script(lambda worker: [worker.init("w", half, "k_batch_async:3")]))
    world.settle()
    node = there(world)
    twin = node.machine._replication.twin
    assert isinstance(twin, Standby)
    assert twin.peer is not None
    message = m.CopyContribution(99, "w", 0, 0, 1, 0, 1, 6)
    effects = node.machine.handle(st.Received(twin.peer, 99, message, 7, 12), now=0.0)
    assert effects[1:] == [ef.Widen(7, "float16")]


def chunk_pushed(count: int) -> Chunk:
    """Return a chunk with so many pushes of rank 1 in its value."""
    chunk = Chunk("w", 0, 3, TensorSpec((3,), "float32"), get_policy("k_batch_sync:2"), "key 'w'")
    chunk.pushed[1] = count
    return chunk


def test_push_that_comes_twice_or_too_late_is_freed() -> None:
    pushes = FollowedPushes()
    assert pushes.came(chunk_pushed(0), Contribution(1, 1, 0, 1, 5, 1)) == []
    assert pushes.came(chunk_pushed(0), Contribution(1, 1, 0, 1, 6, 1)) == [ef.Free(5)]
    assert pushes.came(chunk_pushed(1), Contribution(1, 2, 0, 2, 7, 1)) == [ef.Free(6)]
    assert [part.slot for _, part in pushes.take()] == [7]
    assert pushes.made(chunk_pushed(2)) == []


def test_earlier_steps_go_on_first_whatever_key_they_are_of() -> None:
    """A step of which nothing has come counts as left out for a key when a later one has come for another."""
    pushes, chunk = FollowedPushes(), chunk_pushed(0)
    other = Chunk("v", 0, 3, TensorSpec((3,), "float32"), get_policy("k_batch_sync:2"), "key 'v'")
    for sequence in (1, 2):
        pushes.came(chunk, Contribution(1, sequence, 0, sequence, sequence, 1))
    pushes.came(other, Contribution(1, 1, 0, 1, 3, 1))
    assert [(place, part.clock) for place, part in pushes.take()] == [(("w", 0), 1), (("v", 0), 1), (("w", 0), 2)]
