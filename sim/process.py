"""Processes in simulated time: SimPy's, but waiting for a number of seconds takes no event."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simpy.events import URGENT, Event
from simpy.exceptions import Interrupt

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from simpy.core import Environment

    from sim.clock import Clock


class Process(Event):
    """Something that goes on by itself; it is an event too, which happens when it is over, with what it returns.

    Args:
        env: the simulated time.
        generator: what it does. It yields what it waits for: an event, whose value it gets, or a number of seconds.
    """

    def __init__(self, env: Clock, generator: Generator[Event | float, Any, Any]) -> None:
        super().__init__(env)
        self._after = env.after
        self._generator = generator
        self._target: Event | None = None
        """The event that is waited for."""
        self._waits = 0
        """How often it has waited for a time."""
        _urgently(env, self._begin)

    @property
    def is_alive(self) -> bool:
        """Whether it is not over."""
        return not self.triggered

    def interrupt(self, cause: object = None) -> None:
        """Raise `simpy.Interrupt` in it where it waits, before anything else happens at this time."""
        _urgently(self.env, lambda _: self._interrupt(cause))

    def _begin(self, _: Event) -> None:
        self._go_on(self._generator.send, None)

    def _interrupt(self, cause: object) -> None:
        if self.triggered:
            return
        if self._target is not None and self._target.callbacks is not None:
            self._target.callbacks.remove(self._happened)
        self._waits += 1
        self._go_on(self._generator.throw, Interrupt(cause))

    def _wake(self, number: int) -> None:
        if number == self._waits:
            self._go_on(self._generator.send, None)

    def _happened(self, event: Event) -> None:
        if event._ok:
            self._go_on(self._generator.send, event._value)
        else:
            event.defused = True
            self._go_on(self._generator.throw, event._value)

    def _go_on(self, step: Callable[[Any], Event | float], value: Any) -> None:
        """Let it do what it does until it waits again."""
        self._target = None
        try:
            target = step(value)
            while not isinstance(target, float) and target.callbacks is None:
                # It has happened already.
                target = self._generator.send(target.value)
        except StopIteration as stop:
            self.succeed(stop.value)
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            self.fail(error)
        else:
            if isinstance(target, float):
                self._waits = number = self._waits + 1
                self._after(target, self._wake, number)
            else:
                assert target.callbacks is not None, "it has not happened yet"
                target.callbacks.append(self._happened)
                self._target = target


def _urgently(env: Environment, action: Callable[[Event], None]) -> None:
    """Call something at this time, before anything else that is to happen then."""
    event = Event(env)
    event._ok, event._value = True, None
    event.callbacks = [action]
    env.schedule(event, URGENT)
