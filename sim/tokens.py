"""What stands for gradients, and how thousands of them are kept in little memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Final, overload

Token = tuple[str, int]
"""Stands for a gradient: the name of its worker and the number of the push (from 1) that brought it."""

FEW: Final = 64
"""So many are kept as they are."""


class Tokens(Sequence[Token]):
    """Many gradients, as a column of names and one of numbers, without an object each.

    Objects that are kept would lie between those that are used again for every gradient.
    """

    __slots__ = ("_names", "_numbers")

    def __init__(self, tokens: Sequence[Token]) -> None:
        self._names = [name for name, _ in tokens]
        self._numbers = array("q", [number for _, number in tokens])

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Token]:
        return zip(self._names, self._numbers, strict=True)

    @overload
    def __getitem__(self, index: int) -> Token: ...
    @overload
    def __getitem__(self, index: slice) -> list[Token]: ...
    def __getitem__(self, index: int | slice) -> Token | list[Token]:
        if isinstance(index, slice):
            return list(zip(self._names[index], self._numbers[index], strict=True))
        return self._names[index], self._numbers[index]


def kept(tokens: list[Token]) -> Sequence[Token]:
    """Return gradients as they are to be kept for long."""
    return tokens if len(tokens) <= FEW else Tokens(tokens)
