"""Updates that a worker makes itself, and what their rule keeps for them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from aiokv.checkpoint import files, saving
from aiokv.checkpoint.tensorfile import Shapes, bytes_of, in_order
from aiokv.errors import DataError, UnknownKeyError
from aiokv.optim import rule_to_params

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.arrays import Array
    from aiokv.kernels import Backend
    from aiokv.optim import Optimizer

FORMAT = "aiokv optimizer state"
"""The value of "format" in a file's metadata."""


class StatesContent(msgspec.Struct, forbid_unknown_fields=True):
    """What a file has besides arrays: the rule, its parameters, the number of updates of each weight, and facts."""

    rule: str
    params: dict[str, Any]
    counts: dict[str, int]
    facts: dict[str, Any]


@dataclass(slots=True, eq=False)
class Loaded:
    """What a file has: states by weight and name, numbers of updates, what `save` was given as facts, the checksum."""

    states: dict[str, dict[str, Array]]
    counts: dict[str, int]
    facts: dict[str, Any]
    checksum: str


class Updater:
    """Makes the updates that servers would make, with the same arithmetic, and keeps a state for each parameter.

    Args:
        backend: who computes.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._states: dict[str, dict[str, Array]] = {}
        self._counts: dict[str, int] = {}
        self._scratch = np.empty(0, np.uint8)

    def update(self, name: str, weight: Array, total: Array, rule: Optimizer, num_update: int) -> None:
        """Update a weight in place.

        Args:
            name: whose state is used.
            weight: of any shape.
            total: the summed gradient, of the same shape, in the weight's dtype or in float32 for a lower precision;
                it is not changed.
            rule: what to do.
            num_update: what the rule's schedule looks at.
        """
        flat = np.ascontiguousarray(weight).reshape(-1)
        gradient = np.ascontiguousarray(total).reshape(-1)
        row_size = math.prod(weight.shape[1:]) or 1
        state = self._states.get(name)
        if state is None:
            state = self._states[name] = self._backend.new_state(rule, flat, row_size=row_size)
        count = self._counts.get(name, 0) + 1
        step = rule.step_for(name, count=count, num_update=num_update)
        norms: list[tuple[float, ...]] = []
        for phase in range(rule.norm_phases):
            norms.append(self._backend.norms(rule, phase, flat, gradient, state, step, norms))
        out = self._out(flat)
        self._backend.update(rule, flat, gradient, state, step, out=out, norms=norms, row_size=row_size)
        weight[...] = out.reshape(weight.shape)
        self._counts[name] = count

    def _out(self, weight: Array) -> Array:
        if self._scratch.nbytes < weight.nbytes:
            self._scratch = np.empty(weight.nbytes, np.uint8)
        return self._scratch[: weight.nbytes].view(weight.dtype)

    def save(self, url: str, rule: Optimizer, facts: Mapping[str, Any]) -> str:
        """Write the states to a safetensors file, aside at first.

        Args:
            url: a path, or an address that fsspec knows.
            rule: whose states they are.
            facts: what else is to be kept, as JSON.

        Returns:
            The file's checksum: files with equal states have the same one.

        Raises:
            DataError: it can't be written; the file of before is still there.
        """
        # Sorted, so that equal states are equal files. The name of a state has no slash in it.
        named = sorted((f"{name}/{kept}", array) for name in self._states for kept, array in self._states[name].items())
        arrays = dict(named)
        shapes: Shapes = {name: (array.dtype.name, array.shape) for name, array in named}
        content = StatesContent(rule.name, rule_to_params(rule), dict(sorted(self._counts.items())), dict(facts))
        head = saving.file_head(FORMAT, content, shapes)
        return files.write(url, [head, *(bytes_of(arrays[name]) for name in in_order(shapes))]).hex()

    def use(self, loaded: Loaded) -> None:
        """Go on with the states of a file."""
        self._states, self._counts = loaded.states, loaded.counts

    def read(self, url: str, rule: Optimizer, weights: Mapping[str, Array]) -> Loaded:
        """Read what `save` has written, for `use`.

        Args:
            url: as for `save`.
            rule: whose states they have to be.
            weights: the parameters.

        Raises:
            DataError: no such file, a damaged one, or its states are those of another rule or shape.
            UnknownKeyError: it has a state of a parameter that there is not.
        """
        data = files.read(url)
        content, tensors = saving.open_file(data, url, FORMAT, StatesContent)
        if content.rule != rule.name:
            text = f"{url}: has the state of optimizer {content.rule!r}, not of {rule.name!r}"
            raise DataError(text, path=url, expected=rule.name, got=content.rule)
        states: dict[str, dict[str, Array]] = {key: {} for key in content.counts}
        for full, array in tensors.items():
            key, slash, kept = full.rpartition("/")
            if slash:
                states.setdefault(key, {})[kept] = array.copy()
        for key, state in states.items():
            if key not in weights:
                raise UnknownKeyError(f"{url}: has a state of {key!r}, which is no parameter", key=key)
            self._check(url, key, state, rule, weights[key])
        return Loaded(states, content.counts, content.facts, data[-files.CHECKSUM_BYTES :].hex())

    def _check(self, url: str, name: str, state: dict[str, Array], rule: Optimizer, weight: Array) -> None:
        flat = np.ascontiguousarray(weight).reshape(-1)
        wanted = self._backend.new_state(rule, flat, row_size=math.prod(weight.shape[1:]) or 1)
        expected, got = (
            {kept: f"{array.dtype}[{array.size}]" for kept, array in sorted(arrays.items())}
            for arrays in (wanted, state)
        )
        if expected != got:
            text = f"{url}: the state of {name!r} must be {expected}, got {got}"
            raise DataError(text, path=url, key=name, expected=str(expected), got=str(got))
