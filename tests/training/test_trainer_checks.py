"""What a trainer is made of, and what it refuses to be made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import CodecError, ConfigError, KeyUseError, OptimizerError, SpecMismatchError
from aiokv.optim import SGD


def full(value: float, *shape: int) -> Any:
    return np.full(shape or (10, 1), value, "float32")


@pytest.mark.parametrize(
    ("options", "error", "complaint"),
    [
        ({"params": {}}, KeyUseError, "nothing to train"),
        ({"params": {1: full(1)}}, KeyUseError, "names of parameters are texts, got 1"),
        ({"params": {"w": [1.0, 2.0]}}, SpecMismatchError, "'w': expected an array of NumPy"),
        ({"params": {"w": []}}, SpecMismatchError, "got none"),
        ({"params": {"w": [full(1, 2), full(1, 3)]}}, SpecMismatchError, r"float32\[2\], float32\[3\]"),
        ({"params": {"w": np.broadcast_to(np.float32(1), 3)}}, SpecMismatchError, "'w' is read-only"),
        ({"params": {"w": np.ones(3, int)}}, OptimizerError, "updates floats, but key 'w' has int64"),
        ({"optimizer": "assign"}, OptimizerError, "does not scale gradients"),
        ({"optimizer": "sdg"}, OptimizerError, "unknown optimizer"),
        ({"grad_accumulation": 0}, ConfigError, "grad_accumulation must be more than 0, got 0"),
        ({"clip_norm": -1.0}, ConfigError, "clip_norm must be more than 0"),
        ({"loss_scale": 0.0}, ConfigError, "loss_scale must be a number of more than 0, or 'dynamic', got 0.0"),
        ({"loss_scale": "auto"}, ConfigError, "got 'auto'"),
        ({"reduction": "max"}, OptimizerError, "unknown reduction 'max'"),
        ({"staleness_rate": "1/tau"}, OptimizerError, "unknown staleness_rate '1/tau'"),
        ({"reduction": "mean"}, ConfigError, "reduction 'mean' is for updates on the servers.*update_on_kvstore=True"),
        ({"staleness_rate": "1/(1+tau)"}, ConfigError, r"staleness_rate '1/\(1\+tau\)' is for updates on the servers"),
    ],
)
def test_trainer_that_can_not_be(options: dict[str, Any], error: type[Exception], complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        aiokv.Trainer(**{"params": {"w": full(1)}, "kvstore": None, **options})


def test_compression_that_can_not_be_is_refused() -> None:
    with pytest.raises(CodecError, match="nope"):
        aiokv.Trainer({"w": full(0.0)}, kvstore=aiokv.LocalStore(), compression_params={"type": "nope"})
    with pytest.raises(ConfigError, match="is alone and sends no gradients"):
        aiokv.Trainer({"w": full(0.0)}, kvstore=None, compression_params={"type": "2bit"})


def test_rule_may_be_given_as_a_record_and_then_has_its_parameters() -> None:
    params = {"w": full(0, 1)}
    aiokv.Trainer(params, SGD(learning_rate=0.5), kvstore=None).step(1, {"w": full(1, 1)})
    assert params["w"][0] == -0.5
    with pytest.raises(OptimizerError, match="either a rule, or a name and parameters"):
        aiokv.Trainer(params, SGD(), {"learning_rate": 1.0}, kvstore=None)


def test_rule_without_a_rate_has_none_to_change() -> None:
    trainer = aiokv.Trainer({"w": full(1)}, "accumulate", kvstore=None)
    with pytest.raises(OptimizerError, match="'accumulate' has no learning rate"):
        trainer.set_learning_rate(0.5)
