"""Processes in simulated time: as those of SimPy, but waiting for a time, or for the end of a call, takes no event."""

from __future__ import annotations

from collections.abc import Generator
from types import GeneratorType
from typing import TYPE_CHECKING, Any

from simpy.events import URGENT, Event
from simpy.exceptions import Interrupt

if TYPE_CHECKING:
    from collections.abc import Callable

    from simpy.core import Environment

    from sim.clock import Clock


Activity = Generator[Any, Any, Any]
"""What a process does; it yields what it waits for, see `Process`."""


class Future:
    """What at most one process waits for. It takes a third of the time of an event, and never fails.

    Args:
        env: the simulated time.
    """

    __slots__ = ("_env", "is_done", "process", "value")

    def __init__(self, env: Clock) -> None:
        self._env = env
        self.process: Process | None = None
        """Who waits for it."""
        self.is_done = False
        self.value: Any = None

    def finish(self, value: Any) -> None:
        """Let who waits for it go on with a value, after all that is to happen at once."""
        self.is_done, self.value = True, value
        if self.process is not None:
            self._env.soon((self._tell, ()))

    def _tell(self) -> None:
        if self.process is not None:
            self.process.go_on(self.value)


class Process(Event):
    """Something that goes on by itself; it is an event too, which happens when it is over, with what it returns.

    Args:
        env: the simulated time.
        generator: what it does. It yields what it waits for: an event or a future, whose value it gets, a number of
            seconds, or another generator, which then is what the process does until that is over.
    """

    # What is needed each time that it goes on lies in one piece, for with thousands of processes it is in no cache.
    __slots__ = ("_alarm", "_clock", "_generator", "_life", "_outer", "_target")

    def __init__(self, env: Clock, generator: Activity) -> None:
        super().__init__(env)
        self._clock = env
        self._generator = generator
        self._outer: list[Activity] = []
        """Those that wait for this one, the innermost last. They cost nothing meanwhile, unlike with `yield from`."""
        self._target: Event | Future | None = None
        """What is waited for, unless it is a time."""
        self._life = 0
        """How often it was interrupted."""
        self._alarm: tuple[Process, int] = (self, 0)
        """What is called when a time has come, to no effect if it was interrupted meanwhile."""
        _urgently(env, self._begin)

    @property
    def is_alive(self) -> bool:
        """Whether it is not over."""
        return not self.triggered

    def interrupt(self, cause: object = None) -> None:
        """Raise `simpy.Interrupt` in it where it waits, before anything else happens at this time."""
        _urgently(self.env, lambda _: self._interrupt(cause))

    def _begin(self, _: Event) -> None:
        self.go_on(None)

    def _interrupt(self, cause: object) -> None:
        if self.triggered:
            return
        if isinstance(self._target, Future):
            self._target.process = None
        elif self._target is not None and self._target.callbacks is not None:
            self._target.callbacks.remove(self._happened)
        self._life += 1
        self._alarm = (self, self._life)
        self.go_on(None, Interrupt(cause))

    def _happened(self, event: Event) -> None:
        if event._ok:
            self.go_on(event._value)
        else:
            event.defused = True
            self.go_on(None, event._value)

    def go_on(self, value: Any, error: BaseException | None = None) -> None:
        """Let it do what it does until it waits again.

        Args:
            value: that of what it has waited for.
            error: is raised where it waits, instead.
        """
        while True:
            try:
                target = self._generator.send(value) if error is None else self._generator.throw(error)
            except StopIteration as stop:
                if not self._outer:
                    self.succeed(stop.value)
                    return
                self._generator, value, error = self._outer.pop(), stop.value, None
                continue
            except Exception as failure:  # noqa: BLE001 - whoever waits for it gets it
                if not self._outer:
                    self.fail(failure)
                    return
                self._generator, error = self._outer.pop(), failure
                continue
            if type(target) is float:
                self._target = None
                self._clock.after(target, _wake, self._alarm)
                return
            error = None
            if type(target) is Future:
                if not target.is_done:
                    self._target, target.process = target, self
                    return
                value = target.value
            elif type(target) is GeneratorType:
                self._outer.append(self._generator)
                self._generator, value = target, None
            elif target.callbacks is not None:
                self._target = target
                target.callbacks.append(self._happened)
                return
            else:
                # It has happened already.
                value = target.value


def _wake(process: Process, life: int) -> None:
    if life == process._life:
        process.go_on(None)


def _urgently(env: Environment, action: Callable[[Event], None]) -> None:
    """Call something at this time, before anything else that is to happen then."""
    event = Event(env)
    event._ok, event._value = True, None
    event.callbacks = [action]
    env.schedule(event, URGENT)
