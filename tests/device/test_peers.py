"""Devices that read each other's memory, as far as a machine without a card can tell: what the driver is asked."""

from __future__ import annotations

import logging
from typing import Any

import pytest

peers = pytest.importorskip("aiokv.kernels.cuda.peers", reason="numba-cuda is not installed", exc_type=ImportError)


class Machine:
    """Three devices, of which the first two can read each other's memory. `fails`: the driver says no all the same."""

    def __init__(self, *, fails: bool = False) -> None:
        self.current: list[int] = []
        self.enabled: list[tuple[int, str]] = []
        self.fails = fails
        machine = self

        class Device:
            def __init__(self, number: int) -> None:
                self.number = number

            def __enter__(self) -> None:
                machine.current.append(self.number)

            def __exit__(self, *_: object) -> None:
                machine.current.pop()

        self.gpus = [Device(number) for number in range(3)]

    def current_context(self) -> Any:
        machine, number = self, self.current[-1]

        class Context:
            handle = f"context {number}"

            def can_access_peer(self, other: int) -> bool:
                return {number, other} == {0, 1}

            def enable_peer_access(self, handle: str) -> None:
                if machine.fails:
                    raise RuntimeError("CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED")
                machine.enabled.append((number, handle))

        return Context()


@pytest.fixture(autouse=True)
def nothing_is_known() -> None:
    peers.connect.cache_clear()


def test_a_device_reads_the_memory_of_those_that_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    monkeypatch.setattr(peers, "cuda", machine)
    pairs = [(0, 1), (1, 0), (0, 2), (2, 1)]
    assert [peers.connect(*pair) for pair in pairs] == [True, True, False, False]
    assert machine.enabled == [(0, "context 1"), (1, "context 0")]
    assert peers.connect(0, 1)
    assert len(machine.enabled) == 2, "a driver refuses to be asked twice"


def test_where_the_driver_refuses_copies_go_through_the_host(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers, "cuda", Machine(fails=True))
    with caplog.at_level(logging.WARNING):
        assert not peers.connect(0, 1)
    assert caplog.messages == [
        "CUDA device 0 can't read the memory of device 1: CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"
    ]
