"""Who says which step is in which round: the server with index 0, and what the others do to hear of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.deadlines import earliest
from aiokv.core.effects import Effect, Refuse, Send
from aiokv.core.roster import LEADER
from aiokv.core.server.rounds.decisions import Decided, Decisions, Group, Held, Question, Verdict
from aiokv.errors import AiokvError, ProtocolError, from_code
from aiokv.policy import Closed, RoundPolicy, Token, get_policy
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from aiokv.core.roster import Roster
    from aiokv.core.server.neighbours import Neighbours
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.whole_call import WholeCall
    from aiokv.policy import Decision
    from aiokv.types import Key, Peer, Rank, Round


class Deciding:
    """The part of a `Coordinator` that knows, or decides, which step is in which round.

    Args:
        neighbours: the other servers.
    """

    def __init__(self, neighbours: Neighbours[Chunk | Question | WholeCall]) -> None:
        self._neighbours = neighbours
        self._groups: dict[Group, Decisions] = {}
        self._losses: dict[Rank, float] = {}
        """What workers have reported last."""
        self.on_decided: Callable[[Decisions, list[Token]], None] | None = None
        """Is told of steps that are decided, or on which workers go on, or of ranks that leave; before anybody else."""
        self.on_closing: Callable[[Decisions, list[Token]], None] = lambda decisions, tokens: None
        """Is told of a round that this server is about to close."""

    @property
    def groups(self) -> Iterable[Decisions]:
        """What is known of all groups."""
        return self._groups.values()

    def resume(self, decisions: Decisions, known: Mapping[Rank, int], *, taken_over: bool = True) -> None:
        """Go on in a group from what the server knew in whose place this one is, or from what was saved.

        Args:
            decisions: what it had decided or heard; who waits for more asks again.
            known: what its decider knew of ranks besides, if it had one.
            taken_over: others know more than that of the server.
        """
        decisions.resumed = decisions.newest if taken_over else 0
        self._groups[decisions.group] = decisions
        if self._neighbours.index == LEADER:
            policy = get_policy(decisions.group[0])
            assert isinstance(policy, RoundPolicy), "others decide nothing"
            decisions.decider = policy.decider()
            last, accepted = decisions.rounds.get(decisions.newest, ()), list(decisions.accepted)
            decisions.decider.resume(decisions.newest, last, known, accepted)
            decisions.known = decisions.decider.known()

    def of(self, group: Group) -> Decisions:
        """Return what is known about the rounds of a group of keys.

        Raises:
            PolicyError, ProtocolError: there is no such policy, or it decides no rounds.
        """
        found = self._groups.get(group)
        if found is None:
            policy = get_policy(group[0])
            if not isinstance(policy, RoundPolicy):
                raise ProtocolError(f"policy {group[0]} decides each chunk by itself")
            found = Decisions(group, policy.decider() if self._neighbours.index == LEADER else None)
            self._groups[group] = found
            for rank, loss in self._losses.items():
                found.reported(rank, loss)
        return found

    # --- steps that come to this server ---

    def arrived(
        self, decisions: Decisions, chunk: Chunk, token: Token, read: Round, roster: Roster, now: float
    ) -> Decided:
        """Take in that a chunk holds a contribution of a step about which nothing is decided."""
        holders = decisions.holders.setdefault(token, [])
        holders.append(chunk)
        if token in decisions.accepted:
            return Decided(held=[Held([chunk], token, None)])
        if len(holders) == 1:
            if decisions.decider is not None:
                return self._decide(decisions, token, read, roster, now)
            decisions.unasked[token] = read
        return self._ask(decisions, now)

    def _ask(self, decisions: Decisions, now: float) -> Decided:
        """Ask the deciding server about all steps about which it was not, or could not be asked before."""
        if not decisions.unasked:
            return Decided()
        error = self._neighbours.first_lost([LEADER])
        if error is not None:
            return Decided(held=[decisions.hold(token, error) for token in decisions.unasked])
        decided = Decided()
        unasked, decisions.unasked = decisions.unasked, {}
        for token, read in unasked.items():
            message = m.Arrived(*decisions.group, token.rank, token.clock, read, decisions.newest)
            decided.effects += self._neighbours.ask(LEADER, message, Question(decisions, token, read), now)
        return decided

    def inquire(self, decisions: Decisions, now: float) -> list[Effect]:
        """Ask the deciding server which rounds are closed that this one has not heard of."""
        if decisions.decider is not None or self._neighbours.first_lost([LEADER]) is not None:
            return []
        message = m.GetRounds(*decisions.group, decisions.newest)
        return self._neighbours.ask(LEADER, message, Question(decisions, None, 0), now)

    def asked(self, name: RequestName, message: m.Arrived | m.GetRounds, roster: Roster, now: float) -> Decided:
        """Take in that another server has seen a step, or wants to know which rounds are closed; maybe not at first.

        Raises:
            PolicyError, ProtocolError: there is no such policy, or this server does not decide.
        """
        decisions = self.of((message.policy, message.group))
        if decisions.decider is None:
            raise ProtocolError(f"server {self._neighbours.index} does not decide rounds; server {LEADER} does")
        told = decisions.told.setdefault(name[0], message.known)
        if isinstance(message, m.GetRounds):
            return Decided([decisions.answer(name, "")])
        token, read = Token(message.rank, message.clock), message.read
        before = max(decisions.resumed, decisions.before_end.get(self._neighbours.caller(name[0]), 0))
        if read == message.known >= max(told, before):
            # It has the newest value there, and no step of a later round has been seen there; see `OpenRounds.read`.
            read = max(read, decisions.settled.get(token.rank, 0))
        verdict = decisions.verdicts.get(token)
        if verdict is not None:
            return Decided([decisions.answer(name, verdict)])
        decisions.askers.setdefault(token, []).append(name)
        if token in decisions.accepted:
            decided = Decided([Send(*name, m.Accepted())])
            self._check_stuck(decisions, [token], roster, decided)
            return decided
        return self._decide(decisions, token, read, roster, now)

    # --- deciding ---

    def reported(self, rank: Rank, loss: float) -> None:
        """Take note of the loss that a worker has measured."""
        self._losses[rank] = loss
        for decisions in self._groups.values():
            decisions.reported(rank, loss)

    def _decide(self, decisions: Decisions, token: Token, read: Round, roster: Roster, now: float) -> Decided:
        assert decisions.decider is not None, "it is asked on the server that decides"
        if token.rank in roster.newcomers and not roster.is_member(token.rank):
            decisions.early[token.rank] = None
        made = decisions.decider.arrived(token, read, decisions.members(roster), now)
        decided = self._made(decisions, made, roster, now)
        if token not in decisions.verdicts:
            decisions.accepted[token] = None
            if decisions.goes_on:
                self._tell(decisions, [token])
            decided.held.append(decisions.hold(token))
            decided.effects += [Send(*name, m.Accepted()) for name in decisions.askers.get(token, [])]
            self._check_stuck(decisions, [token], roster, decided)
        return decided

    def _made(self, decisions: Decisions, made: Sequence[Decision], roster: Roster, now: float) -> Decided:
        """Take note of what was decided, and whether that lets somebody go for whom the next round would wait."""
        decided = self._settled(decisions, made)
        while made and roster.leavers and decisions.decider is not None:
            made = decisions.decider.changed(decisions.members(roster), now)
            decided.add(self._settled(decisions, made))
        return decided

    def _settled(self, decisions: Decisions, made: Sequence[Decision]) -> Decided:
        decided, before = Decided(), decisions.newest
        tokens: list[Token] = []
        for decision in made:
            if isinstance(decision, Closed):
                self.on_closing(decisions, decision.tokens)
                decisions.close(decision.round, decision.tokens)
                settled: list[tuple[Token, Verdict]] = [(token, decision.round) for token in decision.tokens]
            else:
                decisions.settle(decision.token, decision.reason)
                settled = [(decision.token, decision.reason)]
            tokens += [token for token, _ in settled]
            for token, verdict in settled:
                decided.held += decisions.release(token, verdict)
                decided.effects += [decisions.answer(name, verdict) for name in decisions.askers.pop(token, [])]
        if decisions.newest > before and decisions.decider is not None:
            decisions.known = decisions.decider.known()
        if tokens:
            self._tell(decisions, tokens)
        return decided

    def _tell(self, decisions: Decisions, tokens: list[Token]) -> None:
        if self.on_decided is not None:
            self.on_decided(decisions, tokens)

    def changed(self, roster: Roster, now: float) -> Decided:
        """Look again at all open rounds, because the members are others."""
        decided = Decided()
        for decisions in self._groups.values():
            if decisions.decider is not None:
                decisions.early = {rank: None for rank in decisions.early if not roster.is_member(rank)}
                made = decisions.decider.changed(decisions.members(roster), now)
                decided.add(self._made(decisions, made, roster, now))
                self._check_stuck(decisions, decisions.accepted, roster, decided)
        return decided

    def _check_stuck(self, decisions: Decisions, tokens: Iterable[Token], roster: Roster, decided: Decided) -> None:
        """Tell those who wait with these steps if no round can be closed, because too many workers are lost."""
        error = self.stuck(decisions, roster)
        if error is None:
            return
        for token in tokens:
            decided.held.append(decisions.hold(token, error))
            decided.effects += [Refuse(*name, error) for name in decisions.askers.pop(token, [])]

    def stuck(self, decisions: Decisions, roster: Roster) -> AiokvError | None:
        """Return why the open round can't be closed, if this server knows that it can't."""
        decider = decisions.decider
        if not roster.lost or decider is None:
            return None
        members = decisions.members(roster)
        missing = decider.missing(members)
        gone = frozenset(roster.lost)
        lost = [rank for rank in missing if rank in gone]
        if len(missing) - len(lost) >= decider.needed(members):
            return None
        return roster.loss(lost, f"round {decisions.newest + 1} of policy {decisions.group[0]}")

    def missing(self, decisions: Decisions, roster: Roster) -> tuple[list[Rank], str]:
        """Return for whom the open round waits, and that in words."""
        decider = decisions.decider
        if decider is None:
            return [], f"server {LEADER} has not closed the round"
        members = decisions.members(roster)
        ranks = decider.missing(members)
        return ranks, f"the round needs {decider.needed(members)} more of rank {roster.labels(ranks)}"

    # --- what the deciding server says ---

    def answered(self, question: Question, message: m.Message) -> Decided:
        """Take in what was decided about a step."""
        decisions, token = question.decisions, question.token
        match message:
            case m.Accepted() if token is not None:
                decisions.accepted[token] = None
                return Decided(held=[decisions.hold(token)])
            case m.Verdict():
                return self._told(decisions, token, message)
            case m.Error(code, text, details):
                return self.refused(question, from_code(code, text, details))
            case _:
                return self.refused(question, ProtocolError(f"unexpected {type(message).__name__}"))

    def _told(self, decisions: Decisions, token: Token | None, message: m.Verdict) -> Decided:
        decided = Decided()
        news: list[Token] = []
        for number, steps in message.rounds:
            if number <= decisions.newest:
                # It was told before, when this question was asked over a connection that has ended.
                continue
            tokens = [Token(rank, clock) for rank, clock in steps]
            decisions.close(number, tokens)
            news += tokens
            for one in tokens:
                decided.held += decisions.release(one, number)
        if token is not None and token not in decisions.verdicts:
            verdict: Verdict = message.reason or message.round
            decisions.settle(token, verdict)
            news.append(token)
            decided.held += decisions.release(token, verdict)
        if news:
            self._tell(decisions, news)
        return decided

    def refused(self, question: Question, error: AiokvError) -> Decided:
        """Take in that the deciding server can't be asked, or does not answer; it is asked again with the next step."""
        decisions, token = question.decisions, question.token
        if token is None or token in decisions.verdicts:
            return Decided()
        decisions.accepted.pop(token, None)
        decisions.unasked[token] = question.read
        return Decided(held=[decisions.hold(token, error)])

    # --- keys that leave a group ---

    def leave(self, group: Group, keys: tuple[Key, ...], rank: Rank, roster: Roster, now: float) -> Decided:
        """Let rounds wait no longer for a rank that pushes keys of the group no longer, as if it had finished."""
        decided = Decided()
        decisions = self.of(group) if get_policy(group[0]).decides else None
        if decisions is not None and decisions.decider is not None:
            decisions.leaving.setdefault(keys, {})[rank] = None
            self._tell(decisions, [])
            made = decisions.decider.changed(decisions.members(roster), now)
            decided.add(self._made(decisions, made, roster, now))
            self._check_stuck(decisions, decisions.accepted, roster, decided)
        return decided

    def stay(self, group: Group, rank: Rank) -> None:
        """Let rounds wait for a rank again: its keys stay in the group."""
        if group in self._groups:
            for ranks in self._groups[group].leaving.values():
                ranks.pop(rank, None)
            self._tell(self._groups[group], [])

    def left(self, group: Group, keys: tuple[Key, ...]) -> None:
        """Let rounds of the group wait for all ranks again: the keys have left it, on all servers."""
        if group in self._groups:
            self._groups[group].leaving.pop(keys, None)
            self._tell(self._groups[group], [])

    # --- ends ---

    def forget_peer(self, peer: Peer) -> None:
        """Forget what a server has asked whose connection is over."""
        for decisions in self._groups.values():
            told = decisions.told.pop(peer, None)
            if told is None:
                continue
            decisions.before_end[self._neighbours.caller(peer)] = told
            for token, askers in list(decisions.askers.items()):
                askers[:] = [name for name in askers if name[0] != peer]
                if not askers:
                    del decisions.askers[token]

    def remove(self, decisions: Decisions, chunk: Chunk) -> None:
        """Forget a chunk that is no more."""
        for blocked in decisions.blocked.values():
            blocked.pop(chunk, None)
        for token, chunks in list(decisions.holders.items()):
            chunks[:] = [other for other in chunks if other is not chunk]
            if not chunks:
                del decisions.holders[token]
                decisions.unasked.pop(token, None)

    # --- time ---

    def deadline(self) -> float | None:
        """Return the time at which `due` wants to be called."""
        if not self._groups:
            return None
        return earliest(*[one.decider.deadline() for one in self._groups.values() if one.decider is not None])

    def due(self, roster: Roster, now: float) -> Decided:
        """Look again at the rounds whose time has come."""
        decided = Decided()
        for decisions in self._groups.values():
            when = decisions.decider.deadline() if decisions.decider is not None else None
            if decisions.decider is not None and when is not None and when <= now:
                made = decisions.decider.due(decisions.members(roster), now)
                decided.add(self._made(decisions, made, roster, now))
        return decided
