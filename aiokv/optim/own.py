"""Rules of a user's own: a record and its arithmetic in one class, installed where the servers run.

    from aiokv.optim import OwnRule, register

    @register
    class Cautious(OwnRule, tag="cautious", frozen=True, kw_only=True):
        '''SGD that moves no element by more than `limit`.'''

        ranges = OwnRule.ranges | {"limit": MORE_THAN_0}
        arrays = ("largest",)

        limit: float = 0.1

        def compute(self, weight, gradient, state, step):
            state["largest"][...] = np.maximum(state["largest"], np.abs(gradient))
            return weight - np.clip(step.learning_rate * gradient, -self.limit, self.limit)

Only the name and the parameters travel: every process that makes or applies the rule imports the module that
registers it.
"""

from __future__ import annotations

from typing import Any

from aiokv.optim.base import LearningRule, Step


class OwnRule(LearningRule, frozen=True, kw_only=True):
    """Base of the rules of a user's own. Its parameters are those of `LearningRule`.

    A subclass has a `tag`, which is its name, and `frozen=True`. Beside `compute` it may have:

    Attributes:
        arrays: the names of the arrays that it keeps; they begin as zeros.
        ranges: for each parameter that is a number, what it may be; see `aiokv.optim.checks`.
        flags: the parameters that are True or False.
        decays_gradient: whether wd times the weight is added to the gradient.
    """

    decays_gradient = True

    @property
    def by_key(self) -> bool:
        """See `Optimizer.by_key`: numbers of its own may be others for each key."""
        return super().by_key or type(self).step_for is not LearningRule.step_for

    def compute(self, weight: Any, gradient: Any, state: dict[str, Any], step: Step) -> Any:
        """Return the new weight, and bring the state up to date in place.

        It must do with each element the same, wherever in an array it lies: a tensor is updated in parts.

        Args:
            weight: a one-dimensional NumPy array of float32 or float64, which must stay as it is.
            gradient: rescaled, clipped and decayed; as long as the weight and of the same dtype.
            state: for each name in `arrays` an array like the weight.
            step: count, learning rate and weight decay of this update.
        """
        raise NotImplementedError
