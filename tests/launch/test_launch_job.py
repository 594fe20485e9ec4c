"""The nodes of a job, and the environment by which each learns its place."""

from __future__ import annotations

import sys

import pytest

from aiokv.config import load_config
from aiokv.errors import ConfigError
from aiokv.launch.base import Job, resolve_command
from aiokv.types import Role

ADDRESS = ("127.0.0.1", 4000)


def test_names_are_numbered_by_role_with_the_prefix_in_front() -> None:
    job = Job(command=["true"], workers=2, servers=1, name_prefix="exp7-")
    assert list(job.names()) == ["exp7-scheduler", "exp7-server-0", "exp7-worker-0", "exp7-worker-1"]


def test_two_jobs_share_neither_cluster_nor_token() -> None:
    one, two = Job(command=["true"]), Job(command=["true"])
    assert one.cluster != two.cluster
    assert one.token != two.token
    assert len(one.token) == 32


def test_token_is_not_shown() -> None:
    job = Job(command=["true"])
    assert job.token not in repr(job)


def test_node_finds_its_place_in_its_environment() -> None:
    job = Job(command=["true"], workers=3, servers=2, cluster="blue", token="secret")
    config = load_config(environ=job.environment("worker-1", Role.WORKER, {}, ADDRESS))
    assert (config.role, config.name, config.cluster, config.token) == (Role.WORKER, "worker-1", "blue", "secret")
    assert (config.scheduler_host, config.scheduler_port) == ADDRESS
    assert (config.num_workers, config.num_servers) == (3, 2)


def test_script_written_for_mxnet_finds_its_place_too() -> None:
    environ = Job(command=["true"], workers=3, servers=2).environment("server-0", Role.SERVER, {}, ("::1", 4000))
    assert {name: value for name, value in environ.items() if name.startswith("DMLC_")} == {
        "DMLC_ROLE": "server",
        "DMLC_PS_ROOT_URI": "::1",
        "DMLC_PS_ROOT_PORT": "4000",
        "DMLC_NUM_WORKER": "3",
        "DMLC_NUM_SERVER": "2",
    }
    assert environ["AIOKV_SCHEDULER"] == "[::1]:4000"


def test_scheduler_listens_at_the_port_of_the_job_and_a_server_at_any() -> None:
    job = Job(command=["true"], port=4000)
    scheduler = load_config(environ=job.environment("scheduler", Role.SCHEDULER, {}))
    server = load_config(environ=job.environment("server-0", Role.SERVER, {}, ADDRESS))
    assert (scheduler.bind_port, server.bind_port) == (4000, 0)


def test_only_a_scheduler_that_is_started_again_waits_for_members_of_an_earlier_cluster() -> None:
    job = Job(command=["true"], port=4000)
    first = load_config(environ=job.environment("scheduler", Role.SCHEDULER, {}))
    second = load_config(environ=job.environment("scheduler", Role.SCHEDULER, {}, ADDRESS))
    asked = load_config(environ=job.environment("scheduler", Role.SCHEDULER, {"AIOKV_SETTLE_TIME": "3"}))
    assert (first.settle_time, second.settle_time, asked.settle_time) == (0.0, 1.5, 3.0)


def test_old_place_of_the_launcher_does_not_reach_the_nodes() -> None:
    inherited = {
        "AIOKV_SCHEDULER_PORT": "1",
        "AIOKV_BIND_PORT": "2",
        "AIOKV_NAME": "old",
        "AIOKV_INTERFACE": "eth0",
        "DMLC_PS_ROOT_URI": "old",
        "AIOKV_ROLE": "worker",
    }
    config = load_config(environ=Job(command=["true"]).environment("scheduler", Role.SCHEDULER, inherited))
    assert (config.role, config.name, config.bind_host, config.bind_port) == (
        Role.SCHEDULER,
        "scheduler",
        "127.0.0.1",
        0,
    )


def test_everything_else_is_inherited() -> None:
    inherited = {"PATH": "/bin", "OMP_NUM_THREADS": "7", "AIOKV_HEARTBEAT": "1"}
    environ = Job(command=["true"]).environment("worker-0", Role.WORKER, inherited, ADDRESS)
    assert inherited.items() <= environ.items()
    assert environ["PYTHONUNBUFFERED"] == "1"


@pytest.mark.parametrize("name", ["python", "python3"])
def test_bare_python_is_the_python_that_runs_aiokv(name: str) -> None:
    assert resolve_command([name, "train.py", "--lr=1"]) == [sys.executable, "train.py", "--lr=1"]


def test_python_with_a_path_is_left_alone() -> None:
    assert resolve_command([sys.executable, "train.py"]) == [sys.executable, "train.py"]


def test_program_that_does_not_exist_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_command(["nosuch.py"])
    assert caught.value.message == (
        "cannot find the program 'nosuch.py' that the workers shall run; to run a script: python nosuch.py"
    )
