"""The settings of training: layers, mistakes, the trainer made of them, and the table of all settings."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv
from aiokv.cli import main
from aiokv.config import load_config
from aiokv.config_table import read_settings
from aiokv.errors import ConfigError
from aiokv.training.config import TrainingConfig, load_training_config

if TYPE_CHECKING:
    from pathlib import Path

FILE = """
num_workers = 4
token = "abc"

[training]
optimizer = "adam"
optimizer_params = {beta1 = 0.5}
batch_size = 8
clip_norm = 2
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "job.toml"
    file.write_text(FILE, encoding="utf-8")
    return str(file)


def test_each_layer_wins_over_the_one_before(path: str) -> None:
    environ = {"AIOKV_CONFIG": path, "AIOKV_TRAINING_BATCH_SIZE": "16", "AIOKV_TRAINING_LOSS_SCALE": "4"}
    config = load_training_config(environ=environ, loss_scale="dynamic")
    assert (config.optimizer, config.optimizer_params, config.clip_norm) == ("adam", {"beta1": 0.5}, 2.0)
    assert (config.batch_size, config.loss_scale, config.gradient_accumulation) == (16, "dynamic", 1)


def test_table_of_parameters_is_json_in_the_environment() -> None:
    environ = {"AIOKV_TRAINING_OPTIMIZER_PARAMS": '{"momentum": 0.9}', "AIOKV_TRAINING_LEARNING_RATE": "0.5"}
    config = load_training_config(environ=environ)
    assert (config.optimizer_params, config.learning_rate) == ({"momentum": 0.9}, 0.5)


def test_node_and_training_read_the_same_file_and_environment(path: str) -> None:
    environ = {"AIOKV_CONFIG": path, "AIOKV_TRAINING_BATCH_SIZE": "2", "AIOKV_NUM_SERVERS": "3"}
    node = load_config(environ=environ)
    assert (node.num_workers, node.num_servers) == (4, 3)
    assert load_training_config(environ=environ).batch_size == 2


@pytest.mark.parametrize(
    ("environ", "arguments", "complaint"),
    [
        (
            {"AIOKV_TRAINING_BATCH_SIZES": "1"},
            {},
            "unknown environment variable 'AIOKV_TRAINING_BATCH_SIZES'; did you mean 'AIOKV_TRAINING_BATCH_SIZE'?",
        ),
        (
            {"AIOKV_TRAINING_BATCH_SIZE": "0"},
            {},
            "batch_size must be a whole number of at least 1, got '0' (from AIOKV_TRAINING_BATCH_SIZE)",
        ),
        (
            {"AIOKV_TRAINING_OPTIMIZER_PARAMS": "momentum=1"},
            {},
            "optimizer_params must be a table of parameters; in the environment as JSON, got 'momentum=1' "
            "(from AIOKV_TRAINING_OPTIMIZER_PARAMS)",
        ),
        (
            {},
            {"loss_scale": "fast"},
            "loss_scale must be a number of more than 0, or dynamic, got 'fast' (from argument 'loss_scale')",
        ),
        ({}, {"batchsize": 3}, "unknown setting of training 'batchsize'; did you mean 'batch_size'?"),
    ],
)
def test_mistakes_name_where_they_come_from(environ: dict[str, str], arguments: Any, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_training_config(environ=environ, **arguments)
    assert str(caught.value) == complaint


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("training = 3", "training must be a table, got 3"),
        ("[training]\nrate = 3", "unknown setting of training 'rate' in "),
        ("[training]\nbatch_size = '3'", "batch_size must be a whole number of at least 1, got '3' (from "),
    ],
)
def test_mistakes_in_the_file(text: str, complaint: str, tmp_path: Path) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_training_config(environ={}, config=str(file))
    assert complaint in str(caught.value)


@pytest.mark.parametrize(("strategy", "wanted"), [("auto", None), ("servers", True), ("workers", False)])
def test_what_the_trainer_is_called_with(strategy: str, wanted: bool | None) -> None:
    config = load_training_config(
        environ={}, kvstore_type="dist_sync", communication_strategy=strategy, reduction="median"
    )
    arguments = config.trainer_arguments()
    assert (arguments["reduction"], arguments["staleness_rate"]) == ("median", "1")
    assert (arguments["kvstore"], arguments["update_on_kvstore"]) == ("dist_sync", wanted)


def test_trainer_of_a_configuration() -> None:
    """Two batches of 1 with gradients of 4, rate .25: the sum over two samples makes -.25 * 8 / 2."""
    config = TrainingConfig(learning_rate=0.25, gradient_accumulation=2, kvstore_type="none")
    params = {"w": np.zeros(3)}
    trainer = aiokv.Trainer.from_config(params, config)
    assert [trainer.step(1, {"w": np.full(3, 4.0)}) for _ in range(2)] == [False, True]
    np.testing.assert_array_equal(params["w"], np.full(3, -1.0))
    assert aiokv.Trainer.from_config(params, config, kvstore=aiokv.LocalStore()).update_on_kvstore


# --- the table ---


def test_every_setting_has_a_row_that_says_what_it_is_for() -> None:
    settings = read_settings(environ={})
    assert len(settings) == len(aiokv.Config.__struct_fields__) + len(TrainingConfig.__struct_fields__)
    assert {setting.origin for setting in settings} == {"default"}
    assert [setting.name for setting in settings if not setting.meaning or not setting.allowed] == []


def test_rows_say_where_values_come_from(path: str) -> None:
    environ = {"AIOKV_ROLE": "scheduler", "DMLC_NUM_SERVER": "3", "AIOKV_TRAINING_BATCH_SIZE": "5"}
    rows = {
        (row.table, row.name): (row.value, row.origin, row.source)
        for row in read_settings(environ=environ, config=path)
    }
    assert rows["", "num_workers"] == (4, "file", path)
    assert rows["", "num_servers"] == (3, "environment", "DMLC_NUM_SERVER")
    assert rows["", "bind_port"] == (9091, "derived", "")
    assert rows["", "token"] == ("***", "file", path)
    assert rows["training", "optimizer"] == ("adam", "file", path)
    assert rows["training", "batch_size"] == (5, "environment", "AIOKV_TRAINING_BATCH_SIZE")
    assert rows["training", "loss_scale"] == (None, "default", "")


@pytest.fixture
def printed(path: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setenv("AIOKV_TOKEN", "a secret")

    def call(*options: str) -> str:
        with pytest.raises(SystemExit) as caught:
            main(["config", "--config", path, *options])
        assert not caught.value.code
        return capsys.readouterr().out

    return call


def test_command_prints_a_table_without_the_token(printed: Any) -> None:
    lines = [line.split() for line in printed().splitlines() if line]
    assert ["num_workers", "4", "file"] in [line[:3] for line in lines]
    assert ["token", "***", "environment", "AIOKV_TOKEN"] in [line[:4] for line in lines]
    assert ["learning_rate", "-", "default"] in [line[:3] for line in lines]
    assert ["table", "[training]:"] in lines
    assert "secret" not in {word for line in lines if line[0] == "token" for word in line[1:4]}


def test_command_prints_json_without_the_token(printed: Any) -> None:
    out = printed("--json")
    rows = {row["name"]: row for row in map(json.loads, out.splitlines())}
    assert rows["optimizer_params"]["value"] == {"beta1": 0.5}
    assert rows["token"]["value"] == "***"
    assert "a secret" not in out
