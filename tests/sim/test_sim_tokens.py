"""Gradients that are kept as columns read as those that were put in."""

from __future__ import annotations

import pytest

from sim.tokens import FEW, Tokens, kept


def test_what_is_put_in_is_read_in_the_same_order() -> None:
    gradients = [("worker-0", 1), ("worker-1", 3), ("worker-0", 2)]
    tokens = Tokens(gradients)
    assert len(tokens) == len(gradients)
    assert list(tokens) == gradients
    assert [tokens[index] for index in range(-3, 3)] == gradients * 2
    assert tokens[::2] == gradients[::2]
    assert ("worker-1", 3) in tokens
    with pytest.raises(IndexError):
        tokens[3]


@pytest.mark.parametrize(("count", "kind"), [(FEW, list), (FEW + 1, Tokens)])
def test_only_many_are_kept_as_columns(count: int, kind: type) -> None:
    gradients = [("worker-0", number) for number in range(count)]
    assert type(kept(gradients)) is kind
    assert list(kept(gradients)) == gradients
