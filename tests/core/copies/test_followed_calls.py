"""Calls that count as a whole: a server and a worker that are lost at the same time take nothing with them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.server.copies.copying import Copying
from aiokv.core.server.copies.draining import Draining
from aiokv.core.server.copies.followed_calls import FollowedCalls
from aiokv.core.server.copies.standby import Standby
from aiokv.core.server.rounds.chunk import Chunk
from aiokv.core.server.rounds.whole_call import WholeCall
from aiokv.policy import get_policy
from aiokv.types import STANDBY, TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.types import Key
    from tests.core.copies.conftest import Asked, Script, Worker, World

ZEROS = np.zeros(3, np.float32)
TABLE = (10, 2)


def whole(worker: Worker, call: int, parts: int = 1, key: str = "w", **changes: Any) -> Asked:
    """Push a key filled with the rank + 1, as a part of a call."""
    value = np.full(3, worker.rank + 1, np.float32)
    return worker.push(key, value, call - 1, whole=m.Whole(call, parts, 1), **changes)


def does(ask: Callable[[Worker], list[Asked]]) -> Callable[[Worker], Script]:
    """Return a script that asks once."""

    def script(worker: Worker) -> Script:
        yield ask(worker)

    return script


def nothing(_: Worker) -> Script:
    """Ask for nothing."""
    yield []


@pytest.fixture
def world(make_world: Callable[..., World]) -> World:
    """Two workers whose keys are made, and a standby that is ready."""
    made = make_world(0, on_worker_loss="shrink")
    made.run(does(lambda worker: [worker.init("w", ZEROS), worker.init("v", ZEROS)]))
    made.settle()
    assert made.state == "ready"
    return made


def followed(world: World) -> FollowedCalls:
    """Return what the standby knows of calls."""
    assert world.standby is not None
    twin = world.standby.machine._replication.twin
    assert isinstance(twin, Standby)
    return twin.calls


def slots(world: World) -> int:
    """Return how many payloads the standby holds."""
    assert world.standby is not None
    return len(world.standby.store._slots)


@pytest.mark.parametrize("worker_first", [False, True])
def test_push_that_counts_is_there_when_its_worker_and_its_server_are_lost(world: World, worker_first: bool) -> None:
    world.begin(nothing, does(lambda worker: [whole(worker, 1)]))
    world.settle()
    if worker_first:
        world.evict(world.workers[1])
        world.settle()
    world.crash(world.primary)
    if not worker_first:
        world.evict(world.workers[1])
    world.settle()
    world.run(does(lambda worker: [whole(worker, 1)]), nothing)
    assert world.value("w").tolist() == [3, 3, 3]


def test_call_that_is_not_whole_counts_nowhere(world: World) -> None:
    world.begin(nothing, does(lambda worker: [whole(worker, 1, 2)]))
    world.settle()
    assert slots(world) == 0
    world.crash(world.primary)
    world.evict(world.workers[1])
    world.settle()
    world.run(does(lambda worker: [whole(worker, 1)]), nothing)
    assert world.value("w").tolist() == [1, 1, 1]


def test_call_of_which_a_part_has_come_to_the_standby_counts_nowhere(world: World) -> None:
    """Its server was lost before it had sent the rest, and so before it had said that it is there."""
    world.begin(nothing, does(lambda worker: [whole(worker, 1, 2), whole(worker, 1, 2, "v")]))
    while not slots(world):
        world.step()
    world.crash(world.primary)
    world.evict(world.workers[1])
    world.settle()
    assert not world.primary.store._slots
    world.run(does(lambda worker: [whole(worker, 1)]), nothing)
    assert world.value("w").tolist() == [1, 1, 1]


def test_pushes_that_are_in_a_value_are_kept_no_longer(world: World) -> None:
    world.begin(does(lambda worker: [whole(worker, 1, 2), whole(worker, 1, 2, "v")]))
    world.go_on()
    world.settle()
    assert slots(world) == 0
    assert not followed(world)._calls
    assert not followed(world)._places


def test_call_that_is_made_in_part_counts_as_a_whole(world: World) -> None:
    world.begin(nothing, does(lambda worker: [whole(worker, 1, 2), whole(worker, 1, 2, "v")]))
    world.settle()
    world.run(does(lambda worker: [whole(worker, 1)]), nothing)
    world.settle()
    assert slots(world) == 1
    world.crash(world.primary)
    world.evict(world.workers[1])
    world.settle()
    world.run(does(lambda worker: [whole(worker, 2, key="v", read_version=0)]), nothing)
    assert world.value("w").tolist() == [3, 3, 3]
    assert world.value("v").tolist() == [3, 3, 3]


def test_push_to_a_key_that_is_deleted_is_kept_no_longer(world: World) -> None:
    world.begin(nothing, does(lambda worker: [whole(worker, 1, 2), whole(worker, 1, 2, "v")]))
    world.settle()
    assert slots(world) == 2
    world.run(does(lambda worker: [worker.ask(m.Delete(("v",), 60.0))]), nothing)
    world.settle()
    assert slots(world) == 1


def test_what_does_not_count_is_kept_no_longer(world: World) -> None:
    world.begin(nothing, does(lambda worker: [whole(worker, 1, 2, timeout=1.0)]))
    world.go_on()
    world.settle()
    assert list(followed(world)._known.values()) == ["late"]


def test_pushes_and_decisions_come_again_over_the_next_link(world: World) -> None:
    world.begin(nothing, does(lambda worker: [whole(worker, 1)]))
    for peer in [peer for peer in world.primary.links if peer < STANDBY]:
        world.cut(world.primary, peer)
    world.settle()
    assert slots(world) == 1
    assert list(followed(world)._known.values()) == [""]
    world.crash(world.primary)
    world.evict(world.workers[1])
    world.settle()
    world.run(does(lambda worker: [whole(worker, 1)]), nothing)
    assert world.value("w").tolist() == [3, 3, 3]


def test_calls_go_on_when_the_standby_they_wait_for_is_none_any_longer(world: World) -> None:
    world.replaces = False
    assert world.standby is not None
    world.begin(nothing, does(lambda worker: [whole(worker, 1)]))
    world.crash(world.standby)
    world.run(does(lambda worker: [whole(worker, 1)]), does(lambda worker: []))
    world.settle()
    assert world.value("w").tolist() == [3, 3, 3]


def test_standby_is_no_successor_before_all_that_counts_is_in_values(world: World) -> None:
    world.begin(nothing, does(lambda worker: [whole(worker, 1)]))
    world.settle()
    assert world.standby is not None
    world.crash(world.standby)
    world.settle()
    assert world.state == "filling", "nobody else has what the other worker has pushed"
    world.run(does(lambda worker: [whole(worker, 1)]), nothing)
    world.settle()
    assert world.state == "ready"


@pytest.mark.parametrize(("policy", "state"), [("ringmaster:9", "filling"), ("bsp", "ready")])
def test_in_other_modes_it_waits_for_what_counts_where_nobody_waits_for_others(
    make_world: Callable[..., World], policy: str, state: str
) -> None:
    """Elsewhere a lost worker's push makes no value any longer, and the others send theirs again."""
    world = make_world(0)
    world.run(does(lambda worker: [worker.init(key, ZEROS, policy) for key in "wv"]))
    world.run(nothing, does(lambda worker: [whole(worker, 1, key="w")] if policy != "bsp" else []))
    world.begin(does(lambda worker: [whole(worker, 1, key="v")]), nothing)
    world.settle()
    assert world.standby is not None
    world.crash(world.standby)
    world.settle()
    assert world.state == state, "the other worker may yet bring its part of the round before"


@pytest.mark.parametrize("seed", range(8))
def test_new_standby_has_the_values_in_which_a_lost_worker_counts(make_world: Callable[..., World], seed: int) -> None:
    """It is no successor when its server has made them, but when they have come."""
    world = make_world(seed, on_worker_loss="shrink")
    world.run(does(lambda worker: [worker.init("w", ZEROS)]))
    world.settle()
    world.begin(nothing, does(lambda worker: [whole(worker, 1)]))
    world.settle()
    assert world.standby is not None
    world.crash(world.standby)
    world.evict(world.workers[1])
    world.settle()
    world.begin(does(lambda worker: [whole(worker, 1)]), nothing)
    while world.state != "ready":
        world.step()
    world.crash(world.primary)
    world.settle()
    assert world.value("w").tolist() == [3, 3, 3]


def test_rows_and_bundles_are_copied_too(make_world: Callable[..., World]) -> None:
    world = make_world(0, on_worker_loss="shrink")
    numbers: list[int] = []

    def init(worker: Worker) -> list[Asked]:
        bundled = worker.init_bundle({"a": ZEROS, "b": ZEROS})
        return [bundled, worker.init_rows("t", TABLE, {1: 0.0})]

    def script(worker: Worker) -> Script:
        asked = init(worker)
        yield asked
        assert isinstance(asked[0].answer, m.Bundled)
        numbers.append(asked[0].answer.bundle)

    def push(worker: Worker) -> list[Asked]:
        parts = m.Whole(1, 2, 1)
        worker.count("a")
        worker.count("b")
        value = np.full(6, worker.rank + 1, np.float32)
        bundle = m.PushBundle(numbers[0], 1, 0, True, 60.0, 0, 1, whole=parts)
        rows = worker.push_rows("t", TABLE, {worker.rank: 1.0, 3: 2.0}, whole=parts)
        return [worker.ask(bundle, value), rows]

    world.run(script)
    world.settle()
    world.begin(nothing, does(push))
    world.settle()
    world.crash(world.primary)
    world.evict(world.workers[1])
    world.settle()
    world.run(does(push), nothing)
    assert world.value("a", -1).tolist() == [3] * 6
    rows = world.primary.store.get_rows("t", 0, 1, np.array([0, 1, 3], np.int64).tobytes())
    assert rows.view(np.float32).reshape(3, 2)[:, 0].tolist() == [1, 1, 4]


def test_bundle_that_is_divided_while_a_push_to_it_is_open(make_world: Callable[..., World]) -> None:
    world = make_world(0, on_worker_loss="shrink")
    numbers: list[int] = []

    def script(worker: Worker) -> Script:
        bundled = worker.init_bundle({"a": ZEROS, "b": ZEROS})
        yield [bundled]
        assert isinstance(bundled.answer, m.Bundled)
        numbers.append(bundled.answer.bundle)

    def together(worker: Worker) -> list[Asked]:
        worker.count("a")
        worker.count("b")
        message = m.PushBundle(numbers[0], 1, 0, True, 60.0, 0, 1, whole=m.Whole(1, 1, 1))
        return [worker.ask(message, np.full(6, worker.rank + 1, np.float32))]

    world.run(script)
    world.settle()
    world.begin(nothing, does(together))
    world.settle()
    world.run(does(lambda worker: [whole(worker, 1, key="a")]), nothing)
    world.settle()
    assert slots(world) == 1, "the other key waits for it"
    world.crash(world.primary)
    world.evict(world.workers[1])
    world.settle()
    world.run(does(lambda worker: [whole(worker, 2, key="b", read_version=0)]), nothing)
    assert world.value("a").tolist() == [3, 3, 3]
    assert world.value("b").tolist() == [3, 3, 3]


def test_push_behind_one_that_is_in_the_value_is_kept(world: World) -> None:
    world.begin(nothing, does(lambda worker: [whole(worker, 1), whole(worker, 2, read_version=0)]))
    world.settle()
    assert slots(world) == 2
    world.run(does(lambda worker: [whole(worker, 1)]), nothing)
    world.settle()
    assert slots(world) == 1


# --- the parts, alone ---


def test_calls_that_were_begun_without_a_standby_end_first_and_then_their_pushes() -> None:
    chunk = Chunk("w", 0, 3, TensorSpec((3,), "float32"), get_policy("bsp"), "key 'w'")
    other = Chunk("v", 0, 3, TensorSpec((3,), "float32"), get_policy("bsp"), "key 'v'")
    chunks: dict[tuple[Key, int], Chunk] = {("w", 0): chunk, ("v", 0): other}
    call = WholeCall((1, 1, 1), 1, 1, asked=True)
    draining = Draining([call])
    assert not draining.is_over(chunks)
    call.ended, chunk.pushed[1], other.pushed[1] = True, 1, 1
    assert not draining.is_over(chunks)
    chunk.reflected[1], chunk.pushed[1] = 1, 2
    assert not draining.is_over(chunks)
    del chunks["v", 0]
    assert draining.is_over(chunks)


def test_what_was_over_and_has_not_arrived_is_waited_for_again() -> None:
    """The link has ended; what the standby says that it has is older."""
    draining = Draining()
    draining.until = 5
    draining.attached(5)
    assert draining.until == 5
    draining.attached(4)
    assert draining.until == 0


def copied(push: m.Push, slot: int, nbytes: int) -> st.Received:
    """Return a push as a standby gets it, which has 6 bytes, so many if it was decoded to a higher precision."""
    head = (1, 0, 1, 1, (), 0, msgspec.msgpack.encode(push), ("h",), "float16", 6)
    return st.Received(9, 1, m.CopyPush(*head), slot, nbytes)


def test_what_was_decoded_to_a_higher_precision_is_taken_for_that() -> None:
    push = m.Push("h", (3,), "float16", 0, 3, 1, 0, True, 5.0, whole=m.Whole(1, 1, 1))
    calls = FollowedCalls()
    assert calls.pushed(copied(push, 4, 12)) == [ef.Widen(4, "float16")]
    assert calls.pushed(copied(push, 5, 6)) == [ef.Free(4)]
    assert calls.settled(m.CopySettled(1, ((0, 1, 1, "gone"),))) == [ef.Free(5)]


def test_decisions_of_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiokv.core.server.copies.followed_calls.REMEMBERED", 2)
    calls = FollowedCalls()
    calls.settled(m.CopySettled(1, ((0, 1, 1, ""), (0, 1, 2, ""), (0, 1, 3, ""))))
    assert list(calls._known) == [(0, 1, 2), (0, 1, 3)]


def test_nobody_waits_for_a_standby_that_is_not_filled(world: World) -> None:
    world.crash(world.standby)  # type: ignore[arg-type]
    world.registers = False
    world.begin(nothing, does(lambda worker: [whole(worker, 1)]))
    world.settle()
    twin = world.primary.machine._replication.twin
    assert isinstance(twin, Copying)
    assert not twin.waits
    world.run(does(lambda worker: [whole(worker, 1)]), nothing)
    assert world.value("w").tolist() == [3, 3, 3]
