"""Updates that wait for other servers, of pushes after which workers have gone on: the standby has these before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.placement import home_of
from aiokv.core.server.copies.copying import Copying
from aiokv.types import SCHEDULER, STANDBY
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Asked, Server

KEY = next(key for key in "abcdefgh" if home_of(key, 2) == 0)
"""A key of six elements whose first half is here, on server 0, and whose second half is on server 1."""

OTHER = 30
"""The connection that server 1 has made."""


def sent(effects: list[ef.Effect], kind: type[m.Message]) -> list[ef.Send]:
    """Return what is sent of one kind."""
    return [effect for effect in effects if isinstance(effect, ef.Send) and isinstance(effect.message, kind)]


class Followed:
    """Server 0 of two, with two workers, the rule lamb, and a standby that the test plays."""

    def __init__(self, make_server: type[Server]) -> None:
        self.server = server = make_server(2, "k_batch_async:2", servers=2, chunk_bytes=12)
        assert server.ask(0, m.SetOptimizer("lamb", {}, "sum", 5.0)).answer == m.Done()
        assert server.init(KEY, shape=(6,), start=0, stop=3).answer == m.Done()
        self.peer = STANDBY
        self.follow("ready")

    def follow(self, state: str, number: int = 1) -> None:
        """Let the view have a standby, which has nothing, and get it all over a link."""
        server = self.server
        view = server.machine._joiner.view
        assert view is not None
        name = f"server-1/0.{number}"
        standby = m.StandbyEntry(name, "server-1", number, "127.0.0.1", 9100 + number, state)
        first = structs.replace(view.servers[0], standby=standby)
        server.epoch += 1
        view = structs.replace(view, epoch=server.epoch, servers=(first, view.servers[1]))
        server.handle(st.Received(SCHEDULER, 0, view))

    def link(self, has: int) -> list[ef.Effect]:
        """Let a connection to the standby be there, which has so much."""
        self.peer -= 1
        self.server.handle(st.Connected(self.peer))
        return self.server.handle(st.Received(self.peer, 1, m.Replicated(has)))

    def lose_link(self) -> None:
        """Let the connection to the standby end."""
        self.server.handle(st.PeerLost(self.peer, "cut"))

    @property
    def last(self) -> int:
        """The number of the last message to the standby."""
        twin = self.server.machine._replication.twin
        assert isinstance(twin, Copying)
        return twin._acks.last

    def acknowledge(self) -> list[ef.Effect]:
        """Let the standby say that it has all."""
        return self.server.handle(st.Received(self.peer, 0, m.Replicated(self.last)))

    def push(self, rank: int) -> Asked:
        """Let a worker push the half that is here."""
        return self.server.push(rank, key=KEY, shape=(6,), start=0, stop=3)

    def measure(self) -> list[ef.Effect]:
        """Let the store compute the sums of this half."""
        return self.server.handle(st.Normed(KEY, 0, 1, 0, [(1.0, 2.0)], None))


@pytest.fixture
def followed(make_server: type[Server]) -> Followed:
    """A server whose standby has all there is."""
    followed = Followed(make_server)
    followed.link(0)
    followed.acknowledge()
    return followed


def test_round_begins_when_the_standby_has_all_of_it(followed: Followed) -> None:
    followed.push(0)
    followed.push(1)
    assert followed.server.seen(ef.Norms) == []
    effects = followed.acknowledge()
    assert [effect.version for effect in effects if isinstance(effect, ef.Norms)] == [1]


def test_chunk_is_copied_while_the_norms_of_another_server_are_waited_for(followed: Followed) -> None:
    """What that server is told has to wait for it, and its norms may wait for that."""
    followed.push(0)
    followed.push(1)
    followed.acknowledge()
    has = followed.last
    followed.measure()
    followed.push(0)
    followed.lose_link()
    effects = followed.link(has)
    (copy,) = sent(effects, m.Copy)
    assert isinstance(copy.message, m.Copy)
    assert copy.message.version == 0
    (contribution,) = sent(effects, m.CopyContribution)
    assert isinstance(contribution.message, m.CopyContribution)
    assert contribution.message.sequence == 2, "the others are there"
    followed.server.servers_at.add(OTHER)
    attach = m.AttachServer(1, "server-1", 1, followed.server.epoch, 5.0)
    effects = followed.server.handle(st.Received(OTHER, 1, attach))
    assert effects == [ef.Hold(ef.Send(OTHER, 1, m.Done()))]
    assert any(isinstance(effect, ef.LetGo) for effect in followed.acknowledge())


def test_chunk_is_not_copied_in_the_middle_for_a_standby_without_which_workers_went_on(followed: Followed) -> None:
    followed.follow("filling", 2)
    followed.push(0)
    followed.push(1)
    assert len(followed.server.seen(ef.Norms)) == 1, "nothing waits for one that is being filled"
    followed.measure()
    assert sent(followed.link(0), m.Copy) == []


def test_answers_go_while_a_filling_begins_again(followed: Followed) -> None:
    """The link ended when all was sent, and not all had arrived."""
    followed.follow("filling", 2)
    before = followed.last
    assert sent(followed.link(before), m.Copy)
    effects = followed.server.handle(st.Received(10, 50, m.GetRules(5.0)))
    assert [type(effect) for effect in effects] == [ef.Hold]
    followed.push(0)
    followed.push(1)
    assert followed.server.seen(ef.Norms) == []
    followed.lose_link()
    effects = followed.link(before)
    assert any(isinstance(effect, ef.LetGo) for effect in effects)
    assert [effect.version for effect in effects if isinstance(effect, ef.Norms)] == [1]
    assert sent(effects, m.StandbyReady) == []
