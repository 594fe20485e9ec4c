"""`aiokv bench limits`: all figures, with messages so small that they cost no time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from aiokv.bench.limits import Peer, measure_limits, parse_limits
from aiokv.bench.sockets import connect, receive_all
from aiokv.errors import AiokvError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.conftest import Ran

FIGURES = {
    "add_gbps",
    "pingpong_gbps",
    "duplex_gbps",
    "latency_us",
    "bare_server_gbps_1w",
    "bare_server_gbps_2w",
}


def test_json_has_every_figure(bench: Callable[[str], Ran]) -> None:
    ran = bench("limits:0.01 --rounds 2 --json")
    assert ran.code == 0
    record = ran.json()
    assert set(record) == FIGURES | {"mib", "rounds"}
    assert all(record[name] > 0 for name in FIGURES)


def test_table_has_a_line_for_every_figure(bench: Callable[[str], Ran]) -> None:
    ran = bench("limits:0.01 --rounds 1")
    assert ran.code == 0
    assert "sockets, both ways at once: GB/s sent + received" in ran.out
    assert sum("GB/s" in line or "us" in line for line in ran.out.splitlines()) == len(FIGURES)


def test_messages_have_64_mib_unless_told_otherwise() -> None:
    assert (parse_limits("limits"), parse_limits("limits:0.5"), parse_limits("large:64")) == (64.0, 0.5, None)


@pytest.mark.parametrize("text", ["limits:", "limits:x", "limits:0", "limits:-1", "limits:nan", "limits:1e9"])
def test_size_must_be_one(text: str) -> None:
    with pytest.raises(ConfigError, match="needs a number of MiB up to 4096"):
        parse_limits(text)


def test_options_of_a_cluster_are_refused(bench: Callable[[str], Ran]) -> None:
    ran = bench("limits --servers 2 --chunk-kib 64")
    assert ran.code == 2
    assert "limits starts no cluster, so these options mean nothing to it: --servers, --chunk-kib" in ran.err


def test_bare_server_adds_what_three_workers_send() -> None:
    with Peer("server", 3, 16, 1) as server:
        port = int(server.read_line())
        connections = [connect(port) for _ in range(3)]
        for number, connection in enumerate(connections):
            connection.sendall(bytes([0, 0, 128, 63]) * 4 if number else bytes(16))
        results = []
        for connection in connections:
            memory = bytearray(16)
            receive_all(connection, memoryview(memory))
            results.append(bytes(memory))
            connection.close()
    # 0.0 + 1.0 + 1.0 = 2.0, which is 0x40000000.
    assert results == [bytes([0, 0, 0, 64]) * 4] * 3


def test_peer_that_dies_is_an_error_with_its_exit_code() -> None:
    with Peer("worker", 1, 4, 1) as peer, pytest.raises(AiokvError, match="the process for 'worker' ended with exit"):
        peer.read_line()


def test_progress_names_what_is_measured_next() -> None:
    names: list[str] = []
    measure_limits(mib=0.001, rounds=1, on_progress=names.append)
    assert len(names) == len(FIGURES)
    assert names[0].startswith("add in place")
