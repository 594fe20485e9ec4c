"""A batch over devices: MXNet's rules, and no copies."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import torch

from aiokv.data import split_and_load, split_data
from aiokv.errors import ConfigError, MissingExtraError


def test_an_even_split_is_views() -> None:
    batch = np.arange(24).reshape(6, 4)
    slices = split_data(batch, 3)
    assert [part.tolist() for part in slices] == [batch[0:2].tolist(), batch[2:4].tolist(), batch[4:6].tolist()]
    assert all(np.shares_memory(part, batch) for part in slices)


def test_one_slice_is_still_a_list() -> None:
    batch = np.arange(3)
    assert [part.tolist() for part in split_data(batch, 1)] == [[0, 1, 2]]


@pytest.mark.parametrize("axis", [1, -1])
def test_another_axis(axis: int) -> None:
    batch = np.arange(8).reshape(2, 4)
    assert [part.tolist() for part in split_data(batch, 2, axis)] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_what_does_not_divide_is_refused_by_its_sizes() -> None:
    with pytest.raises(ConfigError, match=r"shape \(4, 10\) can't be cut into 3 equal slices along axis 1: 10 is no"):
        split_data(np.zeros((4, 10)), 3, axis=1)


def test_in_an_uneven_split_the_first_slices_are_one_longer() -> None:
    # 11 mod 4 = 3 of them.
    assert [part.tolist() for part in split_data(np.arange(11), 4, even_split=False)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 7, 8],
        [9, 10],
    ]


def test_an_uneven_split_over_more_slices_than_elements_leaves_some_empty() -> None:
    assert [part.tolist() for part in split_data(np.arange(2), 3, even_split=False)] == [[0], [1], []]


def test_a_torch_tensor_is_cut_without_a_copy() -> None:
    batch = torch.arange(12).reshape(3, 4)
    slices = split_data(batch, 2, axis=1)
    assert [part.tolist() for part in slices] == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 11]]]
    assert slices[0].data_ptr() == batch.data_ptr()


@pytest.mark.parametrize(
    ("n", "axis", "message"),
    [
        (0, 0, "cannot cut data into 0 slices: expected 1 or more"),
        (2, 2, r"shape \(4, 6\) has no axis 2: expected -2 <= axis < 2"),
        (2, -3, r"shape \(4, 6\) has no axis -3: expected -2 <= axis < 2"),
    ],
)
def test_impossible_cuts_are_named(n: int, axis: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        split_data(np.zeros((4, 6)), n, axis)


def test_loading_onto_the_cpu_gives_views() -> None:
    batch = np.arange(4)
    slices = split_and_load(batch, ["cpu", "cpu"])
    assert [part.tolist() for part in slices] == [[0, 1], [2, 3]]
    assert all(np.shares_memory(part, batch) for part in slices)


def test_loading_a_list_makes_arrays() -> None:
    assert [part.tolist() for part in split_and_load([[1, 2], [3, 4], [5, 6]], ["cpu"] * 2, even_split=False)] == [
        [[1, 2], [3, 4]],
        [[5, 6]],
    ]


@pytest.mark.parametrize("device", ["gpu(0)", "cuda:", "cuda:-1", "cuda:x", "tpu", ""])
def test_an_unknown_device_is_named(device: str) -> None:
    with pytest.raises(ConfigError, match=f"onto {re.escape(repr(device))}: expected 'cpu', 'cuda' or 'cuda:N'"):
        split_and_load(np.arange(4), ["cpu", device])


def test_a_text_is_no_list_of_devices() -> None:
    with pytest.raises(ConfigError, match=r"expected a list of devices, such as \['cuda'\], got the text 'cuda'"):
        split_and_load(np.arange(4), "cuda")


def test_without_a_device_it_is_said_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba_cuda", None)
    with pytest.raises(MissingExtraError, match=r'pip install "aiokv\[cuda\]"'):
        split_and_load(np.arange(4), ["cuda:0", "cuda:1"])


def test_tensors_stay_tensors() -> None:
    """On a device that their library has; of this one there is no other that every machine has."""
    batch = torch.arange(6).reshape(3, 2)
    first, second = split_and_load(batch, [torch.device("cpu"), "cpu"], axis=1)
    assert (first.tolist(), second.tolist()) == ([[0], [2], [4]], [[1], [3], [5]])
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="cannot load a Tensor onto 'cuda:0'"):
            split_and_load(batch, ["cpu", "cuda:0"], axis=1)


def test_no_devices_are_refused() -> None:
    with pytest.raises(ConfigError, match="onto no devices"):
        split_and_load(np.arange(4), [])
