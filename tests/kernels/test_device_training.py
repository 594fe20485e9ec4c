"""Trainers whose parameters lie on a device get the bits of those in the host's memory. Only collected where CUDA
is, or the simulator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numba import cuda
from numpy.typing import NDArray

import aiokv

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Array = NDArray[Any]

SHAPES = {"w": (6, 5), "b": (3,)}


def some(seed: int, dtype: str = "float32") -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}


def on_host(array: Any) -> Array:
    return np.asarray(array.copy_to_host() if hasattr(array, "copy_to_host") else array)


def train(
    place: Callable[[Array], Any],
    store: str | None,
    batch_sizes: list[int],
    *,
    dtype: str = "float32",
    **options: Any,
) -> list[bytes]:
    """Return the bytes of all replicas after some steps, of two replicas for each parameter."""
    params = {name: [place(value), place(value)] for name, value in some(0, dtype).items()}
    kvstore = None if store is None else aiokv.create(store)
    trainer = aiokv.Trainer(params, "adam", {"learning_rate": 0.1}, kvstore=kvstore, **options)
    for step, batch_size in enumerate(batch_sizes, 1):
        gradients = [some(10 * step + n, dtype) for n in range(2)]
        trainer.step(batch_size, {name: [place(each[name]) for each in gradients] for name in SHAPES})
    return [on_host(array).tobytes() for arrays in params.values() for array in arrays]


@pytest.mark.parametrize(
    ("stores", "options", "batch_sizes"),
    [
        (("device", "local"), {"update_on_kvstore": True}, [4, 4, 4]),
        (("device", "local"), {"update_on_kvstore": True}, [4, 2, 4]),
        (("device", "local"), {"update_on_kvstore": True, "compression_params": {"type": "2bit"}}, [4, 4]),
        (("device", "local"), {"update_on_kvstore": True, "clip_norm": 0.5}, [4, 4]),
        (("device", "local"), {"update_on_kvstore": True, "loss_scale": 8.0, "grad_accumulation": 2}, [4, 4, 4, 4]),
        (("device", "local"), {"update_on_kvstore": False}, [4, 4]),
        (("local", "local"), {"update_on_kvstore": True}, [4, 4]),
        ((None, None), {}, [4, 2]),
        (("device", "local"), {"update_on_kvstore": True, "dtype": "float16"}, [4, 2, 4]),
    ],
    ids=["direct", "scaled", "compressed", "clipped", "added up", "workers", "without devices", "alone", "half"],
)
def test_parameters_on_a_device_get_the_bits_of_those_in_the_hosts_memory(
    stores: tuple[str | None, str | None], options: dict[str, Any], batch_sizes: list[int]
) -> None:
    found = train(cuda.to_device, stores[0], batch_sizes, **options)
    assert found == train(np.array, stores[1], batch_sizes, **options)
    assert found[0] == found[1]


def test_gradients_that_are_not_finite_make_no_step() -> None:
    params = {"w": cuda.to_device(np.ones(4, np.float32))}
    trainer = aiokv.Trainer(params, kvstore=None, loss_scale="dynamic")
    assert not trainer.step(1, {"w": cuda.to_device(np.array([1, np.nan, 0, 0], np.float32))})
    assert params["w"].copy_to_host().tolist() == [1] * 4


def test_gradients_are_summed_where_they_lie_and_then_updated() -> None:
    params = {"w": [cuda.to_device(np.ones(4, np.float32)) for _ in range(2)]}
    gradients = {"w": [cuda.to_device(np.full(4, n, np.float32)) for n in (1, 2)]}
    trainer = aiokv.Trainer(
        params, "sgd", {"learning_rate": 1.0}, kvstore=aiokv.create("device"), update_on_kvstore=False
    )
    trainer.allreduce_grads(gradients)
    assert [array.copy_to_host().tolist() for array in gradients["w"]] == [[3] * 4] * 2
    # What a program writes to a parameter in between counts.
    params["w"][0].copy_to_device(np.full(4, 10, np.float32))
    assert trainer.update(1, gradients)
    assert [array.copy_to_host().tolist() for array in params["w"]] == [[7] * 4] * 2


def test_training_goes_on_from_a_file(tmp_path: Path) -> None:
    ends = []
    for stops in (False, True):
        params = {name: cuda.to_device(value) for name, value in some(0).items()}
        trainer = aiokv.Trainer(params, "adam", kvstore=aiokv.create("device"), update_on_kvstore=True)
        trainer.step(1, {name: cuda.to_device(value) for name, value in some(1).items()})
        if stops:
            trainer.save_states(str(tmp_path / "states"))
            params = {name: cuda.to_device(value) for name, value in some(9).items()}
            trainer = aiokv.Trainer(params, "adam", kvstore=aiokv.create("device"), update_on_kvstore=True)
            trainer.load_states(str(tmp_path / "states"))
        trainer.step(1, {name: cuda.to_device(value) for name, value in some(2).items()})
        ends.append([array.copy_to_host().tobytes() for array in params.values()])
    assert ends[0] == ends[1]


# --- local steps ---


def average(rule: Callable[[Any], Any], place: Callable[[Array], Any], dtype: str) -> list[bytes]:
    """Return the bytes of all parameters after six local steps, of two replicas of one of them."""
    values = some(0, dtype)
    params = {"w": [place(values["w"]), place(values["w"])], "b": place(values["b"])}
    averaging = rule(params)
    inner = aiokv.Trainer(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore=None)
    for step in range(6):
        gradients = {name: place(value) for name, value in some(step + 1, dtype).items()}
        inner.step(1, gradients | {"w": [gradients["w"], place(np.zeros(SHAPES["w"], dtype))]})
        averaging.step()
    return [on_host(array).tobytes() for array in (*params["w"], params["b"])]


RULES: dict[str, Callable[[Any], Any]] = {
    "average": lambda params: aiokv.LocalSGD(aiokv.create("local"), params, every=2),
    "outer step": lambda params: aiokv.LocalSGD(
        aiokv.create("local"), params, every=2, outer_optimizer="nag", outer_params={"learning_rate": 0.7}
    ),
    "elastic": lambda params: aiokv.ElasticAveraging(aiokv.create("local"), params, every=2, alpha=0.3),
    "a store that uses devices": lambda params: aiokv.LocalSGD(aiokv.create("device"), params, every=2),
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_local_steps_on_a_device_are_averaged_with_the_bits_of_the_host(rule: Callable[[Any], Any], dtype: str) -> None:
    found = average(rule, cuda.to_device, dtype)
    assert found == average(rule, np.array, dtype)
    assert found[0] == found[1]
