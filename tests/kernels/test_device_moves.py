"""What kernels move, counted access by access, is what the table in the docs says. Only collected where CUDA is, or the
simulator."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiokv.kernels.cuda import listing, measure, reduce, sparse
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.cuda.tensors import Copy

pytestmark = pytest.mark.skipif(not SIMULATED, reason="only there each access can be counted")

ROOT = Path(__file__).parents[2]
TABLE = json.loads((ROOT / "docs" / "device-kernels.json").read_text(encoding="utf-8"))

KERNELS = {listed.name: listed for listed in listing.every_kernel()}

ELEMENTS = 160
"""Whole groups of every kernel, in two parts of the simulator."""


@pytest.fixture(scope="module")
def moves() -> Any:
    spec = importlib.util.spec_from_file_location("kernel_moves", ROOT / "benchmarks" / "kernel_moves.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


@pytest.mark.parametrize("name", [name for name, listed in KERNELS.items() if listed.unit != "element"])
def test_what_is_moved_for_each_unit_is_in_the_table(moves: Any, name: str) -> None:
    assert moves.count(KERNELS[name]) == TABLE["counted"][name]


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
@pytest.mark.parametrize("name", [name for name, listed in KERNELS.items() if listed.spec is not None])
def test_each_element_is_read_once_and_written_once(moves: Any, name: str) -> None:
    spec = KERNELS[name].spec
    assert spec is not None
    launch, numbers = measure.launch_of(spec, [ELEMENTS])
    with moves.counting() as counter:
        launch.run(numbers)
    assert counter.nbytes == KERNELS[name].must_move * ELEMENTS


@pytest.mark.parametrize(("count", "passes"), [(8, 1), (9, 2), (15, 2), (16, 3), (64, 9)])
def test_a_pass_after_the_first_reads_and_writes_the_sum_once_more(moves: Any, count: int, passes: int) -> None:
    """Seven buffers go on from what is there."""
    out, *arrays = (Copy(np.zeros(ELEMENTS, np.float32)) for _ in range(1 + count))
    with moves.counting() as counter:
        reduce.sum_into([out], [arrays])
    assert counter.nbytes == 4 * (count + 1 + 2 * (passes - 1)) * ELEMENTS


@pytest.mark.parametrize("width", [32, 33])
def test_rows_that_occur_several_times_are_read_and_written_once(moves: Any, width: int) -> None:
    """In whole groups, and where none begins: four rows of the message, two of the table."""
    table, rows = (Copy(np.zeros(9 * width, np.float32)) for _ in range(2))
    with moves.counting() as counter:
        sparse.scatter_add(table, np.array([3, 3, 0, 3]), rows[: 4 * width], width)
    assert counter.nbytes == (4 + 2 + 2) * 4 * width
