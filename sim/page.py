"""The report of a command as one HTML page that needs nothing else: numbers, and pictures within it."""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING, Final

from sim import picture
from sim.learning import learns
from sim.report import cell, mean, notes, rows_for, summarise, worker_rows
from sim.report import half_widths as widths

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from matplotlib.figure import Figure

    from sim.record import Run

STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; max-width: 72em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; } th, td { padding: .2em .8em; border-bottom: 1px solid #ddd; }
td { text-align: right; font-variant-numeric: tabular-nums; } td:first-child, th:first-child { text-align: left; }
img { max-width: 100%; height: auto; } figure { margin: 1.5em 0; } figcaption { color: #555; }
"""

SHOWN_WORKERS: Final = 64


def page(results: Mapping[str, Sequence[Run]]) -> str:
    """Return the report of all runs; pictures and the table of workers are of the first run of each policy."""
    runs = [replications[0] for replications in results.values()]
    scenario = runs[0].scenario
    title = html.escape(f"{scenario.name}: {scenario.title}" if scenario.title else scenario.name)
    pictures: list[tuple[Figure, str]] = [
        (picture.timeline(runs), "Timeline: who computes and who waits."),
        (picture.step_times(runs), "Step times: how many steps take at most how long."),
        (picture.time_split(runs), "Where the time of the workers went."),
        (picture.staleness(runs), "Staleness of the gradients."),
        (picture.staleness_by_worker(runs), "Staleness of each worker's gradients."),
        (picture.gradients(runs), "What became of each worker's gradients."),
        (picture.progress(runs), "Gradients applied over time."),
    ]
    if learns(scenario):
        pictures.append((picture.losses(runs), "Loss against time and against updates."))
    body = [
        f"<h1>{title}</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in notes(results)),
        "<h2>Results</h2>",
        _results(results),
        *(_figure(figure, caption) for figure, caption in pictures),
        "<h2>Workers</h2>",
        *(f"<h3>{html.escape(run.policy)}</h3>{_workers(run)}" for run in runs),
        "<h2>Fingerprints</h2>",
        _table(
            ("policy", "seed", "SHA-256 of the event log"), ((run.policy, str(run.seed), run.digest) for run in runs)
        ),
    ]
    head = f'<meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _results(results: Mapping[str, Sequence[Run]]) -> str:
    summaries = {policy: [summarise(run) for run in runs] for policy, runs in results.items()}
    shown = rows_for(next(iter(results.values()))[0].scenario)
    columns = [(mean(each), widths(each)) for each in summaries.values()]
    rows = [[label, *(cell(value(middle), value(width)) for middle, width in columns)] for label, value in shown]
    return _table(["", *results], rows)


def _workers(run: Run) -> str:
    rows = worker_rows(run)[:SHOWN_WORKERS]
    more = f"<p>The first {SHOWN_WORKERS} of {len(run.workers)}.</p>" if len(run.workers) > SHOWN_WORKERS else ""
    return more + _table(
        [name.replace("_", " ") for name in rows[0]], ([_text(v) for v in row.values()] for row in rows)
    )


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _figure(figure: Figure, caption: str) -> str:
    data = base64.b64encode(picture.to_png(figure)).decode()
    return (
        f'<figure><img alt="{caption}" src="data:image/png;base64,{data}"><figcaption>{caption}</figcaption></figure>'
    )
