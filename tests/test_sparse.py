"""Row-sparse values: what a user gives, and what becomes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as hs
from hypothesis.extra import numpy as hnp

import aiokv
from aiokv.errors import KeyUseError, SpecMismatchError, SumOverflowError
from aiokv.kernels import get_backend
from aiokv.list_sums import Merger
from aiokv.sparse import is_sparse, sending_rows

scipy_sparse = pytest.importorskip("scipy.sparse")

FLOATS = hnp.arrays(np.float32, hs.tuples(hs.integers(0, 6), hs.integers(0, 4)), elements=hs.integers(-3, 3))


def test_rows_come_in_any_order_and_those_given_several_times_are_summed() -> None:
    value = aiokv.RowSparse([[7, 3], [7, 0]], np.arange(8.0).reshape(4, 2), (9, 2)).summed()
    np.testing.assert_array_equal(value.indices, [0, 3, 7])
    np.testing.assert_array_equal(value.values, [[6, 7], [2, 3], [4, 6]])
    assert value.indices.dtype == np.int64


@given(hs.lists(hs.tuples(hs.integers(0, 5), hs.integers(-9, 9))))
def test_sums_are_those_of_a_dense_array(rows: list[tuple[int, int]]) -> None:
    expected = np.zeros(6, np.int32)
    for row, number in rows:
        expected[row] += number
    value = aiokv.RowSparse([row for row, _ in rows], np.array([number for _, number in rows], np.int32), (6,))
    np.testing.assert_array_equal(value.to_dense(), expected)


def test_rows_of_one_id_are_added_in_the_order_given() -> None:
    """1e8 + 1 - 1e8 in float32 is 0."""
    value = aiokv.RowSparse([1, 1, 1], np.array([1e8, 1, -1e8], np.float32), (2,))
    np.testing.assert_array_equal(value.to_dense(), [0, 0])


@pytest.mark.parametrize("width", [1, 3, 16])
def test_however_many_rows_of_one_id_there_are_the_order_is_theirs(width: int) -> None:
    rng = np.random.default_rng(width)
    ids, values = rng.integers(0, 3, 200), rng.standard_normal((200, width)).astype(np.float32)
    found = aiokv.RowSparse(ids, values, (3, width)).summed()
    for row in range(3):
        expected = np.zeros(width, np.float32)
        for number in np.flatnonzero(ids == row):
            expected = expected + values[number]
        assert found.values[row].tobytes() == expected.tobytes()


def test_low_precision_is_summed_in_float32() -> None:
    """2048 + 1 is 2048 in float16, so adding a thousand ones one by one would stay there."""
    ones = np.ones(3000, np.float16)
    assert aiokv.RowSparse(np.zeros(3000, int), ones, (1,)).summed().values[0] == 3000


@pytest.mark.parametrize(("dtype", "number"), [("int8", 100), ("uint8", 200), ("int64", 2**62), ("uint64", 2**63)])
def test_sums_of_whole_numbers_that_do_not_fit_are_an_error(dtype: str, number: int) -> None:
    value = aiokv.RowSparse([1, 1], np.array([number, number], dtype), (2,))
    with pytest.raises(SumOverflowError, match=dtype):
        value.summed()


@given(FLOATS)
def test_dense_arrays_there_and_back(array: Any) -> None:
    value = aiokv.RowSparse.from_dense(array)
    assert value.indices.size == np.count_nonzero(array.any(axis=1))
    np.testing.assert_array_equal(value.to_dense(), array)


@given(FLOATS)
def test_scipy_csr_becomes_rows(array: Any) -> None:
    for matrix in (scipy_sparse.csr_array(array), scipy_sparse.csr_matrix(array)):
        assert is_sparse(matrix)
        value = aiokv.RowSparse.from_csr(matrix)
        assert value.indices.size == np.count_nonzero(array.any(axis=1))
        np.testing.assert_array_equal(value.to_dense(), array)


def test_entries_of_a_csr_matrix_at_the_same_place_are_summed() -> None:
    matrix = scipy_sparse.csr_array((np.array([1.0, 2.0, 5.0]), [2, 2, 0], [0, 0, 2, 3]), shape=(3, 4))
    np.testing.assert_array_equal(aiokv.RowSparse.from_csr(matrix).to_dense(), matrix.toarray())


def test_other_scipy_formats_are_refused_with_what_to_do() -> None:
    kv = aiokv.create("local")
    with pytest.raises(SpecMismatchError, match=r"'w'.*'coo'.*tocsr\(\)"):
        kv.push("w", scipy_sparse.coo_array(np.eye(3)))


@pytest.mark.parametrize(
    ("indices", "values", "shape", "reason"),
    [
        ([-1], [1.0], (3,), "row -1 is not in the tensor"),
        ([3], [1.0], (3,), "row 3 is not in the tensor: 0 <= row < 3"),
        ([1.5], [1.0], (3,), "whole numbers, got float64"),
        ([True], [1.0], (3,), "whole numbers, got bool"),
        ([1, 2], [1.0], (3,), r"\(2,\), got \(1,\)"),
        ([1], [[1.0, 2.0]], (3, 3), r"\(1, 3\), got \(1, 2\)"),
        ([0], [1.0], (), "at least one dimension"),
    ],
)
def test_what_can_not_be_is_refused(indices: Any, values: Any, shape: Any, reason: str) -> None:
    with pytest.raises(SpecMismatchError, match=reason):
        aiokv.RowSparse(indices, values, shape)


def test_no_rows() -> None:
    for value in (aiokv.RowSparse.empty((4, 2)), aiokv.RowSparse([], [], (4, 2))):
        assert value.values.shape == (0, 2)
        np.testing.assert_array_equal(value.to_dense(), np.zeros((4, 2)))
    assert repr(aiokv.RowSparse.empty((4, 2))) == "RowSparse(0 rows of float32[4, 2])"


def test_payloads_are_ids_then_values_for_each_server() -> None:
    value = aiokv.RowSparse([6, 1, 5], np.array([6, 1, 5], np.int16), (8,))
    arguments = sending_rows(["w"], [value], [[0, 4]], Merger(get_backend("reference")))
    assert arguments.rows[0].counts == [1, 2]
    expected = np.int64(1).tobytes() + np.int16(1).tobytes()
    expected += np.array([5, 6], np.int64).tobytes() + np.array([5, 6], np.int16).tobytes()
    assert arguments.sources[0].tobytes() == expected


def test_calls_on_one_machine() -> None:
    """The same as on a cluster; here are the arguments that the other tests do not use."""
    kv = aiokv.create("local")
    table = aiokv.RowSparse([1, 3], np.array([[1, 1], [3, 3]], np.float32), (5, 2))
    kv.init({"t": table, "w": np.zeros(2, np.float32)})
    kv.init("u", table)
    kv.set_optimizer("accumulate")
    kv.push({"t": table, "w": np.ones(2, np.float32), "u": aiokv.RowSparse.empty((5, 2))})
    np.testing.assert_array_equal(kv.pull("w"), [1, 1])
    outs = [np.full((5, 2), 9, np.float32) for _ in range(2)]
    assert kv.row_sparse_pull("t", outs, row_ids=[[3, 0], [3, 3]]) is outs
    for out in outs:
        np.testing.assert_array_equal(out, [[0, 0], [0, 0], [0, 0], [6, 6], [0, 0]])
    first, second = kv.row_sparse_pull(["t", "u"], row_ids=[[1], [4, 1]])
    np.testing.assert_array_equal(first.values, [[2, 2]])
    np.testing.assert_array_equal(second.indices, [1, 4])
    np.testing.assert_array_equal(second.values, [[1, 1], [0, 0]])


@pytest.mark.parametrize(
    ("call", "kind", "reason"),
    [
        pytest.param(lambda kv: kv.pull("t"), SpecMismatchError, "row_sparse_pull", id="pull"),
        pytest.param(
            lambda kv: kv.pull("t", np.empty((5, 2), np.float32)), SpecMismatchError, "row_sparse_pull", id="pull into"
        ),
        pytest.param(
            lambda kv: kv.push("t", np.ones((5, 2), np.float32)), SpecMismatchError, "push RowSparse", id="dense push"
        ),
        pytest.param(
            lambda kv: kv.push("w", aiokv.RowSparse.empty((5, 2))), SpecMismatchError, "is dense", id="sparse push"
        ),
        pytest.param(
            lambda kv: kv.row_sparse_pull("w", row_ids=[1]), SpecMismatchError, "is dense", id="row pull of a dense key"
        ),
        pytest.param(
            lambda kv: kv.pushpull("t", aiokv.RowSparse.empty((5, 2))),
            SpecMismatchError,
            "for dense keys",
            id="pushpull",
        ),
        pytest.param(
            lambda kv: kv.broadcast("t", aiokv.RowSparse.empty((5, 2))),
            SpecMismatchError,
            "for dense keys",
            id="broadcast",
        ),
        pytest.param(
            lambda kv: kv.push("t", aiokv.RowSparse.empty((6, 2))),
            SpecMismatchError,
            "never change",
            id="another shape",
        ),
        pytest.param(
            lambda kv: kv.push("t", aiokv.RowSparse.empty((5, 2), "int8")),
            SpecMismatchError,
            "never change",
            id="another dtype",
        ),
        pytest.param(lambda kv: kv.row_sparse_pull("t"), KeyUseError, "row_ids", id="no row ids"),
        pytest.param(lambda kv: kv.row_sparse_pull("t", row_ids=[5]), SpecMismatchError, "row 5", id="no such row"),
        pytest.param(
            lambda kv: kv.row_sparse_pull("t", np.empty((4, 2)), row_ids=[1]),
            SpecMismatchError,
            "never change",
            id="another out",
        ),
        pytest.param(
            lambda kv: kv.row_sparse_pull("t", [1], row_ids=[1]), SpecMismatchError, "NumPy array", id="not an array"
        ),
        pytest.param(lambda kv: kv.row_sparse_pull("nope", row_ids=[1]), KeyUseError, "pass `out`", id="unknown"),
        pytest.param(
            lambda kv: kv.row_sparse_pull(["t"], row_ids=[1, 2]),
            KeyUseError,
            "row_ids must be a list with one",
            id="row ids of another length",
        ),
        pytest.param(
            lambda kv: kv.row_sparse_pull(["t"], np.empty(1), row_ids=[1]),
            KeyUseError,
            "out must be a list",
            id="outs of another kind",
        ),
        pytest.param(
            lambda kv: kv.init_rows("x", (2, 2), rows=aiokv.RowSparse.empty((3, 2))),
            SpecMismatchError,
            "never change",
            id="rows of another shape",
        ),
    ],
)
def test_wrong_calls_say_what_to_do(call: Any, kind: type[Exception], reason: str) -> None:
    kv = aiokv.create("local")
    kv.init("t", aiokv.RowSparse.empty((5, 2)))
    kv.init("w", np.zeros((5, 2), np.float32))
    with pytest.raises(kind, match=reason):
        call(kv)
