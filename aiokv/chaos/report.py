"""What came of a chaos run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from aiokv.chaos.job import SHAPES

if TYPE_CHECKING:
    from rich.console import Console


class Report(msgspec.Struct, kw_only=True):
    """The figures of a run. Contributions are counted for each key and worker.

    Attributes:
        kills: processes that were killed, all together.
        killed: the same by role.
        disturbed: what else was done, by kind.
        resumes: how often the whole job was started again from a checkpoint.
        steps: steps that the job has made.
        bit_equal: whether all workers ended with exactly the weights of an undisturbed run.
        applied: contributions that are in the weights.
        duplicate: contributions that came again and were recognised.
        late: contributions that were not taken because their round was over.
        lost: contributions that should be in the weights, and are not.
        longest_pause_s: seconds from one step to the next, at most.
        seconds: how long the run took.
        problems: what went wrong, in words.
    """

    seed: int
    workers: int
    servers: int
    kills: int = 0
    killed: dict[str, int] = {}
    disturbed: dict[str, int] = {}
    resumes: int = 0
    steps: int = 0
    bit_equal: bool = False
    applied: int = 0
    duplicate: int = 0
    late: int = 0
    lost: int = 0
    longest_pause_s: float = 0.0
    seconds: float = 0.0
    digest: str = ""
    """Of the weights that the workers ended with."""
    problems: list[str] = []

    @property
    def ok(self) -> bool:
        """Whether nothing was lost."""
        return self.bit_equal and not self.lost and not self.problems


def count_contributions(report: Report, updates: int, tallies: dict[str, Any]) -> None:
    """Fill in what became of the contributions.

    Args:
        report: has the steps and the workers.
        updates: how many updates the servers have made, of all keys together.
        tallies: what they have counted, by rank.
    """
    report.applied = updates * report.workers
    report.lost = report.steps * len(SHAPES) * report.workers - report.applied
    counted: Counter[str] = Counter()
    for tally in tallies.values():
        counted.update(tally["dropped"])
        counted["duplicate"] += tally.get("duplicates", 0)
    report.duplicate = counted.pop("duplicate", 0)
    report.late = sum(counted.values())


def show(report: Report, console: Console) -> None:
    """Print a table."""
    from rich.table import Table  # noqa: PLC0415 - only who looks at it needs it

    verdict = "bit-equal to an undisturbed run" if report.bit_equal else "NOT the weights of an undisturbed run"
    table = Table(title=f"{report.steps:,} steps, {report.kills} kills: {verdict}", title_justify="left", box=None)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("killed", ", ".join(f"{role} {number}" for role, number in report.killed.items()) or "-")
    table.add_row("disturbed", ", ".join(f"{kind} {number}" for kind, number in report.disturbed.items()) or "-")
    table.add_row("started again from a checkpoint", f"{report.resumes}")
    for name in ("applied", "duplicate", "late", "lost"):
        table.add_row(f"contributions {name}", f"{getattr(report, name):,}")
    table.add_row("longest pause", f"{report.longest_pause_s:.2f} s")
    table.add_row("took", f"{report.seconds:.0f} s")
    for problem in report.problems:
        table.add_row("problem", problem)
    console.print(table)
