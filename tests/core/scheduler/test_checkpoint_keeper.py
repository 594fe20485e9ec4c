"""The scheduler's part of the cluster's checkpoints: when one is complete, which ones stay, what is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.scheduler.checkpoint_keeper import CheckpointPlan
from aiokv.types import Role
from aiokv.wire import messages as m

Make = Callable[..., Any]
NODES = ("worker-0", "worker-1", "server-0", "server-1")


def file(name: str) -> m.CheckpointFile:
    """Return what is told of a file of 100 bytes."""
    return m.CheckpointFile(name, 100, "ab", 10, "cd")


def formed(make_scheduler: Make, *, reconnect_grace: float = 0.0, **plan: Any) -> Any:
    """Return a scheduler of two workers and two servers, with checkpoints."""
    fields: dict[str, Any] = {"folder": "/ck", "run": 2, "every": 10, "keep": 2} | plan
    rig = make_scheduler(2, 2, checkpoints=CheckpointPlan(**fields), reconnect_grace=reconnect_grace)
    rig.form(*NODES)
    return rig


@pytest.fixture
def scheduler(make_scheduler: Make) -> Any:
    """A scheduler of two workers and two servers, with a checkpoint after every ten rounds."""
    return formed(make_scheduler)


def tell(rig: Any, name: str, message: m.Message) -> list[ef.Effect]:
    """Let a node say something that has no answer."""
    return list(rig.handle(st.Received(rig.peers[name], 0, message)))


def pass_clock(rig: Any, clock: int, *names: str) -> list[ef.Effect]:
    """Let workers be past a clock, both of them unless they are named."""
    effects: list[ef.Effect] = []
    for name in names or ("worker-0", "worker-1"):
        effects += tell(rig, name, m.CheckpointPart(clock))
    return effects


def write(rig: Any, clock: int, *indexes: int) -> list[ef.Effect]:
    """Let servers have written their parts, both of them unless they are named."""
    effects: list[ef.Effect] = []
    for index in indexes or (0, 1):
        effects += tell(rig, f"server-{index}", m.CheckpointPart(clock, file(f"part-{index}")))
    return effects


def complete(rig: Any, clock: int) -> list[ef.Effect]:
    """Let the checkpoint that is asked for be made from the beginning to the end."""
    answer(rig, clock, clock)
    pass_clock(rig, clock)
    write(rig, clock)
    return list(rig.handle(st.ManifestWritten(clock)))


def answer(rig: Any, clock: int, newest: int, *names: str) -> list[ef.Effect]:
    """Let nodes say how far they are, all of them unless they are named."""
    effects: list[ef.Effect] = []
    for name in names or NODES:
        effects += tell(rig, name, m.CheckpointClock(clock, newest))
    return effects


def sent(rig: Any, effects: list[ef.Effect], kind: type) -> list[str]:
    """Return to whom messages of a kind go."""
    names = {peer: name for name, peer in rig.peers.items()}
    return [names[each.peer] for each in effects if isinstance(each, ef.Send) and isinstance(each.message, kind)]


def only(effects: list[ef.Effect], kind: type) -> list[Any]:
    """Return the effects of a kind."""
    return [effect for effect in effects if isinstance(effect, kind)]


def asked(rig: Any, effects: list[ef.Effect]) -> list[int]:
    """Return the clocks that are asked for, after a look whether all nodes are asked."""
    clocks = [each.message.clock for each in only(effects, ef.Send) if isinstance(each.message, m.CheckpointAt)]
    assert sorted(sent(rig, effects, m.CheckpointAt)) == sorted(NODES * (len(clocks) // len(NODES)))
    return list(dict.fromkeys(clocks))


def place(clock: int, run: int = 2) -> str:
    """Return a checkpoint's folder."""
    return f"/ck/run-{run:06d}-clock-{clock:010d}"


def test_view_says_where_and_when(scheduler: Any) -> None:
    view = scheduler.views["worker-1"][-1]
    assert (view.checkpoint_at, view.checkpoints, view.run, view.resume) == (10, "/ck", 2, "")


def test_servers_are_told_when_the_last_worker_is_past_the_round(scheduler: Any) -> None:
    assert pass_clock(scheduler, 10, "worker-1") == []
    effects = pass_clock(scheduler, 10, "worker-0")
    assert sent(scheduler, effects, m.CheckpointRest) == ["server-0", "server-1"]


def test_it_is_complete_when_all_parts_and_what_belongs_to_them_is_written(scheduler: Any) -> None:
    pass_clock(scheduler, 10, "worker-0")
    tell(scheduler, "worker-1", m.CheckpointPart(10, file("residuals-1")))
    assert write(scheduler, 10, 1) == []
    parts, residuals = [file("part-0"), file("part-1")], [(1, file("residuals-1"))]
    assert write(scheduler, 10, 0) == [ef.WriteManifest(10, place(10), 2, parts, residuals)]
    log, *asking = scheduler.handle(st.ManifestWritten(10))
    assert asked(scheduler, asking) == [20]
    text, facts = "the checkpoint of round 10 is complete: 300 bytes", {"clock": 10, "nbytes": 300}
    assert log == ef.Log("info", text, "checkpoint_complete", facts)


def test_the_last_few_stay(scheduler: Any) -> None:
    assert not only(complete(scheduler, 10), ef.RemoveCheckpoints)
    assert not only(complete(scheduler, 20), ef.RemoveCheckpoints)
    assert only(complete(scheduler, 30), ef.RemoveCheckpoints) == [ef.RemoveCheckpoints([place(10)])]
    assert only(complete(scheduler, 40), ef.RemoveCheckpoints) == [ef.RemoveCheckpoints([place(20)])]


def test_those_of_earlier_runs_count_and_what_they_did_not_complete_is_deleted(make_scheduler: Make) -> None:
    old, torn = [place(clock, 1).removeprefix("/ck/") for clock in (80, 90)], place(95, 1).removeprefix("/ck/")
    rig = formed(make_scheduler, names=tuple(old), torn=(torn,), resume=place(90, 1), clock=90)
    view = rig.views["server-0"][-1]
    assert (view.resume, view.checkpoint_at) == (place(90, 1), 100)
    # Two of three stay: what is there to go back to is never less.
    removed = only(complete(rig, 100), ef.RemoveCheckpoints)
    assert removed == [ef.RemoveCheckpoints([place(95, 1), place(80, 1)])]


# --- what makes one impossible ---


def dropped(rig: Any, effects: list[ef.Effect], clock: int) -> str:
    """Return why there is no checkpoint, after a look whether all servers were told."""
    assert sent(rig, effects, m.CheckpointDropped) == ["server-0", "server-1"]
    (log,) = only(effects, ef.Log)
    start = f"there is no checkpoint of round {clock}: "
    assert log.text.startswith(start)
    assert (log.event, log.facts["clock"]) == ("checkpoint_dropped", clock)
    return str(log.text.removeprefix(start))


def test_server_that_could_not_write_is_named(scheduler: Any) -> None:
    pass_clock(scheduler, 10)
    write(scheduler, 10, 0)
    effects = tell(scheduler, "server-1", m.CheckpointPart(10, None, "the disk is full"))
    assert dropped(scheduler, effects, 10) == "server 1: the disk is full"
    assert write(scheduler, 10, 0) == []
    # What the others had written goes with the next one that is complete.
    assert only(complete(scheduler, 20), ef.RemoveCheckpoints) == [ef.RemoveCheckpoints([place(10)])]


def test_worker_that_could_not_write_is_named(scheduler: Any) -> None:
    pass_clock(scheduler, 10, "worker-0")
    effects = tell(scheduler, "worker-1", m.CheckpointPart(10, None, "no such folder"))
    assert dropped(scheduler, effects, 10) == "rank 1: no such folder"
    assert tell(scheduler, "worker-0", m.CheckpointPart(10, None, "no such folder")) == []


def test_manifest_that_could_not_be_written_makes_none(scheduler: Any) -> None:
    pass_clock(scheduler, 10)
    write(scheduler, 10)
    effects = scheduler.handle(st.ManifestWritten(10, "the disk is full"))
    assert dropped(scheduler, effects, 10) == "the disk is full"
    assert scheduler.handle(st.ManifestWritten(10)) == []


def test_server_lost_makes_none(scheduler: Any) -> None:
    pass_clock(scheduler, 10)
    write(scheduler, 10, 0)
    logs = [log.text for log in only(scheduler.drop("server-1"), ef.Log)]
    assert "there is no checkpoint of round 10: a server is lost" in logs
    # What the others write later is of no use.
    assert pass_clock(scheduler, 20) == []
    assert write(scheduler, 20, 0) == []


def test_stranger_has_no_part(make_scheduler: Make) -> None:
    rig = make_scheduler(2, 2)
    assert "only a member" in str(rig.ask("stranger", m.CheckpointPart(10)).answer)
    rig.form("worker-0")
    assert "only a member" in str(rig.ask("worker-0", m.CheckpointClock(10, 3)).answer)


# --- workers that leave ---


def test_nobody_waits_for_a_worker_that_has_left(scheduler: Any) -> None:
    pass_clock(scheduler, 10, "worker-0")
    effects = scheduler.ask("worker-1", m.Leave()) and scheduler.effects
    assert sent(scheduler, effects, m.CheckpointRest) == ["server-0", "server-1"]


def test_job_ends_when_the_last_checkpoint_is_complete(scheduler: Any) -> None:
    pass_clock(scheduler, 10)
    for name in ("worker-0", "worker-1"):
        scheduler.ask(name, m.Leave())
    assert not only(scheduler.effects, ef.Stop)
    write(scheduler, 10)
    assert not only(scheduler.effects, ef.Stop)
    effects = scheduler.handle(st.ManifestWritten(10))
    assert sent(scheduler, effects, m.Stop) == ["server-0", "server-1"]
    assert only(effects, ef.Stop) == [ef.Stop("all workers have left")]


def test_job_ends_when_the_last_checkpoint_fails(scheduler: Any) -> None:
    pass_clock(scheduler, 10)
    for name in ("worker-0", "worker-1"):
        scheduler.ask(name, m.Leave())
    tell(scheduler, "server-0", m.CheckpointPart(10, None, "the disk is full"))
    assert only(scheduler.effects, ef.Stop) == [ef.Stop("all workers have left")]


def test_job_does_not_wait_for_ever_for_the_last_checkpoint(scheduler: Any) -> None:
    pass_clock(scheduler, 10)
    for name in ("worker-0", "worker-1"):
        scheduler.ask(name, m.Leave())
    for now in range(1, 60):
        scheduler.tick(float(now))
        scheduler.beat("server-0", "server-1")
    assert not only(scheduler.effects, ef.Stop)
    scheduler.tick(60.0)
    assert only(scheduler.effects, ef.Stop) == [ef.Stop("all workers have left")]


def test_job_that_has_failed_waits_for_no_checkpoint(scheduler: Any) -> None:
    pass_clock(scheduler, 10)
    scheduler.ask("worker-0", m.Leave())
    assert only(scheduler.drop("worker-1"), ef.Stop)


# --- one after the other ---


def test_next_one_is_asked_for_when_the_last_one_is_complete(scheduler: Any) -> None:
    assert asked(scheduler, complete(scheduler, 10)) == [20]
    assert scheduler.views["worker-0"][-1].checkpoint_at == 10
    assert asked(scheduler, complete(scheduler, 20)) == [30]


def test_those_that_somebody_is_past_by_then_are_left_out(scheduler: Any) -> None:
    answer(scheduler, 7, 35, "server-1")
    assert asked(scheduler, complete(scheduler, 10)) == [40]


def test_next_one_is_further_ahead_each_time_that_somebody_is_past_it(scheduler: Any) -> None:
    complete(scheduler, 10)
    answer(scheduler, 20, 20, "worker-0", "server-0")
    assert asked(scheduler, answer(scheduler, 20, 49, "worker-1")) == [50]
    assert asked(scheduler, answer(scheduler, 50, 69, "server-1")) == [80], "two rounds ahead of all"
    # Who has answered about an earlier one is waited for all the same.
    pass_clock(scheduler, 80)
    answer(scheduler, 80, 80, "worker-0", "worker-1", "server-0")
    assert not sent(scheduler, scheduler.effects, m.CheckpointRest)[2:]
    assert sent(scheduler, answer(scheduler, 80, 80, "server-1"), m.CheckpointRest) == ["server-0", "server-1"]


def test_next_one_is_asked_for_when_one_is_dropped(scheduler: Any) -> None:
    pass_clock(scheduler, 10)
    effects = tell(scheduler, "server-0", m.CheckpointPart(10, None, "the disk is full"))
    assert asked(scheduler, effects) == [20]


def test_regular_one_of_which_nothing_was_begun_is_asked_for_again_without_a_word(make_scheduler: Make) -> None:
    rig = formed(make_scheduler, reconnect_grace=1.0)
    before = len(rig.effects)
    rig.register("server-1", again=True, epoch=1)
    assert asked(rig, rig.effects[before:]) == [10]
    assert not [log for log in only(rig.effects[before:], ef.Log) if "checkpoint" in log.text]


def test_worker_that_is_back_is_asked_again(make_scheduler: Make) -> None:
    """What it has said, or was asked, may have got lost with its connection."""
    rig = formed(make_scheduler, reconnect_grace=1.0)
    before = len(rig.effects)
    rig.register("worker-1", again=True, epoch=1)
    assert sent(rig, rig.effects[before:], m.CheckpointAt) == ["worker-1"]
    pass_clock(rig, 10, "worker-0")
    tell(rig, "worker-1", m.CheckpointClock(10, 10))
    assert sent(rig, pass_clock(rig, 10, "worker-1"), m.CheckpointRest) == ["server-0", "server-1"]


def test_when_all_is_written_a_server_that_is_lost_matters_no_longer(scheduler: Any) -> None:
    pass_clock(scheduler, 10)
    write(scheduler, 10)
    scheduler.drop("server-1")
    (log,) = scheduler.handle(st.ManifestWritten(10))
    assert "is complete" in log.text


def test_servers_are_told_once_more_when_they_wait_for_long(scheduler: Any) -> None:
    """What has come and is never made would keep all later ones from being made."""
    pass_clock(scheduler, 10)
    write(scheduler, 10, 0)
    for now in range(1, 60):
        scheduler.beat(*NODES)
        assert not sent(scheduler, scheduler.tick(float(now)), m.CheckpointRest)
    scheduler.beat(*NODES)
    assert sent(scheduler, scheduler.tick(60.0), m.CheckpointRest) == ["server-0", "server-1"]
    scheduler.beat(*NODES)
    assert not sent(scheduler, scheduler.tick(61.0), m.CheckpointRest)


def started_again(make_scheduler: Make, *, lacking: str = "", **plan: Any) -> Any:
    """Return a scheduler that was started again, and to which all have come back; but one, if it is named."""
    known = formed(make_scheduler).views["worker-0"][-1]
    fields: dict[str, Any] = {"folder": "/ck", "run": 3, "every": 10, "keep": 2} | plan
    rig = make_scheduler(2, 2, checkpoints=CheckpointPlan(**fields))
    for name in NODES:
        if name != lacking:
            rig.register(name, epoch=known.epoch)
    # This belongs to what the one before has asked for.
    tell(rig, "worker-0", m.CheckpointPart(10))
    rig.ask("worker-0", known)
    return rig


@pytest.mark.parametrize("plan", [{}, {"every": 0, "seconds": 60.0}], ids=["by rounds", "by seconds"])
def test_scheduler_that_was_started_again_asks_for_one_at_once(make_scheduler: Make, plan: dict[str, Any]) -> None:
    """It does not know which one was asked for, nor whether anybody is past the first one."""
    rig = started_again(make_scheduler, **plan)
    assert rig.views["worker-1"][-1].checkpoint_at == 0
    assert asked(rig, rig.effects) == [1]
    assert not rig.machine._keeper.is_busy
    assert asked(rig, answer(rig, 1, 123, "server-0")) == [125]
    assert asked(rig, complete(rig, 125)) == ([130] if not plan else [])


def test_scheduler_that_was_started_again_asks_for_none_where_there_are_none(make_scheduler: Make) -> None:
    rig = started_again(make_scheduler, every=0)
    assert asked(rig, rig.effects) == []


@pytest.mark.parametrize(("lacking", "clocks"), [("server-1", []), ("worker-1", [1])])
def test_scheduler_that_was_started_again_asks_those_who_are_back(
    make_scheduler: Make, lacking: str, clocks: list[int]
) -> None:
    """Without a server no checkpoint has all parameters."""
    rig = started_again(make_scheduler, lacking=lacking)
    told = [each for each in only(rig.tick(2.0), ef.Send) if isinstance(each.message, m.CheckpointAt)]
    here = [rig.peers[name] for name in ("server-0", "server-1", "worker-0") if name != lacking]
    assert told == [ef.Send(peer, 0, m.CheckpointAt(clock)) for clock in clocks for peer in here]


# --- every so many seconds ---


@pytest.fixture
def timed(make_scheduler: Make) -> Any:
    """A scheduler of two workers and two servers, with a checkpoint every second."""
    return formed(make_scheduler, every=0, seconds=1.0)


def test_one_is_asked_for_when_it_is_time(timed: Any) -> None:
    assert timed.machine.deadline() <= 1.0
    assert asked(timed, timed.tick(0.9)) == []
    assert asked(timed, timed.tick(1.0)) == [1]


def test_later_one_is_asked_for_when_somebody_was_past_the_first(timed: Any) -> None:
    timed.tick(1.0)
    assert answer(timed, 1, 0, "worker-0", "server-0") == []
    effects = answer(timed, 1, 40, "server-1")
    assert sent(timed, effects, m.CheckpointDropped) == ["server-0", "server-1"]
    assert asked(timed, effects) == [42]
    assert answer(timed, 1, 40, "worker-1") == [], "that was about the first one"
    # Twice as far ahead each time.
    assert asked(timed, answer(timed, 42, 50, "worker-0")) == [54]
    assert asked(timed, answer(timed, 54, 54)) == []
    assert only(complete(timed, 54), ef.Log)


def test_part_of_one_that_came_too_late_is_of_no_use(timed: Any) -> None:
    timed.tick(1.0)
    pass_clock(timed, 1, "worker-0")
    answer(timed, 1, 40, "server-1")
    assert pass_clock(timed, 1) == []
    assert not timed.machine._keeper.is_busy


def test_next_one_is_asked_for_when_the_one_before_is_over(timed: Any) -> None:
    timed.tick(1.0)
    timed.beat(*NODES)
    assert asked(timed, timed.tick(2.0)) == [], "not all have answered"
    answer(timed, 1, 1)
    timed.beat(*NODES)
    assert asked(timed, timed.tick(3.0)) == [], "nobody is past it yet"
    pass_clock(timed, 1, "worker-0")
    timed.beat(*NODES)
    assert asked(timed, timed.tick(4.0)) == [], "it is under way"
    complete(timed, 1)
    answer(timed, 7, 20)
    timed.beat(*NODES)
    assert asked(timed, timed.tick(5.0)) == [21]
    answer(timed, 21, 20)
    tell(timed, "server-0", m.CheckpointPart(21, None, "the disk is full"))
    timed.beat(*NODES)
    assert asked(timed, timed.tick(6.0)) == [23], "of the dropped one there will be none"


def test_none_is_asked_for_when_a_server_is_lost(timed: Any) -> None:
    timed.drop("server-0")
    assert timed.tick(1.0) == []


def test_who_is_lost_is_not_waited_for(timed: Any) -> None:
    timed.tick(1.0)
    answer(timed, 1, 0, "worker-0", "server-0", "server-1")
    pass_clock(timed, 1, "worker-0")
    effects = timed.ask("worker-1", m.Leave()) and timed.effects
    assert sent(timed, effects, m.CheckpointRest) == ["server-0", "server-1"]


def test_what_was_asked_over_a_lost_connection_is_asked_again(make_scheduler: Make) -> None:
    """The server that has come back may not have heard of it, and then the others would wait for ever."""
    timed = formed(make_scheduler, every=0, seconds=1.0)
    timed.tick(1.0)
    timed.beat(*NODES)
    again = timed.register("server-1", again=True, epoch=1)
    assert again.answer is None
    assert pass_clock(timed, 1) == [], "of this one there will be none"
    timed.beat(*NODES)
    assert asked(timed, timed.tick(2.0)) == [3]


def test_both_kinds_are_one_after_the_other(make_scheduler: Make) -> None:
    rig = formed(make_scheduler, seconds=1.0)
    assert rig.views["worker-0"][-1].checkpoint_at == 10
    assert asked(rig, rig.tick(1.0)) == [1]
    rig.beat(*NODES)
    assert asked(rig, rig.tick(2.0)) == [], "this one is not over"
    assert asked(rig, complete(rig, 1)) == [10], "the regular one is still possible"
    answer(rig, 10, 9)
    rig.beat(*NODES)
    assert asked(rig, rig.tick(3.0)) == [], "it is there as soon as another one"
    pass_clock(rig, 10, "worker-0")
    rig.beat(*NODES)
    assert asked(rig, rig.tick(4.0)) == [], "it is under way"
    assert asked(rig, complete(rig, 10)) == [20]


def test_a_standby_has_no_part_of_a_checkpoint(make_scheduler: Make) -> None:
    rig = make_scheduler(2, 2, checkpoints=CheckpointPlan("/ck", 2, 10, keep=2), replication=2)
    rig.form(*NODES)
    standby = rig.views["worker-0"][-1].servers[0].standby.name
    rig.register(standby, Role.SERVER, number=-1, standby=0)
    pass_clock(rig, 10)
    assert tell(rig, standby, m.CheckpointPart(10, file("part-0"))) == []
    assert only(write(rig, 10), ef.WriteManifest)
