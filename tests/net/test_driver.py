"""What all drivers share: the timer of the state machine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokv.config import load_config
from aiokv.core import stimuli as st
from aiokv.net.driver import Driver

if TYPE_CHECKING:
    from aiokv.core import effects as ef


class Alarms:
    """A machine that wants to be woken at given times, and keeps when it was."""

    def __init__(self, times: list[float]) -> None:
        self.times = times
        self.woken: list[float] = []
        self.done = asyncio.Event()

    def handle(self, stimulus: st.Stimulus, *, now: float) -> list[ef.Effect]:
        if isinstance(stimulus, st.Tick):
            self.woken.append(now)
            while self.times and self.times[0] <= now:
                self.times.pop(0)
            if not self.times:
                self.done.set()
        return []

    def deadline(self) -> float | None:
        return self.times[0] if self.times else None


async def test_a_machine_is_woken_at_its_deadlines_also_when_they_have_passed() -> None:
    now = asyncio.get_running_loop().time()
    machine = Alarms([now - 5.0, now + 0.01, now + 0.02])
    driver = Driver(load_config(environ={}))
    driver._start(machine)
    for _ in range(3):
        driver.feed(st.PeerLost(0, "nobody"))
    await machine.done.wait()
    assert machine.woken[-1] >= now + 0.02
    await driver._close_links()


async def test_an_earlier_deadline_takes_the_place_of_a_later_one() -> None:
    now = asyncio.get_running_loop().time()
    machine = Alarms([now + 3600.0])
    driver = Driver(load_config(environ={}))
    driver._start(machine)
    driver.feed(st.PeerLost(0, "nobody"))
    machine.times[:] = [now + 0.01]
    driver.feed(st.PeerLost(0, "nobody"))
    await machine.done.wait()
    assert now + 0.01 <= machine.woken[-1] < now + 3600.0
    await driver._close_links()
