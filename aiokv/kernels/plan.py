"""What an update is to a backend: functions of `aiokv.kernels.arithmetic`, and the arrays and numbers they take."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aiokv.errors import OptimizerError
from aiokv.kernels import arithmetic

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from aiokv.kernels.reference import Scalar
    from aiokv.optim import Norms, Optimizer, Step

FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    name: function
    for name, function in vars(arithmetic).items()
    if isinstance(function, types.FunctionType) and function.__module__ == arithmetic.__name__
}
"""Everything in `arithmetic`, by name."""

INPUTS = ("read", "noise", "row_history")
"""Arrays that some rules read, beside the weight, the sum and what they keep."""


class Plan(NamedTuple):
    """Which functions are called, with what. All names are those of `arithmetic`.

    Attributes:
        prepare: functions that make the gradient, in their order.
        function: what makes the new weight and state, or what is squared and summed; "" for the gradient alone.
        state: the arrays that the function takes and returns.
        inputs: the arrays that it only reads.
        numbers: the numbers that all of them take.
    """

    prepare: tuple[str, ...]
    function: str
    state: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


COMPENSATION = Plan((), "compensation", inputs=("read",), numbers=("lamda",))
"""What becomes of a contribution that was computed from another weight; see `Backend.compensate`."""


def plan_update(rule: Optimizer) -> Plan:
    """Return how a rule's update is computed.

    Raises:
        OptimizerError: no backend knows the rule.
    """
    if rule.kernel not in FUNCTIONS:
        raise OptimizerError(f"no backend can compute {rule!r}", expected="a rule with a kernel", got=repr(rule))
    return _plan(rule.kernel, rule.keeps, _clips(rule), decays=rule.decays_gradient)


def plan_norms(rule: Optimizer, phase: int) -> Plan:
    """Return how the arrays are computed whose sums of squares a phase needs; decay is none of their gradient."""
    return _plan(f"{rule.name}_norms_{phase}", rule.keeps, _clips(rule), decays=False)


def plan_gradient(rule: Optimizer) -> Plan:
    """Return how the gradient alone is computed."""
    return _plan("", (), _clips(rule), decays=rule.decays_gradient)


@functools.cache
def parameters(function: str) -> tuple[str, ...]:
    """Return the names of a function's parameters."""
    code = FUNCTIONS[function].__code__
    return code.co_varnames[: code.co_argcount]


class Prepared:
    """A plan for one rule in one precision, and the numbers of the last step: chunks of a key have the same ones.

    Args:
        rule: its parameters are checked.
        plan: which numbers are taken.
        precision: float32 or float64.

    Raises:
        OptimizerError: a parameter is not in its range any longer when it is rounded.
    """

    def __init__(self, rule: Optimizer, plan: Plan, precision: np.dtype[Any]) -> None:
        rule.check_precision(precision.name)
        self.plan = plan
        self._rule = rule
        self._kind = precision.type
        self._last: tuple[Any, tuple[Scalar, ...]] = (None, ())

    def numbers(self, step: Step, norms: Norms) -> tuple[Scalar, ...]:
        """Return the numbers that the plan takes, in its order and in the precision of the computation."""
        made_for, numbers = self._last
        if made_for != (step, norms):
            numbers = self._numbers(step, norms)
            # In one assignment: threads share the rule.
            self._last = (step, norms), numbers
        return numbers

    def _numbers(self, step: Step, norms: Norms) -> tuple[Scalar, ...]:
        rule, kind = self._rule, self._kind
        # What is too large for the precision shows it in the weights.
        with np.errstate(over="ignore"):
            named = {
                "rescale_grad": getattr(rule, "rescale_grad", 1.0),
                "clip_gradient": getattr(rule, "clip_gradient", None),
                "wd": step.wd,
                **rule.numbers(step, lambda number: float(kind(number)), norms),
            }
            return tuple([kind(named[name]) for name in self.plan.numbers])


def prepare(rule: Optimizer, what: str, precision: np.dtype[Any]) -> Prepared:
    """Return the plan for a rule's "update", its "gradient", or the phase of its norms: "0", "1", and so on.

    Raises:
        OptimizerError: no backend knows the rule, or a parameter is not in its range any longer when it is rounded.
    """
    prepared: Prepared | None = rule.derived.get((what, precision.char))
    if prepared is None:
        match what:
            case "update":
                plan = plan_update(rule)
            case "gradient":
                plan = plan_gradient(rule)
            case phase:
                plan = plan_norms(rule, int(phase))
        prepared = rule.derived[what, precision.char] = Prepared(rule, plan, precision)
    return prepared


def _clips(rule: Optimizer) -> bool:
    return getattr(rule, "clip_gradient", None) is not None


@functools.cache
def _plan(function: str, keeps: tuple[str, ...], clips: bool, *, decays: bool) -> Plan:
    prepare = ("scaled",) + ("clipped",) * clips + ("decayed",) * decays
    own = parameters(function) if function else ()
    state = tuple(name for name in keeps if name in own)
    inputs = tuple(name for name in INPUTS if name in own)
    taken = [name for each in prepare for name in parameters(each)] + list(own)
    numbers = [name for name in dict.fromkeys(taken) if name not in ("w", "g", *state, *inputs)]
    return Plan(prepare, function, state, inputs, tuple(numbers))
