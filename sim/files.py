"""What a run leaves on disk: tables as CSV, results as JSON, traces, and one page to look at."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any

from sim.fates import staleness_rows
from sim.learning import loss_rows
from sim.perfetto import trace
from sim.report import to_json, worker_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from sim.record import Run


def write_files(results: Mapping[str, Sequence[Run]], out: Path, picture: Path, page: str) -> list[str]:
    """Write all files of a command, of the first run of each policy, and return their paths.

    Args:
        results: the runs of each policy, one a replication.
        out: an existing directory.
        picture: where the timeline was written.
        page: the report, HTML.

    Raises:
        OSError: a file can't be written.
    """
    first = {policy: runs[0] for policy, runs in results.items()}
    name = next(iter(first.values())).scenario.name
    tables = {
        "steps": _steps,
        "updates": _updates,
        "drops": _drops,
        "workers": _workers,
        "staleness": staleness_rows,
        "links": _links,
        "losses": loss_rows,
    }
    # Where nothing was dropped or learned there is no table of it.
    contents = {f"{name}-{table}.csv": text for table, rows in tables.items() if (text := _csv(first, rows))}
    # No colons: not every file system takes them.
    contents |= {f"{name}-{policy.replace(':', '-')}.trace.json": trace(run) for policy, run in first.items()}
    contents[f"{name}.html"] = page.encode()
    paths = [str(out / file) for file in (*contents, f"{name}.json")]
    contents[f"{name}.json"] = to_json(results, str(picture), paths)
    for file, content in contents.items():
        (out / file).write_bytes(content)
    return paths


def _csv(runs: Mapping[str, Run], rows: Any) -> bytes:
    text = io.StringIO(newline="")
    writer: csv.DictWriter[str] | None = None
    for policy, run in runs.items():
        for row in rows(run):
            if writer is None:
                writer = csv.DictWriter(text, ["policy", *row], lineterminator="\n")
                writer.writeheader()
            writer.writerow({"policy": policy, **row})
    return text.getvalue().encode()


def _steps(run: Run) -> Iterator[dict[str, Any]]:
    for worker in run.workers:
        for number, step in enumerate(worker.steps, start=1):
            yield {
                "worker": worker.name,
                "step": number,
                "start_s": step.start,
                "computed_s": step.computed,
                "end_s": step.end,
                "busy_s": step.work,
                "wait_s": step.waiting,
                "communicate_s": step.communicated,
                "down_s": step.paused + step.halted,
                "answered": int(step.answered),
                "cancelled": int(step.cancelled),
            }


def _updates(run: Run) -> Iterator[dict[str, Any]]:
    for update in run.updates:
        yield {
            "time_s": update.time,
            "server": update.node,
            "key": update.key,
            "start": update.start,
            "version": update.version,
            "ranks": " ".join(map(str, update.ranks)),
            "staleness": " ".join(map(str, update.staleness)),
        }


def _drops(run: Run) -> Iterator[dict[str, Any]]:
    for drop in run.drops:
        worker, push = drop.token
        yield {
            "time_s": drop.time,
            "server": drop.node,
            "key": drop.key,
            "start": drop.start,
            "worker": worker,
            "push": push,
            "reason": drop.reason,
            "read_version": drop.read,
        }


def _workers(run: Run) -> list[dict[str, Any]]:
    return worker_rows(run)


def _links(run: Run) -> Iterator[dict[str, Any]]:
    for link in run.links:
        yield {
            "source": link.source,
            "target": link.target,
            "messages": link.messages,
            "sent_bytes": link.sent,
            "delivered_bytes": link.delivered,
            "lost_bytes": link.lost,
            "duplicate_bytes": link.duplicate,
        }
