"""The timeline of runs as a picture: who computed and who waited, one panel a policy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

    from sim.record import Run

BUSY: Final = "#0072b2"
WAIT: Final = "#f0c27b"
MARK: Final = "#c1121f"
"""Colours that people with colour vision deficiency can tell apart, also in print."""

SHOWN_STEPS: Final = 12
"""A picture of all steps would show none; a fault is always shown."""

BAR_INCHES: Final = 0.3
PANEL_INCHES: Final = 8.0
LABELLED_WORKERS: Final = 40


def draw(runs: Sequence[Run], path: Path) -> None:
    """Write the timeline of one run of each policy to a PNG file.

    Raises:
        OSError: the file can't be written.
    """
    scenario = runs[0].scenario
    last = max(worker.ended for run in runs for worker in run.workers)
    end = last if scenario.fault else min(last, _interesting(runs))
    panel = min(PANEL_INCHES, 0.7 + BAR_INCHES * scenario.cluster.workers)
    figure = Figure(figsize=(11, 1.3 + panel * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(runs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        _draw_panel(axes, run, end)
    shown = f"; the first {end:.2g} s of {last:.3g} s" if end < last else ""
    panels[-1].set_xlabel(f"simulated time (s){shown}")
    panels[-1].set_xlim(0.0, end)
    title = f"{scenario.name}: {scenario.title}" if scenario.title else scenario.name
    figure.suptitle(f"{title} (seed {runs[0].seed})")
    handles: list[Patch | Line2D] = [
        Patch(color=BUSY, label="busy: computes"),
        Patch(color=WAIT, label="waits for the servers"),
    ]
    if any(worker.struck or worker.error for run in runs for worker in run.workers):
        handles.append(Line2D([], [], color=MARK, marker="x", linestyle="", label="ended early"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.savefig(path, dpi=110)


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
        steps = [step for step in worker.steps if step.start < end]
        busy = [(step.start, step.computed - step.start) for step in steps]
        wait = [(step.computed, step.end - step.computed) for step in steps if step.end > step.computed]
        # The white edge separates steps that follow each other without a wait.
        axes.broken_barh(busy, (row - 0.4, 0.8), facecolors=BUSY, edgecolors="white", linewidth=0.4)
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
