"""What a worker refuses to push: what is no number, and gradients whose norm is far from what it is otherwise."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from aiokv.arrays import check_finite
from aiokv.core.keys import name_keys
from aiokv.errors import ConfigError, NormLimitError
from aiokv.list_sums import Resident
from aiokv.training.gradients import global_norm

if TYPE_CHECKING:
    from aiokv.arrays import Arguments, Array
    from aiokv.types import Key

LAST = 64
"""Of how many norms the median is taken."""

FIRST = 16
"""From how many norms on there is a median."""

MOST_HISTORIES = 256
"""Of how many different sets of keys norms are known."""


class Guard:
    """Looks at what a worker pushes, all keys of a call together, so that all of it is sent or nothing.

    Args:
        check_finite: refuse NaN and infinities.
        max_norm: the largest Euclidean norm of all elements of a call; 0: any.
        max_norm_ratio: the largest norm as a multiple of the median of the last 64 that were accepted for the same
            keys, from 16 of them on; 0: any.

    Raises:
        ConfigError: a limit is negative, or no number.
    """

    def __init__(self, *, check_finite: bool = False, max_norm: float = 0.0, max_norm_ratio: float = 0.0) -> None:
        for name, limit in (("max_norm", max_norm), ("max_norm_ratio", max_norm_ratio)):
            if not limit >= 0:
                text = f"{name} must be a number of at least 0, got {limit!r}"
                raise ConfigError(text, key=name, expected="at least 0", got=limit)
        self._checks_finite = check_finite
        self._most = max_norm or math.inf
        self._ratio = max_norm_ratio
        self._measures = bool(max_norm or max_norm_ratio)
        self._accepted: dict[tuple[Key, ...], deque[float]] = {}
        """The last norms, for the keys that they are of; the keys that were pushed last are the last ones."""

    @property
    def looks(self) -> bool:
        """Whether it looks at gradients at all."""
        return self._checks_finite or self._measures

    def measure(self, arguments: Arguments) -> float:
        """Return the norm of what a call sends, 0 if nobody wants it. Any thread may call it.

        Raises:
            NotFiniteError: names the key and what is no number in it.
        """
        arrays, squares = arguments.values, arguments.squares
        if self._checks_finite:
            # What a device has measured comes here only if it is to be shown what is wrong with it.
            looked = [n for n in range(len(arrays)) if not math.isfinite(squares.get(n, math.nan))]
            check_finite([arguments.keys[n] for n in looked], [_in_host(arrays[n]) for n in looked])
        if not self._measures:
            return 0.0
        # A norm that is too large for a float64 is infinite, and refused as such.
        with np.errstate(all="ignore"):
            rest = (array for n, array in enumerate(arrays) if n not in squares and array.dtype.kind not in "biu")
            return math.hypot(global_norm(rest), math.sqrt(math.fsum(squares.values())))

    def admit(self, keys: list[Key], norm: float) -> None:
        """Accept a norm, or refuse it.

        Raises:
            NormLimitError: it is over the limit, or no number.
        """
        if not self._measures:
            return
        named = tuple(keys)
        accepted = self._accepted.pop(named, None) or deque(maxlen=LAST)
        self._accepted[named] = accepted
        if len(self._accepted) > MOST_HISTORIES:
            del self._accepted[next(iter(self._accepted))]
        limit, why = self._most, f"the limit is max_norm = {self._most:.4g}"
        median = statistics.median(accepted) if len(accepted) >= FIRST else 0.0
        # Where gradients have been zero, nothing can be said of others.
        if self._ratio and median and self._ratio * median < limit:
            limit = self._ratio * median
            why = f"the limit is max_norm_ratio = {self._ratio:g} times {median:.4g}, the median of the last ones"
        if norm <= limit and math.isfinite(norm):
            accepted.append(norm)
            return
        text = (
            f"the gradient of {name_keys(named)} has a norm of {norm:.4g}, but {why}; nothing of this call was pushed"
        )
        raise NormLimitError(text, keys=list(keys), expected=limit, got=norm)


def _in_host(array: Array | Resident) -> Array:
    return array.to_host() if isinstance(array, Resident) else array
