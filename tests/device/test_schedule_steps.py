"""What overlaps and what waits, step by step; `test_schedule.py` shows that nothing goes wrong in any other order."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from aiokv.device import records as r
from aiokv.device.records import Kind, Stream
from aiokv.device.schedule import Schedule
from aiokv.errors import AiokvError, DeviceMemoryError
from aiokv.kernels.work import Add

W = ("w", 0)
BYTES = 100


def install(schedule: Schedule, chunk: Any = W, slot: int = 0) -> list[r.Effect]:
    return schedule.handle(r.Install(chunk, BYTES, slot, "zero"))


class Begun(NamedTuple):
    """A part of a launch, with what the launch waits for."""

    stream: Stream
    waits: list[r.Event]
    event: r.Event
    work: Any
    buffers: list[r.Buffer]


def tasks(effects: list[r.Effect]) -> list[r.Copy | Begun]:
    """Return the copies, and the parts of the launches."""
    found: list[r.Copy | Begun] = []
    for effect in effects:
        if isinstance(effect, r.Copy):
            found.append(effect)
        elif isinstance(effect, r.Launch):
            found += [Begun(effect.stream, effect.waits, part.event, part.work, part.buffers) for part in effect.parts]
    return found


def copies(effects: list[r.Effect]) -> list[r.Copy]:
    return [effect for effect in effects if isinstance(effect, r.Copy)]


def complete(schedule: Schedule, effects: list[r.Effect]) -> list[r.Effect]:
    """Report all that was begun; return what is wanted then."""
    return [more for task in tasks(effects) for more in schedule.handle(r.Completed(task.event))]


def test_contributions_are_copied_while_others_are_added() -> None:
    """The copies of what lands wait for nothing; each addition waits for the copy of what it adds."""
    schedule = Schedule([10_000])
    complete(schedule, install(schedule))
    landed = [copies(schedule.handle(r.Landed(slot, BYTES, 0)))[0] for slot in (1, 2, 3)]
    adds = [tasks(schedule.handle(r.Fold(1, [slot], "add", BYTES)))[0] for slot in (2, 3)]
    assert [(copy.stream, copy.waits) for copy in landed] == [(Stream(0, Kind.IN), [])] * 3
    assert [(add.stream, add.waits) for add in adds] == [
        (Stream(0, Kind.COMPUTE), [landed[1].event]),
        (Stream(0, Kind.COMPUTE), [landed[2].event]),
    ]


def landed(schedule: Schedule, *slots: int) -> list[r.Copy]:
    return [copies(schedule.handle(r.Landed(slot, BYTES, 0)))[0] for slot in slots]


def fold(schedule: Schedule, source: int) -> list[r.Copy | Begun]:
    """Add to slot 1; return what was begun."""
    return tasks(schedule.handle(r.Fold(1, [source], Add("float32", ("float32",), adds=True), BYTES, joins=True)))


def add(*sources: str) -> Add:
    return Add("float32", sources, adds=True)


def test_contributions_that_come_while_others_are_copied_are_added_in_one_go() -> None:
    """In the order in which they are to be added, whatever the order in which they are there."""
    schedule = Schedule([10_000])
    first, second, third = landed(schedule, 1, 2, 3)
    assert [fold(schedule, source) for source in (2, 3)] == [[], []]
    for copy in (third, first):
        assert not tasks(schedule.handle(r.Completed(copy.event)))
    (launch,) = tasks(schedule.handle(r.Completed(second.event)))
    assert isinstance(launch, Begun)
    assert launch.buffers == [first.target, second.target, third.target]
    assert (launch.work, launch.waits) == (add("float32", "float32"), [])


def test_who_wants_a_sum_lets_all_be_added_that_waits() -> None:
    """By events of the device: the host waits for nothing."""
    schedule = Schedule([10_000])
    complete(schedule, install(schedule))
    arrived = landed(schedule, 1, 2, 3)
    assert [fold(schedule, source) for source in (2, 3)] == [[], []]
    launch, renew = tasks(schedule.handle(r.Update(W, 1, 1, "renew")))
    assert isinstance(launch, Begun)
    assert isinstance(renew, Begun)
    assert launch.buffers == [copy.target for copy in arrived]
    assert launch.waits == [arrived[-1].event]
    assert (renew.work, renew.waits) == ("renew", [])


def test_eight_arrays_are_added_in_one_pass_and_more_in_another_one() -> None:
    schedule = Schedule([10_000])
    complete(schedule, install(schedule))
    landed(schedule, *range(1, 12))
    begun = [task for source in range(2, 12) for task in fold(schedule, source)]
    begun += tasks(schedule.handle(r.Update(W, 1, 1, None)))
    assert [task.work for task in begun if isinstance(task, Begun)] == [add(*["float32"] * n) for n in (7, 3)]


def test_a_contribution_that_comes_late_is_added_when_it_comes() -> None:
    schedule = Schedule([10_000])
    for copy in landed(schedule, 1, 2):
        schedule.handle(r.Completed(copy.event))
    (launch,) = fold(schedule, 2)
    assert isinstance(launch, Begun)
    assert launch.work == add("float32")


def test_what_waits_to_be_added_is_given_back_with_its_sum() -> None:
    schedule = Schedule([10_000])
    arrived = landed(schedule, 1, 2)
    assert fold(schedule, 2) == []
    schedule.handle(r.Freed(1))
    for copy in arrived:
        assert not tasks(schedule.handle(r.Completed(copy.event)))
    schedule.validate()
    assert schedule._flow.memory.used == [0]


def test_a_version_is_published_when_its_event_is_there() -> None:
    schedule = Schedule([10_000])
    complete(schedule, install(schedule))
    complete(schedule, schedule.handle(r.Landed(1, BYTES, 0)))
    (launch,) = tasks(schedule.handle(r.Update(W, 1, 1, "renew")))
    assert schedule.version_of(W) == 0
    assert r.Published(W, 1, None) in schedule.handle(r.Completed(launch.event))
    assert schedule.version_of(W) == 1


def test_a_sum_that_is_the_value_waits_for_what_makes_it() -> None:
    schedule = Schedule([10_000])
    complete(schedule, install(schedule))
    copied = schedule.handle(r.Landed(1, BYTES, 0))
    assert schedule.handle(r.Update(W, 1, 1, None)) == []
    ended = complete(schedule, copied)
    assert r.Published(W, 1, None) in ended


def test_the_first_value_is_sent_from_where_it_has_landed() -> None:
    schedule = Schedule([10_000])
    effects = install(schedule)
    take = next(effect for effect in effects if isinstance(effect, r.Take))
    assert schedule.handle(r.Requested(7, W, 0)) == [r.Ready(7, {"": take.buffer}, None)]


def test_all_who_want_a_value_get_one_copy_of_it() -> None:
    schedule = Schedule([10_000])
    complete(schedule, install(schedule))
    complete(schedule, schedule.handle(r.Landed(1, BYTES, 0)))
    schedule.handle(r.Update(W, 1, 1, None))
    reserve, copy = schedule.handle(r.Requested(1, W, 1))
    assert isinstance(reserve, r.Reserve)
    assert isinstance(copy, r.Copy)
    assert copy.stream == Stream(0, Kind.OUT)
    assert schedule.handle(r.Requested(2, W, 1)) == []
    ready = schedule.handle(r.Completed(copy.event))
    assert ready == [r.Ready(ticket, {"": reserve.buffer}, None) for ticket in (1, 2)]


def test_what_was_wanted_before_is_copied_without_being_asked_for() -> None:
    """So the copy follows the update at once, and the loop is not waited for in between."""
    schedule = Schedule([10_000])
    complete(schedule, install(schedule))
    schedule.handle(r.Requested(1, W, 0))
    complete(schedule, schedule.handle(r.Landed(1, BYTES, 0)))
    launch, copy = tasks(schedule.handle(r.Update(W, 1, 1, "renew")))
    assert (copy.stream, copy.waits) == (Stream(0, Kind.OUT), [launch.event])


def test_state_is_not_changed_while_it_is_copied() -> None:
    schedule = Schedule([10_000])
    complete(schedule, install(schedule))
    fresh = {"momentum": r.Fresh(BYTES, "zero")}
    complete(schedule, schedule.handle(r.Landed(1, BYTES, 0)))
    complete(schedule, schedule.handle(r.Update(W, 1, 1, "renew", 0, ("momentum",), fresh)))
    saved = copies(schedule.handle(r.Requested(1, W, 1, state=True)))
    complete(schedule, schedule.handle(r.Landed(2, BYTES, 0)))
    launch = tasks(schedule.handle(r.Update(W, 2, 2, "renew", 0, ("momentum",))))[0]
    assert launch.waits == [saved[-1].event]


def test_a_buffer_is_used_again_for_what_has_its_size() -> None:
    schedule = Schedule([10_000])
    complete(schedule, install(schedule))
    landed = schedule.handle(r.Landed(1, BYTES, 0))
    freed = schedule.handle(r.Freed(1))
    assert freed == [], "it is still being copied to"
    complete(schedule, landed)
    again = schedule.handle(r.Landed(2, BYTES, 0))
    assert not [effect for effect in again if isinstance(effect, r.Allocate)]
    assert copies(again)[0].target == copies(landed)[0].target


def test_idle_buffers_make_room_for_others() -> None:
    schedule = Schedule([2 * BYTES])
    complete(schedule, install(schedule))
    landed = schedule.handle(r.Landed(1, BYTES, 0))
    complete(schedule, landed)
    schedule.handle(r.Freed(1))
    effects = schedule.handle(r.Landed(2, BYTES // 2, 0))
    assert [effect for effect in effects if isinstance(effect, r.Deallocate)] == [
        r.Deallocate(copies(landed)[0].target)
    ]


def test_what_does_not_fit_says_how_much_was_wanted_where() -> None:
    schedule = Schedule([10_000, 3 * BYTES // 2])
    install(schedule)
    install(schedule, ("v", 0), 1)
    with pytest.raises(DeviceMemoryError, match="CUDA device 1 has 50 bytes left for buffers, and 100 were") as caught:
        schedule.handle(r.Landed(2, BYTES, 1))
    assert caught.value.details == {"expected": 100, "got": 50}


def test_sums_of_two_devices_are_added_where_the_first_one_is() -> None:
    schedule = Schedule([10_000, 10_000])
    landed = [copies(schedule.handle(r.Landed(slot, BYTES, slot)))[0] for slot in (0, 1)]
    moved, add = tasks(schedule.handle(r.Fold(0, [1], "add", BYTES)))
    assert isinstance(moved, r.Copy)
    assert (moved.stream, moved.source, moved.waits) == (Stream(0, Kind.IN), landed[1].target, [landed[1].event])
    assert (add.stream, add.waits) == (Stream(0, Kind.COMPUTE), [moved.event])


def test_an_update_that_failed_leaves_the_value_and_forgets_the_state_that_it_began() -> None:
    schedule = Schedule([10_000])
    complete(schedule, install(schedule))
    complete(schedule, schedule.handle(r.Landed(1, BYTES, 0)))
    begin, launch = tasks(schedule.handle(r.Update(W, 1, 1, "renew", 0, ("m",), {"m": r.Fresh(BYTES, "zero")})))
    schedule.handle(r.Completed(begin.event))
    error = AiokvError("no")
    assert r.Published(W, 1, error) in schedule.handle(r.Completed(launch.event, error))
    assert schedule.version_of(W) == 1
    assert schedule.state_of(W) == {}


def test_a_sum_that_went_wrong_before_is_no_value() -> None:
    schedule = Schedule([10_000])
    complete(schedule, install(schedule))
    (copy,) = tasks(schedule.handle(r.Landed(1, BYTES, 0)))
    error = AiokvError("no")
    schedule.handle(r.Completed(copy.event, error))
    assert r.Published(W, 1, error) in schedule.handle(r.Update(W, 1, 1, None))


# --- many chunks at once ---


def kind_of(work: object) -> object:
    return work


def behind(schedule: Schedule, count: int) -> list[Begun]:
    """Have two launches under way, and the contributions of so many chunks there; return the launches."""
    for number in range(count + 2):
        complete(schedule, schedule.handle(r.Install((number, 0), BYTES, number, "zero")))
        complete(schedule, schedule.handle(r.Landed(100 + number, BYTES, 0)))
    begun = [task for number in (0, 1) for task in update(schedule, number)]
    assert [len(effects) for effects in (begun, update(schedule, 2))] == [2, 0]
    return [task for task in begun if isinstance(task, Begun)]


def update(schedule: Schedule, number: int, work: Any = "renew") -> list[r.Copy | Begun]:
    return tasks(schedule.handle(r.Update((number, 0), 1, 100 + number, work)))


def launches(effects: list[r.Effect]) -> list[list[Any]]:
    """Return the works of each launch."""
    return [[part.work for part in effect.parts] for effect in effects if isinstance(effect, r.Launch)]


def test_updates_that_are_ready_while_a_device_is_behind_are_one_launch() -> None:
    schedule = Schedule([1_000_000], kind_of)
    first, _ = behind(schedule, 161)
    assert not [task for number in range(3, 163) for task in update(schedule, number)]
    assert launches(schedule.handle(r.Completed(first.event))) == [["renew"] * 161]


def test_sums_and_then_their_updates_are_two_launches() -> None:
    """Each update needs a sum, so none can be made with the sums; and the other way round for what comes later."""
    schedule = Schedule([1_000_000], kind_of)
    first, _ = behind(schedule, 5)
    for number in (3, 4, 5):
        complete(schedule, schedule.handle(r.Landed(200 + number, BYTES, 0)))
        assert not tasks(schedule.handle(r.Fold(100 + number, [200 + number], "add", BYTES)))
        assert not update(schedule, number)
    assert launches(schedule.handle(r.Completed(first.event))) == [["renew"], ["add"] * 3, ["renew"] * 3]


def test_works_of_different_kinds_are_launches_of_their_own() -> None:
    schedule = Schedule([1_000_000], lambda work: None if work == "alone" else work)
    first, _ = behind(schedule, 5)
    for number, work in enumerate(["alone", "adam", "alone", "adam"], 3):
        assert not update(schedule, number, work)
    assert launches(schedule.handle(r.Completed(first.event))) == [["renew"], ["alone"], ["adam", "adam"], ["alone"]]


def test_values_are_copied_when_the_launch_that_makes_them_has_gone_out() -> None:
    schedule = Schedule([1_000_000], kind_of)
    first, _ = behind(schedule, 2)
    schedule.handle(r.Requested(1, (3, 0), 0))
    assert not update(schedule, 3)
    made, wanted, copy = tasks(schedule.handle(r.Completed(first.event)))
    assert (made.waits, wanted.waits, copy.waits) == ([], [], [wanted.event])
    assert isinstance(copy, r.Copy)


def test_a_launch_waits_for_what_each_of_its_works_needs() -> None:
    """Here for the copies of two contributions, the later of which is enough to wait for."""
    schedule = Schedule([1_000_000], kind_of)
    first, _ = behind(schedule, 3)
    arrived = landed(schedule, 203, 204)
    for number in (3, 4):
        assert not tasks(schedule.handle(r.Update((number, 0), 1, 200 + number, "renew")))
    made = tasks(schedule.handle(r.Completed(first.event)))
    assert [task.work for task in made if isinstance(task, Begun)] == ["renew"] * 3
    assert [task.waits for task in made] == [[arrived[1].event]] * 3


def test_the_update_of_a_single_chunk_does_not_wait_for_its_sum_to_be_reported() -> None:
    schedule = Schedule([10_000], kind_of)
    complete(schedule, install(schedule))
    for copy in landed(schedule, 1, 2, 3):
        schedule.handle(r.Completed(copy.event))
    begun = [*fold(schedule, 2), *fold(schedule, 3), *tasks(schedule.handle(r.Update(W, 1, 1, "renew")))]
    assert [task.work for task in begun if isinstance(task, Begun)] == [add("float32"), add("float32"), "renew"]


def test_a_device_that_is_behind_does_not_hold_up_another_one() -> None:
    schedule = Schedule([1_000_000] * 2, kind_of)
    for number in range(8):
        complete(schedule, schedule.handle(r.Install((number, 0), BYTES, number, "zero")))
        complete(schedule, schedule.handle(r.Landed(100 + number, BYTES, number % 2)))
    begun = [(number % 2, len(update(schedule, number))) for number in (0, 2, 4, 1, 3)]
    assert begun == [(0, 1), (0, 1), (0, 0), (1, 1), (1, 1)]


def kept(schedule: Schedule) -> tuple[r.Buffer, r.Buffer]:
    """Install a chunk and update it once; return where its value lies, and where the one before, which is kept."""
    first = install(schedule)
    complete(schedule, first)
    complete(schedule, schedule.handle(r.Landed(1, BYTES, 0)))
    [update] = tasks(effects := schedule.handle(r.Update(W, 1, 1, "update", keeps=True)))
    complete(schedule, effects)
    assert isinstance(update, Begun)
    before, now = update.buffers[:2]
    return now, before


def test_a_gradient_is_compared_with_the_value_and_with_the_one_that_was_read() -> None:
    schedule = Schedule([10_000])
    now, before = kept(schedule)
    [copy] = copies(schedule.handle(r.Landed(2, BYTES, 0)))
    [compared] = tasks(schedule.handle(r.Compare(2, W, 0, "compare", BYTES)))
    assert isinstance(compared, Begun)
    assert compared.buffers == [copy.target, now, before]
    assert compared.waits == [copy.event]
    # Whatever uses the gradient waits for that.
    [update] = tasks(schedule.handle(r.Update(W, 2, 2, "update")))
    assert isinstance(update, Begun)
    assert update.buffers == [now, copy.target]
    schedule.validate()


def test_a_gradient_that_becomes_wider_is_compared_into_another_buffer() -> None:
    schedule = Schedule([10_000])
    now, before = kept(schedule)
    [copy] = copies(effects := schedule.handle(r.Landed(2, BYTES, 0)))
    complete(schedule, effects)
    [compared] = tasks(schedule.handle(r.Compare(2, W, 0, "compare", 2 * BYTES)))
    assert isinstance(compared, Begun)
    wide, *others = compared.buffers
    assert others == [copy.target, now, before]
    assert wide not in others
    assert schedule.nbytes_of(2) == 2 * BYTES
    schedule.validate()


def test_a_gradient_on_another_device_is_compared_on_that_of_its_chunk() -> None:
    schedule = Schedule([10_000, 10_000])
    kept(schedule)
    complete(schedule, schedule.handle(r.Landed(2, BYTES, 1)))
    moved, compared = tasks(schedule.handle(r.Compare(2, W, 0, "compare", BYTES)))
    assert isinstance(moved, r.Copy)
    assert isinstance(compared, Begun)
    assert compared.stream == Stream(0, Kind.COMPUTE)
    assert compared.buffers[0] == moved.target
    assert schedule.device_of(2) == 0
    schedule.validate()


def test_a_gradient_for_which_there_is_no_room_stays_as_it_is() -> None:
    schedule = Schedule([3 * BYTES])
    kept(schedule)
    complete(schedule, schedule.handle(r.Landed(2, BYTES, 0)))
    with pytest.raises(DeviceMemoryError):
        schedule.handle(r.Compare(2, W, 0, "compare", 2 * BYTES))
    assert schedule.nbytes_of(2) == BYTES
    schedule.validate()
