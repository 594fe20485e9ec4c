"""Workers that train by themselves for a while and then bring their parameters together: rules of the worker's side.

Servers need to know nothing of them: all that is exchanged are keys of the policies "sum", "bsp" and "asp".
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from aiokv.errors import ClosedError, ConfigError, OptimizerError, SpecMismatchError
from aiokv.kernels import get_backend
from aiokv.optim import PRECISIONS, LearningRule, make_optimizer, rule_to_params
from aiokv.training.parameters import Parameters

if TYPE_CHECKING:
    from collections.abc import Mapping

    from aiokv.arrays import Array
    from aiokv.kvstore import KVStore

STATUS = "aiokv.local_sgd.status"
"""The key by which workers learn how many of them have made steps since the last average, and how many go on."""

BETA = 0.9
"""How far the center moves to the mean of the workers in one exchange of all of them: what Zhang et al. 2015 use."""


class LocalSGD:
    """Averages the parameters of all workers after every so many steps that each has made alone.

    Local SGD (Stich 2019), with any optimizer for the local steps. With an outer optimizer it is DiLoCo (Douillard et
    al. 2023): the servers take the mean of what the workers have moved by as a gradient, and make a step of their own.
    Its numbers there: every 500 steps, "nag" with learning_rate 0.7 and momentum 0.9.

    All workers make it with the same arguments and begin with the values of rank 0. Sums are made in the order of the
    ranks, so that all workers have the same bits after every average, and in every run. Between averages the keys hold
    the parameters of the last one: they can be pulled and saved.

    Args:
        store: a store; rounds are those of all its workers, whatever its type.
        params: by name, float arrays of NumPy or tensors with DLPack, such as PyTorch's, in the host's memory or on
            devices; they are updated in place. A list of tensors are replicas of one parameter: the first one counts,
            and all are updated.
        every: how many steps a worker makes alone, H.
        outer_optimizer: the name of the servers' update rule, see `aiokv.optim`; None: the mean becomes the new value.
            There is one rule for all keys of a cluster but those of the policy "sum".
        outer_params: the rule's parameters.
        timeout: seconds that an exchange may take. It has to be more than workers are apart after `every` steps.
            Default: `Config.call_timeout`.

    Raises:
        ConfigError: `every` is less than 1.
        KeyUseError, SpecMismatchError: a parameter can't be averaged.
        OptimizerError: unknown rule, one without a learning rate, a wrong parameter, or another rule is set.
        AlreadyInitializedError: the store has one of the names already, with another value.
    """

    def __init__(
        self,
        store: KVStore,
        params: Mapping[str, Any],
        *,
        every: int,
        outer_optimizer: str | None = None,
        outer_params: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        self._store = store
        self._params = _of_floats(params)
        self._every = check_every(every)
        self._timeout = timeout
        self._local_steps = 0
        self._finished = False
        self._anchor: dict[str, Array] = {}
        """With an outer optimizer: the parameters that the local steps have begun with."""
        outer = _outer_rule(outer_optimizer, outer_params)
        store.init(self._params.weights, policy="sum" if outer is None else "bsp", timeout=timeout)
        # Integers: no codec touches them.
        store.init(STATUS, np.zeros(2, np.int64), policy="sum", timeout=timeout)
        self._has_outer = outer is not None
        if outer is not None:
            store.set_optimizer(outer.name, timeout=timeout, **rule_to_params(outer))
        self.pull()

    def pull(self) -> None:
        """Go on from the values on the servers, as after `load` of the store; local steps are forgotten."""
        self._store.pull(self._params.weights, timeout=self._timeout)
        self._params.spread()
        self._begin()

    def step(self) -> bool:
        """Take note of one local step that was made; after `every` of them, average.

        Returns:
            Whether the parameters were averaged.

        Raises:
            ClosedError: this worker has finished.
        """
        if self._finished:
            raise ClosedError("this worker has called finish(): it makes no more steps")
        self._local_steps += 1
        if self._local_steps < self._every:
            return False
        self._synchronize(goes_on=True)
        return True

    def finish(self) -> None:
        """Make no more steps; returns when all workers have finished, with the same parameters on all of them.

        Every worker calls it, however many steps it has made. Steps since the last average count in the next one, and
        this worker receives the averages that the others still make. Can be called twice.
        """
        while not self._finished:
            self._finished = not self._synchronize(goes_on=False)

    def _synchronize(self, *, goes_on: bool) -> bool:
        """Average if any worker has made steps, and say whether any worker goes on."""
        status = np.array([self._local_steps > 0, goes_on], np.int64)
        contributors, going_on = map(int, self._store.pushpull(STATUS, status, timeout=self._timeout))
        # An outer optimizer with momentum would move on without any step.
        if contributors:
            self._params.fetch()
            weights = self._params.weights
            shares = {name: self._share(name, value, contributors) for name, value in weights.items()}
            self._store.pushpull(shares, out=weights, timeout=self._timeout)
            self._params.spread()
            self._begin()
        return going_on > 0

    def _share(self, name: str, value: Array, contributors: int) -> Array:
        """Return this worker's part of a mean. It is divided before the sum, so that the servers hold the mean."""
        if not self._local_steps:
            return np.zeros_like(value)
        moved = self._anchor[name] - value if self._has_outer else value
        return _like(moved / contributors, value)

    def _begin(self) -> None:
        """Begin anew to make local steps."""
        self._local_steps = 0
        if self._has_outer:
            self._anchor = {name: value.copy() for name, value in self._params.weights.items()}


class ElasticAveraging:
    """Ties the parameters of each worker to a center on the servers, and lets them explore round it.

    EASGD (Zhang, Choromanska & LeCun 2015). After every so many local steps of worker i, with any optimizer::

        d = alpha * (x_i - center);  x_i = x_i - d;  center = center + d

    No worker waits for another one. The result of a training is the center: see `center`. All workers make it with the
    same arguments. They begin at the center, and that with the values of rank 0. The servers' update rule becomes
    "accumulate", for all keys of the cluster but those of the policy "sum".

    Args:
        store: a store, whatever its type.
        params: by name, float arrays of NumPy or tensors with DLPack, such as PyTorch's, in the host's memory or on
            devices; they are updated in place. A list of tensors are replicas of one parameter: the first one counts,
            and all are updated.
        every: how many steps a worker makes between two exchanges, tau.
        alpha: how far a worker and the center move to each other, more than 0 and at most 1; 0.9 divided by the number
            of workers when not given, as in the paper.
        synchronous: all workers exchange at the same time, with the same center: the same bits in every run. A worker
            without more steps calls `finish` of the store, so that the others do not wait for it.
        timeout: seconds that an exchange may take; `Config.call_timeout` when not given.

    Raises:
        ConfigError: `every` or `alpha` can't be.
        KeyUseError, SpecMismatchError: a parameter can't be averaged.
        OptimizerError: another rule is set.
        AlreadyInitializedError: the store has one of the names already, with another value.
    """

    def __init__(
        self,
        store: KVStore,
        params: Mapping[str, Any],
        *,
        every: int,
        alpha: float | None = None,
        synchronous: bool = False,
        timeout: float | None = None,
    ) -> None:
        self._store = store
        self._params = _of_floats(params)
        self._every = check_every(every)
        self._alpha = _check_alpha(BETA / store.num_workers if alpha is None else alpha)
        self._timeout = timeout
        self._local_steps = 0
        store.init(self._params.weights, policy="bsp" if synchronous else "asp", timeout=timeout)
        store.set_optimizer("accumulate", timeout=timeout)
        store.pull(self._params.weights, timeout=timeout)
        self._params.spread()

    def step(self) -> bool:
        """Take note of one local step that was made; after `every` of them, exchange with the center.

        Returns:
            Whether there was an exchange.
        """
        self._local_steps += 1
        if self._local_steps < self._every:
            return False
        self._local_steps = 0
        center = self.center()
        self._params.fetch()
        weights = self._params.weights
        pulls = {name: _like(self._alpha * (x - center[name]), x) for name, x in weights.items()}
        self._store.push(pulls, timeout=self._timeout)
        for name, x in weights.items():
            np.subtract(x, pulls[name], out=x)
        self._params.spread()
        return True

    def center(self) -> dict[str, Array]:
        """Return copies of the center's parameters, by name."""
        center = {name: np.empty_like(value) for name, value in self._params.weights.items()}
        self._store.pull(center, timeout=self._timeout)
        return center


def _of_floats(params: Mapping[str, Any]) -> Parameters:
    """Return the parameters, which can be written.

    Raises:
        KeyUseError: there are none, or a name is no text.
        SpecMismatchError: one can't be written, or does not hold floats.
        ConfigError, MissingExtraError: one lies on a device, and it or its packages can't be used.
    """
    found = Parameters(params, get_backend("reference"))
    for name, array in found.weights.items():
        if array.dtype.name not in PRECISIONS:
            raise SpecMismatchError(
                f"{name!r}: expected floats, which have a mean, got {array.dtype}",
                key=name,
                expected="float",
                got=array.dtype.name,
            )
    return found


def _like(array: Array, other: Array) -> Array:
    """Return an array in the dtype of another one: arithmetic may lead away from low precisions, and from arrays."""
    return np.asarray(array, other.dtype)


def check_every(every: int) -> int:
    """Return how many steps lie between two exchanges.

    Raises:
        ConfigError: it is less than 1.
    """
    if every < 1:
        raise ConfigError(f"every must be at least 1, got {every!r}", key="every", expected="at least 1", got=every)
    return every


def _check_alpha(alpha: float) -> float:
    if not 0 < alpha <= 1:
        expected = "more than 0 and at most 1"
        raise ConfigError(f"alpha must be {expected}, got {alpha!r}", key="alpha", expected=expected, got=alpha)
    return float(alpha)


def _outer_rule(name: str | None, params: Mapping[str, Any] | None) -> LearningRule | None:
    if name is None:
        if params:
            raise OptimizerError("outer_params are those of a rule: name it as outer_optimizer")
        return None
    rule = make_optimizer(name, params or {})
    if not isinstance(rule, LearningRule):
        raise OptimizerError(f"outer optimizer {name!r} does not descend: it has no learning rate", got=name)
    return rule
