"""Batches put onto a device. Only collected where CUDA is, or the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda

import aiokv
from aiokv.errors import ConfigError, SpecMismatchError


def test_slices_lie_on_their_devices() -> None:
    batch = np.arange(24).reshape(4, 6)
    parts = aiokv.split_and_load(batch, ["cuda:0", "cpu", "cuda"], axis=1)
    assert [part.copy_to_host().tolist() for part in parts[::2]] == [batch[:, :2].tolist(), batch[:, 4:].tolist()]
    assert np.shares_memory(parts[1], batch)


def test_what_is_on_the_device_is_a_copy() -> None:
    batch = np.zeros(4)
    first, second = aiokv.split_and_load(batch, ["cuda:0"] * 2)
    batch[:] = 1
    assert first.copy_to_host().tolist() == second.copy_to_host().tolist() == [0, 0]


def test_a_list_is_loaded_and_uneven_slices_may_be_empty() -> None:
    parts = aiokv.split_and_load([[1, 2]], ["cuda"] * 2, even_split=False)
    assert [part.copy_to_host().tolist() for part in parts] == [[[1, 2]], []]


def test_a_device_that_is_not_here_is_named() -> None:
    seen = ", ".join(f"cuda:{number}" for number in range(len(cuda.gpus)))
    with pytest.raises(ConfigError, match=f"cannot load data onto 'cuda:99': this process sees {seen}$"):
        aiokv.split_and_load(np.zeros(4), ["cuda:0", "cuda:99"])


def test_what_lies_on_a_device_is_not_moved() -> None:
    array: Any = cuda.to_device(np.zeros(4))
    with pytest.raises(SpecMismatchError, match="data must be an array in the host's memory"):
        aiokv.split_and_load(array, ["cuda:0"] * 2)
