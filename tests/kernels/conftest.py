"""The backends and rules that a test of the arithmetic runs on, and how it runs them.

The simulator replaces CUDA for a whole process, and a device keeps threads and memory: `test_kernel_cuda.py` starts a
process in which a variable is set, and there the tests run on CUDA and on nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.kernels import Backend, get_backend
from aiokv.optim import (
    DCASGD,
    LAMB,
    LARS,
    NAG,
    RULES,
    SGD,
    Assign,
    LearningRule,
    Optimizer,
    RMSProp,
    Signum,
    make_optimizer,
    rule_to_params,
)

Array = NDArray[Any]

BACKENDS = os.environ.get("KERNEL_TESTS_BACKENDS", "reference cpu").split()

# What is tested on CUDA alone.
collect_ignore_glob = [] if "cuda" in BACKENDS else ["test_device_*.py"]

# Every rule as it is by default, and in the forms that have an arithmetic of their own.
FORMS: dict[str, Optimizer] = {
    **{name: rule() for name, rule in RULES.items()},
    "sgd with momentum": SGD(momentum=0.9),
    "nag without momentum": NAG(momentum=0.0),
    "signum without momentum": Signum(momentum=0.0, wd_lh=0.1),
    "dcasgd with momentum": DCASGD(momentum=0.9),
    "rmsprop with momentum": RMSProp(momentum=0.9),
    "rmsprop centered": RMSProp(centered=True),
    "rmsprop centered with momentum": RMSProp(centered=True, momentum=0.9),
    "lars with momentum": LARS(momentum=0.9),
    "lamb within bounds": LAMB(bias_correction=False, lower_bound=0.5, upper_bound=2.0),
}


def make_general(rule: Optimizer) -> Optimizer:
    """Return the rule with decay, a scale and a limit of the gradient, which some of the gradients exceed."""
    if isinstance(rule, Assign):
        return rule
    general = {"rescale_grad": 0.3, "clip_gradient": 0.4}
    if isinstance(rule, LearningRule):
        general["wd"] = 0.01
    return make_optimizer(rule.name, rule_to_params(rule) | general)


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return get_backend(request.param)


@pytest.fixture(params=FORMS)
def rule(request: pytest.FixtureRequest) -> Optimizer:
    """Every rule in every form."""
    return make_general(FORMS[request.param])


@pytest.fixture(params=[name for name, rule in FORMS.items() if isinstance(rule, LearningRule)])
def learning_rule(request: pytest.FixtureRequest) -> Optimizer:
    """Every rule that has a learning rate, in every form."""
    return make_general(FORMS[request.param])


@pytest.fixture(scope="session")
def bits() -> Callable[[Array], bytes]:
    """What returns an array's memory, with all NaNs made equal: their payload is the processor's choice."""

    def bits(array: Array) -> bytes:
        if array.dtype.kind != "f" and array.dtype != ml_dtypes.bfloat16:
            return array.tobytes()
        with np.errstate(invalid="ignore"):
            return np.where(np.isnan(array), np.full_like(array, np.nan), array).tobytes()

    return bits


@pytest.fixture(scope="session")
def on_device() -> Callable[[Array], Any]:
    """What copies an array to the device; a part of the copy is one again."""
    from aiokv.kernels.cuda.tensors import Copy  # noqa: PLC0415 - it needs CUDA or the simulator

    return Copy


@pytest.fixture(scope="session")
def read() -> Callable[[Any, Array], Array]:
    """What copies an array back; the other argument says how it looks."""

    def read(device: Any, like: Array) -> Array:
        found = np.empty_like(like)
        device.copy_to(found)
        return found

    return read


Run = Callable[..., tuple[Array, dict[str, Array]]]


@pytest.fixture(scope="session")
def run() -> Run:
    """What returns weight and state after an update with each of some gradients, which are left as they are.

    With `wide` the sums are float32, and the new weights go to arrays of their own.
    """

    def run(
        backend: Backend, rule: Optimizer, weight: Array, gradients: Sequence[Array], *, wide: bool = False
    ) -> tuple[Array, dict[str, Array]]:
        state = backend.new_state(rule, weight)
        for count, gradient in enumerate(gradients, 1):
            total = gradient.astype(np.float32) if wide else gradient.copy()
            out = np.empty_like(weight) if wide else total
            step = rule.step_for("w", count=count, num_update=count)
            norms: list[tuple[float, ...]] = []
            for phase in range(rule.norm_phases):
                norms.append(backend.norms(rule, phase, weight, total, state, step, norms))
            backend.update(rule, weight, total, state, step, out=out if wide else None, norms=norms)
            weight = out
        return weight, state

    return run
