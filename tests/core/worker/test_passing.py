"""How a worker passes the clocks of the cluster's checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.errors import StaleEpochError
from aiokv.types import SCHEDULER
from aiokv.wire import messages as m

Make = Callable[..., Any]
AT_2 = {"checkpoint_at": 2, "checkpoints": "/ck", "run": 3}
FOLDER = {"checkpoints": "/ck", "run": 3}
PLACE = "/ck/run-000003-clock-0000000002"


@pytest.fixture
def worker(make_worker: Make) -> Any:
    """A worker of two with the keys "v" and "w", and a checkpoint after the second round."""
    return keyed(make_worker(settings=AT_2))


def keyed(rig: Any) -> Any:
    """Let the keys be initialised, each in a call of its own."""
    for key in ("v", "w"):
        rig.finish(rig.transfer("init", key))
    return rig


def told(rig: Any) -> list[m.Message]:
    """Return what the scheduler was told of checkpoints."""
    kinds = (m.CheckpointPart, m.CheckpointClock)
    sends = [effect for effect in rig.effects if isinstance(effect, ef.Send) and effect.peer == SCHEDULER]
    return [send.message for send in sends if isinstance(send.message, kinds)]


def rounds(rig: Any, count: int, *keys: str) -> None:
    """Push and pull some rounds, one after the other."""
    for _ in range(count):
        rig.finish(rig.transfer("pushpull", *(keys or ("v", "w"))))


def test_scheduler_is_told_with_the_first_push_of_the_next_round(worker: Any) -> None:
    rounds(worker, 2)
    assert told(worker) == []
    rounds(worker, 1)
    assert told(worker) == [m.CheckpointPart(2)]
    rounds(worker, 2)
    assert told(worker) == [m.CheckpointPart(2)]


def test_not_before_all_pushes_of_before_are_answered(worker: Any) -> None:
    rounds(worker, 1)
    slow = worker.transfer("push", "v")
    rounds(worker, 2, "w")
    assert told(worker) == []
    worker.finish(slow)
    assert told(worker) == [m.CheckpointPart(2)]


def test_pushes_of_later_rounds_are_not_waited_for(worker: Any) -> None:
    rounds(worker, 2)
    worker.transfer("push", "w")
    assert told(worker) == [m.CheckpointPart(2)]


def test_nothing_is_told_without_checkpoints(make_worker: Make) -> None:
    rig = keyed(make_worker())
    rounds(rig, 5)
    assert told(rig) == []


def test_who_leaves_after_the_last_round_is_past_it(worker: Any) -> None:
    rounds(worker, 2)
    leave = worker.call(st.Depart, timeout=5.0)
    assert leave.messages == [m.CheckpointPart(2), m.Leave()]


def test_who_leaves_with_an_open_push_is_not(worker: Any) -> None:
    rounds(worker, 1)
    worker.transfer("push", "w")
    worker.transfer("push", "v")
    assert worker.call(st.Depart, timeout=5.0).messages == [m.Leave()]


def ask(rig: Any, clock: int) -> list[m.Message]:
    """Let the scheduler ask for a clock; return what it is told."""
    before = len(told(rig))
    rig.handle(st.Received(SCHEDULER, 0, m.CheckpointAt(clock)))
    return told(rig)[before:]


def test_clock_that_is_asked_for_is_passed_too(make_worker: Make) -> None:
    rig = keyed(make_worker(settings=FOLDER))
    rounds(rig, 1)
    assert ask(rig, 2) == [m.CheckpointClock(2, 1)]
    rounds(rig, 2)
    assert told(rig)[1:] == [m.CheckpointPart(2)]


def test_clock_that_is_over_is_not(make_worker: Make) -> None:
    rig = keyed(make_worker(settings=FOLDER))
    rounds(rig, 3)
    assert ask(rig, 2) == [m.CheckpointClock(2, 3)]
    rounds(rig, 1)
    assert told(rig)[1:] == []


def test_the_clock_that_is_asked_for_last_takes_the_place_of_the_one_before(worker: Any) -> None:
    rounds(worker, 1)
    assert ask(worker, 3) == [m.CheckpointClock(3, 1)]
    rounds(worker, 3)
    assert told(worker)[1:] == [m.CheckpointPart(3)]


def test_who_is_asked_again_says_again_what_it_has_said(worker: Any) -> None:
    """What it has said may have got lost with the connection, and the scheduler would wait for ever."""
    rounds(worker, 1)
    assert ask(worker, 2) == [m.CheckpointClock(2, 1)]
    rounds(worker, 2)
    assert ask(worker, 2) == [m.CheckpointClock(2, 2), m.CheckpointPart(2)]


def test_what_was_passed_for_a_scheduler_that_is_no_more_is_not_for_the_next_one(worker: Any) -> None:
    rounds(worker, 3)
    worker._settings = AT_2 | {"run": 4}
    worker.publish()
    assert ask(worker, 2) == [m.CheckpointClock(2, 3)]


def test_who_has_taken_the_place_of_another_worker_may_be_past_it_already(worker: Any) -> None:
    worker.call(st.Resume, clock=7, updates={"v": 7, "w": 7})
    assert told(worker) == [m.CheckpointPart(2)]


# --- what compression has left ---


def compressed(make_worker: Make) -> Any:
    """Return a worker that compresses with error feedback."""
    rig = keyed(make_worker(settings=AT_2))
    call = rig.call(st.ConfigureCompression, name="2bit", params={}, pull_name="", pull_params={}, timeout=5.0)
    return rig.finish(call) and rig


def push(rig: Any, *keys: str, encode: bool = True) -> Any:
    """Push keys, encoded at once unless told otherwise."""
    call = rig.transfer("push", *keys, shape=(2, 3))
    if encode:
        send_all(rig, call)
    return call


def send_all(rig: Any, call: Any) -> None:
    """Let what was pushed be encoded, sent and answered."""
    call.sends = [each for each in rig.handle(st.Encoded(call.number)) if isinstance(each, ef.Send)]
    call.sends = [send for send in call.sends if send.peer != SCHEDULER]
    rig.finish(call)


def kept(rig: Any) -> list[tuple[int, list[Any]]]:
    """Return what was kept: clock and keys."""
    return [(each.clock, each.keys) for each in rig.effects if isinstance(each, ef.KeepResiduals)]


def test_what_is_left_is_kept_before_the_first_gradient_of_the_next_round_is_encoded(make_worker: Make) -> None:
    rig = compressed(make_worker)
    for _ in range(2):
        push(rig, "v", "w")
    assert kept(rig) == []
    call = push(rig, "w", encode=False)
    assert [type(effect) for effect in rig.effects[-2:]] == [ef.KeepResiduals, ef.Encode]
    assert kept(rig) == [(2, ["w"])]
    send_all(rig, call)
    (write,) = [each for each in rig.effects if isinstance(each, ef.WriteResiduals)]
    assert write == ef.WriteResiduals(2, PLACE)
    assert told(rig) == []
    file = m.CheckpointFile("residuals-0.safetensors", 9, "a", 1, "b")
    rig.handle(st.PartWritten(2, file))
    assert told(rig) == [m.CheckpointPart(2, file)]
    assert ask(rig, 2) == [m.CheckpointClock(2, 2), m.CheckpointPart(2, file)]


def test_what_was_written_for_one_that_is_not_asked_for_any_longer_is_not_told(make_worker: Make) -> None:
    rig = compressed(make_worker)
    for _ in range(3):
        push(rig, "v", "w")
    ask(rig, 9)
    rig.handle(st.PartWritten(2, m.CheckpointFile("residuals-0.safetensors", 9, "a", 1, "b")))
    assert told(rig) == [m.CheckpointClock(9, 3)]


def test_clock_of_a_gradient_that_is_being_encoded_counts(make_worker: Make) -> None:
    """What was left before that is not known any more."""
    rig = compressed(make_worker)
    ask(rig, 5)
    for _ in range(2):
        push(rig, "v", "w")
    push(rig, "v", encode=False)
    assert ask(rig, 2) == [m.CheckpointClock(2, 3)]


def test_it_is_kept_of_other_keys_as_long_as_the_clock_is_not_passed(make_worker: Make) -> None:
    rig = compressed(make_worker)
    push(rig, "v", "w")
    slow = push(rig, "v", encode=False)
    sends = [each for each in rig.handle(st.Encoded(slow.number)) if isinstance(each, ef.Send)]
    push(rig, "w")
    push(rig, "w")
    assert kept(rig) == [(2, ["w"])]
    assert not any(isinstance(each, ef.WriteResiduals) for each in rig.effects)
    push(rig, "v", encode=False)
    assert kept(rig) == [(2, ["w"]), (2, ["v"])]
    rig.answer(sends[0])
    assert [each for each in rig.effects if isinstance(each, ef.WriteResiduals)] == [ef.WriteResiduals(2, PLACE)]


def leave(rig: Any) -> list[ef.Effect]:
    """Let a worker leave after two rounds; return what comes of it."""
    for _ in range(2):
        push(rig, "v", "w")
    before = len(rig.effects)
    rig.leaving = rig.call(st.Depart, timeout=5.0)
    return list(rig.effects[before:])


def test_who_compresses_leaves_when_what_is_left_after_the_last_round_is_written(make_worker: Make) -> None:
    rig = compressed(make_worker)
    assert leave(rig) == [ef.WriteResiduals(2, PLACE)]
    file = m.CheckpointFile("residuals-0.safetensors", 9, "a", 1, "b")
    sends = [each.message for each in rig.handle(st.PartWritten(2, file)) if isinstance(each, ef.Send)]
    assert sends == [m.CheckpointPart(2, file), m.Leave()]


def test_who_leaves_does_not_wait_for_ever_until_something_is_written(make_worker: Make) -> None:
    rig = compressed(make_worker)
    leave(rig)
    while m.Leave() not in [each.message for each in rig.tick(rig.machine.deadline()) if isinstance(each, ef.Send)]:
        assert rig.now < 5.0


def test_who_is_dismissed_while_it_writes_says_no_more(make_worker: Make) -> None:
    rig = compressed(make_worker)
    leave(rig)
    rig.handle(st.Received(SCHEDULER, 0, m.Error(StaleEpochError.code, "evicted", {})))
    rig.handle(st.PartWritten(2, None, "the disk is full"))
    assert rig.leaving.outcome == "done"
    assert not [each for each in rig.effects if isinstance(each, ef.Send) and isinstance(each.message, m.Leave)]


def test_who_leaves_looks_for_a_scheduler_that_is_gone_while_it_writes(make_worker: Make) -> None:
    rig = compressed(make_worker)
    leave(rig)
    assert any(isinstance(each, ef.Connect) for each in rig.handle(st.PeerLost(SCHEDULER, "reset")))


def test_what_is_left_of_a_gradient_that_is_not_sent_any_longer_is_not_written(make_worker: Make) -> None:
    rig = compressed(make_worker)
    push(rig, "v", "w")
    push(rig, "w", encode=False)
    assert m.Leave() in rig.call(st.Depart, timeout=5.0).messages


def test_writing_that_fails_is_told(worker: Any) -> None:
    worker.handle(st.PartWritten(2, None, "the disk is full"))
    assert told(worker) == [m.CheckpointPart(2, None, "the disk is full")]
