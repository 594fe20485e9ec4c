"""What other servers are told waits until the standby knows what it says, and for no chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from msgspec import structs

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.server.copies.acknowledgements import Acknowledgements
from aiokv.core.server.copies.copying import Copying
from aiokv.core.server.copies.server_answers import ServerAnswers
from aiokv.core.server.copies.subjects import DECISIONS
from aiokv.types import SCHEDULER, STANDBY
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from tests.core.conftest import Server

OTHER = 30
"""The connection that server 1 has made."""

FIRST, SECOND = (ef.Send(OTHER, request, m.Accepted()) for request in (2, 3))


def test_answers_go_in_their_order_when_the_standby_has_what_was_sent_before() -> None:
    acks, answers = Acknowledgements(), ServerAnswers()
    acks.next(DECISIONS)
    answers.add(FIRST)
    assert answers.take(acks, unsent=False) == []
    acks.next(DECISIONS)
    answers.add(SECOND)
    assert answers.take(acks, unsent=False) == []
    acks.acknowledged(1)
    assert answers.take(acks, unsent=False) == [FIRST]
    acks.acknowledged(2)
    assert answers.take(acks, unsent=False) == [SECOND]
    assert answers.take_all() == []


def test_an_answer_waits_for_what_is_not_sent_yet() -> None:
    acks, answers = Acknowledgements(), ServerAnswers()
    answers.add(FIRST)
    assert answers.take(acks, unsent=True) == []
    acks.next(DECISIONS)
    assert answers.take(acks, unsent=False) == []
    # Over another link that is sent once more.
    answers.attached()
    assert answers.take(acks, unsent=True) == []
    acks.next(DECISIONS)
    acks.acknowledged(2)
    assert answers.take(acks, unsent=False) == [FIRST]


def test_all_answers_go_where_there_is_no_standby_any_longer() -> None:
    answers = ServerAnswers()
    answers.add(FIRST)
    assert answers.take_all() == [FIRST]


def link(server: Server, peer: int, has: int) -> list[ef.Effect]:
    """Let a connection to the standby be there, which has so much."""
    server.handle(st.Connected(peer))
    return server.handle(st.Received(peer, 1, m.Replicated(has)))


def sent(effects: list[ef.Effect], kind: type[m.Message]) -> list[ef.Effect]:
    """Return what is sent of one kind."""
    return [effect for effect in effects if isinstance(effect, ef.Send) and isinstance(effect.message, kind)]


@pytest.fixture
def followed(make_server: type[Server]) -> Server:
    """Server 0 of two, with a standby that has all there is."""
    server = make_server(2, servers=2)
    server.init()
    view = server.machine._joiner.view
    assert view is not None
    first, second = view.servers
    standby = m.StandbyEntry("server-1/0.1", "server-1", 1, "127.0.0.1", 9100, "ready")
    first = structs.replace(first, standby=standby)
    server.epoch += 1
    view = structs.replace(view, epoch=server.epoch, servers=(first, second))
    server.handle(st.Received(SCHEDULER, 0, view))
    copied = sent(link(server, STANDBY - 1, 0), m.Copy)
    assert copied
    server.handle(st.Received(STANDBY - 1, 0, m.Replicated(last_of(server))))
    return server


def last_of(server: Server) -> int:
    """Return the number of the last message to the standby."""
    twin = server.machine._replication.twin
    assert isinstance(twin, Copying)
    return twin._acks.last


def test_a_chunk_that_is_being_updated_holds_no_answer_to_another_server_back(followed: Server) -> None:
    followed.hold = True
    followed.push(0)
    followed.push(1)
    # What the standby has not said that it has is sent as a whole, when the update is made.
    followed.handle(st.PeerLost(STANDBY - 1, "cut"))
    effects = link(followed, STANDBY - 2, 0)
    assert sent(effects, m.Copy) == []
    followed.servers_at.add(OTHER)
    attach = m.AttachServer(1, "server-1", 1, followed.epoch, 5.0)
    effects = followed.handle(st.Received(OTHER, 1, attach))
    assert effects == []
    effects = followed.handle(st.Received(STANDBY - 2, 0, m.Replicated(last_of(followed))))
    assert effects == [ef.Send(OTHER, 1, m.Done())]
    effects = followed.handle(st.Received(10, 50, m.GetRules(5.0)))
    assert [type(effect) for effect in effects] == [ef.Hold], "a worker may have read what the standby does not have"
