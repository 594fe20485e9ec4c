"""Many small random scenarios with all checks, each from a seed of its own, and what is wrong with any of them."""

from __future__ import annotations

import re
from concurrent.futures import Executor, as_completed
from typing import TYPE_CHECKING, Final

import msgspec

from aiokv.errors import ConfigError
from sim.cluster import simulate
from sim.futures import cancelled_at_errors
from sim.progress import lacking_progress
from sim.random_scenarios import random_scenario
from sim.shrink import shrink
from sim.writing import to_toml

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from sim.scenario import Scenario

BATCH: Final = 25
"""So many seeds are given to a process at once."""

MAX_SEEDS: Final = 10_000_000

_DETAILS: Final = re.compile(r"(?:0x[0-9a-f]+|[-\d.]+|'[^']*'|\[[^]]*\]|\s)+")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """A seed with whose scenario something is wrong."""

    seed: int
    policy: str
    what: str
    command: str
    """Repeats it."""
    scenario: str
    """The smallest scenario that was found to fail in the same way, as the text of a TOML file."""


def wrong_with(scenario: Scenario, seed: int) -> str:
    """Run a scenario and return the first thing that is wrong with it in a sentence; nothing when all is well."""
    try:
        run = simulate(scenario, scenario.policies[0], seed, validated=1)
    except Exception as error:  # noqa: BLE001 - whatever a bug raises is what is looked for
        return " ".join(f"{type(error).__name__}: {error}".split())
    return next(iter(lacking_progress(run)), "")


def _kind(text: str) -> str:
    """Return what is left of a sentence without its names and numbers."""
    return _DETAILS.sub("#", text)


def try_seed(seed: int, *, tries: int = 300) -> Finding | None:
    """Run the scenario of a seed; when something is wrong with it, look for a small one with the same trouble.

    Args:
        seed: which scenario.
        tries: how many smaller scenarios are run at most.
    """
    scenario = random_scenario(seed)
    what = wrong_with(scenario, seed)
    if not what:
        return None
    smallest = shrink(scenario, lambda smaller: _kind(wrong_with(smaller, seed)) == _kind(what), tries)
    return Finding(
        seed=seed,
        policy=scenario.policies[0],
        what=what,
        command=f"aiokv sim fuzz --seeds {seed}..{seed}",
        scenario=to_toml(smallest),
    )


def try_seeds(seeds: Sequence[int]) -> list[Finding]:
    """Run the scenarios of some seeds."""
    return [finding for seed in seeds if (finding := try_seed(seed)) is not None]


def fuzz(seeds: range, executor: Executor, on_seed: Callable[[], None] = lambda: None) -> list[Finding]:
    """Run the scenarios of all seeds, and return what is wrong, by seed.

    Args:
        seeds: which.
        executor: where they are run; any of `concurrent.futures` or alike.
        on_seed: is called for each seed that is done.
    """
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    futures = {executor.submit(try_seeds, batch): len(batch) for batch in batches}
    found: list[Finding] = []
    with cancelled_at_errors(futures):
        for future in as_completed(futures):
            found += future.result()
            for _ in range(futures[future]):
                on_seed()
    return sorted(found, key=lambda finding: finding.seed)


def first_finding(seeds: Iterable[int], about: str = "") -> tuple[int, str] | None:
    """Return the first seed with which something is wrong, and what; without looking for a smaller scenario.

    Args:
        seeds: are tried in this order.
        about: a regular expression that is found in what is looked for.
    """
    for seed in seeds:
        what = wrong_with(random_scenario(seed), seed)
        if what and re.search(about, what):
            return seed, what
    return None


def write_scenarios(found: Sequence[Finding], out: Path) -> list[str]:
    """Write the smallest scenario of each finding into an existing directory, and return the paths."""
    paths = [out / f"fuzz-{finding.seed}.toml" for finding in found]
    for finding, path in zip(found, paths, strict=True):
        path.write_text(f"# {finding.what}\n# {finding.command}\n\n{finding.scenario}", encoding="utf-8")
    return [str(path) for path in paths]


def to_json(seeds: range, found: Sequence[Finding], files: Sequence[str], seconds: float) -> bytes:
    """Return what came out as one JSON object.

    Args:
        seeds: of all scenarios.
        found: what is wrong.
        files: where the smallest scenarios are.
        seconds: what it took.
    """
    findings = [{**msgspec.to_builtins(each), "file": file} for each, file in zip(found, files, strict=True)]
    document = {
        "first": seeds[0],
        "last": seeds[-1],
        "seeds": len(seeds),
        "failed": len(found),
        "findings": findings,
        "seconds": seconds,
        "seeds_per_s": len(seeds) / seconds,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2)


def parse_seeds(text: str) -> range:
    """Return the seeds of a text such as "0..1999", which names the first and the last one, or of a single number.

    Raises:
        ConfigError: it is none.
    """
    match = re.fullmatch(r"(\d+)(?:\.\.(\d+))?", text.strip())
    if match is None:
        raise ConfigError(f"expected FIRST..LAST, as in 0..1999, got {text!r}", got=text)
    first, last = int(match[1]), int(match[2] or match[1])
    if not 0 <= last - first < MAX_SEEDS:
        raise ConfigError(f"expected at least one and at most {MAX_SEEDS:,} seeds, got {text!r}", got=text)
    return range(first, last + 1)
