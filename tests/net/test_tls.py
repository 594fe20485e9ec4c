"""TLS on every connection of a cluster: who is let in, who is not, and what each of them is told."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import errno
import logging
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import trustme

import aiokv
from aiokv.config import Config, load_config
from aiokv.errors import ConfigError, HandshakeError, JoinTimeoutError
from aiokv.net import tls
from aiokv.net.tcp import Link

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from aiokv.net.driver import Driver
    from tests.net.conftest import Cluster, MakeCluster

Certify = Callable[..., dict[str, Any]]

SHORT = {"join_timeout": 1.0, "call_timeout": 0.9, "death_timeout": 0.8, "heartbeat": 0.3}


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def certify(authority: trustme.CA, tmp_path: Path) -> Certify:
    """Return what makes the settings of TLS: with the cluster's authority or another one, for a name."""

    def make(name: str = "127.0.0.1", *, signed_by: trustme.CA | None = None, **facts: Any) -> dict[str, Any]:
        certificate = (signed_by or authority).issue_cert(name, **facts)
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        authority.cert_pem.write_to_path(str(folder / "ca.pem"))
        certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
        for pem in certificate.cert_chain_pems:
            pem.write_to_path(str(folder / "cert.pem"), append=True)
        return {f"tls_{kind}": str(folder / f"{kind}.pem") for kind in ("ca", "cert", "key")}

    return make


def links(nodes: Iterable[Driver]) -> list[Link]:
    return [link for node in nodes for link in node._links.values() if isinstance(link, Link)]


def protocols(running: Cluster) -> set[str | None]:
    """Return what is spoken on the connections of a cluster, e.g. TLSv1.3; None: nothing but our own frames."""
    found: set[str | None] = set()
    for link in links([running.scheduler, *running.servers, *running.workers]):
        assert link._transport is not None
        secured = link._transport.get_extra_info("ssl_object")
        found.add(None if secured is None else secured.version())
    return found


async def train(cluster: MakeCluster, **settings: Any) -> tuple[list[bytes], set[str | None], int]:
    """Return the weights after three rounds of LARS, what was spoken, and how many links servers have to each other.

    LARS needs the norm of a tensor that is cut over both servers.
    """
    async with cluster(workers=2, servers=2, **settings) as running:
        first = np.linspace(-1, 1, 300_000, dtype=np.float32)
        await running.each(lambda kv: kv.init("w", first))
        await running.each(lambda kv: kv.set_optimizer("lars", learning_rate=0.1, momentum=0.9))
        for _ in range(3):
            await running.each(lambda kv: kv.push("w", first * (1 + kv.rank)))
        values = await running.each(lambda kv: kv.pull("w"))
        between = sum(link.initiator and link.peer < -1 for link in links(running.servers))
        assert all(node.counters["shared_memory.connections"] == 0 for node in running.servers) or not settings
        return [value.tobytes() for value in values], protocols(running), between


async def test_all_connections_are_encrypted_and_the_bits_are_the_same(cluster: MakeCluster, certify: Certify) -> None:
    plain, spoken, _ = await train(cluster)
    assert spoken == {None}
    secured, spoken, between = await train(cluster, **certify())
    assert spoken == {"TLSv1.3"}
    assert between >= 1
    assert secured == plain


async def test_large_arrays_go_through_tls_both_ways(cluster: MakeCluster, certify: Certify) -> None:
    async with cluster(workers=2, **certify()) as running:
        size = 4_000_000
        await running.each(lambda kv: kv.init("w", np.zeros(size, np.float32)))
        gradients = [np.random.default_rng(rank).normal(size=size).astype(np.float32) for rank in range(2)]
        for _ in range(3):
            values = await running.each(lambda kv: kv.pushpull("w", gradients[kv.rank]))
            for value in values:
                np.testing.assert_array_equal(value, gradients[0] + gradients[1])


async def test_a_call_that_is_cancelled_under_tls_gives_its_array_back(cluster: MakeCluster, certify: Certify) -> None:
    async with cluster(workers=2, **certify()) as running:
        first, second = running.workers
        await running.each(lambda kv: kv.init("w", np.zeros(2_000_000, np.float32)))
        gradient = np.ones(2_000_000, np.float32)
        call = asyncio.create_task(first.push("w", gradient))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        gradient[:] = 1000
        value = await second.pushpull("w", np.full(2_000_000, 2, np.float32))
        np.testing.assert_array_equal(value, np.full(2_000_000, 3, np.float32))


async def test_a_worker_without_a_certificate_is_refused_where_they_are_mutual(
    cluster: MakeCluster, certify: Certify, caplog: pytest.LogCaptureFixture
) -> None:
    nobody = {"tls_cert": "", "tls_key": ""}
    async with cluster(workers=1, start_workers=False, **certify()) as running:
        with pytest.raises(JoinTimeoutError, match="may not accept this node's certificate"):
            await running.client("worker-0", **nobody, **SHORT).start()
        assert running.scheduler.counters["handshakes_failed"] >= 1
        assert "peer did not return a certificate" in caplog.text
        async with running.client("worker-0") as kv:
            await kv.barrier()
    async with (
        cluster(workers=1, start_workers=False, **certify(), tls_mutual=False) as running,
        running.client("worker-0", **nobody) as kv,
    ):
        await kv.init("w", np.ones(3, np.float32))
        np.testing.assert_array_equal(await kv.pull("w"), np.ones(3))


async def test_a_worker_of_another_authority_is_refused_whatever_it_believes(
    cluster: MakeCluster, certify: Certify, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster(workers=1, start_workers=False, **certify()) as running:
        with pytest.raises(JoinTimeoutError, match="may not accept this node's certificate"):
            await running.client("worker-0", **certify(signed_by=trustme.CA()), **SHORT).start()
        assert "its certificate is not accepted" in caplog.text


async def test_a_listener_of_another_authority_is_not_told_anything(
    cluster: MakeCluster, certify: Certify, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker ends the handshake before it proves anything."""
    stranger = trustme.CA()
    async with cluster(workers=1, start_workers=False, **certify()) as running:
        mine = certify(signed_by=stranger)
        stranger.cert_pem.write_to_path(mine["tls_ca"])
        address = running.scheduler.address
        words = f"no connection to {address}: its certificate is not accepted: .*(self.signed|issuer)"
        with pytest.raises(HandshakeError, match=words):
            await running.client("worker-0", **mine).start()
        while not running.scheduler.counters["handshakes_failed"]:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.001)
    assert [each for each in caplog.messages if each.endswith(": ")] == []


async def test_a_certificate_that_has_expired_is_not_accepted(cluster: MakeCluster, certify: Certify) -> None:
    past = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
    old = certify(not_before=past, not_after=past + datetime.timedelta(days=1))
    async with aiokv.Scheduler(num_workers=1, num_servers=1, bind_port=0, token="t", **old) as scheduler:
        client = aiokv.connect(scheduler.address, token="t", **certify())
        with pytest.raises(HandshakeError, match="certificate has expired"):
            await client.start()


@pytest.mark.parametrize("listens", [True, False], ids=["listener", "initiator"])
async def test_tls_on_one_side_only_is_refused_at_once_and_both_are_told(
    cluster: MakeCluster, certify: Certify, caplog: pytest.LogCaptureFixture, listens: bool
) -> None:
    none = dict.fromkeys(("tls_ca", "tls_cert", "tls_key"), "")
    theirs, mine = (certify(), none) if listens else (none, certify())
    async with cluster(workers=1, start_workers=False, **theirs) as running:
        with pytest.raises(HandshakeError, match="turn it on for both or for neither"):
            await running.client("worker-0", **mine).start()
        assert running.scheduler.counters["handshakes_failed"] == 1
    assert caplog.text.count("turn it on for both or for neither") == 1


async def test_names_in_certificates_count_when_that_is_asked_for(cluster: MakeCluster, certify: Certify) -> None:
    async with cluster(workers=1, start_workers=False, **certify("elsewhere.example")) as running:
        with pytest.raises(HandshakeError, match=r"not valid for '127\.0\.0\.1'"):
            await running.client("worker-0", **certify(), tls_names=True).start()
        async with running.client("worker-0", **certify()) as kv:
            await kv.barrier()
    async with cluster(workers=1, **certify(), tls_names=True) as running:
        await running.workers[0].barrier()


async def test_a_stranger_that_says_nothing_is_cut(
    cluster: MakeCluster, certify: Certify, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tls.TIMES, "ssl_handshake_timeout", 0.2)
    async with cluster(workers=1, **certify()) as running:
        reader, writer = await asyncio.open_connection(running.scheduler.host, running.scheduler.port)
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        assert running.scheduler.admission.handshakes == 0
        assert running.scheduler.counters["handshakes_failed"] == 1


async def test_a_node_without_a_descriptor_left_refuses_and_goes_on(
    certify: Certify, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    async with aiokv.Scheduler(num_workers=1, num_servers=1, bind_port=0, token="t", **certify()) as scheduler:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "fromfd", full)
            reader, writer = await asyncio.open_connection(scheduler.host, scheduler.port)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
        assert (scheduler.admission.open, scheduler.counters["handshakes_failed"]) == (0, 1)
        with pytest.raises(HandshakeError, match="token"):
            await aiokv.connect(scheduler.address, token="another", **certify()).start()


async def test_a_node_that_closes_waits_for_no_handshake(certify: Certify, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with aiokv.Scheduler(num_workers=1, num_servers=1, bind_port=0, token="t", **certify()) as scheduler:
        reader, writer = await asyncio.open_connection(scheduler.host, scheduler.port)
        while not scheduler.admission.handshakes:  # noqa: ASYNC110 - a connection that is accepted is no event
            await asyncio.sleep(0)
        await scheduler.close()
        assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
    assert "this node is closing" in caplog.text


# --- settings ---


@pytest.mark.parametrize(
    ("missing", "words"),
    [("tls_ca", "need tls_ca"), ("tls_key", "belong together"), ("tls_cert", "belong together")],
)
def test_settings_that_do_not_go_together_are_refused(certify: Certify, missing: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(environ={}, **certify() | {missing: ""})


def test_a_listener_needs_a_certificate(certify: Certify) -> None:
    config = Config(tls_ca=certify()["tls_ca"])
    with pytest.raises(ConfigError, match="set tls_cert and tls_key"):
        tls.listener_context(config)
    assert tls.initiator_context(config) is not None


def test_a_file_that_is_not_there_is_named(certify: Certify, tmp_path: Path) -> None:
    nowhere = str(tmp_path / "nowhere.pem")
    with pytest.raises(ConfigError, match=r"tls_ca: can't use '.*nowhere\.pem': No such file"):
        tls.initiator_context(Config(**certify() | {"tls_ca": nowhere}))


def test_a_file_that_is_no_certificate_is_named(certify: Certify, tmp_path: Path) -> None:
    (tmp_path / "text.pem").write_text("hello")
    with pytest.raises(ConfigError, match=r"tls_cert: can't use '.*text\.pem'"):
        tls.initiator_context(Config(**certify() | {"tls_cert": str(tmp_path / "text.pem")}))


def test_without_settings_there_is_no_tls() -> None:
    assert tls.listener_context(Config()) is None
    assert tls.initiator_context(Config()) is None


WORKER = """
import numpy as np, aiokv
with aiokv.blocking.connect() as kv:
    kv.init("w", np.zeros(100_000, np.float32))
    value = kv.pushpull("w", np.ones(100_000, np.float32))
    print("sum", value[0], aiokv.load_config().uses_tls)
"""


def test_a_job_that_is_run_with_certificates_uses_them_everywhere(certify: Certify) -> None:
    options = [part for name, path in certify().items() for part in (f"--{name.replace('_', '-')}", path)]
    command = [sys.executable, "-m", "aiokv", "run", "-w", "2", "-s", "2", *options, "--", "python", "-c", WORKER]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("sum 2.0 True") == 2


def test_options_of_a_node_are_its_settings(certify: Certify) -> None:
    files = certify() | {"tls_key": "/nowhere/key.pem"}
    options = [part for name, path in files.items() for part in (f"--{name.replace('_', '-')}", path)]
    for node in ("scheduler", "server"):
        command = [sys.executable, "-m", "aiokv", node, "--port", "0", *options]
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
        assert run.returncode == 1
        assert "error: tls_cert: can't use" in run.stderr
