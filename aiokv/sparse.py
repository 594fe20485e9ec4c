"""Row-sparse values: some rows of a tensor, all others being zero.

`RowSparse` is what a user pushes to a row-sparse key and reads from it. The rest of this module turns one into what is
sent: row ids that are increasing, each once, and their values, cut by where the rows live.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from aiokv.arrays import Arguments, DeviceOut, as_described, checked_out, find_device_outs, sending, spec_of
from aiokv.core.keys import check_same_spec
from aiokv.core.stimuli import Rows
from aiokv.core.tables import check_table
from aiokv.core.worker.row_parts import cut_rows
from aiokv.errors import KeyUseError, SpecMismatchError, SumOverflowError
from aiokv.kernels.foreign import OnDevice, is_on_device
from aiokv.types import TensorSpec

if TYPE_CHECKING:
    from aiokv.list_sums import Merger
    from aiokv.types import Key

Array = NDArray[Any]
Ids = NDArray[np.int64]
Bounds = Callable[["Key", TensorSpec], list[int]]


class RowSparse:
    """Some rows of a tensor; all others are zero. Rows that are given several times are summed.

        aiokv.RowSparse([7, 3, 7], [[1, 1], [2, 2], [3, 3]], (1000, 2))    # row 3 is [2, 2], row 7 is [4, 4]

    Args:
        indices: whole numbers, 0 <= index < shape[0], in any order and shape; kept as one dimension of int64.
        values: the values of each row: an array whose first dimension is as long as the indices, and whose
            others are those of the tensor. It is not copied. It may lie on a device, for a store that uses that device:
            there rows of one index are summed.
        shape: of the whole tensor.

    Raises:
        SpecMismatchError: an index is no row of the tensor, or the values do not fit.
    """

    __slots__ = ("indices", "shape", "values")

    def __init__(self, indices: Any, values: Any, shape: tuple[int, ...]) -> None:
        self.shape = tuple(int(length) for length in shape)
        """Shape of the whole tensor."""
        if not self.shape:
            raise SpecMismatchError("a row-sparse value has at least one dimension, got shape ()", got="()")
        self.indices: Ids = row_ids_of(indices, self.shape[0])
        """Row ids, in the order given."""
        self.values: Any = OnDevice(values) if is_on_device(values) else np.asarray(values)
        """Values of each row, in the same order."""
        expected = (self.indices.size, *self.shape[1:])
        if not self.indices.size and not self.values.nbytes:
            self.values = np.empty(expected, self.values.dtype)
        if self.values.shape != expected:
            text = f"{self.indices.size} rows of shape {self.shape[1:]} need values of shape {expected}"
            got = self.values.shape
            raise SpecMismatchError(f"{text}, got {got}", expected=str(expected), got=str(got))

    def __repr__(self) -> str:
        return f"RowSparse({self.indices.size} rows of {self.spec})"

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any = np.float32) -> Self:
        """Return a value without rows: all of the tensor is zero."""
        return cls(np.empty(0, np.int64), np.empty((0, *shape[1:]), dtype), shape)

    @classmethod
    def from_dense(cls, array: Any) -> Self:
        """Return all rows of an array that are not zero everywhere."""
        dense = np.asarray(array)
        rows = np.flatnonzero(dense.reshape(len(dense), -1).any(axis=1)) if dense.size else np.empty(0, np.int64)
        return cls(rows, dense[rows], dense.shape)

    @classmethod
    def from_csr(cls, matrix: Any) -> Self:
        """Return the rows of a SciPy CSR matrix or array that have entries; entries at the same place are summed."""
        starts = np.asarray(matrix.indptr, np.int64)
        lengths = np.diff(starts)
        rows = np.flatnonzero(lengths)
        values = np.zeros((rows.size, matrix.shape[1]), matrix.data.dtype)
        used = slice(int(starts[0]), int(starts[-1]))
        places = (np.repeat(np.arange(rows.size), lengths[rows]), matrix.indices[used])
        np.add.at(values, places, matrix.data[used])
        return cls(rows, values, matrix.shape)

    @property
    def spec(self) -> TensorSpec:
        """Shape and dtype of the whole tensor."""
        return TensorSpec(self.shape, self.values.dtype.name)

    def to_dense(self) -> Array:
        """Return the whole tensor; of values in the host's memory."""
        unique = self.summed()
        dense = np.zeros(self.shape, self.values.dtype)
        dense[unique.indices] = unique.values
        return dense

    def summed(self) -> RowSparse:
        """Return the same value with increasing row ids, each once. Rows of one id are added in the order given.

        Raises:
            SumOverflowError: a sum of integers is out of range.
            SpecMismatchError: the values lie on a device.
        """
        ids, values = self.indices, self.values
        if isinstance(values, OnDevice):
            got = type(values.array).__name__
            expected = "values in the host's memory"
            text = f"expected {expected}, got {got} on a device: a store that uses the device sums them"
            raise SpecMismatchError(text, expected=expected, got=got)
        if np.all(ids[1:] > ids[:-1]):
            return self
        order = np.argsort(ids, kind="stable")
        ids, values = ids[order], values[order]
        starts = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
        if starts.size < ids.size:
            ids, values = ids[starts], _add_runs(values, starts)
        return RowSparse(ids, values, self.shape)


def _add_runs(values: Array, starts: NDArray[np.intp]) -> Array:
    """Add neighbouring rows, those of each run from its start to the next one."""
    dtype = values.dtype
    if dtype.kind in "iu":
        sums = np.add.reduceat(values, starts, axis=0, dtype=dtype)
        exact = np.add.reduceat(values.astype(np.float64), starts, axis=0)
        # Sums that wrapped around are wrong by 2**bits at least; float64 is never wrong by nearly as much.
        if np.any(np.abs(exact - sums.astype(np.float64)) > 2.0 ** (8 * dtype.itemsize - 1)):
            raise SumOverflowError(f"rows with the same id sum up to more than {dtype} can hold")
        return np.asarray(sums)
    # A long sum of low precision is exact, or nearly so, only in a higher one.
    precise = np.float64 if dtype == np.float64 else np.float32
    first = np.zeros(len(values), bool)
    first[starts] = True
    run = np.cumsum(first) - 1
    sums = values[starts].astype(precise)
    with np.errstate(all="ignore"):
        # One after the other: `reduceat` has an order of its own, which differs from processor to processor.
        np.add.at(sums, run[~first], values[~first].astype(precise))
        return np.asarray(sums.astype(dtype))


def row_ids_of(ids: Any, rows: int) -> Ids:
    """Return row ids as one dimension of int64, in the order given.

    Raises:
        SpecMismatchError: one is no row of a tensor with so many.
    """
    if is_on_device(ids):
        got = f"{type(ids).__name__} on a device"
        raise SpecMismatchError(f"row ids must be in the host's memory, got {got}: copy them", expected="host", got=got)
    array = np.asarray(ids).reshape(-1)
    if not array.size:
        return np.empty(0, np.int64)
    if array.dtype.kind not in "iu":
        got = array.dtype.name
        raise SpecMismatchError(f"row ids must be whole numbers, got {got}", expected="integers", got=got)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= rows:
        row = low if low < 0 else high
        expected = f"0 <= row < {rows}"
        raise SpecMismatchError(f"row {row} is not in the tensor: {expected}", expected=expected, got=row)
    return array.astype(np.int64, copy=False)


def is_sparse(value: object) -> bool:
    """Return True for what is pushed to row-sparse keys: `RowSparse`, and SciPy's sparse matrices and arrays."""
    return isinstance(value, RowSparse) or _is_scipy(value)


def _is_scipy(value: object) -> bool:
    # Told by what they have, so that SciPy need not be there.
    return not isinstance(value, np.ndarray) and all(hasattr(value, name) for name in ("tocsr", "shape", "format"))


def sparse_spec(key: Key, value: Any) -> TensorSpec:
    """Return shape and dtype of a sparse value.

    Raises:
        SpecMismatchError: it is a SciPy matrix of another format than CSR.
    """
    if isinstance(value, RowSparse):
        return value.spec
    if value.format != "csr":
        text = f"key {key!r}: a SciPy matrix must be in CSR format, got {value.format!r}: call its tocsr()"
        raise SpecMismatchError(text, key=key, expected="csr", got=str(value.format))
    return TensorSpec(tuple(map(int, value.shape)), value.data.dtype.name)


def sparse_nbytes(value: Any) -> int:
    """Return about how many bytes there are to pack of a sparse value that has a spec."""
    if isinstance(value, RowSparse):
        return value.indices.nbytes + int(value.values.nbytes)
    rows, width = value.shape
    return int(min(rows, value.nnz)) * int(width) * int(value.data.itemsize)


# --- arguments of calls ---


def sending_rows(keys: list[Key], values: list[Any], bounds: list[list[int]], merger: Merger) -> Arguments:
    """Read the arguments of a call that sends to some row-sparse keys, and maybe to others. Any thread may call it.

    Args:
        keys: all keys.
        values: the value of each, sparse or not.
        bounds: the first row of each chunk, for each sparse value in their order.
        merger: who sums rows that lie on devices.

    Raises:
        KeyUseError, SpecMismatchError, SumOverflowError: a value is missing or can't be.
    """
    arguments = sending({key: value for key, value in zip(keys, values, strict=True) if not is_sparse(value)}, None)
    arguments.single = False
    arguments.specs = [spec_of(source) for source in arguments.sources]
    sparse = [(key, value) for key, value in zip(keys, values, strict=True) if is_sparse(value)]
    for (key, value), starts in zip(sparse, bounds, strict=True):
        rows = _unique(key, value if isinstance(value, RowSparse) else RowSparse.from_csr(value), merger)
        counts = _counts(rows.indices, starts)
        arguments.keys.append(key)
        arguments.sources.append(_packed(rows, counts))
        arguments.specs.append(rows.spec)
        arguments.rows.append(Rows(counts))
        arguments.row_values.append(rows.values)
    return arguments


def _unique(key: Key, rows: RowSparse, merger: Merger) -> RowSparse:
    """Return rows in the host's memory, each once, increasing."""
    if not isinstance(rows.values, OnDevice):
        return rows.summed()
    ids, values = merger.sum_rows(key, rows.indices, rows.values)
    return RowSparse(ids, values, rows.shape).summed()


def _counts(ids: Ids, bounds: list[int]) -> list[int]:
    """Return how many of the increasing row ids lie in each chunk."""
    cuts = np.searchsorted(ids, bounds)
    cuts[0] = 0
    return [int(count) for count in np.diff(np.append(cuts, ids.size))]


def _packed(rows: RowSparse, counts: list[int]) -> NDArray[np.uint8]:
    """Return the payloads of all messages, one after the other."""
    ids, spec = rows.indices, rows.spec
    values = np.ascontiguousarray(rows.values, rows.values.dtype.newbyteorder("="))
    parts: list[Array] = []
    begin = 0
    for count in counts:
        for size in cut_rows(count, spec):
            piece = slice(begin, begin + size)
            parts += [ids[piece].view(np.uint8), values[piece].reshape(-1).view(np.uint8)]
            begin += size
    return np.concatenate(parts)


@dataclass(slots=True, eq=False)
class RowPull:
    """What is wanted of one row-sparse key: the rows, and the arrays that they are for, if there are any."""

    key: Key
    rows: RowSparse
    outs: list[Any]
    counts: list[int]

    def finish(self) -> None:
        """Make arrays in the host's memory what was received: rows that were not asked for are zero."""
        for out in self.outs:
            if isinstance(out, np.ndarray):
                out[...] = 0
                out[self.rows.indices] = self.rows.values


def pulling_rows(key: Key, out: Any, row_ids: Any, spec: TensorSpec | None, bounds: Bounds) -> RowPull:
    """Read the arguments of a row pull of one key.

    Args:
        key: the key.
        out: None, an array of the whole shape, or a list of such arrays.
        row_ids: whole numbers in any order and shape; each counts once.
        spec: what is known of the key.
        bounds: returns the first row of each chunk of a row-sparse key.

    Raises:
        KeyUseError: row ids are missing, or the key's shape is not known.
        SpecMismatchError: a row id or an array can't be.
    """
    if row_ids is None:
        raise KeyUseError(f"key {key!r}: pass `row_ids`, the rows that are wanted", key=key)
    outs = [checked_out(key, each) for each in out] if isinstance(out, list | tuple) else []
    if not outs and out is not None:
        outs = [checked_out(key, out)]
    for each in outs:
        found = spec_of(as_described(each))
        spec = spec or found
        check_same_spec(key, spec, found)
    if spec is None:
        raise KeyUseError(f"key {key!r}: pass `out`, since this worker did not initialize the key", key=key)
    check_table(key, spec)
    ids = np.unique(row_ids_of(row_ids, spec.shape[0]))
    rows = RowSparse(ids, np.empty((ids.size, *spec.shape[1:]), spec.dtype), spec.shape)
    return RowPull(key, rows, outs, _counts(ids, bounds(key, spec)))


def aligned(keys: list[Key], outs: Any, row_ids: Any) -> tuple[list[Key], list[Any], list[Any]]:
    """Return keys, outs and row ids of a pull of several keys.

    Raises:
        KeyUseError: there is not one of each for every key.
    """
    outs = [None] * len(keys) if outs is None else outs
    for name, given in (("out", outs), ("row_ids", row_ids)):
        if not isinstance(given, list | tuple) or len(given) != len(keys):
            got = f"{len(given)} of them" if isinstance(given, list | tuple) else type(given).__name__
            raise KeyUseError(f"{name} must be a list with one for each of {len(keys)} keys, got {got}")
    return keys, list(outs), list(row_ids)


def pulling(pulls: list[RowPull]) -> Arguments:
    """Return the arguments of the call that carries out row pulls."""
    values = [pull.rows.values for pull in pulls]
    specs = [pull.rows.spec for pull in pulls]
    rows = [Rows(pull.counts, pull.rows.indices.tobytes()) for pull in pulls]
    arguments = Arguments([pull.key for pull in pulls], [], values, [], single=False, specs=specs, rows=rows)
    for number, pull in enumerate(pulls):
        found = find_device_outs([pull.outs])
        arguments.device_outs += [DeviceOut(number, out.array, pull.rows.indices) for out in found]
    return arguments


def refuse_sparse(call: str, keys: list[Key], values: list[Any]) -> None:
    """Refuse sparse values where there can't be any.

    Raises:
        SpecMismatchError: says what to do instead.
    """
    for key, value in zip(keys, values, strict=True):
        if is_sparse(value):
            text = f"key {key!r}: {call} is for dense keys; use push, then row_sparse_pull"
            raise SpecMismatchError(text, key=key, expected="an array", got=type(value).__name__)
