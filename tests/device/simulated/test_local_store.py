"""The store of one process on a device, and the one on the host: the same bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

import aiokv
from aiokv.errors import NotFiniteError
from aiokv.kernels.cuda.work import Works
from aiokv.store.device import DeviceStore

if TYPE_CHECKING:
    from pathlib import Path

Values = dict[str, NDArray[Any]]

SHAPES = {"a": (7, 3), "b": (33,), "c": (2000,)}


def gradients(seed: int, dtype: str) -> Values:
    rng = np.random.default_rng(seed)
    return {key: rng.standard_normal(shape).astype(dtype) for key, shape in SHAPES.items()}


def train(name: str, rule: str, dtype: str, path: Path) -> tuple[Values, Values]:
    """Return the values after five steps, and after a load of those after two and three more steps."""
    with aiokv.create(name) as kv:
        kv.set_optimizer(rule)
        kv.init(gradients(99, dtype))
        out = gradients(0, dtype)
        for step in range(5):
            if step == 2:
                kv.save(str(path / name))
            kv.pushpull(gradients(step, dtype), out=out)
        first = {key: array.copy() for key, array in out.items()}
        kv.load(str(path / name))
        for step in range(2, 5):
            kv.pushpull({"b": gradients(step, dtype)["b"]}, out={"b": out["b"]})
        return first, out


@pytest.mark.parametrize(("rule", "dtype"), [("adam", "float32"), ("lamb", "float16"), ("sgld", "float32")])
def test_values_have_the_bits_of_the_host(tmp_path: Path, rule: str, dtype: str) -> None:
    on_device, on_host = (train(name, rule, dtype, tmp_path) for name in ("device", "local"))
    for mine, other in zip(on_device, on_host, strict=True):
        for key in SHAPES:
            assert mine[key].tobytes() == other[key].tobytes()


def test_what_can_not_be_sent_is_an_error_of_the_call() -> None:
    with aiokv.create("device") as kv:
        kv.set_gradient_compression(None, pull_compression="2bit")
        kv.init("w", np.zeros(600, np.float32))
        out = np.empty(600, np.float32)
        kv.pull("w", out)
        with pytest.raises(NotFiniteError):
            kv.pushpull("w", np.full(600, np.inf, np.float32), out=out)


def test_keys_are_on_the_device() -> None:
    with aiokv.create("device") as kv:
        kv.init({"w": np.zeros(600, np.float32), "i": np.zeros(3, np.int32)})
        store = kv._worker._store  # type: ignore[attr-defined]
        assert isinstance(store, DeviceStore)
        assert store.is_on_device("w", 0)
        assert not store.is_on_device("i", 0)


def test_keys_that_are_pushed_together_are_updated_in_a_handful_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each key was made by a call of its own, so each is a chunk. The first go out at once, all others together."""
    launches: list[tuple[str, int]] = []
    launch = Works.launch

    def watch(works: Works, given: Any, stream: Any) -> None:
        launches.append((type(given[0][0]).__name__, len(given)))
        launch(works, given, stream)

    monkeypatch.setattr(Works, "launch", watch)
    values = {f"k{n}": np.full(3 + n % 7, 1.0, np.float32) for n in range(40)}
    with aiokv.create("device") as kv:
        for key, value in values.items():
            kv.init(key, value)
        kv.set_optimizer("sgd", learning_rate=0.25, momentum=0.5)
        # m = -0.25, w = 0.75; m = -0.125 - 0.25, w = 0.375.
        for expected in (0.75, 0.375):
            kv.push(values)
            assert all((value == expected).all() for value in kv.pull(list(values)))
    assert launches[-1][1] >= 30
    assert len(launches) <= 10
