"""Rules without a learning rate: keep the sum, or add it up."""

from __future__ import annotations

from aiokv.optim.base import FloatRule, Optimizer


class Assign(Optimizer, tag="assign", frozen=True):
    """The new value is the sum of the contributions."""


class Accumulate(FloatRule, tag="accumulate", frozen=True, kw_only=True):
    """Add the sum of the contributions, as the rule `test` of MXNet 1.x does: w = w + rescale_grad * sum.

    Parameters are those of `FloatRule`.
    """
