"""The arithmetic of every update rule, written once.

Each function here is called with whole NumPy arrays by `reference`, and element by element in one loop by `cpu` and
`cuda`, which compile it. The operations and their order are the same, so the bits are. A few rules keep that so:

- only + - * /, comparisons, `abs`, `sqrt` and `where`, which every backend rounds alike, and functions of this module;
- no literals: a number such as 1.0 has the precision of the computation, so it is a parameter;
- parameters are the weight `w`, the gradient `g`, then arrays, then numbers, by the names that the rule gives them;
- a rule returns the new weight and then what it keeps, in the order of the rule's `keeps`;
- nothing is written in place.
"""

# ruff: noqa: PLR0913, PLR0917 - a formula has as many numbers as it has, and only kernels call it

from __future__ import annotations

from typing import Any

from numpy import sqrt, where

X = Any
"""An array, or one element of it."""


# --- the gradient ---


def scaled(g: X, rescale_grad: X) -> X:
    """Return the sum as a gradient."""
    return rescale_grad * g


def clipped(g: X, clip_gradient: X) -> X:
    """Limit the size of an element; NaN stays NaN."""
    return where(g > clip_gradient, clip_gradient, where(g < -clip_gradient, -clip_gradient, g))


def decayed(g: X, w: X, wd: X) -> X:
    """Add weight decay."""
    return g + wd * w


# --- parts of rules ---


def sign(x: X, zero: X, one: X) -> X:
    """Return 1, -1 or, where it is 0 or NaN, x."""
    return where(x > zero, one, where(x < zero, -one, x))


def mean_of(mean: X, x: X, kept: X, rest: X) -> X:
    """Return a moving mean with x in it."""
    return kept * mean + rest * x


def add_square(total: X, x: X) -> X:
    """Add a square to a sum, both in float64."""
    return total + x * x


# --- following the gradient ---


def accumulate(w: X, g: X) -> tuple[X, ...]:
    """See `aiokv.optim.Accumulate`."""
    return (w + g,)


def sgd(w: X, g: X, learning_rate: X) -> tuple[X, ...]:
    """See `aiokv.optim.SGD`."""
    return (w - learning_rate * g,)


def sgd_with_momentum(w: X, g: X, momentum: X, learning_rate: X, decay: X) -> tuple[X, ...]:
    """See `aiokv.optim.SGD`."""
    momentum = decay * momentum - learning_rate * g
    return w + momentum, momentum


def nag_with_momentum(w: X, g: X, momentum: X, learning_rate: X, decay: X) -> tuple[X, ...]:
    """See `aiokv.optim.NAG`."""
    step = learning_rate * g
    momentum = decay * momentum - step
    return w + (decay * momentum - step), momentum


def sgld(w: X, g: X, noise: X, half_rate: X, deviation: X) -> tuple[X, ...]:
    """See `aiokv.optim.SGLD`."""
    return (w - half_rate * g + deviation * noise,)


def signum(w: X, g: X, learning_rate: X, left: X, zero: X, one: X) -> tuple[X, ...]:
    """See `aiokv.optim.Signum`."""
    return (left * w - learning_rate * sign(g, zero, one),)


def signum_with_momentum(
    w: X, g: X, momentum: X, learning_rate: X, left: X, decay: X, rest: X, zero: X, one: X
) -> tuple[X, ...]:
    """See `aiokv.optim.Signum`."""
    momentum = decay * momentum - rest * g
    return left * w + learning_rate * sign(momentum, zero, one), momentum


def compensated(w: X, g: X, read: X, lamda: X) -> X:
    """Return the gradient as it would be where the weight is now, by the first term of Taylor's series."""
    return g + lamda * (g * g) * (w - read)


def compensation(w: X, g: X, read: X, lamda: X) -> tuple[X, ...]:
    """See `aiokv.kernels.Backend.compensate`."""
    return (compensated(w, g, read, lamda),)


def dcasgd(w: X, g: X, read: X, learning_rate: X, lamda: X) -> tuple[X, ...]:
    """See `aiokv.optim.DCASGD`."""
    return (w - learning_rate * compensated(w, g, read, lamda),)


def dcasgd_with_momentum(w: X, g: X, momentum: X, read: X, learning_rate: X, decay: X, lamda: X) -> tuple[X, ...]:
    """See `aiokv.optim.DCASGD`."""
    momentum = decay * momentum - learning_rate * compensated(w, g, read, lamda)
    return w + momentum, momentum


def lion(
    w: X, g: X, mean: X, learning_rate: X, wd: X, beta1: X, rest1: X, beta2: X, rest2: X, zero: X, one: X
) -> tuple[X, ...]:
    """See `aiokv.optim.Lion`."""
    direction = sign(mean_of(mean, g, beta1, rest1), zero, one)
    return w - learning_rate * (direction + wd * w), mean_of(mean, g, beta2, rest2)


# --- adam and its family ---


def adam(
    w: X, g: X, mean: X, variance: X, rate: X, beta1: X, rest1: X, beta2: X, rest2: X, epsilon: X
) -> tuple[X, ...]:
    """See `aiokv.optim.Adam`."""
    mean = mean_of(mean, g, beta1, rest1)
    variance = mean_of(variance, g * g, beta2, rest2)
    return w - rate * mean / (sqrt(variance) + epsilon), mean, variance


def adamw(
    w: X, g: X, mean: X, variance: X, rate: X, root: X, shrink: X, beta1: X, rest1: X, beta2: X, rest2: X, epsilon: X
) -> tuple[X, ...]:
    """See `aiokv.optim.AdamW`."""
    mean = mean_of(mean, g, beta1, rest1)
    variance = mean_of(variance, g * g, beta2, rest2)
    return w - shrink * w - rate * mean / (sqrt(variance) / root + epsilon), mean, variance


def adamax(w: X, g: X, mean: X, largest: X, rate: X, beta1: X, rest1: X, beta2: X, epsilon: X) -> tuple[X, ...]:
    """See `aiokv.optim.Adamax`."""
    mean = mean_of(mean, g, beta1, rest1)
    size, before = abs(g), beta2 * largest
    # NaN is the larger of two numbers.
    largest = where(before > size, before, size)
    return w - rate * mean / (largest + epsilon), mean, largest


def nadam(
    w: X,
    g: X,
    mean: X,
    variance: X,
    rate_now: X,
    rate_mean: X,
    root: X,
    beta1: X,
    rest1: X,
    beta2: X,
    rest2: X,
    epsilon: X,
) -> tuple[X, ...]:
    """See `aiokv.optim.Nadam`."""
    mean = mean_of(mean, g, beta1, rest1)
    variance = mean_of(variance, g * g, beta2, rest2)
    return w - (rate_now * g + rate_mean * mean) / (sqrt(variance) / root + epsilon), mean, variance


def adabelief(
    w: X, g: X, mean: X, variance: X, rate: X, root: X, beta1: X, rest1: X, beta2: X, rest2: X, epsilon: X
) -> tuple[X, ...]:
    """See `aiokv.optim.AdaBelief`."""
    mean = mean_of(mean, g, beta1, rest1)
    off = g - mean
    variance = mean_of(variance, off * off, beta2, rest2) + epsilon
    return w - rate * mean / (sqrt(variance) / root + epsilon), mean, variance


# --- scaled by history ---


def adagrad(w: X, g: X, history: X, learning_rate: X, epsilon: X) -> tuple[X, ...]:
    """See `aiokv.optim.AdaGrad`."""
    history = history + g * g
    return w - learning_rate * g / (sqrt(history) + epsilon), history


def groupadagrad(w: X, g: X, row_history: X, learning_rate: X, epsilon: X) -> tuple[X, ...]:
    """See `aiokv.optim.GroupAdaGrad`."""
    return (w - learning_rate * g / (sqrt(row_history) + epsilon),)


def adadelta(w: X, g: X, squares: X, steps: X, learning_rate: X, rho: X, rest: X, epsilon: X) -> tuple[X, ...]:
    """See `aiokv.optim.AdaDelta`."""
    squares = mean_of(squares, g * g, rho, rest)
    step = sqrt(steps + epsilon) / sqrt(squares + epsilon) * g
    return w - learning_rate * step, squares, mean_of(steps, step * step, rho, rest)


def rmsprop(w: X, g: X, squares: X, learning_rate: X, rho: X, rest: X, epsilon: X) -> tuple[X, ...]:
    """See `aiokv.optim.RMSProp`."""
    squares = mean_of(squares, g * g, rho, rest)
    return w - learning_rate * g / (sqrt(squares) + epsilon), squares


def rmsprop_with_momentum(
    w: X, g: X, squares: X, momentum: X, learning_rate: X, rho: X, rest: X, decay: X, epsilon: X
) -> tuple[X, ...]:
    """See `aiokv.optim.RMSProp`."""
    squares = mean_of(squares, g * g, rho, rest)
    momentum = decay * momentum - learning_rate * g / (sqrt(squares) + epsilon)
    return w + momentum, squares, momentum


def spread(squares: X, mean: X, zero: X) -> X:
    """Return the standard deviation; rounding must not make it the root of less than 0."""
    variance = squares - mean * mean
    return sqrt(where(variance < zero, zero, variance))


def rmsprop_centered(
    w: X, g: X, squares: X, mean: X, learning_rate: X, rho: X, rest: X, epsilon: X, zero: X
) -> tuple[X, ...]:
    """See `aiokv.optim.RMSProp`."""
    squares = mean_of(squares, g * g, rho, rest)
    mean = mean_of(mean, g, rho, rest)
    return w - learning_rate * g / (spread(squares, mean, zero) + epsilon), squares, mean


def rmsprop_centered_with_momentum(
    w: X, g: X, squares: X, mean: X, momentum: X, learning_rate: X, rho: X, rest: X, decay: X, epsilon: X, zero: X
) -> tuple[X, ...]:
    """See `aiokv.optim.RMSProp`."""
    squares = mean_of(squares, g * g, rho, rest)
    mean = mean_of(mean, g, rho, rest)
    momentum = decay * momentum - learning_rate * g / (spread(squares, mean, zero) + epsilon)
    return w + momentum, squares, mean, momentum


# --- following a leader ---


def ftrl(w: X, g: X, leader: X, squares: X, learning_rate: X, wd: X, lamda1: X, beta: X, zero: X) -> tuple[X, ...]:
    """See `aiokv.optim.Ftrl`."""
    before, squares = sqrt(squares), squares + g * g
    after = sqrt(squares)
    leader = leader + g - (after - before) / learning_rate * w
    # -sign(z) * max(|z| - lamda1, 0)
    pull = where(leader > lamda1, lamda1 - leader, where(leader < -lamda1, -lamda1 - leader, zero * leader))
    return pull / ((beta + after) / learning_rate + wd), leader, squares


def ftml(
    w: X,
    g: X,
    variance: X,
    scale: X,
    leader: X,
    learning_rate: X,
    first: X,
    root: X,
    beta1: X,
    rest1: X,
    beta2: X,
    rest2: X,
    epsilon: X,
) -> tuple[X, ...]:
    """See `aiokv.optim.FTML`."""
    variance = mean_of(variance, g * g, beta2, rest2)
    before, scale = scale, first / learning_rate * (sqrt(variance) / root + epsilon)
    leader = mean_of(leader, g, beta1, rest1) - (scale - beta1 * before) * w
    return -leader / scale, variance, scale, leader


# --- scaled by norms: each `..._norms_n` returns what is squared and summed in phase n ---


def lars_norms_0(w: X, g: X) -> tuple[X, ...]:
    """See `aiokv.optim.LARS`."""
    return w, g


def direction(x: X, variance: X, w: X, root: X, epsilon: X, wd: X) -> X:
    """Return a step of Adam with decay."""
    return x / (sqrt(variance) / root + epsilon) + wd * w


def lamb_norms_0(
    w: X, g: X, mean: X, variance: X, first: X, root: X, wd: X, beta1: X, rest1: X, beta2: X, rest2: X, epsilon: X
) -> tuple[X, ...]:
    """See `aiokv.optim.LAMB`."""
    mean = mean_of(mean, g, beta1, rest1)
    variance = mean_of(variance, g * g, beta2, rest2)
    return w, direction(first * mean, variance, w, root, epsilon, wd)


def lamb(
    w: X,
    g: X,
    mean: X,
    variance: X,
    rate: X,
    first: X,
    root: X,
    wd: X,
    beta1: X,
    rest1: X,
    beta2: X,
    rest2: X,
    epsilon: X,
) -> tuple[X, ...]:
    """See `aiokv.optim.LAMB`."""
    mean = mean_of(mean, g, beta1, rest1)
    variance = mean_of(variance, g * g, beta2, rest2)
    return w - rate * direction(first * mean, variance, w, root, epsilon, wd), mean, variance


def lans_norms_0(g: X) -> tuple[X, ...]:
    """See `aiokv.optim.LANS`."""
    return (g,)


def lans_norms_1(
    w: X,
    g: X,
    mean: X,
    variance: X,
    scale: X,
    first: X,
    root: X,
    wd: X,
    beta1: X,
    rest1: X,
    beta2: X,
    rest2: X,
    epsilon: X,
) -> tuple[X, ...]:
    """See `aiokv.optim.LANS`."""
    own = scale * g
    mean = mean_of(mean, own, beta1, rest1)
    variance = mean_of(variance, own * own, beta2, rest2)
    return (
        w,
        direction(first * mean, variance, w, root, epsilon, wd),
        direction(own, variance, w, root, epsilon, wd),
    )


def lans(
    w: X,
    g: X,
    mean: X,
    variance: X,
    scale: X,
    rate_mean: X,
    rate_own: X,
    first: X,
    root: X,
    wd: X,
    beta1: X,
    rest1: X,
    beta2: X,
    rest2: X,
    epsilon: X,
) -> tuple[X, ...]:
    """See `aiokv.optim.LANS`."""
    own = scale * g
    mean = mean_of(mean, own, beta1, rest1)
    variance = mean_of(variance, own * own, beta2, rest2)
    towards_mean = rate_mean * direction(first * mean, variance, w, root, epsilon, wd)
    towards_own = rate_own * direction(own, variance, w, root, epsilon, wd)
    return w - towards_mean - towards_own, mean, variance
