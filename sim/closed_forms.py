"""What is known on paper, to compare the simulator with. Times are in units of the arguments; sources are named."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable


def harmonic(n: int) -> float:
    """Return 1 + 1/2 + ... + 1/n: the mean of the largest of n exponential times with mean 1 (Renyi 1953)."""
    return math.fsum(1.0 / i for i in range(1, n + 1))


def deviation_of_largest(n: int) -> float:
    """Return the standard deviation of the largest of n exponential times with mean 1 (Renyi 1953)."""
    return math.sqrt(math.fsum(1.0 / i**2 for i in range(1, n + 1)))


def exponential_with_slow(n: int, factor: float) -> float:
    """Return the mean of the largest of n - 1 exponential times with mean 1 and one with mean `factor`."""
    m = n - 1
    rate = 1.0 / factor
    beta = math.gamma(rate) * math.gamma(n) / math.gamma(n + rate)
    return harmonic(m) + beta


def mean_of_largest(n: int, cdf: Callable[[float], float], end: float, points: int = 20_001) -> float:
    """Return the mean of the largest of n independent positive times: the integral of 1 - F(t)^n.

    Args:
        n: how many.
        cdf: F, their distribution function.
        end: a time after which F is 1, as far as it matters.
        points: at how many times F is evaluated.
    """
    times = np.linspace(0.0, end, points)
    missing = 1.0 - np.array([cdf(float(time)) for time in times]) ** n
    return float(np.trapezoid(missing, times))


def normal_cdf(mean: float, sd: float) -> Callable[[float], float]:
    """Return the distribution function of a normal time."""
    return lambda t: 0.5 * math.erfc((mean - t) / (sd * math.sqrt(2.0)))


def erlang_cdf(phases: int) -> Callable[[float], float]:
    """Return the distribution function of a sum of so many exponential times with mean 1."""

    def cdf(t: float) -> float:
        terms = [1.0]
        for i in range(1, phases):
            terms.append(terms[-1] * t / i)
        return 1.0 - math.exp(-t) * math.fsum(terms)

    return cdf


def at_most_late(n: int, most: int, late: float) -> float:
    """Return the probability that at most so many of n are late, each by itself with a probability."""
    return math.fsum(math.comb(n, i) * late**i * (1.0 - late) ** (n - i) for i in range(most + 1))


def at_most_late_together(n: int, most: int, a: float, b: float) -> float:
    """Return the same when the probability follows a beta distribution, equal for all n: they are late together."""

    def beta(x: float, y: float) -> float:
        return math.lgamma(x) + math.lgamma(y) - math.lgamma(x + y)

    return math.fsum(math.comb(n, i) * math.exp(beta(i + a, n - i + b) - beta(a, b)) for i in range(most + 1))


def closed_queue(customers: int, think: float, service: float) -> tuple[float, float]:
    """Return throughput and response time of a closed system with one exponential server.

    Exact mean value analysis (Reiser and Lavenberg 1980).

    Args:
        customers: how many there are.
        think: mean seconds that each spends elsewhere.
        service: mean seconds of a service.
    """
    queue = throughput = response = 0.0
    for n in range(1, customers + 1):
        response = service * (1.0 + queue)
        throughput = n / (think + response)
        queue = throughput * response
    return throughput, response


def open_queue(load: float, scv: float) -> float:
    """Return the mean time in an M/G/1 queue, in service times (Pollaczek 1930, Khinchin 1932).

    Args:
        load: arrivals in a mean service time, below 1.
        scv: squared coefficient of variation of the service time: 1 exponential, 0 constant.
    """
    return 1.0 + load * (1.0 + scv) / (2.0 * (1.0 - load))


def push_time(nbytes: float, bandwidth: float, workers: int, servers: int) -> float:
    """Return the seconds in which all workers push so many bytes each, spread evenly over the servers."""
    return max(nbytes / bandwidth, workers * nbytes / (servers * bandwidth))


def young(cost: float, mtbf: float) -> float:
    """Return the best time between checkpoints to first order (Young 1974)."""
    return math.sqrt(2.0 * cost * mtbf)


def daly(cost: float, mtbf: float) -> float:
    """Return the best time between checkpoints to higher order (Daly 2006, equation 37)."""
    root = math.sqrt(cost / (2.0 * mtbf))
    return young(cost, mtbf) * (1.0 + root / 3.0 + root**2 / 9.0) - cost


def efficiency(interval: float, cost: float, mtbf: float, restart: float) -> float:
    """Return the share of time that is useful, with exponential failures also while saving and restarting (Daly 2006).

    Args:
        interval: seconds of work between checkpoints.
        cost: seconds of a checkpoint.
        mtbf: mean seconds between failures.
        restart: seconds from a failure until work goes on.
    """
    return interval / (mtbf * math.exp(restart / mtbf) * math.expm1((interval + cost) / mtbf))


def at_least_up(nodes: int, wanted: int, availability: float) -> float:
    """Return the probability that at least so many of independent nodes are up."""
    return math.fsum(
        math.comb(nodes, up) * availability**up * (1.0 - availability) ** (nodes - up)
        for up in range(wanted, nodes + 1)
    )


def delayed_descent_limit(staleness: int) -> float:
    """Return the rate times curvature below which gradient descent with a constant delay is stable.

    The roots of z^(d+1) - z^d + r lie in the unit circle (Levin and May 1976).
    """
    return 2.0 * math.sin(math.pi / (2.0 * (2.0 * staleness + 1.0)))


def heavy_ball(workers: int, rate: float, updates: int) -> float:
    """Return the mean of x after so many asynchronous updates on x^2/2 from x = 1, with exponential workers.

    Asynchrony acts as momentum 1 - 1/N with a step of rate/N (Mitliagkas and others 2016).
    """
    # All workers have read the beginning, so the first step is a whole one.
    before, x = 1.0 + rate, 1.0
    for _ in range(updates):
        before, x = x, x + (1.0 - 1.0 / workers) * (x - before) - rate / workers * x
    return x


def noise_floor(rate: float, curvature: float, deviation: float, batch: int) -> float:
    """Return the variance at which stochastic gradient descent on a x^2/2 stays (Mandt and others 2017).

    Args:
        rate: the learning rate.
        curvature: a.
        deviation: standard deviation of one gradient.
        batch: how many gradients are averaged.
    """
    return rate * deviation**2 / (curvature * batch * (2.0 - rate * curvature))


# --- policies ---


def first_exponential(n: int, k: int) -> float:
    """Return the mean of the k-th smallest of n exponential times with mean 1: H_n - H_(n-k) (Renyi 1953)."""
    return harmonic(n) - harmonic(n - k)


def first_pareto(n: int, k: int, shape: float, moment: int = 1) -> float:
    """Return a moment of the k-th smallest of n Pareto times with minimum 1 (Huang 1975).

    It is finite if n - k + 1 is more than moment/shape.
    """
    rest, power = n - k + 1, moment / shape
    return math.exp(math.lgamma(n + 1) - math.lgamma(rest) + math.lgamma(rest - power) - math.lgamma(n + 1 - power))


def best_first(n: int, shift: float) -> int:
    """Return the k for which k of n workers make most gradients a second, with times shift + exponential(1)."""
    return max(range(1, n + 1), key=lambda k: k / (shift + first_exponential(n, k)))


def coded_round(n: int, spare: int, shift: float, scale: float) -> float:
    """Return the mean time of a round with gradient coding whose delays do not grow with the work.

    Every worker computes spare + 1 of the n parts and sends one sum, and any n - spare sums give the whole gradient
    (Tandon and others 2017).

    Args:
        n: workers, and parts.
        spare: how many workers a round does not wait for.
        shift: time that one part takes.
        scale: mean of the exponential delay of a worker.
    """
    return (spare + 1) * shift + scale * first_exponential(n, n - spare)


def coded_round_in_proportion(n: int, spare: int, shift: float, scale: float) -> float:
    """Return the same where each part takes shift + exponential(scale), equal for all parts of a worker."""
    return (spare + 1) * (shift + scale * first_exponential(n, n - spare))


def stale_pair(fast: float, slow: float, bound: int) -> tuple[float, float]:
    """Return steps a second of each of two exponential workers under SSP, and how often the fast one is blocked.

    The lead is a birth-death chain from -m to m, with m = bound + 1: at either end one of them waits.

    Args:
        fast: rate of one.
        slow: rate of the other.
        bound: of SSP.
    """
    most = bound + 1
    weights = [(fast / slow) ** lead for lead in range(-most, most + 1)]
    blocked = weights[-1] / math.fsum(weights)
    return fast * (1.0 - blocked), blocked
