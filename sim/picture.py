"""Runs as pictures: who computed and who waited, how long steps take, how stale gradients are, where the time went."""

from __future__ import annotations

import io
import itertools
import math
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from sim.fates import REASONS, fates
from sim.learning import curve_of
from sim.report import window
from sim.split import judged, shares

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from sim.record import Run

BUSY: Final = "#0072b2"
WAIT: Final = "#f0c27b"
MARK: Final = "#c1121f"
LOST: Final = "#d9817b"
"""Colours that people with colour vision deficiency can tell apart, also in print."""

SHOWN_STEPS: Final = 12
"""A picture of all steps would show none; a fault is always shown."""

BAR_INCHES: Final = 0.3
PANEL_INCHES: Final = 8.0
LABELLED_WORKERS: Final = 40
LEGEND_COLUMNS: Final = 4


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the timeline of one run of each policy to a PNG file.

    Raises:
        OSError: the file can't be written.
    """
    path.write_bytes(to_png(timeline(runs)))


def to_png(figure: Figure) -> bytes:
    """Return a picture as the content of a PNG file."""
    content = io.BytesIO()
    figure.savefig(content, dpi=110, format="png")
    return content.getvalue()


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def timeline(runs: Sequence[Run]) -> Figure:
    """Return the timeline of one run of each policy, one panel for each."""
    scenario = runs[0].scenario
    last = max(worker.ended for run in runs for worker in run.workers)
    end = last if scenario.fault else min(last, _interesting(runs))
    panel = min(PANEL_INCHES, 0.7 + BAR_INCHES * scenario.cluster.workers)
    figure = _figure(11, 1.3 + panel * len(runs))
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        _draw_panel(axes, run, end)
    shown = f"; the first {end:.2g} s of {last:.3g} s" if end < last else ""
    panels[-1].set_xlabel(f"simulated time (s){shown}")
    panels[-1].set_xlim(0.0, end)
    title = f"{scenario.name}: {scenario.title}" if scenario.title else scenario.name
    figure.suptitle(f"{title} (seed {runs[0].seed})", parse_math=False)
    handles: list[Patch | Line2D] = [
        Patch(color=BUSY, label="busy: computes"),
        Patch(color=WAIT, label="waits for the servers"),
    ]
    if any(run.dropped or worker.steps.pushed < len(worker.steps) for run in runs for worker in run.workers):
        handles.insert(1, Patch(color=LOST, label="computes in vain: dropped or abandoned"))
    if any(worker.struck or worker.error for run in runs for worker in run.workers):
        handles.append(Line2D([], [], color=MARK, marker="x", linestyle="", label="ended early"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    return figure


def _interesting(runs: Sequence[Run]) -> float:
    """Return how many seconds to show: a few steps of the policy under which they take longest."""
    means = []
    for run in runs:
        times = [step.end - step.start for worker in run.workers for step in worker.steps]
        means.append(sum(times) / max(1, len(times)))
    begin = max(worker.begun for run in runs for worker in run.workers)
    return begin + SHOWN_STEPS * max(means)


def _draw_panel(axes: Axes, run: Run, end: float) -> None:
    scenario = run.scenario
    for row, worker in enumerate(run.workers):
        steps = [(step, counts) for step, counts in judged(run, worker) if step.start < end]
        busy = [(step.start, step.computed - step.start) for step, _ in steps]
        colours = [BUSY if counts or not step.answered else LOST for step, counts in steps]
        wait = [(step.computed, step.end - step.computed) for step, _ in steps if step.end > step.computed]
        # The white edge separates steps that follow each other without a wait.
        axes.broken_barh(busy, (row - 0.4, 0.8), facecolors=colours, edgecolors="white", linewidth=0.4)
        axes.broken_barh(wait, (row - 0.4, 0.8), facecolors=WAIT)
        if worker.struck or worker.error:
            axes.plot([worker.ended], [row], color=MARK, marker="x", markersize=8, markeredgewidth=2, clip_on=False)
    every = 1 + (len(run.workers) - 1) // LABELLED_WORKERS
    rows = list(range(0, len(run.workers), every))
    axes.set_yticks(rows, [_label(scenario.slow, run.workers[row].name) for row in rows])
    axes.set_ylim(len(run.workers) - 0.4, -0.6)
    axes.set_title(run.policy, loc="left", fontweight="bold")
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _label(slow: dict[str, float], name: str) -> str:
    return f"{name} ({slow[name]:g} x slower)" if name in slow else name


# --- what the report shows besides ---

SERIES: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
"""Okabe and Ito's colours (2008)."""

STYLES: Final = tuple(itertools.product(("-", "--", ":"), SERIES))
"""Of lines: more policies than colours can be told apart."""

WHOLE: Final = 102.0
"""Where a scale of per cent ends: a line at 100 is seen whole."""

THICK, THIN = 3.0, 1.3
"""Lines that come later are thinner: those that they cover are seen beside them."""

FATES: Final = {
    "applied": BUSY,
    "late": MARK,
    "stale": "#e69f00",
    "evicted": "#000000",
    "cancelled": "#777777",
    "other": "#cc79a7",
    "open": "#56b4e9",
}
"""What can become of a gradient; "open": it failed, or servers held it at the end."""

PARTS: Final = {
    "busy": BUSY,
    "communicate": "#56b4e9",
    "wait": WAIT,
    "checkpoint": "#009e73",
    "down": "#777777",
    "lost": LOST,
}


def _lines(runs: Sequence[Run]) -> Iterator[tuple[Run, dict[str, Any]]]:
    """Yield each run and how its line is drawn."""
    for number, (run, (line, colour)) in enumerate(zip(runs, itertools.cycle(STYLES), strict=False)):
        width = THICK + (THIN - THICK) * number / max(1, len(runs) - 1)
        yield run, {"where": "post", "color": colour, "linestyle": line, "linewidth": width, "label": run.policy}


def step_times(runs: Sequence[Run]) -> Figure:
    """Return how many steps take at most how long, one curve a policy."""
    figure = _figure(7, 3.6 + 0.2 * (len(runs) // LEGEND_COLUMNS))
    axes = figure.subplots()
    for run, style in _lines(runs):
        begin, end = window(run)
        times = sorted(s.end - s.start for w in run.workers for s in w.steps if s.answered and begin < s.end <= end)
        if times:
            axes.step([times[0], *times], 100.0 * np.arange(len(times) + 1) / len(times), **style)
    axes.set_xlabel("step time (s)")
    axes.set_ylabel("steps that take at most so long (%)")
    _from_zero(axes)
    axes.set_ylim(0.0, WHOLE)
    _finish(figure, axes)
    return figure


def staleness(runs: Sequence[Run]) -> Figure:
    """Return how many gradients are at most how stale, one curve a policy."""
    figure = _figure(7, 3.6 + 0.2 * (len(runs) // LEGEND_COLUMNS))
    axes = figure.subplots()
    found = {run.policy: [value for update in run.updates for value in update.staleness] for run in runs}
    most = max((max(values) for values in found.values() if values), default=0)
    for run, style in _lines(runs):
        values = found[run.policy]
        if values:
            shares = 100.0 * np.cumsum(np.bincount(values, minlength=most + 1)) / len(values)
            # From nothing up to those that are not stale at all.
            axes.step([0, *range(most + 1)], [0.0, *shares], **style)
    axes.set_xlabel("staleness (versions made since the one that the gradient was computed at)")
    axes.set_ylabel("gradients that are at most so stale (%)")
    _from_zero(axes, least=1.0)
    axes.set_ylim(0.0, WHOLE)
    _finish(figure, axes)
    return figure


def staleness_by_worker(runs: Sequence[Run]) -> Figure:
    """Return how stale each worker's gradients are: mean, and 95th percentile, one panel a policy."""
    figure, panels = _worker_panels(runs)
    most = 1.0
    for axes, run in zip(panels, runs, strict=True):
        for row, fate in enumerate(fates(run).values()):
            values = np.repeat(list(fate.staleness), list(fate.staleness.values()))
            if len(values):
                middle, high = float(np.mean(values)), float(np.percentile(values, 95))
                most = max(most, high)
                axes.plot([middle, high], [row, row], color=BUSY, linewidth=1.2)
                axes.plot([middle], [row], color=BUSY, marker="o", linestyle="", clip_on=False)
                axes.plot([high], [row], color=BUSY, marker="|", linestyle="", markersize=9, clip_on=False)
    panels[-1].set_xlim(0.0, 1.05 * most)
    panels[-1].set_xlabel("staleness (versions): mean (dot) and 95th percentile (bar)")
    return figure


def gradients(runs: Sequence[Run]) -> Figure:
    """Return what became of each worker's gradients, one panel a policy."""
    figure, panels = _worker_panels(runs)
    seen: dict[str, Patch] = {}
    for axes, run in zip(panels, runs, strict=True):
        for row, fate in enumerate(fates(run).values()):
            known = {name: fate.dropped[name] for name in REASONS}
            other = fate.dropped.total() - sum(known.values())
            counts = {"applied": fate.applied, **known, "other": other, "open": fate.open}
            left = 0
            for name, count in counts.items():
                if count:
                    axes.barh(row, count, left=left, color=FATES[name], height=0.7)
                    seen.setdefault(name, Patch(color=FATES[name], label=name))
                left += count
    panels[-1].set_xlabel("steps")
    figure.legend(handles=list(seen.values()), loc="outside upper center", ncols=len(FATES), frameon=False)
    return figure


def _worker_panels(runs: Sequence[Run]) -> tuple[Figure, Sequence[Axes]]:
    """Return a figure with a panel for each policy, and a row for each worker in it."""
    workers = runs[0].workers
    height = min(PANEL_INCHES, 0.5 + 0.2 * len(workers))
    figure = _figure(9, 1.0 + height * len(runs))
    panels: list[Axes] = list(figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0])
    every = 1 + (len(workers) - 1) // LABELLED_WORKERS
    for axes, run in zip(panels, runs, strict=True):
        rows = range(0, len(workers), every)
        axes.set_yticks(rows, [_label(run.scenario.slow, workers[row].name) for row in rows])
        axes.set_ylim(len(workers) - 0.4, -0.6)
        axes.set_title(run.policy, loc="left", fontweight="bold")
        _clean(axes)
    return figure, panels


def time_split(runs: Sequence[Run]) -> Figure:
    """Return where the time of all workers went, one bar a policy."""
    figure = _figure(9, 1.6 + 0.45 * len(runs))
    axes = figure.subplots()
    for row, run in enumerate(runs):
        left = 0.0
        parts = shares(run)
        for part, colour in PARTS.items():
            share = 100.0 * getattr(parts, part)
            axes.barh(row, share, left=left, color=colour, label=part if row == 0 else None, height=0.6)
            left += share
    axes.set_yticks(range(len(runs)), [run.policy for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0.0, 100.0)
    axes.set_xlabel("share of the workers' time from first step to end (%)")
    _clean(axes)
    figure.legend(loc="outside upper center", ncols=len(PARTS), frameon=False)
    return figure


def progress(runs: Sequence[Run]) -> Figure:
    """Return how many gradients are applied over time, one curve a policy."""
    figure = _figure(7, 3.6 + 0.2 * (len(runs) // LEGEND_COLUMNS))
    axes = figure.subplots()
    for run, style in _lines(runs):
        chunks = max(1, len({(update.key, update.start) for update in run.updates}))
        counts = np.cumsum([len(update.ranks) for update in run.updates]) / chunks
        axes.step(
            [update.time for update in run.updates],
            counts,
            **style,
        )
    axes.set_xlabel("simulated time (s)")
    axes.set_ylabel("gradients applied")
    _from_zero(axes)
    axes.set_ylim(bottom=0.0)
    _finish(figure, axes)
    return figure


WIDE_RANGE: Final = 30.0
"""Losses whose largest is so many times the smallest are shown on a logarithmic scale."""


def losses(runs: Sequence[Run]) -> Figure:
    """Return the loss against simulated time and against updates, one curve a policy, and the target."""
    figure = _figure(10, 4.0 + 0.2 * (len(runs) // LEGEND_COLUMNS))
    panels: list[Axes] = list(figure.subplots(1, 2, sharey=True))
    shown: list[float] = []
    for run, style in _lines(runs):
        curve = curve_of(run)
        shown += [loss for loss in curve.losses if math.isfinite(loss)]
        for axes, places in zip(panels, (curve.times, list(map(float, curve.updates))), strict=True):
            axes.step(places, curve.losses, **style)
    target = runs[0].scenario.learning.target_loss
    for axes, label in zip(panels, ("simulated time (s)", "updates"), strict=True):
        _from_zero(axes)
        if target is not None:
            axes.axhline(target, color="#777777", linestyle="-.", linewidth=1.0, label=f"target {target:g}")
        axes.set_xlabel(label)
        axes.grid(color="#dddddd", linewidth=0.6)
        _clean(axes)
    smallest = min(shown, default=0.0)
    if smallest > 0.0 and max(shown) > WIDE_RANGE * smallest:
        panels[0].set_yscale("log")
    elif smallest >= 0.0:
        panels[0].set_ylim(bottom=0.0)
    panels[0].set_ylabel("loss")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=LEGEND_COLUMNS + 1, frameon=False
    )
    return figure


def _from_zero(axes: Axes, least: float = 0.0) -> None:
    """Let the horizontal axis begin at 0, and end behind the last point, also where all points are at one place."""
    last = max((float(np.max(line.get_xdata())) for line in axes.get_lines() if np.size(line.get_xdata())), default=0.0)
    axes.set_xlim(0.0, 1.05 * max(last, least) or 1.0)


def _finish(figure: Figure, axes: Axes) -> None:
    _clean(axes)
    axes.grid(color="#dddddd", linewidth=0.6)
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper center", ncols=LEGEND_COLUMNS, frameon=False)


def _clean(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
