"""What simulated workers optimise: where it starts, what a worker's gradient is, and how good parameters are."""

from __future__ import annotations

import functools
import importlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from aiokv.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sim.sections import LearningSection

Floats = NDArray[np.float64]

WORKLOADS: Final = ("none", "quadratic", "digits")
"""Those that need no function of one's own."""

CLASSES: Final = 10
PIXELS: Final = 64
BRIGHTEST: Final = 16.0


class Problem(NamedTuple):
    """What is optimised.

    Attributes:
        start: the parameters at version 0, of any shape.
        gradient: of parameters, the worker's number and the number of its push, both from a seed; shaped as they are.
            Equal arguments give equal gradients: under every policy push i of a worker uses the same data.
        loss: of parameters.
    """

    start: Floats
    gradient: Callable[[Floats, int, int], Floats]
    loss: Callable[[Floats], float]


def make_problem(section: LearningSection, *, seed: int, workers: int) -> Problem:
    """Return what a scenario's workers optimise.

    Args:
        section: names it; anything but "none".
        seed: selects all random numbers.
        workers: how many there are.

    Raises:
        ConfigError: there is no such function, or it returns something else.
        MissingExtraError: the digits come with scikit-learn, which is not installed.
    """
    match section.workload:
        case "quadratic":
            return _quadratic(section.noise, seed)
        case "digits":
            return _digits(section.batch, seed)
        case name:
            return _own(name, seed, workers)


def _quadratic(noise: float, seed: int) -> Problem:
    def gradient(x: Floats, worker: int, push: int) -> Floats:
        return x + noise * np.random.default_rng((seed, worker, push)).standard_normal(1) if noise else x

    return Problem(np.ones(1), gradient, lambda x: float(x @ x) / 2.0)


def _digits(batch: int, seed: int) -> Problem:
    """Return softmax regression; the last row of the parameters is the bias."""
    images, labels = load_digits()
    right = np.eye(CLASSES)[labels]

    def probabilities(parameters: Floats, rows: Floats) -> Floats:
        scores = rows @ parameters
        scores -= scores.max(axis=1, keepdims=True)
        powers: Floats = np.exp(scores)
        powers /= powers.sum(axis=1, keepdims=True)
        return powers

    def gradient(parameters: Floats, worker: int, push: int) -> Floats:
        chosen = np.random.default_rng((seed, worker, push)).integers(0, len(images), batch)
        rows = images[chosen]
        found: Floats = rows.T @ (probabilities(parameters, rows) - right[chosen]) / batch
        return found

    def loss(parameters: Floats) -> float:
        likely = probabilities(parameters, images)[np.arange(len(labels)), labels]
        return float(-np.mean(np.log(likely)))

    return Problem(np.zeros((PIXELS + 1, CLASSES)), gradient, loss)


@functools.cache
def load_digits() -> tuple[Floats, NDArray[np.int64]]:
    """Return scikit-learn's 1,797 handwritten digits: 64 pixels from 0 to 1 and a 1 for each, and what it shows.

    Raises:
        MissingExtraError: scikit-learn is not installed.
    """
    try:
        from sklearn import datasets  # noqa: PLC0415 - optional, and slow to import
    except ImportError:
        raise MissingExtraError(
            "the workload 'digits' takes its images from scikit-learn: install the extra with "
            "pip install 'aiokv[examples]'",
            expected="aiokv[examples]",
        ) from None
    images, labels = datasets.load_digits(return_X_y=True)
    return np.hstack([images / BRIGHTEST, np.ones((len(images), 1))]), labels.astype(np.int64)


def _own(name: str, seed: int, workers: int) -> Problem:
    module, _, function = name.partition(":")
    try:
        make = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"learning.workload: can't find {name!r}: {error}; is it on PYTHONPATH?", got=name) from None
    if not callable(make):
        raise ConfigError(f"learning.workload: expected that {name!r} is a function, got {make!r}", got=name)
    made = make(seed, workers)
    if not isinstance(made, tuple) or len(made) != len(Problem._fields) or not all(map(callable, made[1:])):
        raise ConfigError(
            f"learning.workload: expected that {name!r} returns start, gradient and loss, got {made!r}", got=name
        )
    start, gradient, loss = made
    problem = Problem(np.array(start, np.float64), _shaped(name, gradient), _number(name, loss))
    problem.start.flags.writeable = False
    # What is wrong with them is said before anything is simulated.
    problem.gradient(problem.start, 0, 1)
    problem.loss(problem.start)
    return problem


def _number(name: str, loss: Callable[..., Any]) -> Callable[[Floats], float]:
    def number(parameters: Floats) -> float:
        found = loss(parameters)
        if not isinstance(found, (int, float, np.number, np.ndarray)) or np.size(found) != 1:
            raise ConfigError(f"learning.workload: expected that the loss of {name!r} is a number, got {found!r}")
        return float(np.reshape(found, ()))

    return number


def _shaped(name: str, gradient: Callable[..., Any]) -> Callable[[Floats, int, int], Floats]:
    def shaped(parameters: Floats, worker: int, push: int) -> Floats:
        found = np.asarray(gradient(parameters, worker, push), np.float64)
        if found.shape != parameters.shape:
            text = f"learning.workload: {name!r} has parameters of shape {parameters.shape}, its gradient {found.shape}"
            raise ConfigError(text, expected=parameters.shape, got=found.shape)
        return found

    return shaped
