"""How fast the simulator is: `aiokv sim bench`."""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Final

import msgspec
import psutil

from sim.cluster import simulate
from sim.compute import Exponential
from sim.faults import Bursts, Link, Pause
from sim.fuzz import try_seeds
from sim.scenario import Scenario
from sim.sections import ClusterSection, NetworkSection, StopSection

if TYPE_CHECKING:
    from collections.abc import Callable

LARGE: Final = 10_000


class Speed(msgspec.Struct, frozen=True):
    """What was measured. `large` is the number of workers of the large run, and `rounds` that of its steps.

    Seconds are those of one process's processor time, so that other programs on the machine count for little.
    """

    gradients_per_s_16: float
    gradients_per_s_10000: float
    seconds_10000x100: float
    peak_rss_mib: float
    replays_per_s: float
    fuzz_seeds_per_s: float
    chaos_bsp: float
    """How many times faster than real time 8 workers with steps of 100 ms and faults are simulated, with all checks."""
    chaos_asp: float
    """The same where nobody waits, and three times as many steps are made."""
    large: int
    rounds: int


def _scenario(workers: int, steps: int) -> Scenario:
    cluster = ClusterSection(workers=workers, heartbeat=1e5, death_timeout=5e5, call_timeout=1e6, join_timeout=1e6)
    stop = StopSection(departures=False)
    return Scenario(steps=steps, compute=Exponential(mean=1.0), cluster=cluster, stop=stop)


class _Steps:
    """Takes the time of the first and of the last step. Each time costs as much as a twentieth of a step."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._done = 0
        self.first = 0.0
        self.last = 0.0

    def __call__(self) -> None:
        self._done += 1
        if self._done == 1:
            self.first = time.process_time()
        elif self._done == self._count:
            self.last = time.process_time()

    @property
    def per_second(self) -> float:
        """How many were made in a second, the first one not counted."""
        return (self._count - 1) / (self.last - self.first)


def _timed(workers: int, steps: int) -> tuple[float, float, float]:
    """Return gradients a second from the first step on, seconds for all, and the most memory in MiB."""
    done = _Steps(workers * steps)
    begin = time.process_time()
    simulate(_scenario(workers, steps), "bsp", 1, on_step=done, check=False)
    memory = psutil.Process().memory_info()
    peak = getattr(memory, "peak_wset", memory.rss)
    try:
        import resource  # noqa: PLC0415 - only where there is one

        peak = max(peak, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    except ImportError:
        pass
    return done.per_second, time.process_time() - begin, peak / 2**20


def _chaos(steps: int) -> Scenario:
    return Scenario(
        steps=steps,
        compute=Exponential(mean=0.1),
        cluster=ClusterSection(workers=8),
        network=NetworkSection(latency=0.001, jitter=0.0005, loss=0.001),
        fault=(
            Pause(node="worker-1", at=3.0, duration=1.0),
            Bursts(node="workers", factor=3.0, gap=5.0, duration=0.5),
            Link(node="worker-2", to="server-0", at=2.0, duration=2.0, latency=0.02, reorder=0.2),
        ),
    )


def _replays(count: int) -> float:
    """Return how many small runs with faults and all checks are done in a second."""
    scenario = _chaos(100)
    begin = time.process_time()
    for seed in range(count):
        simulate(scenario, "bsp", seed)
    return count / (time.process_time() - begin)


def _times_real(policy: str, steps: int) -> float:
    """Return how many simulated seconds of such a run pass in a second."""
    begin = time.process_time()
    return simulate(_chaos(steps), policy, 1).elapsed / (time.process_time() - begin)


def _seeds(count: int) -> float:
    """Return how many random scenarios of the fuzz are done in a second, with all checks."""
    begin = time.process_time()
    found = try_seeds(range(count))
    assert not found, f"the fuzz found something: {found[0].what}"
    return count / (time.process_time() - begin)


def _apart(function: Callable[..., object], *arguments: int | str) -> object:
    """Call a function in a process of its own, whose memory is its own."""
    with ProcessPoolExecutor(1) as executor:
        return executor.submit(function, *arguments).result()


def bench(large: int, rounds: int) -> Speed:
    """Measure all.

    Args:
        large: number of workers of the large run; fewer than 10,000 for a quick look.
        rounds: steps of each of them.
    """
    small = _apart(_timed, 16, 2000)
    big = _apart(_timed, large, rounds)
    replays = _apart(_replays, 40)
    seeds = _apart(_seeds, 200)
    in_step, alone = _apart(_times_real, "bsp", 2000), _apart(_times_real, "asp", 2000)
    assert isinstance(small, tuple)
    assert isinstance(big, tuple)
    assert isinstance(replays, float)
    assert isinstance(seeds, float)
    assert isinstance(in_step, float)
    assert isinstance(alone, float)
    return Speed(
        gradients_per_s_16=small[0],
        gradients_per_s_10000=big[0],
        seconds_10000x100=big[1],
        peak_rss_mib=big[2],
        replays_per_s=replays,
        fuzz_seeds_per_s=seeds,
        chaos_bsp=in_step,
        chaos_asp=alone,
        large=large,
        rounds=rounds,
    )
