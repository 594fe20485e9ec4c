"""What a row-sparse key may be, and how it may be used; checked on both sides of the wire."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from aiokv.core.keys import check_spec
from aiokv.errors import SpecMismatchError

if TYPE_CHECKING:
    from aiokv.types import Key, TensorSpec

MAX_ROW_BYTES = 16 * 1024 * 1024
"""Longest row: it has to fit in one message."""


def check_table(key: Key, spec: TensorSpec) -> None:
    """Refuse a spec that a row-sparse key can't have.

    Raises:
        SpecMismatchError: as for any key, or it has no rows, or too long ones.
    """
    check_spec(key, spec)
    if not spec.shape:
        raise SpecMismatchError(f"key {key!r}: a row-sparse key has at least one dimension", key=key, got=str(spec))
    if row_bytes(spec) > MAX_ROW_BYTES:
        text = f"key {key!r}: a row of {spec} has {row_bytes(spec)} bytes, at most {MAX_ROW_BYTES} are supported"
        raise SpecMismatchError(text, key=key, expected=f"{MAX_ROW_BYTES} bytes", got=f"{row_bytes(spec)} bytes")


def row_bytes(spec: TensorSpec) -> int:
    """Return how long the values of one row are."""
    return math.prod(spec.shape[1:]) * spec.itemsize


def check_sparse(key: Key, *, is_sparse: bool, wanted: bool) -> None:
    """Refuse to use a row-sparse key as a dense one, or the other way round.

    Raises:
        SpecMismatchError: says which calls the key has.
    """
    if is_sparse != wanted:
        expected, got = ("row-sparse", "dense") if is_sparse else ("dense", "row-sparse")
        how = "push RowSparse values and read it with row_sparse_pull" if is_sparse else "push arrays and use pull"
        raise SpecMismatchError(f"key {key!r} is {expected}: {how}", key=key, expected=expected, got=got)
