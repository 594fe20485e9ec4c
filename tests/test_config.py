"""The configuration: which layer wins, and what a mistake in each of them says."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from aiokv.addresses import format_address, is_loopback, parse_address
from aiokv.config import Config, load_config
from aiokv.errors import ConfigError, MissingExtraError
from aiokv.types import Role

if TYPE_CHECKING:
    from pathlib import Path


def problem(environ: dict[str, str] | None = None, **arguments: Any) -> str:
    """Return what `load_config` complains about."""
    with pytest.raises(ConfigError) as caught:
        load_config(environ=environ or {}, **arguments)
    return str(caught.value)


def toml(folder: Path, text: str) -> str:
    """Write a configuration file and return its path."""
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- layers ---


def test_nothing_given_means_one_worker_and_one_server_on_this_machine() -> None:
    config = load_config(environ={})
    assert (config.num_workers, config.num_servers, config.bind_host, config.bind_port) == (1, 1, "127.0.0.1", 0)
    assert (config.scheduler_host, config.scheduler_port, config.role) == ("127.0.0.1", 9091, None)


def test_each_layer_wins_over_the_one_before(tmp_path: Path) -> None:
    path = toml(tmp_path, "num_workers = 2\nnum_servers = 2\nheartbeat = 1\ncluster = 'file'")
    environ = {
        "AIOKV_CONFIG": path,
        "DMLC_NUM_WORKER": "3",
        "DMLC_NUM_SERVER": "3",
        "AIOKV_NUM_SERVERS": "4",
        "AIOKV_NAME": "env",
    }
    config = load_config(environ=environ, name="argument")
    assert (config.heartbeat, config.num_workers, config.num_servers, config.name) == (1.0, 3, 4, "argument")
    assert config.cluster == "file"


def test_file_argument_wins_over_the_variable(tmp_path: Path) -> None:
    path = toml(tmp_path, "cluster = 'right'")
    assert load_config(environ={"AIOKV_CONFIG": "/nowhere.toml"}, config=path).cluster == "right"


def test_argument_none_counts_as_not_given() -> None:
    assert load_config(environ={"AIOKV_CLUSTER": "blue"}, cluster=None).cluster == "blue"


def test_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    path = toml(tmp_path, "token = 'secret'")
    assert load_config(environ={"AIOKV_CONFIG": path, "AIOKV_TOKEN": "", "DMLC_ROLE": ""}).token == "secret"


def test_names_of_mxnet_are_understood() -> None:
    environ = {
        "DMLC_ROLE": "worker",
        "DMLC_PS_ROOT_URI": "10.1.2.3",
        "DMLC_PS_ROOT_PORT": "9000",
        "DMLC_NUM_WORKER": "5",
        "DMLC_NUM_SERVER": "3",
        "DMLC_NODE_HOST": "10.1.2.4",
        "DMLC_PS_VAN_TYPE": "zmq",
    }
    config = load_config(environ=environ)
    assert config.role is Role.WORKER
    assert (config.scheduler_host, config.scheduler_port, config.advertise_host) == ("10.1.2.3", 9000, "10.1.2.4")
    assert (config.num_workers, config.num_servers) == (5, 3)


def test_short_form_of_the_scheduler_in_every_layer(tmp_path: Path) -> None:
    path = toml(tmp_path, "scheduler = 'file:1'")
    environ = {"AIOKV_CONFIG": path}
    assert load_config(environ=environ).scheduler_host == "file"
    environ["AIOKV_SCHEDULER"] = "[fd00::1]:2"
    config = load_config(environ=environ)
    assert (config.scheduler_host, config.scheduler_port) == ("fd00::1", 2)
    assert load_config(environ=environ, scheduler="argument:3").scheduler_port == 3


def test_long_form_in_a_later_layer_replaces_half_of_the_short_form() -> None:
    config = load_config(environ={"AIOKV_SCHEDULER": "node:1"}, scheduler_port=2)
    assert (config.scheduler_host, config.scheduler_port) == ("node", 2)


# --- where a node listens ---


def test_scheduler_listens_where_everybody_looks_for_it() -> None:
    config = load_config(environ={"DMLC_ROLE": "scheduler", "AIOKV_SCHEDULER": "10.0.0.1:9000"})
    assert (config.bind_host, config.bind_port) == ("10.0.0.1", 9000)
    assert load_config(environ={}, role=Role.SCHEDULER).bind_port == 9091


def test_scheduler_listens_elsewhere_when_told_so() -> None:
    config = load_config(
        environ={"AIOKV_SCHEDULER": "10.0.0.1:9000"}, role="scheduler", bind_host="0.0.0.0", bind_port=0
    )
    assert (config.bind_host, config.bind_port) == ("0.0.0.0", 0)


def test_server_does_not_listen_where_the_scheduler_does() -> None:
    config = load_config(environ={"AIOKV_SCHEDULER": "10.0.0.1:9000"}, role="server")
    assert (config.bind_host, config.bind_port) == ("127.0.0.1", 0)


def loopback_interface() -> str:
    """Return the name of the interface that has 127.0.0.1."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address == "127.0.0.1" for entry in entries):
            return name
    raise AssertionError("this machine has no loopback interface")


def test_interface_gives_its_ipv4_address() -> None:
    config = load_config(environ={"DMLC_INTERFACE": loopback_interface()})
    assert config.bind_host == "127.0.0.1"


def test_address_in_a_later_layer_replaces_the_interface() -> None:
    assert load_config(environ={"DMLC_INTERFACE": "nosuch0"}, bind_host="127.0.0.5").bind_host == "127.0.0.5"


def test_interface_in_a_later_layer_replaces_the_address() -> None:
    config = load_config(environ={"AIOKV_BIND_HOST": "10.0.0.1"}, interface=loopback_interface())
    assert config.bind_host == "127.0.0.1"


def test_unknown_interface_is_refused_with_those_that_exist() -> None:
    text = problem({"DMLC_INTERFACE": "nosuch0"})
    assert "interface 'nosuch0' (from DMLC_INTERFACE) does not exist; there are: " in text
    assert loopback_interface() in text


def test_interface_without_psutil_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(MissingExtraError, match="pip install psutil, or give the address as bind_host"):
        load_config(environ={"DMLC_INTERFACE": "lo"})


def test_interface_and_address_together_are_refused() -> None:
    assert "give one of them" in problem({"AIOKV_INTERFACE": "lo", "AIOKV_BIND_HOST": "127.0.0.1"})


@pytest.mark.parametrize(
    ("advertise", "bound", "expected"),
    [
        ("", "10.0.0.7", "10.0.0.7"),
        ("", "node7", "node7"),
        ("", "0.0.0.0", "10.9.9.9"),
        ("", "::", "10.9.9.9"),
        ("public", "0.0.0.0", "public"),
    ],
)
def test_others_are_told_an_address_that_they_can_reach(advertise: str, bound: str, expected: str) -> None:
    config = load_config(environ={}, advertise_host=advertise)
    assert config.advertised_host(bound, "10.9.9.9") == expected


# --- mistakes ---


def test_unknown_variable_is_refused_with_the_closest_name() -> None:
    text = problem({"AIOKV_NUM_WORKER": "3"})
    assert text == "unknown environment variable 'AIOKV_NUM_WORKER'; did you mean 'AIOKV_NUM_WORKERS'?"


def test_unknown_variable_that_resembles_nothing_is_refused_with_all_names() -> None:
    assert "known: AIOKV_ROLE, AIOKV_CLUSTER" in problem({"AIOKV_ZZZZZZZZZZZZ": "1"})


def test_unknown_key_of_the_file_is_refused_with_the_closest_name(tmp_path: Path) -> None:
    path = toml(tmp_path, "heart_beat = 3")
    assert problem(config=path) == f"unknown setting 'heart_beat' in {path}; did you mean 'heartbeat'?"


def test_unknown_argument_is_refused_with_the_closest_name() -> None:
    assert problem(worker=3) == "unknown setting 'worker'; did you mean 'num_workers'?"


def test_bad_value_in_the_environment_names_source_key_expected_and_got() -> None:
    text = problem({"DMLC_NUM_WORKER": "many"})
    assert text == "num_workers must be a whole number of at least 1, got 'many' (from DMLC_NUM_WORKER)"


def test_bad_value_in_the_file_names_source_key_expected_and_got(tmp_path: Path) -> None:
    path = toml(tmp_path, "scheduler_port = '9091'")
    assert problem(config=path) == f"scheduler_port must be a port number from 0 to 65535, got '9091' (from {path})"


def test_bad_argument_names_source_key_expected_and_got() -> None:
    text = problem(loop="trio")
    assert text == "loop must be one of auto, uvloop, asyncio, got 'trio' (from argument 'loop')"


def test_details_can_be_read_by_a_program() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={"AIOKV_ROLE": "boss"})
    expected = {"key": "role", "source": "AIOKV_ROLE", "expected": "one of scheduler, server, worker", "got": "'boss'"}
    assert caught.value.details == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("bind_port", 65536),
        ("bind_port", -1),
        ("num_workers", 0),
        ("num_servers", True),
        ("heartbeat", 0.0),
        ("heartbeat", float("nan")),
        ("join_timeout", float("inf")),
        ("chunk_bytes", 4096 - 64),
        ("chunk_bytes", 4096 + 1),
        ("chunk_bytes", (64 << 20) + 64),
        ("split_bytes", 0),
        ("backend", "fortran"),
        ("cluster", ""),
        ("bind_host", ""),
    ],
)
def test_value_out_of_range_is_refused(name: str, value: Any) -> None:
    assert problem(**{name: value}).startswith(f"{name} must be ")


def test_scenario_63_time_outs_that_contradict_each_other_are_refused() -> None:
    assert problem({"AIOKV_DEATH_TIMEOUT": "1.5"}) == (
        "time-outs contradict each other: heartbeat < death_timeout < call_timeout <= join_timeout must hold, "
        "got heartbeat = 2, death_timeout = 1.5, call_timeout = 60, join_timeout = 120 "
        "(death_timeout from AIOKV_DEATH_TIMEOUT; the others are defaults)"
    )


def test_error_about_several_settings_says_where_each_comes_from() -> None:
    text = problem({"AIOKV_NUM_WORKERS": "4"}, role=Role.SCHEDULER, max_workers=2)
    assert text.endswith(" (num_workers from AIOKV_NUM_WORKERS, max_workers from argument 'max_workers')")
    text = problem(role=Role.SCHEDULER, max_workers=2, num_workers=4, on_worker_loss="shrink")
    assert "on_worker_loss" not in text
    assert problem(tls_cert="cert.pem", tls_ca="ca.pem").endswith("give both, or none of them")


def test_checkpoints_need_a_place() -> None:
    assert problem({"AIOKV_RESUME": "latest"}, checkpoint_every=3) == (
        "got checkpoint_every = 3 and resume = 'latest' without checkpoint_folder: set it to a path or an address "
        "where all nodes find the checkpoints "
        "(checkpoint_every from argument 'checkpoint_every', resume from AIOKV_RESUME)"
    )


def test_calls_have_to_outlast_the_wait_for_a_respawned_worker() -> None:
    text = problem({"AIOKV_RESPAWN_TIMEOUT": "51"}, on_worker_loss="respawn")
    assert "death_timeout + respawn_timeout <= call_timeout must hold" in text
    assert "got death_timeout = 10, respawn_timeout = 51, call_timeout = 60" in text
    assert "respawn_timeout from AIOKV_RESPAWN_TIMEOUT" in text
    # In the other modes nobody waits for that.
    assert load_config(environ={}, respawn_timeout=51.0).respawn_timeout == 51.0


def test_workers_can_not_be_fewer_than_are_started() -> None:
    assert "min_workers = 3 is more than num_workers = 2" in problem(role=Role.SCHEDULER, num_workers=2, min_workers=3)
    text = problem(on_worker_loss="shrink", num_workers=2, min_workers=2, respawn_timeout=51.0)
    assert "with on_worker_loss = 'shrink', death_timeout + respawn_timeout <= call_timeout must hold" in text
    assert load_config(environ={}, on_worker_loss="shrink", respawn_timeout=51.0).min_workers == 1


def test_a_copy_needs_another_server() -> None:
    text = problem(role=Role.SCHEDULER, num_servers=1, replication=2)
    assert text.startswith("replication = 2 needs at least 2 servers, got 1")


def test_short_and_long_form_that_contradict_each_other_are_refused() -> None:
    text = problem({"AIOKV_SCHEDULER": "node:1", "AIOKV_SCHEDULER_PORT": "2"})
    assert "AIOKV_SCHEDULER" in text
    assert "contradict each other" in text


@pytest.mark.parametrize(
    "text", ["node", "node:", ":1", "node:x", "node:65536", "::1:9091", "[]:1", "node:" + "9" * 5000]
)
def test_address_without_host_or_port_is_refused(text: str) -> None:
    assert "expected host:port, with an IPv6 address in brackets, got" in problem({"AIOKV_SCHEDULER": text})


def test_missing_file_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "no.toml")
    assert problem({"AIOKV_CONFIG": path}) == (
        f"cannot read the configuration file {path!r} (from AIOKV_CONFIG): No such file or directory"
    )


def test_file_with_a_syntax_error_is_refused_with_the_line(tmp_path: Path) -> None:
    path = toml(tmp_path, "num_workers = 1\nnum_servers 2")
    text = problem(config=path)
    assert text.startswith(f"{path} is not a TOML file: ")
    assert "line 2" in text


# --- token ---


def test_token_is_not_shown() -> None:
    config = load_config(environ={"AIOKV_TOKEN": "opensesame"})
    assert config.token == "opensesame"
    assert "opensesame" not in f"{config!r} {config}"
    assert "token='***'" in repr(config)


def test_token_of_a_wrong_type_is_not_shown(tmp_path: Path) -> None:
    assert "8675309" not in problem(config=toml(tmp_path, "token = 8675309"))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_no_token_is_needed_on_loopback(host: str) -> None:
    load_config(environ={}, bind_host=host).check_token()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "node7", "128.0.0.1"])
def test_token_is_needed_on_a_network(host: str) -> None:
    with pytest.raises(ConfigError, match="needs a token"):
        load_config(environ={}, bind_host=host).check_token()
    load_config(environ={}, bind_host=host, token="x").check_token()


# --- small helpers ---


@pytest.mark.parametrize(("host", "port", "text"), [("node", 1, "node:1"), ("::1", 9091, "[::1]:9091")])
def test_addresses_are_written_as_they_are_read(host: str, port: int, text: str) -> None:
    assert format_address(host, port) == text
    assert parse_address(text) == (host, port)


def test_loopback_is_no_matter_of_spelling() -> None:
    assert is_loopback("LocalHost")


def test_config_cannot_be_changed_afterwards() -> None:
    config = Config()
    with pytest.raises(AttributeError):
        config.num_workers = 2  # type: ignore[misc]


def test_scenario_51_import_ignores_the_environment() -> None:
    code = "import aiokv.config, aiokv.cli; print('quiet')"
    environ = os.environ | {"AIOKV_ROLE": "nonsense", "DMLC_ROLE": "server", "AIOKV_UNKNOWN": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("quiet\n", "")


@pytest.mark.parametrize("given", [{"environ": {"AIOKV_PLUGINS": "one, two.three"}}, {"plugins": ("one", "two.three")}])
def test_plugins_are_names_of_modules(given: dict[str, Any]) -> None:
    assert load_config(**({"environ": {}} | given)).plugins == ("one", "two.three")


@pytest.mark.parametrize("text", ["one two", "one,,two", "../one", "one.py;", "1"])
def test_what_is_no_name_of_a_module_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="plugins must be a list of modules' names"):
        load_config(environ={"AIOKV_PLUGINS": text})


# --- checkpoints ---


@pytest.mark.parametrize(
    "settings",
    [{"checkpoint_every": 5}, {"checkpoint_seconds": 1.0}, {"resume": "latest"}],
    ids=lambda each: str(*each),
)
def test_checkpoints_need_a_folder(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="without checkpoint_folder"):
        load_config(environ={}, **settings)
    assert load_config(environ={}, checkpoint_folder="/ck", **settings).checkpoint_folder == "/ck"


def test_job_may_go_on_from_a_place_that_is_named_without_having_checkpoints_itself() -> None:
    assert load_config(environ={"AIOKV_RESUME": "/old"}).resume == "/old"
