"""Chunks in which several keys lie: a rule may want to see each key by itself."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from aiokv.kernels import Backend
    from aiokv.optim import Norms, Optimizer, Step
    from aiokv.types import Piece

Array = NDArray[Any]
State = dict[str, Array]


def cut(array: Array, pieces: Sequence[Piece]) -> list[Array]:
    """Return each piece's part of an array that has an element for each of the chunk, or for each row."""
    sizes = [piece.size for piece in pieces]
    if array.size != sum(sizes):
        sizes = [piece.size // piece.row_size for piece in pieces]
    edges = itertools.pairwise([0, *itertools.accumulate(sizes)])
    return [array[low:high] for low, high in edges]


def cut_state(state: Mapping[str, Array], pieces: Sequence[Piece]) -> list[State]:
    """Return each piece's part of what a rule keeps."""
    parts: list[State] = [{} for _ in pieces]
    for name, array in state.items():
        for part, own in zip(parts, cut(array, pieces), strict=True):
            part[name] = own
    return parts


def new_state(backend: Backend, rule: Optimizer, weight: Array, pieces: Sequence[Piece]) -> State:
    """Return what a rule keeps for a chunk, as it is before the first update."""
    if len(pieces) == 1 or not rule.by_row:
        return backend.new_state(rule, weight, row_size=pieces[0].row_size if rule.by_row else 1)
    parts = [
        backend.new_state(rule, own, row_size=piece.row_size)
        for own, piece in zip(cut(weight, pieces), pieces, strict=True)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def steps_for(rule: Optimizer, pieces: Sequence[Piece], count: int, clock: int) -> list[Step]:
    """Return the numbers of an update of each piece; those of the first where they don't depend on the key."""
    keys = pieces if rule.by_key else pieces[:1]
    return [rule.step_for(piece.key, count=count, num_update=clock) for piece in keys]


def update(
    backend: Backend,
    rule: Optimizer,
    pieces: Sequence[Piece],
    steps: Sequence[Step],
    weight: Array,
    total: Array,
    state: State,
    *,
    out: Array | None,
    norms: Sequence[Norms],
    read: Array | None,
) -> None:
    """Update a chunk, in one go where the rule does not depend on the key.

    Args:
        backend: who computes.
        rule: what to do.
        pieces: the keys in the chunk.
        steps: from `steps_for`.
        weight: the chunk's value.
        total: the sum of the contributions.
        state: what the rule keeps for the chunk.
        out: where the new value goes; over `total` when it is None.
        norms: for each phase, the sums of squares of each key.
        read: the value that the contributor had read, for a rule that `reads_weight`; None for the current one.
    """
    if not rule.by_key:
        backend.update(rule, weight, total, state, steps[0], out=out, read=read)
        return
    weights, totals, states = cut(weight, pieces), cut(total, pieces), cut_state(state, pieces)
    outs = [None] * len(pieces) if out is None else cut(out, pieces)
    reads = [None] * len(pieces) if read is None else cut(read, pieces)
    for i, piece in enumerate(pieces):
        backend.update(
            rule,
            weights[i],
            totals[i],
            states[i],
            steps[i],
            out=outs[i],
            norms=[phase[i] for phase in norms],
            read=reads[i],
            offset=piece.start,
            row_size=piece.row_size,
        )


def sums_of_squares(
    backend: Backend,
    rule: Optimizer,
    phase: int,
    pieces: Sequence[Piece],
    steps: Sequence[Step],
    weight: Array,
    total: Array,
    state: State,
    gathered: Sequence[Norms],
) -> list[tuple[float, ...]]:
    """Return what a phase before an update needs of each key in a chunk; the arguments are as in `update`."""
    weights, totals, states = cut(weight, pieces), cut(total, pieces), cut_state(state, pieces)
    return [
        backend.norms(rule, phase, weights[i], totals[i], states[i], steps[i], [before[i] for before in gathered])
        for i in range(len(pieces))
    ]
