"""Workloads: real gradients under simulated updates, compared with arithmetic by hand, papers and torch."""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner

from aiokv.errors import ConfigError, MissingExtraError
from aiokv.kernels.robust import combine
from aiokv.optim import make_optimizer
from sim import cli
from sim.assertions import broken_assertions
from sim.cluster import simulate
from sim.compute import Constant, Exponential
from sim.faults import Poison
from sim.files import write_files
from sim.learning import curve_of, learned
from sim.page import page
from sim.problems import load_digits, make_problem
from sim.report import mean, standard_error, summarise
from sim.scenario import load_scenario, parse_scenario
from sim.sections import LearningSection, StopSection
from sim.updating import Updater, robust

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from sim.record import Run
    from sim.scenario import Scenario


@pytest.fixture
def learn(make_scenario: Callable[..., Scenario]) -> Callable[..., Run]:
    """Return a function that runs a quadratic on equal workers that take a second for each step."""

    def run(policy: str, workers: int, steps: int, rate: float, **fields: Any) -> Run:
        section = LearningSection(
            workload=fields.pop("workload", "quadratic"),
            params={"learning_rate": rate, **fields.pop("params", {})},
            **{name: fields.pop(name) for name in list(fields) if name in LearningSection.__struct_fields__},
        )
        law, seed = fields.pop("law", Constant(mean=1.0)), fields.pop("seed", 1)
        return simulate(make_scenario(workers, steps, law, learning=section, **fields), policy, seed)

    return run


# --- the order and the age of gradients ---


def test_descent_without_staleness_shrinks_the_loss_by_the_same_factor_each_time(learn: Callable[..., Run]) -> None:
    losses = curve_of(learn("bsp", 3, 20, 0.1)).losses
    assert losses == pytest.approx([0.5 * 0.9 ** (2 * n) for n in range(21)])


@pytest.mark.parametrize(("workers", "limit"), [(2, 1.0), (4, 0.445042), (8, 0.209057)])
def test_descent_with_a_delay_is_stable_below_the_known_rate_only(
    learn: Callable[..., Run], workers: int, limit: float
) -> None:
    """2 sin(pi / (2 (2 tau + 1))) for the staleness tau = workers - 1 (Levin and May 1976)."""
    below, above = (curve_of(learn("asp", workers, 1600 // workers, part * limit)).losses for part in (0.97, 1.03))
    assert max(below[-100:]) < 0.5 * max(below[200:300])
    assert max(above[-100:]) > 2.0 * max(above[200:300])


def test_asynchrony_begets_momentum(learn: Callable[..., Run]) -> None:
    """Mitliagkas and others 2016: the mean path of 16 workers with rate 0.1 is that of momentum 15/16."""
    stop = StopSection(updates=10, departures=False)
    values = [
        curve_of(learn("asp", 16, 10, 0.1, law=Exponential(mean=1.0), stop=stop, seed=seed)).parameters[0]
        for seed in range(80)
    ]
    assert abs(np.mean(values) - 0.088654) < 3.0 * np.std(values, ddof=1) / math.sqrt(len(values))


def test_noise_keeps_the_loss_at_the_known_floor(learn: Callable[..., Run]) -> None:
    """The variance of x is eta / (B (2 - eta)) = 0.006579 for rate 0.1 and 8 gradients (Mandt and others 2017)."""
    losses = curve_of(learn("bsp", 8, 2500, 0.1, noise=1.0)).losses[100:]
    # Squares of x are correlated by 0.81 from update to update: 2400 of them are as good as 250.
    assert np.mean(losses) == pytest.approx(0.006579 / 2.0, rel=3.0 * math.sqrt(2.0 / 250.0))


@pytest.mark.parametrize(
    ("rate", "expected"),
    [
        ("1", [1.0, 0.9, 0.8, 0.71]),
        ("1/max(1,tau)", [1.0, 0.9, 0.8, 0.71]),
        ("1/(1+tau)", [1.0, 0.9, 0.85, 0.805]),
    ],
)
def test_two_workers_by_hand(learn: Callable[..., Run], rate: str, expected: list[float]) -> None:
    # The first gradient is fresh, all others are one version old.
    losses = curve_of(learn("asp", 2, 2, 0.1, staleness_rate=rate)).losses
    assert losses[:4] == pytest.approx([x * x / 2.0 for x in expected])


@pytest.mark.parametrize(("reduction", "factor"), [("mean", 0.9), ("sum", 0.6), ("mean_of_world", 0.9)])
def test_what_becomes_of_the_gradients_of_an_update(learn: Callable[..., Run], reduction: str, factor: float) -> None:
    assert curve_of(learn("bsp", 4, 2, 0.1, reduction=reduction)).parameters[0] == pytest.approx(factor**2)


def test_delay_is_compensated_by_hand(learn: Callable[..., Run]) -> None:
    # x falls by 0.1 (g + g g (x - read) / 2), where g = read: 1 at first, then 1 once more, then 0.9.
    curve = curve_of(learn("asp", 2, 2, 0.1, optimizer="dcasgd", params={"lamda": 0.5}))
    assert curve.losses[:4] == pytest.approx([x * x / 2.0 for x in (1.0, 0.9, 0.805, 0.7188475)])


def test_delays_of_several_gradients_of_an_update_are_compensated_by_hand(learn: Callable[..., Run]) -> None:
    # Worker 0 comes first and goes on with what there is, worker 1 closes the round and reads what it has made.
    run = learn("k_batch_async:2", 2, 3, 0.1, optimizer="dcasgd", params={"lamda": 0.5})
    assert [update.staleness for update in run.updates] == [[0, 0], [1, 0], [1, 0]]
    # The mean of 1 + (0.9 - 1) / 2 and 0.9, then that of 0.9 + 0.81 (0.8075 - 0.9) / 2 and 0.8075.
    x = [1.0, 0.9, 0.9 - 0.0925, 0.8075 - 0.083501875]
    assert curve_of(run).losses == pytest.approx([value * value / 2.0 for value in x])


@pytest.mark.parametrize("reduction", ["median", "trimmed_mean"])
@pytest.mark.parametrize("number", [1, 2, 3, 9])
def test_robust_reductions_are_those_of_servers(reduction: str, number: int) -> None:
    parts = list(np.random.default_rng(number).standard_normal((number, 5)))
    np.testing.assert_allclose(robust(parts, reduction), combine(parts, reduction))


def test_a_poisoned_gradient_ends_all_learning(learn: Callable[..., Run]) -> None:
    losses = curve_of(learn("bsp", 2, 5, 0.1, fault=(Poison(node="worker-1", step=3),))).losses
    assert [math.isnan(loss) for loss in losses] == [False] * 3 + [True] * 3


# --- policies that go by the loss ---


def test_rounds_grow_with_the_losses_that_workers_measure(learn: Callable[..., Run]) -> None:
    """AdaSync: ceil(2 sqrt(F_0 / F_t)) of eight workers, where F_t is the mean of what they had measured by then."""
    run = learn("adasync:2", 8, 40, 0.1, law=Exponential(mean=1.0))
    losses = curve_of(run).losses
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    # In an ideal network a worker reports and pushes in the same moment, and it reads what its round has made.
    read = dict.fromkeys((worker.name for worker in run.workers), 0)
    pushed = sorted((step.computed, worker.name) for worker in run.workers for step in worker.steps)
    updates = iter(run.updates)
    update, open_ = next(updates), 0
    sizes = []
    for time, name in pushed:
        last[name] = losses[read[name]]
        first.setdefault(name, last[name])
        open_ += 1
        known = sum(first.values()) / sum(last.values())
        wanted = min(8, math.ceil(2 * math.sqrt(known)))
        if open_ < wanted or time > 20.0:
            continue
        assert (update.time, len(update.ranks)) == (time, open_)
        sizes.append(open_)
        read |= dict.fromkeys((token[0] for token in update.tokens), update.version)
        update, open_ = next(updates), 0
    assert sizes[0] == 2
    assert sorted(sizes) == sizes
    assert sizes[-1] == 8


def test_without_a_workload_nobody_measures_a_loss(learn: Callable[..., Run]) -> None:
    run = learn("adasync:2", 4, 10, 0.1, workload="none")
    assert {len(update.ranks) for update in run.updates} == {2}


# --- update rules ---


@pytest.mark.parametrize(
    ("name", "params", "peer"),
    [
        ("sgd", {"wd": 0.01}, lambda w: torch.optim.SGD([w], lr=0.05, weight_decay=0.01)),
        ("sgd", {"momentum": 0.9}, lambda w: torch.optim.SGD([w], lr=0.05, momentum=0.9)),
        ("nag", {"momentum": 0.8}, lambda w: torch.optim.SGD([w], lr=0.05, momentum=0.8, nesterov=True)),
        ("adam", {"wd": 0.1}, lambda w: torch.optim.Adam([w], lr=0.05, weight_decay=0.1)),
    ],
)
def test_rules_do_what_those_of_torch_do(name: str, params: dict[str, Any], peer: Callable[..., Any]) -> None:
    stream = np.random.default_rng(7)
    ours = stream.standard_normal((3, 2))
    theirs = torch.tensor(ours.copy(), requires_grad=True)
    updater, optimizer = Updater(make_optimizer(name, {"learning_rate": 0.05, **params}), "w", ours), peer(theirs)
    for _ in range(20):
        gradient = stream.standard_normal((3, 2))
        ours = updater.update(ours, gradient, ours)
        theirs.grad = torch.tensor(gradient)
        optimizer.step()
    # They differ in where Adam adds its epsilon, which is 1e-8.
    np.testing.assert_allclose(ours, theirs.detach().numpy(), rtol=1e-5)


def test_a_gradient_is_scaled_and_then_clipped() -> None:
    rule = make_optimizer("sgd", {"learning_rate": 1.0, "rescale_grad": 0.5, "clip_gradient": 1.0})
    zero = np.zeros(3)
    assert Updater(rule, "w", zero).update(zero, np.array([1.0, 4.0, -4.0]), zero).tolist() == [-0.5, -1.0, 1.0]


# --- the digits ---


def test_workers_learn_to_read_digits(learn: Callable[..., Run]) -> None:
    curve = curve_of(learn("asp", 4, 200, 0.5, workload="digits", loss_every=50, law=Exponential(mean=1.0)))
    # Ten classes of which none is known: ln 10.
    assert curve.losses[0] == pytest.approx(math.log(10.0))
    assert curve.updates == list(range(0, 801, 50))
    images, labels = load_digits()
    assert np.mean((images @ curve.parameters).argmax(axis=1) == labels) > 0.9


def test_the_gradient_of_the_digits_is_that_of_their_loss(learn: Callable[..., Run]) -> None:
    # One step with all images in the batch, nearly: the loss falls by the rate times the gradient's square.
    run = learn("bsp", 1, 1, 1e-3, workload="digits", batch=200_000)
    images, labels = load_digits()
    weights = torch.zeros(65, 10, dtype=torch.float64, requires_grad=True)
    torch.nn.functional.cross_entropy(torch.tensor(images) @ weights, torch.tensor(labels)).backward()
    assert weights.grad is not None
    np.testing.assert_allclose(curve_of(run).parameters, -1e-3 * weights.grad.numpy(), atol=1e-5)


def test_without_scikit_learn_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, learn: Callable[..., Run]) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    load_digits.cache_clear()
    with pytest.raises(MissingExtraError, match=re.escape("pip install 'aiokv[examples]'")):
        curve_of(learn("bsp", 1, 1, 0.1, workload="digits"))


def test_the_scenario_that_comes_along_shows_what_it_says() -> None:
    scenario = load_scenario("learning")
    summaries = {policy: summarise(simulate(scenario, policy, 0)) for policy in scenario.policies}
    assert broken_assertions(scenario.assertions, summaries) == []
    times = [summaries[policy].learning.time_to_target_s for policy in ("asp", "backup:1", "ssp:3", "bsp")]
    assert times == sorted(times)
    updates = {policy: each.learning.updates_to_target for policy, each in summaries.items()}
    assert 5.0 * updates["bsp"] < updates["asp"] < updates["ssp:3"]


# --- a function of one's own ---

OWN = """\
import numpy as np

def line(seed, workers):
    goal = np.arange(workers, dtype=float)
    return np.zeros(workers), lambda x, worker, push: x - goal, lambda x: float(abs(x - goal).max())

def flat(seed, workers):
    return np.zeros(3), lambda x, worker, push: x[:2], lambda x: 0.0

def crooked(seed, workers):
    return np.ones(1), lambda x, worker, push: np.full(1, 100.0 if worker == 2 else 1.0), lambda x: float(x[0])

def nothing(seed, workers):
    return None

NUMBER = 3

def many(seed, workers):
    return np.zeros(3), lambda x, worker, push: x, lambda x: x

def no_loss(seed, workers):
    return np.zeros(3), lambda x, worker, push: x, lambda x: None
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_problem.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("own_problem", None)


@pytest.mark.usefixtures("own")
def test_a_function_of_ones_own_is_optimised(learn: Callable[..., Run]) -> None:
    curve = curve_of(learn("bsp", 3, 4, 0.5, workload="own_problem:line"))
    assert curve.parameters == pytest.approx(np.arange(3) * (1.0 - 0.5**4))
    assert curve.losses == [2.0, 1.0, 0.5, 0.25, 0.125]


@pytest.mark.usefixtures("own")
def test_a_median_does_not_follow_one_worker_that_is_far_off(learn: Callable[..., Run]) -> None:
    ends = {
        reduction: curve_of(learn("bsp", 3, 3, 0.1, workload="own_problem:crooked", reduction=reduction)).losses[-1]
        for reduction in ("mean", "median")
    }
    assert ends == pytest.approx({"mean": 1.0 - 3 * 0.1 * 34.0, "median": 1.0 - 3 * 0.1})


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("workload", "message"),
    [
        ("own_problm:line", "can't find 'own_problm:line': No module named 'own_problm'"),
        ("own_problem:lines", "has no attribute 'lines'"),
        ("own_problem:nothing", "returns start, gradient and loss, got None"),
        ("own_problem:flat", "has parameters of shape (3,), its gradient (2,)"),
        ("own_problem:NUMBER", "expected that 'own_problem:NUMBER' is a function, got 3"),
        ("own_problem:many", "expected that the loss of 'own_problem:many' is a number, got array([0., 0., 0.])"),
        ("own_problem:no_loss", "expected that the loss of 'own_problem:no_loss' is a number, got None"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_before_anything_runs(workload: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_problem(LearningSection(workload=workload), seed=0, workers=2)


# --- results ---


def test_the_target_is_reached_at_the_first_version_that_is_good_enough(learn: Callable[..., Run]) -> None:
    # x halves each second, so the loss is 1/2, 1/8, 1/32 and so on.
    found = learned(learn("bsp", 1, 5, 0.5, target_loss=0.125))
    assert (found.loss, found.updates_to_target) == (0.5 * 0.25**5, 1.0)
    assert found.time_to_target_s == pytest.approx(1.0)


def test_a_target_that_is_not_reached_fails_what_is_asserted_of_it(learn: Callable[..., Run]) -> None:
    reached, missed = (summarise(learn("bsp", 1, steps, 0.5, target_loss=0.1)) for steps in (5, 1))
    assert missed.learning.time_to_target_s == math.inf
    together = mean([reached, missed])
    assert broken_assertions(["time_to_target < 1 h"], {"bsp": together}) == [
        "bsp: expected time_to_target < 1 h, got time_to_target = inf h"
    ]
    assert math.isnan(standard_error([reached, missed]).learning.time_to_target_s)


def test_losses_are_in_the_report_and_in_all_files(learn: Callable[..., Run], tmp_path: Path) -> None:
    results = {policy: [learn(policy, 2, 4, 0.5, target_loss=0.01)] for policy in ("bsp", "asp")}
    content = page(results)
    assert "Loss against time and against updates." in content
    assert "time to the target loss (s)" in content
    write_files(results, tmp_path, tmp_path / "test.png", content)
    with (tmp_path / "test-losses.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["policy"] == "bsp"]
    assert [float(row["loss"]) for row in rows] == [0.5 * 0.25**n for n in range(5)]
    bsp = json.loads((tmp_path / "test.json").read_bytes())["policies"]["bsp"]
    assert bsp["losses"]["updates"] == [0, 1, 2, 3, 4]
    assert bsp["learning"]["updates_to_target"] == 3.0


SMALL = """\
steps = 4
policies = ["bsp"]
assertions = []
[cluster]
workers = 2
[compute]
law = "constant"
mean = 1.0
[learning]
workload = "quadratic"
params = { learning_rate = 0.5 }
target_loss = 1e-9
"""


def test_the_command_shows_that_the_target_was_never_reached(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    result = CliRunner().invoke(cli.sim, ["run", str(path), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert re.search(r"time to the target loss \(s\).*never", result.stdout)


def test_a_sweep_compares_what_was_learned(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    path.write_text(SMALL.replace("1e-9", "0.01"))
    arguments = ["sweep", str(path), "--set", "learning.params.learning_rate=0.5,0.01", "--replications", "2"]
    result = CliRunner().invoke(cli.sim, [*arguments, "--json", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    fast, slow = json.loads(result.stdout)
    # Four updates, each of which takes half or a hundredth of x away.
    assert [each["values"]["loss"][0] for each in (fast, slow)] == pytest.approx([0.5 * 0.25**4, 0.5 * 0.99**8])
    assert fast["values"]["updates_to_target"] == [3.0, 0.0]
    again = CliRunner().invoke(cli.sim, [*arguments, "--out", str(tmp_path)])
    assert "never" in again.stdout


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            '"quadratic"',
            '"quadratc"',
            "my.toml, line 10: learning.workload: expected none, quadratic, digits or module:function, got 'quadratc'; "
            "did you mean 'quadratic'?",
        ),
        ("[learning]", '[learning]\noptimizer = "sgdd"', "learning.optimizer: unknown optimizer 'sgdd'"),
        (
            "[learning]",
            '[learning]\noptimizer = "lamb"',
            "learning.optimizer: the simulator computes adam, dcasgd, nag, sgd, with or without momentum; "
            "'lamb' runs on servers only",
        ),
        ("learning_rate = 0.5", "learning_rate = -1", "learning.optimizer: "),
    ],
)
def test_a_mistake_in_the_section_is_explained(old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_scenario(SMALL.replace(old, new).encode(), "my.toml")


@pytest.mark.parametrize(
    ("without", "message"),
    [
        (SMALL[SMALL.index("[learning]") :], "'time_to_target' needs a workload: set learning.workload"),
        ("target_loss = 1e-9", "'time_to_target' needs a target: set learning.target_loss"),
    ],
)
def test_an_assertion_about_nothing_is_refused(without: str, message: str) -> None:
    text = SMALL.replace(without, "").replace("assertions = []", 'assertions = ["time_to_target < 1 h"]')
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_scenario(text.encode(), "my.toml")
