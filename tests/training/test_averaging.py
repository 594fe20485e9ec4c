"""Local SGD and elastic averaging with one worker and no network: their numbers, and what they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiokv
from aiokv.errors import ClosedError, ConfigError, KeyUseError, OptimizerError, SpecMismatchError

DILOCO: Any = {"learning_rate": 0.7, "momentum": 0.9}


def full(value: float, *shape: int, dtype: str = "float32") -> Any:
    return np.full(shape or (3,), value, dtype)


# --- local SGD ---


def test_alone_it_is_plain_training_bit_by_bit() -> None:
    rng = np.random.default_rng(1)
    params = {"w": rng.standard_normal(50).astype("float32"), "b": np.array(0.1, "float32")}
    plain = {name: value.copy() for name, value in params.items()}
    local = aiokv.LocalSGD(aiokv.create("local"), params, every=3)
    synchronized = []
    for _ in range(7):
        for value, plain_value in zip(params.values(), plain.values(), strict=True):
            step = rng.standard_normal(value.shape).astype("float32")
            for array in (value, plain_value):
                array[...] = array - step
        synchronized.append(local.step())
    assert synchronized == [False, False, True, False, False, True, False]
    local.finish()
    assert [params[name].tobytes() for name in params] == [plain[name].tobytes() for name in params]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_outer_nesterov_by_hand(dtype: str) -> None:
    """Sutskever's form, m = .5 m - .5 g, x = x + .5 m - .5 g, where g is what the worker has moved by, downwards.

    From 8 to 4: g = 4, m = -2, x = 8 - 1 - 2 = 5. From 5 to 3: g = 2, m = -2, x = 5 - 1 - 1 = 3.
    """
    x = full(8, dtype=dtype)
    rule = {"learning_rate": 0.5, "momentum": 0.5}
    local = aiokv.LocalSGD(aiokv.create("local"), {"x": x}, every=1, outer_optimizer="nag", outer_params=rule)
    seen = []
    for moved in (4, 2):
        x -= moved
        local.step()
        seen.append(float(x[0]))
    assert seen == [5, 3]


def test_outer_nesterov_is_that_of_torch() -> None:
    """DiLoCo's reference is PyTorch's SGD with Nesterov momentum on the outer gradient, old minus new."""
    torch: Any = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    x = rng.standard_normal(20)
    expected = torch.tensor(x.copy())
    optimizer = torch.optim.SGD([expected], lr=0.7, momentum=0.9, nesterov=True)
    local = aiokv.LocalSGD(aiokv.create("local"), {"x": x}, every=2, outer_optimizer="nag", outer_params=DILOCO)
    for _ in range(5):
        moves = rng.standard_normal((2, 20))
        expected.grad = torch.tensor(moves.sum(axis=0))
        optimizer.step()
        for move in moves:
            x -= move
            local.step()
        np.testing.assert_allclose(x, expected.numpy(), rtol=1e-12, atol=1e-12)


def test_outer_momentum_does_not_move_who_has_made_no_step() -> None:
    x = full(8)
    local = aiokv.LocalSGD(aiokv.create("local"), {"x": x}, every=1, outer_optimizer="nag", outer_params=DILOCO)
    x -= 1
    local.step()
    before = x.copy()
    local.finish()
    np.testing.assert_array_equal(x, before)


def test_tensors_of_torch_are_averaged_where_they_lie() -> None:
    torch: Any = pytest.importorskip("torch")
    kv = aiokv.create("local")
    kv.init("w", full(5), policy="sum")
    w = torch.nn.Parameter(torch.full((3,), 5.0))
    aiokv.LocalSGD(kv, {"w": w}, every=1)
    kv.push("w", full(7))
    aiokv.LocalSGD(kv, {"w": w}, every=1).pull()
    assert w.tolist() == [7, 7, 7]


def test_after_a_load_the_outer_gradient_begins_at_what_was_loaded(tmp_path: Any) -> None:
    """Saved at 6 by SGD with rate 1; then 5 local units down make 1, whatever came between."""
    x = full(8)
    kv = aiokv.create("local")
    rule = {"learning_rate": 1.0}
    local = aiokv.LocalSGD(kv, {"x": x}, every=1, outer_optimizer="sgd", outer_params=rule)
    x -= 2
    local.step()
    kv.save(str(tmp_path / "saved"))
    x -= 100
    local.step()
    kv.load(str(tmp_path / "saved"))
    local.pull()
    np.testing.assert_array_equal(x, full(6))
    x -= 5
    local.step()
    np.testing.assert_array_equal(x, full(1))


def test_the_store_holds_the_average_for_whoever_reads_it() -> None:
    kv, x = aiokv.create("local"), full(8)
    local = aiokv.LocalSGD(kv, {"x": x}, every=1)
    x -= 3
    local.step()
    np.testing.assert_array_equal(kv.pull("x"), full(5))


def test_who_has_finished_makes_no_steps() -> None:
    local = aiokv.LocalSGD(aiokv.create("local"), {"x": full(0)}, every=2)
    local.finish()
    local.finish()
    with pytest.raises(ClosedError, match=r"has called finish\(\)"):
        local.step()


@pytest.mark.parametrize(
    ("name", "params", "complaint"),
    [
        ("accumulate", None, "outer optimizer 'accumulate' does not descend"),
        ("assign", None, "outer optimizer 'assign' does not descend"),
        ("nagg", None, "unknown optimizer 'nagg'"),
        ("nag", {"momentum": 2.0}, "momentum"),
        (None, {"momentum": 0.9}, "name it as outer_optimizer"),
    ],
)
def test_outer_rules_that_can_not_be(name: Any, params: Any, complaint: str) -> None:
    kv = aiokv.create("local")
    with pytest.raises(OptimizerError, match=complaint):
        aiokv.LocalSGD(kv, {"x": full(0)}, every=1, outer_optimizer=name, outer_params=params)


# --- elastic averaging ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
def test_worker_and_center_pull_each_other_by_hand(dtype: str) -> None:
    """Both at 8; the worker goes to 4: d = .25 * (4 - 8) = -1. Then to 1 from 5: d = .25 * (1 - 7) = -1.5."""
    x = full(8, dtype=dtype)
    elastic = aiokv.ElasticAveraging(aiokv.create("local"), {"x": x}, every=2, alpha=0.25)
    seen = []
    for move in (2, 2, 1, 3):
        x -= move
        seen.append((elastic.step(), float(x[0]), float(elastic.center()["x"][0])))
    assert seen == [(False, 6, 8), (True, 5, 7), (False, 4, 7), (True, 2.5, 5.5)]


def test_alpha_of_the_paper() -> None:
    """0.9 for one worker: from (0, 10), d = .9 * -10."""
    x = full(10)
    elastic = aiokv.ElasticAveraging(aiokv.create("local"), {"x": x}, every=1)
    x -= 10
    elastic.step()
    np.testing.assert_allclose([x[0], elastic.center()["x"][0]], [9, 1], rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, -1.0, 1.5, float("nan")])
def test_alphas_that_can_not_be(alpha: float) -> None:
    with pytest.raises(ConfigError, match="alpha must be more than 0 and at most 1"):
        aiokv.ElasticAveraging(aiokv.create("local"), {"x": full(0)}, every=1, alpha=alpha)


# --- both ---


@pytest.mark.parametrize("rule", [aiokv.LocalSGD, aiokv.ElasticAveraging])
@pytest.mark.parametrize(
    ("params", "every", "error", "complaint"),
    [
        ({"x": full(0)}, 0, ConfigError, "every must be at least 1, got 0"),
        ({"x": full(0, dtype="int32")}, 1, SpecMismatchError, "'x': expected floats, which have a mean, got int32"),
        ({}, 1, KeyUseError, "nothing to train"),
    ],
)
def test_what_can_not_be_averaged(rule: Any, params: Any, every: int, error: Any, complaint: str) -> None:
    with pytest.raises(error, match=complaint):
        rule(aiokv.create("local"), params, every=every)


@pytest.mark.parametrize("rule", [aiokv.LocalSGD, aiokv.ElasticAveraging])
def test_parameters_are_written_so_read_only_ones_are_refused(rule: Any) -> None:
    x = full(0)
    x.flags.writeable = False
    with pytest.raises(SpecMismatchError, match="'x' is read-only"):
        rule(aiokv.create("local"), {"x": x}, every=1)
