"""From runs to numbers: statistics, a table for people and a dict for programs. Times are seconds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from rich.table import Table

from sim.disk import describe as describe_checkpoints
from sim.disk import steps_since_checkpoint
from sim.fates import REASONS, fates
from sim.intervals import batch_half_width, student
from sim.job_results import JobSummary, summarise_job
from sim.job_results import describe as describe_job
from sim.learning import Learning, learned, learns, loss_columns
from sim.saving import describe as describe_saves
from sim.saving import steps_since_save
from sim.split import Split, end_of, shares, split

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from sim.record import Run, UpdateRecord
    from sim.scenario import Scenario
    from sim.steps import Step

NOTHING: Final = math.nan

ROUNDING: Final = 1e-12
"""What is less is shown as nothing."""

NAMED_WORKERS: Final = 8
"""A note names so many workers; more are counted."""


class StepTime(msgspec.Struct, frozen=True):
    """Seconds from the start of a step's computation to the answer to its push."""

    mean: float
    p50: float
    p95: float
    p99: float


class Staleness(msgspec.Struct, frozen=True):
    """Versions made between the one that a gradient was computed at and the one that it was applied to."""

    mean: float
    p95: float
    max: float


class Dropped(msgspec.Struct, frozen=True):
    """Shares of all steps whose gradient is in no update, by what was the matter with it."""

    late: float
    """Its round was closed without it."""
    stale: float
    """It was computed at too old a version."""
    evicted: float
    """It was late, as its worker was so often that no round waited for it."""
    cancelled: float
    """Its worker abandoned it before it was done."""
    other: float
    """What policies of installed packages call otherwise."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.late + self.stale + self.evicted + self.cancelled + self.other


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of a run, or their means over several runs; NaN where there is nothing to count.

    All but `dropped`, `held`, `split`, `learning`, `job` and `elapsed_s` count what ended in the window: from when the
    first worker completes its warm-up until the first worker ends its loop, so all workers are
    at work. Of a job that is started again, all but `job` is about its first life.
    """

    step_time_s: StepTime
    step_time_half_width_s: StepTime
    """How far each of these may be off to either side at 95 %, judged by ten parts of the run."""
    utilisation: float
    """Share of the window in which a worker computes, 0 to 1, mean over the workers."""
    updates_per_s: float
    """Versions made a second, of a chunk."""
    gradients_per_s: float
    """Gradients applied a second, of a chunk."""
    staleness: Staleness
    split: Split
    """Where the time of all workers went, from first step to end, as shares."""
    dropped: Dropped
    held: float
    """Share of the workers' time for which servers held reads back because the policy says so."""
    goodput: float
    """Share of the workers' time that went into gradients which counted (effective training time ratio)."""
    bytes_sent: float
    failed_workers: float
    """How many did not come to the end of their loop."""
    learning: Learning
    job: JobSummary
    window_s: float
    elapsed_s: float
    """From the start of the first node to the end of the last."""


def window(run: Run) -> tuple[float, float]:
    """Return the begin and end of the time in which statistics are taken; an empty one when there is none."""
    warmup = run.scenario.warmup
    begins = [
        worker.steps[warmup - 1].end if warmup else worker.begun
        for worker in run.workers
        if len(worker.steps) >= max(1, warmup)
    ]
    end = min(worker.ended for worker in run.workers)
    return min(begins, default=end), end


def summarise(run: Run) -> Summary:
    """Return the numbers of a run."""
    begin, end = window(run)
    length = max(0.0, end - begin)
    steps = [step for worker in run.workers for step in worker.steps]
    ended = sorted((step for step in steps if step.answered and begin < step.end <= end), key=lambda step: step.end)
    times = [step.end - step.start for step in ended]
    busy = math.fsum(_work_within(step, begin, end) for step in steps)
    updates = [update for update in run.updates if begin < update.time <= end]
    chunks = len({(update.key, update.start) for update in run.updates})
    parts = shares(run)
    behind = [staleness for update in updates for staleness in update.staleness]
    return Summary(
        step_time_s=StepTime(*_mean_and_percentiles(times, 50, 95, 99)),
        step_time_half_width_s=StepTime(
            batch_half_width(times, lambda part: float(np.mean(part))),
            *(
                batch_half_width(times, lambda part, percent=percent: float(np.percentile(part, percent)))  # type: ignore[misc]
                for percent in (50, 95, 99)
            ),
        ),
        utilisation=_ratio(busy, length * len(run.workers)),
        updates_per_s=_ratio(len(updates), length * chunks),
        gradients_per_s=_ratio(len(behind), length * chunks),
        staleness=Staleness(*_mean_and_percentiles(behind, 95, 100)),
        split=parts,
        dropped=_dropped(run),
        held=_ratio(sum(run.held.values()), math.fsum(end_of(run, worker) - worker.begun for worker in run.workers)),
        goodput=parts.busy,
        bytes_sent=float(sum(link.sent + link.lost + link.duplicate for link in run.links)),
        failed_workers=float(len(failures(run))),
        learning=learned(run),
        job=summarise_job(run),
        window_s=length,
        elapsed_s=run.elapsed,
    )


def _dropped(run: Run) -> Dropped:
    found = fates(run).values()
    steps = sum(fate.steps for fate in found)
    shares = {name: _ratio(sum(fate.dropped[name] for fate in found), steps) for name in REASONS}
    every = _ratio(sum(fate.dropped.total() for fate in found), steps)
    return Dropped(**shares, other=every - sum(shares.values()))


def _work_within(step: Step, begin: float, end: float) -> float:
    """Return the seconds of computing in a window; what was stalled or stopped is spread evenly over the step."""
    length = step.computed - step.start
    inside = min(step.computed, end) - max(step.start, begin)
    return inside * step.work / length if inside > 0 and length > 0 else 0.0


def worker_rows(run: Run) -> list[dict[str, Any]]:
    """Return one entry for each worker: steps, where its time went in seconds, and what became of its gradients."""
    found = fates(run)
    reasons = dict.fromkeys([*REASONS, *run.dropped.values()])
    return [
        {
            "worker": worker.name,
            "steps": worker.steps.answered,
            "mean_step_s": statistics.fmean([s.end - s.start for s in worker.steps]) if worker.steps else NOTHING,
            **{f"{part}_s": seconds for part, seconds in msgspec.to_builtins(split(run, worker)).items()},
            "held_s": run.held.get(worker.rank, 0.0),
            "applied": found[worker.name].applied,
            **{reason: found[worker.name].dropped[reason] for reason in reasons},
            "open": found[worker.name].open,
            "duplicates": run.duplicates.get(worker.rank, 0),
            "staleness_mean": _mean_of(found[worker.name].staleness),
            "staleness_max": max(found[worker.name].staleness, default=0),
            "error": type(worker.error).__name__ if worker.error else "",
        }
        for worker in run.workers
    ]


def _mean_of(counts: Counter[int]) -> float:
    return _ratio(sum(value * count for value, count in counts.items()), counts.total())


def poisoned_updates(run: Run) -> list[UpdateRecord]:
    """Return the updates that hold a gradient with NaN; every value after the first is NaN too."""
    return [update for update in run.updates if any(token in run.poisoned for token in update.tokens)]


def _mean_and_percentiles(values: Sequence[float], *percents: float) -> list[float]:
    if not values:
        return [NOTHING] * (1 + len(percents))
    return [float(np.mean(values)), *np.percentile(values, percents).tolist()]


def _ratio(count: float, whole: float) -> float:
    return count / whole if whole > 0 else NOTHING


def combine(summaries: Sequence[Summary], reduce: Callable[[list[float]], float]) -> Summary:
    """Return a summary each of whose numbers is made of that number in all summaries where it is not NaN."""

    def together(parts: Sequence[Any]) -> Any:
        if isinstance(parts[0], dict):
            return {name: together([part[name] for part in parts]) for name in parts[0]}
        numbers = [part for part in parts if not math.isnan(part)]
        return reduce(numbers) if numbers else NOTHING

    # NaN has no place in JSON, but the builtins of `to_builtins` may hold it.
    return msgspec.convert(together([msgspec.to_builtins(summary) for summary in summaries]), Summary)


def mean(summaries: Sequence[Summary]) -> Summary:
    """Return the means over replications."""
    return combine(summaries, statistics.fmean)


def standard_error(summaries: Sequence[Summary]) -> Summary:
    """Return the standard errors of the means over replications; NaN for fewer than two, or where one is infinite."""

    def error(numbers: list[float]) -> float:
        if len(numbers) < 2 or not all(map(math.isfinite, numbers)):  # noqa: PLR2004 - what a deviation takes
            return NOTHING
        return statistics.stdev(numbers) / math.sqrt(len(numbers))

    return combine(summaries, error)


# --- what did not go well ---


def failures(run: Run) -> list[dict[str, Any]]:
    """Return one entry for each worker that did not come to the end of its loop."""
    found: list[dict[str, Any]] = []
    for worker in run.workers:
        done = worker.steps.answered
        entry = {"seed": run.seed, "worker": worker.name, "steps": done, "ended_s": worker.ended}
        if worker.error is not None:
            found.append({**entry, "error": type(worker.error).__name__, "message": worker.error.message})
        elif worker.struck:
            found.append({**entry, "error": "Fault", "message": "the scenario ended it"})
    return found


# --- for programs ---


def half_widths(summaries: Sequence[Summary]) -> Summary:
    """Return how far the mean over replications may be off to either side at 95 %.

    Of a single run only those of the step times are known, from its parts; the others are NaN.
    """
    if len(summaries) == 1:
        nothing = combine(summaries, lambda numbers: NOTHING)
        return msgspec.structs.replace(nothing, step_time_s=summaries[0].step_time_half_width_s)
    factor = student(len(summaries) - 1)
    return combine([standard_error(summaries)], lambda numbers: factor * numbers[0])


def to_json(results: Mapping[str, Sequence[Run]], picture: str, files: Sequence[str] = ()) -> bytes:
    """Return one JSON object with the numbers of all policies; null where there is nothing to count.

    Args:
        results: the runs of each policy, one a replication.
        picture: where the timeline was written.
        files: what else was written.
    """
    first = next(iter(results.values()))[0]
    scenario = first.scenario
    policies = {}
    for policy, runs in results.items():
        summaries = [summarise(run) for run in runs]
        policies[policy] = {
            **msgspec.to_builtins(mean(summaries)),
            "standard_error": msgspec.to_builtins(standard_error(summaries)) if len(runs) > 1 else None,
            "half_width_95": msgspec.to_builtins(half_widths(summaries)),
            "workers": worker_rows(runs[0]),
            "staleness_by_worker": {
                name: dict(sorted(fate.staleness.items())) for name, fate in fates(runs[0]).items()
            },
            "links": [msgspec.to_builtins(link) for link in runs[0].links],
            "losses": loss_columns(runs[0]),
            "saves": [msgspec.to_builtins(save) for save in runs[0].saves],
            "lives": [] if runs[0].job is None else [msgspec.to_builtins(life) for life in runs[0].job.lives],
            "steps_since_save": steps_since_save(runs[0]),
            "checkpoints": {place: place not in runs[0].torn for place in runs[0].checkpoints},
            "steps_since_checkpoint": steps_since_checkpoint(runs[0]),
            "poisoned_updates": sum(len(poisoned_updates(run)) for run in runs),
            "failures": [failure for run in runs for failure in failures(run)],
            "unstopped": list(dict.fromkeys(name for run in runs for name in run.unstopped)),
            "traces": [run.digest for run in runs],
        }
    document = {
        "scenario": scenario.name,
        "title": scenario.title,
        "seed": first.seed,
        "replications": max(len(runs) for runs in results.values()),
        "workers": scenario.cluster.workers,
        "servers": scenario.cluster.servers,
        "steps": scenario.steps,
        "warmup": scenario.warmup,
        "policies": policies,
        "picture": picture,
        "files": list(files),
    }
    # msgspec writes NaN as null.
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


# --- for people ---

ROWS: Final[list[tuple[str, Callable[[Summary], float]]]] = [
    ("step time, mean (s)", lambda s: s.step_time_s.mean),
    ("step time, median (s)", lambda s: s.step_time_s.p50),
    ("step time, 95th percentile (s)", lambda s: s.step_time_s.p95),
    ("step time, 99th percentile (s)", lambda s: s.step_time_s.p99),
    ("busy (% of all workers' time)", lambda s: 100.0 * s.split.busy),
    ("communicating (%)", lambda s: 100.0 * s.split.communicate),
    ("waiting (%)", lambda s: 100.0 * s.split.wait),
    ("saving (%)", lambda s: 100.0 * s.split.checkpoint),
    ("down (%)", lambda s: 100.0 * s.split.down),
    ("lost work (%)", lambda s: 100.0 * s.split.lost),
    ("held back by the policy (%)", lambda s: 100.0 * s.held),
    ("steps dropped as late (%)", lambda s: 100.0 * s.dropped.late),
    ("steps dropped as stale (%)", lambda s: 100.0 * s.dropped.stale),
    ("steps dropped as evicted (%)", lambda s: 100.0 * s.dropped.evicted),
    ("steps abandoned (%)", lambda s: 100.0 * s.dropped.cancelled),
    ("utilisation (%)", lambda s: 100.0 * s.utilisation),
    ("updates per second", lambda s: s.updates_per_s),
    ("gradients per second", lambda s: s.gradients_per_s),
    ("staleness, mean (versions)", lambda s: s.staleness.mean),
    ("staleness, 95th percentile", lambda s: s.staleness.p95),
    ("staleness, maximum", lambda s: s.staleness.max),
]
"""What the tables show: a label and the number."""

LEARNING_ROWS: Final[list[tuple[str, Callable[[Summary], float]]]] = [
    ("loss at the end", lambda s: s.learning.loss),
    ("time to the target loss (s)", lambda s: s.learning.time_to_target_s),
    ("updates to the target loss", lambda s: s.learning.updates_to_target),
]


JOB_ROWS: list[tuple[str, Callable[[Summary], float]]] = [
    ("job done after (s)", lambda s: s.job.seconds),
    ("starts of the job", lambda s: s.job.lives),
    ("steps lost", lambda s: s.job.lost_steps),
    ("useful time of the job (%)", lambda s: 100.0 * s.job.useful),
]


def rows_for(scenario: Scenario) -> list[tuple[str, Callable[[Summary], float]]]:
    """Return what the tables of a scenario show."""
    rows = ROWS + LEARNING_ROWS if learns(scenario) else ROWS
    return rows + JOB_ROWS if scenario.cluster.restarts else rows


def table(results: Mapping[str, Sequence[Run]]) -> Table:
    """Return a table of the numbers, one column a policy, and how far they may be off at 95 %."""
    first = next(iter(results.values()))[0]
    scenario = first.scenario
    made = Table(title=f"{scenario.name}: {scenario.title}" if scenario.title else scenario.name)
    made.add_column("")
    columns = []
    for policy, runs in results.items():
        made.add_column(policy, justify="right")
        summaries = [summarise(run) for run in runs]
        columns.append((mean(summaries), half_widths(summaries)))
    for label, value in rows_for(scenario):
        made.add_row(label, *(cell(value(middle), value(width)) for middle, width in columns))
    return made


def cell(value: float, width: float) -> str:
    """Return a number and how far it may be off to either side as they stand in a table."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "never"
    value = value if abs(value) > ROUNDING else 0.0
    return f"{value:.4g}" if math.isnan(width) else f"{value:.4g} ± {width:.2g}"


def notes(results: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return what the reader of the table should know, one line each."""
    runs = next(iter(results.values()))
    scenario = runs[0].scenario
    cluster = scenario.cluster
    slow = "".join(f", {name} {factor:g} times slower" for name, factor in scenario.slow.items())
    seeds = f"seed {runs[0].seed}" if len(runs) == 1 else f"seeds {runs[0].seed} to {runs[-1].seed}"
    lines = [
        f"{_count(cluster.workers, 'worker')}{slow}; {_count(cluster.servers, 'server')}; "
        f"{_count(scenario.steps, 'step')} a worker; {seeds}",
        "counted while all workers are at work"
        + (f", after the first {scenario.warmup} steps of the fastest" if scenario.warmup else ""),
    ]
    lines += [
        f"after {_count(change.after, 'step')} of a worker its policy becomes {change.policy}"
        for change in scenario.change
    ]
    of = f"mean of {len(runs)} runs" if len(runs) > 1 else "of step times, judged by ten parts of the run"
    lines.append(f"± is half the width of the 95 % confidence interval: {of}")
    for policy, replications in results.items():
        stuck = dict.fromkeys(name for run in replications for name in run.unstopped)
        if stuck:
            lines.append(f"{policy}: still running long after the last worker: {', '.join(stuck)}")
        describers = (describe_saves, describe_checkpoints) if replications[0].job is None else (describe_job,)
        said = (describe(replications[0]) for describe in describers)
        lines += [f"{policy}: {text}" for text in said if text]
        if poisoned := poisoned_updates(replications[0]):
            first = poisoned[0]
            lines.append(
                f"{policy}: version {first.version} of key {first.key!r} at {first.time:.4g} s holds NaN, and so does "
                "all that follows"
            )
        found = [failure for run in replications for failure in failures(run)]
        kinds = Counter((failure["error"], failure["message"]) for failure in found)
        for (error, message), count in kinds.items():
            names = ", ".join(f["worker"] for f in found if (f["error"], f["message"]) == (error, message))
            lines.append(
                f"{policy}: {names if count <= NAMED_WORKERS else _count(count, 'worker')}: {error}: {message}"
            )
    return lines


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
