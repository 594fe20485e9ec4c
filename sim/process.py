"""Processes in simulated time: as those of SimPy, but waiting for a time, or for the end of a call, takes no event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from simpy.events import URGENT, Event
from simpy.exceptions import Interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from simpy.core import Environment

    from sim.clock import Clock


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


_FIRST: Final = (0,)


class Process(Event):
    """Something that goes on by itself; it is an event too, which happens when it is over, with what it returns.

    Args:
        env: the simulated time.
        generator: what it does. It yields what it waits for: an event or a future, whose value it gets, or a number of
            seconds.
    """

    def __init__(self, env: Clock, generator: Generator[Event | Future | float, Any, Any]) -> None:
        super().__init__(env)
        self._clock = env
        self._generator = generator
        self._target: Event | Future | None = None
        """What is waited for, unless it is a time."""
        self._lives: tuple[int] = _FIRST
        """How often it was interrupted; what it waits for is called with that, to no effect once it was."""
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
        self._lives = (self._lives[0] + 1,)
        self.go_on(Interrupt(cause), self._generator.throw)

    def _wake(self, lives: int) -> None:
        if lives == self._lives[0]:
            self.go_on(None)

    def _happened(self, event: Event) -> None:
        if event._ok:
            self.go_on(event._value)
        else:
            event.defused = True
            self.go_on(event._value, self._generator.throw)

    def go_on(self, value: Any, step: Callable[[Any], Event | Future | float] | None = None) -> None:
        """Let it do what it does until it waits again.

        Args:
            value: that of what it waits for.
            step: hands it over, unless by sending it.
        """
        try:
            target = self._generator.send(value) if step is None else step(value)
            while True:
                if type(target) is float:
                    self._target = None
                    self._clock.after(target, self._wake, *self._lives)
                    return
                if type(target) is Future:
                    if not target.is_done:
                        self._target, target.process = target, self
                        return
                elif target.callbacks is not None:  # type: ignore[union-attr]
                    self._target = target  # type: ignore[assignment]
                    target.callbacks.append(self._happened)  # type: ignore[union-attr]
                    return
                # It has happened already.
                target = self._generator.send(target.value)  # type: ignore[union-attr]
        except StopIteration as stop:
            self.succeed(stop.value)
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            self.fail(error)


def _urgently(env: Environment, action: Callable[[Event], None]) -> None:
    """Call something at this time, before anything else that is to happen then."""
    event = Event(env)
    event._ok, event._value = True, None
    event.callbacks = [action]
    env.schedule(event, URGENT)
