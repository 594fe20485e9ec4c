"""Fifty steps of every rule that PyTorch has too, with its numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.kernels import Backend, get_backend
from aiokv.optim import (
    NAG,
    SGD,
    AdaDelta,
    AdaGrad,
    Adam,
    Adamax,
    AdamW,
    Nadam,
    Optimizer,
    RMSProp,
)

Array = NDArray[Any]
Run = Callable[..., tuple[Array, dict[str, Array]]]

torch = pytest.importorskip("torch")

STEPS = 50

Torch = Callable[[Any], Any]

CASES: dict[str, tuple[Optimizer, Torch]] = {
    "sgd": (SGD(learning_rate=0.05, wd=0.01), lambda p: torch.optim.SGD(p, 0.05, weight_decay=0.01)),
    "sgd with momentum": (
        SGD(learning_rate=0.05, momentum=0.9, wd=0.01),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    ),
    "nag": (
        NAG(learning_rate=0.05, momentum=0.9, wd=0.01),
        lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01, nesterov=True),
    ),
    # Its epsilon is added to the corrected root, ours to the root itself: it has to be too small to matter.
    "adam": (
        Adam(learning_rate=0.01, wd=0.01, epsilon=1e-12),
        lambda p: torch.optim.Adam(p, 0.01, eps=1e-12, weight_decay=0.01),
    ),
    "adamw": (AdamW(learning_rate=0.01, wd=0.1), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1)),
    "adamax": (Adamax(learning_rate=0.01, wd=0.01), lambda p: torch.optim.Adamax(p, 0.01, weight_decay=0.01)),
    "nadam": (Nadam(learning_rate=0.01, wd=0.01), lambda p: torch.optim.NAdam(p, 0.01, weight_decay=0.01)),
    "adagrad": (
        AdaGrad(learning_rate=0.05, wd=0.01, epsilon=1e-4),
        lambda p: torch.optim.Adagrad(p, 0.05, weight_decay=0.01, eps=1e-4),
    ),
    "adadelta": (
        AdaDelta(learning_rate=0.5, rho=0.95, wd=0.01),
        lambda p: torch.optim.Adadelta(p, 0.5, rho=0.95, eps=1e-6, weight_decay=0.01),
    ),
    "rmsprop": (
        RMSProp(learning_rate=0.01, rho=0.95, wd=0.01),
        lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.95, weight_decay=0.01),
    ),
    "rmsprop with momentum": (
        RMSProp(learning_rate=0.01, momentum=0.8),
        lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9, momentum=0.8),
    ),
    "rmsprop centered": (
        RMSProp(learning_rate=0.01, rho=0.95, centered=True, wd=0.01),
        lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.95, centered=True, weight_decay=0.01),
    ),
    "rmsprop centered with momentum": (
        RMSProp(learning_rate=0.01, centered=True, momentum=0.8),
        lambda p: torch.optim.RMSprop(p, 0.01, alpha=0.9, centered=True, momentum=0.8),
    ),
}


@pytest.fixture(scope="module")
def reference() -> Backend:
    """What all other backends have the bits of."""
    return get_backend("reference")


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 3e-5), ("float64", 1e-9)])
@pytest.mark.parametrize("case", CASES)
def test_fifty_steps_are_those_of_pytorch(reference: Backend, run: Run, case: str, dtype: str, rtol: float) -> None:
    rule, make = CASES[case]
    rng = np.random.default_rng(0)
    start, *gradients = (rng.uniform(0.5, 1.5, (STEPS + 1, 40)) * rng.choice([-1, 1], (STEPS + 1, 40))).astype(dtype)
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = make([parameter])
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    weight, _ = run(reference, rule, start, gradients)
    np.testing.assert_allclose(weight, parameter.detach().numpy(), rtol=rtol, atol=rtol)
