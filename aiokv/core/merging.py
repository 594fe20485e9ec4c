"""What becomes of the contributions of an update before its rule sees them: each is scaled, then they are reduced."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from aiokv.errors import OptimizerError
from aiokv.optim import PRECISIONS

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.optim import Optimizer
    from aiokv.types import Key, Version

    Rate = Callable[[Version], float]

ROBUST = ("median", "trimmed_mean")
"""Reductions that look at all contributions at once; see `aiokv.kernels.robust`."""

REDUCTIONS = ("sum", "mean", "mean_of_world", *ROBUST)
"""What becomes of contributions: their sum, or that divided by how many there are, or by how many workers there are."""

RATES: dict[str, Rate | None] = {
    "1": None,
    "1/max(1,tau)": lambda tau: 1.0 / max(1, tau),
    "1/(1+tau)": lambda tau: 1.0 / (1 + tau),
}
"""What a contribution is multiplied by. tau is its staleness: how many versions were made between the one that it was
computed at and the one that it changes. The second is the rule of Zhang et al. (2015)."""


class Merging(NamedTuple):
    """How contributions are merged: a name of `RATES` and one of `REDUCTIONS`."""

    reduction: str = "sum"
    staleness_rate: str = "1"

    def __str__(self) -> str:
        rate = "" if self.staleness_rate == "1" else f", at staleness rate {self.staleness_rate}"
        return f"reduced to the {self.reduction}{rate}"

    @property
    def robust(self) -> str | None:
        """The reduction that looks at all contributions at once, if it is one."""
        return self.reduction if self.reduction in ROBUST else None

    @property
    def rate(self) -> Rate | None:
        """What a contribution is multiplied by, of its staleness; None: nothing is."""
        return RATES[self.staleness_rate]

    def divisor(self, contributors: int, world: int) -> int:
        """Return what a sum is divided by."""
        if self.reduction == "mean":
            return contributors
        return world if self.reduction == "mean_of_world" else 1

    def check(self, rule: Optimizer) -> None:
        """Refuse unknown names, and what a rule can't be given.

        Raises:
            OptimizerError: says which.
        """
        for what, given, names in (
            ("reduction", self.reduction, REDUCTIONS),
            ("staleness_rate", self.staleness_rate, RATES),
        ):
            if given not in names:
                known = ", ".join(names)
                raise OptimizerError(f"unknown {what} {given!r}; known: {known}", expected=known, got=given)
        if self.rate is not None and rule.name == "assign":
            text = (
                f"staleness_rate {self.staleness_rate!r} scales gradients, but rule 'assign' takes values as they are"
            )
            raise OptimizerError(text, expected="another rule, or '1'", got=self.staleness_rate)

    def check_dtype(self, key: Key, dtype: str, rule: Optimizer) -> None:
        """Refuse a key whose contributions can't be merged so, or whose value the rule can't update.

        Raises:
            OptimizerError: names the key.
        """
        # All rules that go with a staleness rate are for floats.
        rule.check_dtype(key, dtype)
        if self.reduction != "sum" and dtype not in PRECISIONS:
            text = f"reduction {self.reduction!r} divides, but key {key!r} has {dtype}; make it floats, or use 'sum'"
            raise OptimizerError(text, key=key, expected="float", got=dtype)

    def check_table(self, key: Key) -> None:
        """Refuse a row-sparse key: its contributions can't be merged so.

        Raises:
            OptimizerError: names the key.
        """
        if self.robust:
            text = (
                f"reduction {self.reduction!r} needs every worker's value of each element, but key {key!r} is "
                "row-sparse"
            )
            raise OptimizerError(text, key=key, expected="sum, mean or mean_of_world", got=self.reduction)
