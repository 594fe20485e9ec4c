"""Rounds that are decided once, on several servers: what they ask each other, and that all come to the same."""

from __future__ import annotations

import random
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as hy

from aiokv.core import effects as ef
from aiokv.core import stimuli as st
from aiokv.core.server.rounds import decisions
from aiokv.errors import AiokvError, PolicyError, ProtocolError, ServerLostError, WorkerLostError
from aiokv.types import SCHEDULER, peer_of_server
from aiokv.wire import messages as m
from tests.core.conftest import Asked, Server

if TYPE_CHECKING:
    from tests.core.conftest import Like

BREAKS = 0.05
"""How likely it is that a link ends before the next thing happens."""

LEADER = peer_of_server(0)
"""The other server's own link to server 0."""

THERE = 50
"""The connection that server 1 has opened to server 0."""

SECOND = {"shape": (2,), "start": 1, "stop": 2}
"""The half of a key of two elements that is on server 1."""


# --- server 1, and server 0 played by hand ---


def other(policy: str = "k_sync:2", workers: int = 3, keys: str = "w") -> Server:
    server = Server(workers, policy, index=1, servers=2)
    for key in keys:
        server.init(key)
    return server


def linked(policy: str = "k_sync:2", workers: int = 3, keys: str = "w") -> Server:
    """Return server 1 after its first question, of step 1 of rank 0."""
    server = other(policy, workers, keys)
    server.push(0)
    server.handle(st.Connected(LEADER))
    server.handle(st.Received(LEADER, 1, m.Done()))
    return server


def questions(server: Server) -> list[ef.Send]:
    return [one for one in server.seen(ef.Send) if one.peer == LEADER and isinstance(one.message, m.Arrived)]


def question(send: ef.Send) -> m.Arrived:
    assert isinstance(send.message, m.Arrived)
    return send.message


def answer(server: Server, message: m.Message, number: int = -1) -> list[ef.Effect]:
    """Let server 0 answer a question, the last one unless told otherwise."""
    return server.handle(st.Received(LEADER, questions(server)[number].request, message))


def test_other_server_asks_the_first_about_a_step_once(like: type[Like]) -> None:
    server = other(keys="ab")
    pushed = [server.push(0, key=key) for key in "ab"]
    assert server.seen(ef.Connect)[1:] == [ef.Connect(LEADER, "127.0.0.1", 9000)]
    server.handle(st.Connected(LEADER))
    server.handle(st.Received(LEADER, 1, m.Done()))
    (send,) = questions(server)
    assert send.message == m.Arrived("k_sync:2", (), 0, 1, 0, 0)
    answer(server, m.Accepted())
    assert pushed[0].pending
    answer(server, m.Verdict(1, "", ((1, ((0, 1), (2, 1))),)))
    assert pushed[0].pending, "the other worker of the round is to come"
    server.push(2, key="b")
    assert [asked.answer for asked in pushed] == [None, m.Done(1)]
    assert len(questions(server)) == 1, "the round was told with the answer"


def test_losses_decide_on_the_first_server_alone() -> None:
    """A worker reports to that one only; another one does nothing with it."""
    first, second = Server(3, "adasync:1"), other("adasync:1")
    for server in (first, second):
        assert [server.ask(rank, m.ReportLoss(8.0, 5.0)).answer for rank in range(3)] == [m.Done()] * 3
    # Also what was reported before there was a key.
    first.init()
    assert first.push(0).answer == m.Done(1)
    for rank in range(3):
        first.ask(rank, m.ReportLoss(2.0, 5.0))
    # ceil(sqrt(8 / 2)) of them.
    pushed = [first.push(rank) for rank in (1, 2)]
    assert [asked.answer for asked in pushed] == [m.Done(2)] * 2


def test_step_that_is_late_is_answered_with_the_rounds_it_was_too_late_for() -> None:
    server = linked()
    late = server.push(1, want_value=True)
    answer(server, m.Verdict(0, "late", ((1, ((0, 1), (2, 1))),)))
    assert late.pending
    server.push(2)
    assert late.answer == m.Value(1, dropped="late", round=1)


def test_step_that_is_accepted_is_answered_where_nobody_waits_for_rounds() -> None:
    server = linked("k_batch_async:2")
    server.push(1)
    first, second = (server.asked[peer, request] for peer, request in list(server.asked)[-2:])
    answer(server, m.Accepted(), 0)
    answer(server, m.Accepted(), 1)
    assert first.answer == second.answer == m.Done(0)
    answer(server, m.Verdict(1, "", ((1, ((0, 1), (1, 1))),)), 0)
    answer(server, m.Verdict(1, "", ()), 1)
    assert server.value() == 2.0


def test_chunk_that_comes_when_its_step_is_accepted_is_answered_at_once() -> None:
    server = linked("k_batch_async:2", keys="wx")
    answer(server, m.Accepted())
    assert server.push(0, key="x").answer == m.Done(0)


def test_step_in_no_round_frees_what_it_brought() -> None:
    server = linked("ringmaster:1")
    answer(server, m.Verdict(0, "stale", ()))
    assert not server.slots


def test_server_that_says_that_a_round_is_stuck_is_believed_and_asked_again() -> None:
    server = linked("k_sync:3")
    pushed, pull = [asked for asked in server.asked.values() if asked.peer == 10][-1], server.pull(0)
    error = WorkerLostError("round 1 can't complete", ranks=[2])
    answer(server, m.Error(error.code, error.message, error.details))
    assert isinstance(pushed.error, WorkerLostError)
    assert isinstance(pull.error, WorkerLostError)
    second = server.push(1)
    assert [asked.rank for asked in map(question, questions(server))] == [0, 0, 1]
    answer(server, m.Accepted(), 1)
    answer(server, m.Verdict(1, "", ((1, ((0, 1), (1, 1))),)), 2)
    assert second.answer == m.Done(1), "what was pushed before has stayed counted"
    assert server.value() == 2.0


def test_answer_that_is_none_is_told_to_who_waits() -> None:
    server = linked()
    (pushed,) = [asked for asked in server.asked.values() if asked.pending]
    answer(server, m.Totals((1.0,)))
    assert isinstance(pushed.error, ProtocolError)
    assert "unexpected Totals" in str(pushed.error)


def test_verdict_that_nobody_asked_for_ends_the_link() -> None:
    server = linked()
    (pushed,) = [asked for asked in server.asked.values() if asked.pending]
    effects = server.handle(st.Received(LEADER, 99, m.Verdict(1, "", ())))
    assert ef.Disconnect(LEADER, "unexpected Verdict") in effects
    assert pushed.pending


def reconnect(server: Server) -> None:
    """Let the link of server 1 end, and be made again."""
    server.handle(st.PeerLost(LEADER, "connection reset"))
    server.handle(st.Connected(LEADER))
    server.handle(st.Received(LEADER, 1, m.Done()))


def test_link_that_ends_is_made_again_and_what_is_not_decided_is_asked_again() -> None:
    server = linked(keys="wx")
    pushed = [asked for asked in server.asked.values() if asked.pending]
    answer(server, m.Accepted())
    server.handle(st.PeerLost(LEADER, "connection reset"))
    pushed.append(server.push(0, key="x"))
    server.push(1)
    server.handle(st.Connected(LEADER))
    server.handle(st.Received(LEADER, 1, m.Done()))
    steps = [m.Arrived("k_sync:2", (), rank, 1, 0, 0) for rank in (0, 0, 1)]
    assert [send.message for send in questions(server)] == steps
    assert [send.request for send in questions(server)] == [2, 2, 3]
    answer(server, m.Accepted(), 0)
    answer(server, m.Verdict(1, "", ((1, ((0, 1), (2, 1))),)), 0)
    for key in "wx":
        server.push(2, key=key)
        assert server.value(key) == 2.0
    assert [asked.answer for asked in pushed] == [m.Done(1)] * 2


def test_rounds_that_are_told_again_over_another_connection_are_closed_once() -> None:
    """Server 0 goes by what this one knew when it asked first."""
    server = linked()
    server.push(1)
    news = ((1, ((1, 1), (2, 1))),)
    answer(server, m.Verdict(1, "", news), 1)
    server.push(2)
    assert server.value() == 2.0
    reconnect(server)
    answer(server, m.Verdict(2, "", (*news, (2, ((0, 1), (1, 2))))), 0)
    server.push(1, read_version=1)
    assert server.value() == 4.0
    decisions_of = server.machine._deciding.of(("k_sync:2", ()))
    assert (decisions_of.newest, decisions_of.counts) == (2, {0: 1, 1: 2, 2: 1})


def test_link_that_cannot_be_made_in_time_fails_the_push() -> None:
    server = other()
    pushed = server.push(0, timeout=60.0)
    server.handle(st.ConnectFailed(LEADER, "connection refused"))
    server.tick(9.0)
    assert pushed.pending
    server.handle(st.Received(SCHEDULER, 0, m.Heartbeat()))
    server.tick(10.0)
    assert isinstance(pushed.error, ServerLostError)
    assert "no link to it: connection refused" in str(pushed.error)


def test_without_server_0_nothing_is_decided() -> None:
    server = linked()
    before = [asked for asked in server.asked.values() if asked.pending]
    server.servers[0] = ("lost", "killed")
    server.publish()
    before.append(server.push(1))
    for asked in before:
        assert isinstance(asked.error, ServerLostError)
        assert "killed" in str(asked.error)


def test_error_about_a_step_that_is_decided_meanwhile_changes_nothing() -> None:
    server = linked()
    server.push(1)
    answer(server, m.Verdict(1, "", ((1, ((0, 1), (1, 1))),)), 1)
    assert server.value() == 2.0
    assert not answer(server, m.Error(1, "broken", {}), 0)


def test_deadline_says_that_the_first_server_has_not_closed_the_round() -> None:
    server = linked()
    (pushed,) = [asked for asked in server.asked.values() if asked.pending]
    server.tick(5.0)
    assert "server 0 has not closed the round" in str(pushed.error)


def test_lost_worker_is_left_to_the_first_server() -> None:
    server = linked("k_sync:3")
    (pushed,) = [asked for asked in server.asked.values() if asked.pending]
    server.lose(2)
    pull = server.pull(0)
    assert pushed.pending
    assert pull.pending


@pytest.mark.parametrize(("policy", "goes_on"), [("ringmaster:9", True), ("k_async:1", True), ("round_robin", False)])
def test_what_a_lost_worker_has_not_brought_is_waited_for_only_where_workers_wait_for_others(
    policy: str, goes_on: bool
) -> None:
    """Its step has come with one key, and it can bring the other one no longer."""
    server = linked(policy, keys="wx")
    answer(server, m.Verdict(1, "", ((1, ((0, 1),)),)))
    pushed = server.push(1, key="x")
    answer(server, m.Verdict(2, "", ((2, ((1, 1),)),)))
    assert pushed.pending, "rank 0 may bring it yet"
    server.lose(0)
    assert isinstance(pushed.answer, m.Done if goes_on else WorkerLostError)


def test_key_that_is_deleted_before_its_step_is_decided() -> None:
    server = linked()
    server.ask(0, m.Delete(("w",), 5.0))
    answer(server, m.Accepted())
    answer(server, m.Verdict(1, "", ((1, ((0, 1), (1, 1))),)))
    assert not server.slots


def test_key_that_is_deleted_is_not_asked_about_again() -> None:
    server = linked(keys="wx")
    error = WorkerLostError("round 1 can't complete", ranks=[2])
    answer(server, m.Error(error.code, error.message, error.details))
    server.ask(0, m.Delete(("w",), 5.0))
    server.push(1, key="x")
    assert questions(server)[-1].message == m.Arrived("k_sync:2", (), 1, 1, 0, 0)
    assert len(questions(server)) == 2


# --- server 0, and server 1 played by hand ---


def leader(policy: str = "k_sync:2", workers: int = 3) -> Server:
    server = Server(workers, policy, servers=2)
    server.init()
    assert server.ask(0, m.AttachServer(1, "server-1", 1, server.epoch, 5.0), peer=THERE).answer == m.Done()
    server.servers_at.add(THERE)
    return server


def ask(server: Server, rank: int, clock: int, *, read: int = 0, known: int = 0, **changes: Any) -> list[Any]:
    """Let server 1 ask about a step; return all answers that it gets then, by request."""
    fields = {"policy": server.policy, "group": ()} | changes
    before = len(server.effects)
    request = 1000 + before
    arrived = m.Arrived(**fields, rank=rank, clock=clock, read=read, known=known)
    server.handle(st.Received(THERE, request, arrived))
    return told(server.effects[before:])


def told(effects: list[ef.Effect]) -> list[Any]:
    """Return what is sent to server 1."""
    sent = [one for one in effects if isinstance(one, ef.Send | ef.Refuse) and one.peer == THERE]
    return [one.message if isinstance(one, ef.Send) else one.error for one in sent]


def test_rounds_that_were_closed_are_told_once_with_the_next_answer() -> None:
    server = leader()
    assert ask(server, 0, 1) == [m.Accepted()]
    assert ask(server, 1, 1) == [m.Verdict(1, "", ((1, ((0, 1), (1, 1))),)), m.Verdict(1, "", ())]
    assert ask(server, 2, 1) == [m.Verdict(0, "late", ())]
    assert ask(server, 2, 1) == [m.Verdict(0, "late", ())]


def test_step_that_both_have_seen_is_one() -> None:
    server = leader()
    before = len(server.effects)
    server.push(0)
    assert ask(server, 0, 1) == [m.Accepted()]
    server.push(1)
    assert told(server.effects[before:]) == [m.Accepted(), m.Verdict(1, "", ((1, ((0, 1), (1, 1))),))]
    assert ask(server, 1, 1, known=0) == [m.Verdict(1, "", ())]


def test_server_whose_keys_do_not_change_is_not_taken_to_be_behind() -> None:
    server = leader(workers=2)
    for number in (1, 2):
        for rank in (0, 1):
            server.push(rank, read_version=number - 1)
    assert ask(server, 0, 3, read=0, known=0) == [m.Accepted()]
    server.push(1, read_version=2)
    assert server.pull(1).pending, "rank 0 still has to push here, or to go on"


def test_server_that_has_steps_of_a_later_round_is_behind() -> None:
    server = leader()
    assert ask(server, 0, 1) == [m.Accepted()]
    ask(server, 1, 1)
    # Asked before it has heard of the round.
    assert ask(server, 0, 2, read=0, known=0) == [m.Verdict(0, "late", ())]


def test_connection_of_a_server_ends_and_its_next_one_hears_what_it_does_not_know() -> None:
    server = leader()
    ask(server, 0, 1)
    server.handle(st.PeerLost(THERE, "connection reset"))
    before = len(server.effects)
    server.push(1)
    assert told(server.effects[before:]) == []
    server.servers_at.clear()
    server.ask(0, m.AttachServer(1, "server-1", 1, server.epoch, 5.0), peer=THERE)
    server.servers_at.add(THERE)
    assert ask(server, 0, 1) == [m.Verdict(1, "", ((1, ((0, 1), (1, 1))),))]


def reattach(server: Server) -> None:
    """Let server 1 connect again, before the end of its connection is noticed."""
    server.servers_at.clear()
    assert server.ask(0, m.AttachServer(1, "server-1", 1, server.epoch, 5.0), peer=THERE + 1).answer == m.Done()
    server.servers_at.add(THERE + 1)


def ask_again(server: Server, rank: int, clock: int, *, read: int = 0, known: int = 0) -> list[Any]:
    """As `ask`, over the later connection."""
    arrived = m.Arrived(server.policy, (), rank, clock, read, known)
    effects = server.handle(st.Received(THERE + 1, 2000 + len(server.effects), arrived))
    return [one.message if isinstance(one, ef.Send) else one.error for one in effects if one.peer == THERE + 1]  # type: ignore[union-attr]


def test_step_that_is_asked_about_again_is_one() -> None:
    server = leader()
    assert ask(server, 0, 1) == [m.Accepted()]
    reattach(server)
    assert ask_again(server, 0, 1) == [m.Accepted()]
    news = ((1, ((0, 1), (1, 1))),)
    assert ask_again(server, 1, 1) == [m.Verdict(1, "", news), m.Verdict(1, "", ())]
    reattach(server)
    assert ask_again(server, 1, 1) == [m.Verdict(1, "", ())]


def test_answer_that_a_round_is_stuck_is_given_again() -> None:
    server = leader("k_sync:3")
    server.lose(2)
    accepted, error = ask(server, 1, 1)
    reattach(server)
    again = ask_again(server, 1, 1)
    assert again[0] == accepted == m.Accepted()
    assert str(again[1]) == str(error)
    assert isinstance(error, WorkerLostError)


def test_step_that_was_asked_before_its_server_had_heard_of_a_round_is_behind_also_when_it_is_asked_again() -> None:
    """The answer with the round has come; the step had been asked about before, and its question got lost."""
    server = leader("k_batch_sync:2")
    assert ask(server, 0, 1) == [m.Accepted()]
    server.push(1)
    reattach(server)
    assert ask_again(server, 0, 2, read=0, known=0) == [m.Verdict(0, "late", ((1, ((0, 1), (1, 1))),))]


def test_server_whose_first_question_over_a_connection_is_about_older_values() -> None:
    server = leader()
    assert ask(server, 0, 1, read=0, known=7) == [m.Accepted()]


def test_other_servers_questions_stay_when_one_is_gone() -> None:
    server = Server(3, "k_sync:2", servers=3)
    for index in (1, 2):
        server.ask(0, m.AttachServer(index, f"server-{index}", 1, server.epoch, 5.0), peer=THERE + index)
    server.servers_at |= {THERE + 1, THERE + 2}
    arrived = m.Arrived("k_sync:2", (), 0, 1, 0, 0)
    server.handle(st.Received(THERE + 1, 7, arrived))
    server.handle(st.Received(THERE + 2, 8, arrived))
    server.handle(st.PeerLost(THERE + 1, "connection reset"))
    effects = server.handle(st.Received(THERE + 2, 9, m.Arrived("k_sync:2", (), 1, 1, 0, 0)))
    rounds = ((1, ((0, 1), (1, 1))),)
    assert effects == [
        ef.Send(THERE + 2, 8, m.Verdict(1, "", rounds)),
        ef.Send(THERE + 2, 9, m.Verdict(1, "", ())),
    ]


def test_server_is_told_that_too_few_workers_are_left() -> None:
    server = leader("k_sync:3")
    ask(server, 0, 1)
    (error,) = told(server.lose(2))
    assert isinstance(error, WorkerLostError)
    accepted, error = ask(server, 1, 1)
    assert accepted == m.Accepted()
    assert isinstance(error, WorkerLostError)


def test_server_that_is_far_behind_hears_of_the_newest_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "REMEMBERED", 4)
    server = leader("ringmaster:100", workers=1)
    for number in range(10):
        server.push(0, read_version=number)
    (verdict,) = ask(server, 0, 11)
    assert [number for number, _ in verdict.rounds] == [8, 9, 10, 11]


def test_only_the_first_server_decides() -> None:
    server = Server(3, "k_sync:2", index=1, servers=2)
    server.ask(0, m.AttachServer(0, "server-0", 1, server.epoch, 5.0), peer=THERE)
    server.servers_at.add(THERE)
    (error,) = ask(server, 0, 1)
    assert isinstance(error, ProtocolError)
    assert "server 1 does not decide rounds; server 0 does" in str(error)


@pytest.mark.parametrize(("policy", "kind"), [("bsp", ProtocolError), ("nope", PolicyError)])
def test_policy_that_decides_no_rounds_is_refused(policy: str, kind: type[AiokvError]) -> None:
    (error,) = ask(leader(), 0, 1, policy=policy)
    assert isinstance(error, kind)


def test_worker_cannot_ask(like: type[Like]) -> None:
    server = Server(3, "k_sync:2", servers=2)
    effects = server.handle(st.Received(10, 1, m.Arrived("k_sync:2", (), 0, 1, 0, 0)))
    assert effects == [ef.Disconnect(10, "unexpected Arrived from a worker")]


# --- all servers, with messages in any order ---


class Together:
    """Servers and workers with messages between servers that take any time, but keep their order on each link.

    So many links `break` for no reason. Each side gets some of what is under way, and the question comes again.

    In each step a worker pushes a bit of its own to every key, on all servers, and goes on when all are answered. So
    the difference between two versions of a key says which steps are in the round.
    """

    def __init__(self, servers: int, workers: int, policy: str, keys: int, seed: int, breaks: int = 0) -> None:
        self.rigs = [Server(workers, policy, index=index, servers=servers) for index in range(servers)]
        for index, rig in enumerate(self.rigs):
            rig.servers_at |= {THERE + one for one in range(servers) if one != index}
            rig.hold = True
        self.breaks = breaks
        self.places = [(rig, f"k{number}") for rig in self.rigs for number in range(keys)]
        for rig, key in self.places:
            rig.init(key)
        self.random = random.Random(seed)
        self.links: dict[tuple[int, int], deque[st.Stimulus]] = {}
        self.broken: set[tuple[int, int]] = set()
        """Ways over which nothing comes until their beginning has noticed that the link has ended."""
        self._taken = [0] * servers
        self.workers = [Steps(self, rank) for rank in range(workers)]
        self.bits = 0
        self.dropped = 0

    def new_bit(self) -> int:
        self.bits += 1
        return 1 << (self.bits - 1)

    def _collect(self) -> None:
        """Put what servers have sent to others on the links."""
        for here, rig in enumerate(self.rigs):
            for effect in rig.effects[self._taken[here] :]:
                match effect:
                    case ef.Connect(peer) if peer < SCHEDULER:
                        self._put(here, here, st.Connected(peer))
                    case ef.Send(peer, request, message) if peer < SCHEDULER:
                        self._put(here, -2 - peer, st.Received(THERE + here, request, message))
                    case ef.Send(peer, request, message) if peer in rig.servers_at:
                        self._put(here, peer - THERE, st.Received(peer_of_server(here), request, message))
                    case _:
                        assert not isinstance(effect, ef.Disconnect)
            self._taken[here] = len(rig.effects)

    def _put(self, source: int, target: int, stimulus: st.Stimulus) -> None:
        if (source, target) not in self.broken:
            self.links.setdefault((source, target), deque()).append(stimulus)

    def _break(self) -> None:
        """Let a link to the first server end; what is sent before it is noticed is lost."""
        self.breaks -= 1
        other = self.random.randrange(1, len(self.rigs))
        link = self.rigs[other].machine._neighbours.links.get(LEADER)
        ways = (((other, 0), THERE + other), ((0, other), LEADER))
        under_way = [each for way, _ in ways for each in self.links.get(way, ())]
        if link is None or not link.connected or any(isinstance(each, st.PeerLost) for each in under_way):
            return
        for way, lost in ways:
            queue = self.links.setdefault(way, deque())
            for _ in range(self.random.randint(0, len(queue))):
                queue.pop()
            queue.append(st.PeerLost(lost, "connection reset"))
            self.broken.add(way)

    def act(self) -> bool:
        """Do one of the things that can be done now; False: there is none."""
        self._collect()
        actions: list[Any] = [worker.act for worker in self.workers if worker.can_act]
        actions += [rig.finish for rig in self.rigs if rig.applying]
        actions += [lambda link=link: self._deliver(link) for link, queue in self.links.items() if queue]
        if self.breaks and actions and self.random.random() < BREAKS:
            actions = [self._break]
        if not actions:
            return False
        self.random.choice(actions)()
        return True

    def _deliver(self, link: tuple[int, int]) -> None:
        stimulus = self.links[link].popleft()
        if isinstance(stimulus, st.PeerLost):
            self.broken.discard((link[1], link[0]))
        self.rigs[link[1]].handle(stimulus)

    def run(self, steps: int) -> None:
        """Let all workers make so many steps; who has made them leaves when nobody can go on."""
        for worker in self.workers:
            worker.left = steps
        for _ in range(len(self.workers) + 1):
            while self.act():
                pass
            done = [worker.rank for worker in self.workers if worker.is_done and not worker.gone]
            for rank in done:
                self.workers[rank].gone = True
                for rig in self.rigs:
                    rig.leave(rank)

    def rounds(self, place: tuple[Server, str]) -> list[int]:
        """Return the bits of the steps of each round of a key."""
        versions = place[0].values[place[1], 0]
        return [int(versions[number] - versions[number - 1]) for number in range(1, len(versions))]


class Steps:
    """A worker of `Together`."""

    def __init__(self, cluster: Together, rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        self.left = self.clock = 0
        self.gone = False
        self.bit = 0
        self.made: list[int] = []
        self.dropped: list[int] = []
        self.skips = False
        self._skipped = False
        self._to_push: list[tuple[Server, str]] = []
        self._asked: dict[tuple[Server, str], Asked] = {}
        self.mask: dict[int, list[tuple[Server, str]]] = {}
        """Which keys were pushed in a step."""
        self._read: dict[tuple[Server, str], int] = {}

    @property
    def is_done(self) -> bool:
        return not self.left and not self._to_push and not any(asked.pending for asked in self._asked.values())

    @property
    def can_act(self) -> bool:
        if self._to_push:
            return True
        return bool(self.left) and not any(asked.pending for asked in self._asked.values())

    def act(self) -> None:
        """Push the next key, or end the step and begin another."""
        if not self._to_push:
            self.end()
            self.begin()
        place = self._to_push.pop()
        rig, key = place
        read = self._read.get(place, 0)
        asked = rig.push(
            self.rank, float(self.bit), key=key, clock=self.clock, read_version=read, want_value=True, timeout=1e6
        )
        self._asked[place] = asked

    def end(self) -> None:
        """Look at the answers of a step."""
        if not self._asked:
            return
        answers = [asked.answer for asked in self._asked.values()]
        assert all(isinstance(answer, m.Value) for answer in answers), answers
        reasons = {answer.dropped for answer in answers if isinstance(answer, m.Value)}
        assert len(reasons) == 1, "a step has one fate everywhere"
        (self.dropped if reasons != {""} else self.made).append(self.bit)
        for place, answer in zip(self._asked, answers, strict=True):
            assert isinstance(answer, m.Value)
            self._read[place] = answer.version
        self._asked = {}

    def begin(self) -> None:
        """Make a gradient, which is one bit."""
        self.clock, self.left = self.clock + 1, self.left - 1
        self.bit = self.cluster.new_bit()
        self._to_push = list(self.cluster.places)
        if self.skips and not self._skipped and self.cluster.random.random() < 0.5:
            # The first key of all is in every step.
            self._to_push = self._to_push[:1]
        self._skipped = len(self._to_push) < len(self.cluster.places)
        self.mask[self.bit] = list(self._to_push)
        self.cluster.random.shuffle(self._to_push)


@pytest.mark.no_cover
@pytest.mark.parametrize(
    ("policy", "size"),
    [
        *[("k_sync:2", 2), ("backup:1", 2), ("k_async:2", 2), ("k_batch_async:3", 3), ("k_batch_sync:2", 2)],
        *[("ringmaster:2", 1), ("round_robin", 1), ("quorum:3:1e6", 3), ("adasync:2", 2)],
    ],
)
@settings(max_examples=40)
@given(seed=hy.integers(0, 2**32), servers=hy.integers(2, 3), keys=hy.integers(1, 2), breaks=hy.sampled_from([0, 9]))
def test_every_key_of_every_server_has_the_same_steps_in_the_same_rounds(
    policy: str, size: int, seed: int, servers: int, keys: int, breaks: int
) -> None:
    cluster = Together(servers, 3, policy, keys, seed, breaks)
    cluster.run(5)
    first, *others = [cluster.rounds(place) for place in cluster.places]
    for rounds in others:
        assert rounds == first
    for worker in cluster.workers:
        worker.end()
    made = [bit for worker in cluster.workers for bit in worker.made]
    dropped = [bit for worker in cluster.workers for bit in worker.dropped]
    assert sorted(made + dropped) == [1 << number for number in range(15)], "everybody is answered about every step"
    assert sum(first) & sum(dropped) == 0
    open_steps = sum(made) - sum(first)
    assert open_steps.bit_count() < size, "what is in no round waits for others; each step is in one round at most"
    alone = [rounds.bit_count() != size for rounds in first]
    assert alone == sorted(alone), "a round has another size only when there are fewer workers"


@given(seed=hy.integers(0, 2**32))
def test_gradients_of_k_sync_are_never_stale(seed: int) -> None:
    cluster = Together(1, 3, "k_sync:2", 1, seed)
    cluster.run(8)
    applies = [apply for rig in cluster.rigs for apply in rig.seen(ef.Apply)]
    assert {behind for apply in applies for behind in apply.staleness} == {0}


@pytest.mark.no_cover
@settings(max_examples=50)
@given(seed=hy.integers(0, 2**32), servers=hy.integers(1, 3), policy=hy.sampled_from(["k_sync:2", "k_async:2"]))
def test_key_that_is_left_out_of_steps_has_of_each_round_what_was_pushed(seed: int, servers: int, policy: str) -> None:
    cluster = Together(servers, 3, policy, 2, seed)
    for worker in cluster.workers:
        worker.skips = True
    cluster.run(6)
    first, *others = cluster.places
    pushed = {bit: places for worker in cluster.workers for bit, places in worker.mask.items()}
    for place in others:
        here = sum(bit for bit, places in pushed.items() if place in places)
        assert cluster.rounds(place) == [steps & here for steps in cluster.rounds(first) if steps & here]
    assert all(worker.is_done for worker in cluster.workers)
