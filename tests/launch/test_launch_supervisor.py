"""What the launcher decides when a node ends, a signal comes or time runs out."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from aiokv.launch.supervisor import Outcome, Phase, Recovery, Step, Supervisor, describe_exit
from aiokv.types import Role

ROLES = {
    "scheduler": Role.SCHEDULER,
    "server-0": Role.SERVER,
    "worker-0": Role.WORKER,
    "worker-1": Role.WORKER,
}


def running(**recovery: Any) -> Supervisor:
    """Return a supervisor of a job whose nodes are all started."""
    supervisor = Supervisor(ROLES, Recovery(**recovery))
    assert supervisor.scheduler_ready() is Step.START
    return supervisor


def test_job_is_done_when_the_last_worker_is() -> None:
    job = running()
    assert job.exited("worker-1", 0) is Step.WAIT
    assert job.exited("worker-0", 0) is Step.FINISH
    assert job.outcome == Outcome(0)


def test_scheduler_and_server_may_end_well_while_a_worker_still_saves_its_model() -> None:
    job = running()
    assert [job.exited("scheduler", 0), job.exited("server-0", 0), job.exited("worker-0", 0)] == [Step.WAIT] * 3
    assert job.exited("worker-1", 0) is Step.FINISH


@pytest.mark.parametrize("name", ["scheduler", "server-0", "worker-1"])
def test_any_node_that_fails_ends_the_job_with_its_code(name: str) -> None:
    job = running()
    assert job.exited(name, 3) is Step.END
    assert job.outcome == Outcome(3, f"{name} exited with code 3", name)


def test_node_that_is_killed_ends_the_job_as_a_shell_would_say_it() -> None:
    job = running()
    assert job.exited("server-0", -9) is Step.END
    assert job.outcome == Outcome(137, "server-0 was killed by SIGKILL", "server-0")


def test_exit_code_that_no_shell_can_return_becomes_one() -> None:
    job = running()
    job.exited("worker-0", 0xC0000005)
    assert job.outcome.exit_code == 1


def test_first_failure_is_the_reason_whatever_follows() -> None:
    job = running()
    job.exited("server-0", -9)
    assert job.exited("worker-0", 1) is Step.WAIT
    assert job.timed_out(5) is Step.WAIT
    assert job.outcome.node == "server-0"


def test_server_that_fails_after_the_last_worker_is_done_changes_nothing() -> None:
    job = running()
    job.exited("worker-0", 0)
    job.exited("worker-1", 0)
    assert job.exited("server-0", -15) is Step.WAIT
    assert job.outcome == Outcome(0)


def test_scheduler_that_ends_before_it_listens_is_a_failure_even_with_code_0() -> None:
    job = Supervisor(ROLES)
    assert job.exited("scheduler", 0) is Step.END
    assert job.outcome == Outcome(1, "scheduler exited with code 0 before it said where it listens", "scheduler")


def test_scheduler_that_never_listens_ends_the_job() -> None:
    job = Supervisor(ROLES)
    assert job.not_ready(30.0) is Step.END
    assert job.outcome == Outcome(1, "the scheduler did not say within 30 s where it listens")


def test_time_to_start_does_not_count_once_the_scheduler_listens() -> None:
    assert running().not_ready(30.0) is Step.WAIT


def test_scheduler_that_listens_too_late_starts_nothing() -> None:
    job = Supervisor(ROLES)
    job.not_ready(30.0)
    assert job.scheduler_ready() is Step.WAIT


def test_program_that_can_not_be_started_ends_the_job() -> None:
    job = running()
    assert job.not_started("worker-0", "Permission denied") is Step.END
    assert job.outcome == Outcome(127, "worker-0 could not be started: Permission denied", "worker-0")


def test_job_that_takes_too_long_ends_and_names_who_was_still_running() -> None:
    job = running()
    job.exited("worker-0", 0)
    assert job.timed_out(2.5) is Step.END
    assert job.outcome.exit_code == 124
    assert job.outcome.reason == "the job did not end within 2.5 s; still running: scheduler, server-0, worker-1"


@pytest.mark.parametrize(
    ("number", "outcome"),
    [(signal.SIGINT, Outcome(130, "interrupted")), (signal.SIGTERM, Outcome(143, "ended by SIGTERM"))],
)
def test_signal_ends_the_job(number: int, outcome: Outcome) -> None:
    job = running()
    assert job.signalled(number) is Step.END
    assert job.outcome == outcome


def test_second_ctrl_c_kills() -> None:
    job = running()
    job.signalled(signal.SIGINT)
    assert job.signalled(signal.SIGINT) is Step.KILL


def test_signal_ends_a_job_that_is_still_starting() -> None:
    job = Supervisor(ROLES)
    assert job.signalled(signal.SIGTERM) is Step.END
    assert job.phase is Phase.ENDING


def test_job_ends_when_nobody_reads_its_output() -> None:
    job = running()
    assert job.output_lost() is Step.END
    assert job.outcome.exit_code == 141


def test_signal_without_a_name_is_shown_by_its_number() -> None:
    assert describe_exit(-200) == "was killed by signal 200"


# --- nodes that are started again ---


@pytest.mark.parametrize(
    ("name", "recovery"),
    [
        ("worker-1", {"on_worker_loss": "respawn"}),
        ("scheduler", {}),
        ("server-0", {"replicated": True}),
        ("worker-0", {"on_worker_loss": "respawn", "colocated": True, "replicated": True}),
    ],
)
def test_node_whose_work_is_not_lost_with_it_is_started_again(name: str, recovery: dict[str, Any]) -> None:
    job = running(restarts=1, **recovery)
    assert job.exited(name, -9) is Step.RESTART
    assert job.failed == [name]
    assert name in job.running
    assert job.phase is Phase.RUNNING


@pytest.mark.parametrize(
    ("name", "recovery"),
    [
        ("server-0", {}),
        ("worker-1", {"on_worker_loss": "fail"}),
        ("worker-0", {"on_worker_loss": "respawn", "colocated": True}),
    ],
)
def test_job_that_has_lost_something_starts_again_from_its_checkpoint(name: str, recovery: dict[str, Any]) -> None:
    job = running(restarts=1, resumable=True, **recovery)
    assert job.exited(name, -9) is Step.RESUME
    assert job.exited("worker-0", 1) is Step.WAIT
    assert job.failed == []
    job.begin_again()
    assert job.phase is Phase.STARTING
    assert job.running == list(ROLES)
    assert job.scheduler_ready() is Step.START


@pytest.mark.parametrize(
    ("name", "recovery"),
    [("server-0", {}), ("worker-1", {}), ("worker-1", {"on_worker_loss": "shrink", "colocated": True})],
)
def test_job_that_has_lost_something_ends_without_a_checkpoint(name: str, recovery: dict[str, Any]) -> None:
    job = running(restarts=5, **recovery)
    assert job.exited(name, -9) is Step.END
    assert job.outcome.node == name


def test_server_that_is_not_started_again_is_replaced_by_another_one() -> None:
    job = running(replicated=True)
    assert job.exited("server-0", -9) is Step.WAIT
    assert job.parameters_lost("server-0") is Step.END
    assert job.outcome == Outcome(1, "server-0 is lost, and nobody has a copy of its parameters", "server-0")
    assert job.parameters_lost("server-1") is Step.WAIT


def test_parameters_of_which_there_is_no_copy_are_those_of_the_last_checkpoint() -> None:
    job = running(restarts=2, replicated=True, resumable=True)
    assert job.exited("server-0", -9) is Step.RESTART
    assert job.parameters_lost("server-0") is Step.RESUME
    assert job.parameters_lost("server-0") is Step.WAIT
    assert job.restarts_left == 0


def test_restarts_are_counted_all_together() -> None:
    job = running(restarts=2, on_worker_loss="respawn", resumable=True)
    steps = [job.exited("worker-0", -9), job.exited("worker-0", 1), job.exited("worker-1", -9)]
    assert steps == [Step.RESTART, Step.RESTART, Step.END]
    assert job.outcome == Outcome(137, "worker-1 was killed by SIGKILL", "worker-1")


def test_cluster_that_shrinks_goes_on_as_long_as_there_is_a_worker() -> None:
    job = running(on_worker_loss="shrink")
    assert job.exited("worker-0", -9) is Step.WAIT
    assert job.exited("worker-1", 0) is Step.FINISH
    assert job.outcome == Outcome(0)


def test_cluster_that_shrinks_to_nothing_has_failed() -> None:
    job = running(on_worker_loss="shrink")
    job.exited("worker-0", -9)
    assert job.exited("worker-1", -9) is Step.END


def test_node_that_fails_before_the_job_runs_is_not_started_again() -> None:
    job = Supervisor(ROLES, Recovery(restarts=5, resumable=True))
    assert job.exited("scheduler", 1) is Step.END


def test_signal_while_everything_is_ended_ends_the_job_for_good() -> None:
    job = running(restarts=1, resumable=True)
    job.exited("server-0", -9)
    assert job.signalled(signal.SIGINT) is Step.END
    job.begin_again()
    assert job.phase is Phase.ENDING
    assert job.outcome == Outcome(130, "interrupted")


def test_time_to_start_is_that_of_the_scheduler_which_is_started_now() -> None:
    job = running(restarts=1, resumable=True)
    job.exited("server-0", -9)
    job.begin_again()
    assert job.not_ready(30.0, life=0) is Step.WAIT
    assert job.not_ready(30.0, life=1) is Step.END


# --- workers that bring their weights ---


def test_scheduler_and_servers_are_started_again_when_the_workers_have_left_them() -> None:
    job = Supervisor({**ROLES, "server-1": Role.SERVER}, Recovery(restarts=1, reseeds=True, resumable=True))
    job.scheduler_ready()
    assert job.exited("server-0", -9) is Step.WAIT
    assert job.phase is Phase.RESEEDING
    assert job.parameters_lost("server-0") is Step.WAIT
    assert job.exited("server-1", 0) is Step.WAIT
    assert job.exited("scheduler", 1) is Step.RESEED
    assert (job.phase, job.restarts_left, job.life) == (Phase.STARTING, 0, 1)
    assert sorted(job.running) == ["scheduler", "server-0", "server-1", "worker-0", "worker-1"]
    assert job.not_ready(30.0, 0) is Step.WAIT, "that was the scheduler of before"
    assert job.scheduler_ready() is Step.START
    assert job.exited("worker-0", 0) is Step.WAIT
    assert job.exited("worker-1", 0) is Step.FINISH
    assert job.outcome == Outcome(0)


def test_servers_that_are_lost_with_their_copies_are_started_again_too() -> None:
    job = running(restarts=1, reseeds=True, replicated=True)
    assert job.parameters_lost("server-0") is Step.WAIT
    assert job.exited("server-0", -9) is Step.WAIT
    assert job.exited("scheduler", 1) is Step.RESEED


def test_a_worker_that_fails_when_it_is_to_bring_its_weights_ends_the_job() -> None:
    job = running(restarts=5, reseeds=True, on_worker_loss="respawn")
    job.exited("server-0", -9)
    assert job.exited("worker-0", 1) is Step.END
    assert job.outcome == Outcome(1, "worker-0 exited with code 1", "worker-0")


def test_a_worker_that_is_done_before_the_scheduler_is_there_again_is_done() -> None:
    job = running(restarts=1, reseeds=True)
    job.exited("server-0", -9)
    assert job.exited("scheduler", 1) is Step.RESEED
    assert job.exited("worker-0", 0) is Step.WAIT


def test_a_worker_that_is_done_is_none_of_those_for_which_the_scheduler_is_started_again() -> None:
    job = running(restarts=1, reseeds=True)
    assert job.workers == 2
    assert job.exited("worker-1", 0) is Step.WAIT
    assert job.exited("server-0", -9) is Step.WAIT
    assert job.exited("scheduler", 1) is Step.RESEED
    assert job.workers == 1
    assert job.exited("worker-0", 0) is Step.FINISH


@pytest.mark.parametrize("first", ["worker-1", "server-0"])
def test_a_worker_without_which_the_others_go_on_does_not_bring_its_weights(first: str) -> None:
    """It has failed before a server, or after that."""
    job = running(restarts=1, reseeds=True, on_worker_loss="shrink")
    second = "worker-1" if first == "server-0" else "server-0"
    assert job.exited(first, -9) is Step.WAIT
    assert job.exited(second, -9) is Step.WAIT
    assert job.exited("scheduler", 1) is Step.RESEED
    assert job.workers == 1


def test_the_last_worker_that_fails_when_it_is_to_bring_its_weights_ends_the_job() -> None:
    job = running(restarts=1, reseeds=True, on_worker_loss="shrink")
    job.exited("worker-1", 0)
    job.exited("server-0", -9)
    assert job.exited("worker-0", 1) is Step.END


def test_a_job_that_begins_from_a_checkpoint_begins_with_all_workers() -> None:
    job = running(restarts=1, resumable=True)
    job.exited("worker-1", 0)
    assert job.exited("server-0", -9) is Step.RESUME
    job.begin_again()
    assert job.workers == 2


@pytest.mark.parametrize("recovery", [{"reseeds": True}, {"restarts": 1}])
def test_without_restarts_or_unless_that_is_wanted_a_lost_server_ends_the_job(recovery: dict[str, Any]) -> None:
    assert running(**recovery).exited("server-0", 3) is Step.END
