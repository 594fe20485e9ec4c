"""Work in other processes, and what is left of it after Ctrl-C."""

from __future__ import annotations

import os
import signal

import pytest

from sim.futures import Processes


def interrupt_oneself() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def divide(number: int, *, by: int) -> float:
    return number / by


def test_results_and_errors_come_back() -> None:
    with Processes(1) as executor:
        assert executor.submit(divide, 6, by=2).result() == 3.0
        with pytest.raises(ZeroDivisionError):
            executor.submit(divide, 6, by=0).result()


@pytest.mark.skipif(os.name == "nt", reason="os.kill ends a process there, whatever the signal")
def test_a_process_that_was_interrupted_begins_nothing_more() -> None:
    with Processes(1) as executor:
        interrupted, after = executor.submit(interrupt_oneself), executor.submit(divide, 6, by=2)
        for future in (interrupted, after):
            with pytest.raises(KeyboardInterrupt):
                future.result()
