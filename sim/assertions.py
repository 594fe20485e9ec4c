"""Sentences about results, such as "p95_step < 80 ms": what they mean, and whether they are true."""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aiokv.errors import ConfigError
from sim.decoding import closest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sim.report import Summary

METRICS: Final[dict[str, Callable[[Summary], float]]] = {
    "mean_step": lambda s: s.step_time_s.mean,
    "p50_step": lambda s: s.step_time_s.p50,
    "p95_step": lambda s: s.step_time_s.p95,
    "p99_step": lambda s: s.step_time_s.p99,
    "utilisation": lambda s: s.utilisation,
    "updates_per_s": lambda s: s.updates_per_s,
    "gradients_per_s": lambda s: s.gradients_per_s,
    "staleness_mean": lambda s: s.staleness.mean,
    "staleness_p95": lambda s: s.staleness.p95,
    "staleness_max": lambda s: s.staleness.max,
    "goodput": lambda s: s.goodput,
    "dropped": lambda s: s.dropped.total,
    "held": lambda s: s.held,
    "elapsed": lambda s: s.elapsed_s,
    "failed_workers": lambda s: s.failed_workers,
    "job_time": lambda s: s.job.seconds,
    "job_useful": lambda s: s.job.useful,
    "lost_steps": lambda s: s.job.lost_steps,
    "loss": lambda s: s.learning.loss,
    "time_to_target": lambda s: s.learning.time_to_target_s,
    "updates_to_target": lambda s: s.learning.updates_to_target,
}
"""What can be asserted, by name: times in seconds, shares from 0 to 1, rates a second."""

OF_JOB: Final = ("job_time", "job_useful", "lost_steps")
"""Those that need a job which is started again."""

LEARNED: Final = ("loss", "time_to_target", "updates_to_target")
"""Those that need a workload."""

UNITS: Final = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "min": 60.0, "h": 3600.0, "%": 0.01}

_COMPARE: Final[dict[str, Callable[[float, float], bool]]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}
_FORM: Final = re.compile(r"\s*(?:(\S+)\.)?(\w+)\s*(<=|>=|==|<|>)\s*([-+\d.eE]+)\s*(\S*)\s*")


@dataclass(slots=True, frozen=True)
class Assertion:
    """One sentence. `policy` is empty when it holds for all; `bound` is in seconds or the like, whatever the `unit`."""

    text: str
    policy: str
    metric: str
    sign: str
    bound: float
    unit: str = ""

    def holds(self, value: float) -> bool:
        """Say whether it is true of a value; of none it is not."""
        return not math.isnan(value) and _COMPARE[self.sign](value, self.bound)

    def shown(self, value: float) -> str:
        """Return a value in words, in the unit of the sentence."""
        return f"{value / UNITS[self.unit]:.6g} {self.unit}".rstrip()


def parse_assertion(text: str, policies: Sequence[str]) -> Assertion:
    """Read a sentence.

    Args:
        text: as in "p95_step < 80 ms" or "asp.staleness_mean <= 7".
        policies: names that may stand before the point.

    Raises:
        ConfigError: it is none; says what was expected.
    """
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(f"expected a sentence like 'p95_step < 80 ms', got {text!r}")
    policy, metric, sign, number, unit = match.groups(default="")
    if policy and policy not in policies:
        raise ConfigError(f"the policies of this scenario are {', '.join(policies)}, got {policy!r}")
    if metric not in METRICS:
        raise ConfigError(f"no result {metric!r}{closest(metric, list(METRICS))}; known: {', '.join(METRICS)}")
    if unit not in UNITS:
        raise ConfigError(f"no unit {unit!r}; known: {', '.join(filter(None, UNITS))}")
    try:
        return Assertion(text, policy, metric, sign, float(number) * UNITS[unit], unit)
    except ValueError:
        raise ConfigError(f"expected a number after {sign!r}, got {number!r}") from None


def broken_assertions(texts: Sequence[str], summaries: Mapping[str, Summary]) -> list[str]:
    """Return which sentences are not true of the results, and what is.

    Args:
        texts: the sentences of a scenario.
        summaries: the results, by policy.
    """
    broken = []
    for text in texts:
        assertion = parse_assertion(text, list(summaries))
        for policy, summary in summaries.items():
            value = METRICS[assertion.metric](summary)
            if assertion.policy in {"", policy} and not assertion.holds(value):
                broken.append(f"{policy}: expected {text}, got {assertion.metric} = {assertion.shown(value)}")
    return broken
