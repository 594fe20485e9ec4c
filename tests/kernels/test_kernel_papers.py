"""Rules against the formulas of their authors, written down once more in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.kernels import Backend, get_backend
from aiokv.optim import (
    DCASGD,
    FTML,
    LAMB,
    LANS,
    LARS,
    SGLD,
    AdaBelief,
    Adam,
    Ftrl,
    GroupAdaGrad,
    Lion,
    Nadam,
    Optimizer,
    Signum,
)

Array = NDArray[Any]
Run = Callable[..., tuple[Array, dict[str, Array]]]
Formula = Callable[[Array, list[Array]], Array]

SIZE = 24


def moments(gradients: list[Array], beta1: float, beta2: float) -> Iterator[tuple[int, Array, Array, Array]]:
    """Yield t, the gradient, and the corrected means of gradients and squares (Kingma & Ba 2015, algorithm 1)."""
    m, v = np.zeros(SIZE), np.zeros(SIZE)
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g**2
        yield t, g, m / (1 - beta1**t), v / (1 - beta2**t)


def adam(w: Array, gradients: list[Array]) -> Array:
    for t, _, m, v in moments(gradients, 0.8, 0.95):
        # Ours is epsilon-hat of their section 2.
        w = w - 0.02 * m / (np.sqrt(v) + 1e-3 / np.sqrt(1 - 0.95**t))
    return w


def nadam_of_dozat(w: Array, gradients: list[Array]) -> Array:
    """Dozat 2016, algorithm 2, with the mu that Keras and MXNet use."""
    mu = [0.9 * (1 - 0.5 * 0.96 ** (t * 0.004)) for t in range(len(gradients) + 2)]
    m, v = np.zeros(SIZE), np.zeros(SIZE)
    for t, g in enumerate(gradients, 1):
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        m_hat = m / (1 - np.prod(mu[1 : t + 2]))
        g_hat = g / (1 - np.prod(mu[1 : t + 1]))
        w = w - 0.01 * ((1 - mu[t]) * g_hat + mu[t + 1] * m_hat) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


def adabelief(w: Array, gradients: list[Array]) -> Array:
    """Zhuang et al. 2020, algorithm 2."""
    m, s = np.zeros(SIZE), np.zeros(SIZE)
    for t, g in enumerate(gradients, 1):
        m = 0.9 * m + 0.1 * g
        s = 0.999 * s + 0.001 * (g - m) ** 2 + 1e-6
        w = w - 0.01 * (m / (1 - 0.9**t)) / (np.sqrt(s / (1 - 0.999**t)) + 1e-6)
    return w


def lion(w: Array, gradients: list[Array]) -> Array:
    """Chen et al. 2023, program 1."""
    m = np.zeros(SIZE)
    for g in gradients:
        w = w - 0.01 * (np.sign(0.9 * m + 0.1 * g) + 0.1 * w)
        m = 0.99 * m + 0.01 * g
    return w


def signum(w: Array, gradients: list[Array]) -> Array:
    """Bernstein et al. 2018, algorithm 2, with the decoupled decay of MXNet."""
    m = np.zeros(SIZE)
    for g in gradients:
        m = 0.9 * m + 0.1 * g
        w = (1 - 0.01 * 0.1) * w - 0.01 * np.sign(m)
    return w


def ftrl(w: Array, gradients: list[Array]) -> Array:
    """McMahan et al. 2013, algorithm 1, with lambda2 = wd."""
    z, n = np.zeros(SIZE), np.zeros(SIZE)
    for g in gradients:
        sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / 0.1
        z = z + g - sigma * w
        n = n + g**2
        w = np.where(np.abs(z) <= 0.2, 0, -1 / ((1 + np.sqrt(n)) / 0.1 + 0.5) * (z - np.sign(z) * 0.2))
    return w


def ftml(w: Array, gradients: list[Array]) -> Array:
    """Zheng & Kwok 2017, algorithm 1."""
    v, d, z = np.zeros(SIZE), np.zeros(SIZE), np.zeros(SIZE)
    for t, g in enumerate(gradients, 1):
        v = 0.999 * v + 0.001 * g**2
        after = (1 - 0.6**t) / 0.01 * (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        sigma = after - 0.6 * d
        z = 0.6 * z + 0.4 * g - sigma * w
        d = after
        w = -z / d
    return w


def lars(w: Array, gradients: list[Array]) -> Array:
    """You et al. 2017, algorithm 1."""
    v = np.zeros(SIZE)
    for g in gradients:
        rate = 0.01 * np.linalg.norm(w) / (np.linalg.norm(g) + 0.05 * np.linalg.norm(w) + 1e-8)
        v = 0.9 * v + 0.5 * rate * (g + 0.05 * w)
        w = w - v
    return w


def lamb(w: Array, gradients: list[Array]) -> Array:
    """You et al. 2020, algorithm 2."""
    for _, _, m, v in moments(gradients, 0.9, 0.999):
        r = m / (np.sqrt(v) + 1e-6) + 0.05 * w
        w = w - 0.01 * np.linalg.norm(w) / np.linalg.norm(r) * r
    return w


def lans(w: Array, gradients: list[Array]) -> Array:
    """Zheng et al. 2020, algorithm 2."""
    for _, g, m, v in moments([g / np.linalg.norm(g) for g in gradients], 0.9, 0.999):
        a = m / (np.sqrt(v) + 1e-6) + 0.05 * w
        b = g / (np.sqrt(v) + 1e-6) + 0.05 * w
        size = np.linalg.norm(w)
        w = w - 0.01 * (0.9 * size / np.linalg.norm(a) * a + 0.1 * size / np.linalg.norm(b) * b)
    return w


def sign_descent(w: Array, gradients: list[Array]) -> Array:
    """Bernstein et al. 2018, algorithm 1."""
    for g in gradients:
        w = w - 0.01 * np.sign(g)
    return w


def lower_bounded_lamb(w: Array, gradients: list[Array]) -> Array:
    """As LAMB, with |w| never less than 100."""
    for _, _, m, v in moments(gradients, 0.9, 0.999):
        r = m / (np.sqrt(v) + 1e-6)
        w = w - 1e-4 * max(float(np.linalg.norm(w)), 100.0) / np.linalg.norm(r) * r
    return w


def bounded_lamb(w: Array, gradients: list[Array]) -> Array:
    """As LAMB, with |w| never more than 0.5 and nothing corrected."""
    m, v = np.zeros(SIZE), np.zeros(SIZE)
    for g in gradients:
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        r = m / (np.sqrt(v) + 1e-6)
        w = w - 0.01 * min(float(np.linalg.norm(w)), 0.5) / np.linalg.norm(r) * r
    return w


FORMULAS: dict[str, tuple[Optimizer, Formula]] = {
    "adam": (Adam(learning_rate=0.02, beta1=0.8, beta2=0.95, epsilon=1e-3), adam),
    "nadam": (Nadam(learning_rate=0.01), nadam_of_dozat),
    "adabelief": (AdaBelief(learning_rate=0.01), adabelief),
    "lion": (Lion(learning_rate=0.01, wd=0.1), lion),
    "signum": (Signum(learning_rate=0.01, wd_lh=0.1), signum),
    "signum without momentum": (Signum(learning_rate=0.01, momentum=0.0), sign_descent),
    "ftrl": (Ftrl(learning_rate=0.1, lamda1=0.2, wd=0.5), ftrl),
    "ftml": (FTML(learning_rate=0.01), ftml),
    "lars": (LARS(learning_rate=0.5, momentum=0.9, eta=0.01, wd=0.05), lars),
    "lamb": (LAMB(learning_rate=0.01, wd=0.05), lamb),
    "lamb within bounds": (LAMB(learning_rate=0.01, upper_bound=0.5, bias_correction=False), bounded_lamb),
    "lamb above a bound": (LAMB(learning_rate=1e-4, lower_bound=100.0), lower_bounded_lamb),
    "lans": (LANS(learning_rate=0.01, wd=0.05), lans),
}


@pytest.fixture(scope="module")
def reference() -> Backend:
    """What all other backends have the bits of."""
    return get_backend("reference")


@pytest.fixture
def start() -> Array:
    return np.random.default_rng(1).normal(size=SIZE)


@pytest.fixture
def gradients() -> list[Array]:
    rng = np.random.default_rng(2)
    return [rng.uniform(0.1, 1, SIZE) * rng.choice([-1, 1], SIZE) for _ in range(50)]


@pytest.mark.parametrize(("dtype", "rtol"), [("float32", 1e-4), ("float64", 1e-10)])
@pytest.mark.parametrize("case", FORMULAS)
def test_fifty_steps_follow_the_formulas_of_the_authors(
    reference: Backend, run: Run, start: Array, gradients: list[Array], case: str, dtype: str, rtol: float
) -> None:
    rule, formula = FORMULAS[case]
    weight, _ = run(reference, rule, start.astype(dtype), [gradient.astype(dtype) for gradient in gradients])
    np.testing.assert_allclose(weight, formula(start, gradients), rtol=rtol, atol=rtol)


def test_dcasgd_compensates_by_the_squares_of_the_gradient(
    reference: Backend, start: Array, gradients: list[Array]
) -> None:
    """Zheng et al. 2017, equation 10."""
    rule = DCASGD(learning_rate=0.1, lamda=0.3, momentum=0.5)
    read, w, m, state = start + 1, start, np.zeros(SIZE), reference.new_state(rule, start)
    weight = start
    for count, g in enumerate(gradients[:5], 1):
        m = 0.5 * m - 0.1 * (g + 0.3 * g * g * (w - read))
        w = w + m
        total = g.copy()
        reference.update(rule, weight, total, state, rule.step_for("w", count=count, num_update=count), read=read)
        weight = total
    np.testing.assert_allclose(weight, w, rtol=1e-13)


def test_langevin_steps_are_half_the_gradient_and_noise(
    reference: Backend, start: Array, gradients: list[Array]
) -> None:
    """Welling & Teh 2011, equation 4: noise that is the same with and without a gradient."""
    rule, totals = SGLD(learning_rate=0.1), [gradients[0].copy(), np.zeros(SIZE)]
    for total in totals:
        reference.update(rule, start, total, {}, rule.step_for("w", count=1, num_update=1))
    np.testing.assert_allclose(totals[0] - totals[1], -0.05 * gradients[0], rtol=1e-10)


def test_a_row_has_one_history(reference: Backend) -> None:
    """Rows (1, 3) and (0, 2): means of squares 5 and 2, then the same again."""
    rule = GroupAdaGrad(learning_rate=0.5, epsilon=0.25)
    weight, g = np.zeros(4), np.array([1.0, 3, 0, 2])
    state = reference.new_state(rule, weight, row_size=2)
    for count, history in ((1, [5, 2]), (2, [10, 4])):
        total = g.copy()
        step = rule.step_for("w", count=count, num_update=count)
        reference.update(rule, weight, total, state, step, row_size=2)
        np.testing.assert_allclose(total, weight - 0.5 * g / (np.sqrt(np.repeat(history, 2)) + 0.25))
        assert state["history"].tolist() == history
        weight = total


def test_the_gradient_is_scaled_then_clipped_then_decayed(
    reference: Backend, run: Run, learning_rule: Optimizer
) -> None:
    """A gradient far over the limit acts as one at the limit."""
    weight = np.array([1.0, -2, 3])
    (huge, _), (limit, _) = (
        run(reference, learning_rule, weight, [np.array([size, -size, size])]) for size in (1e6, 0.4 / 0.3)
    )
    np.testing.assert_allclose(huge, limit, rtol=1e-12)
