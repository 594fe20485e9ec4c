"""Pushes that count together: when a worker is lost, its last call is in the rounds of all keys, or of none.

With `on_worker_loss = "shrink"` the others go on without a lost worker, so nobody brings the rest of what it was
sending. A server therefore keeps the pushes of a call aside until all of the call is here, and tells the server with
index 0. That one sees when it is on all servers, or that it never will be, and decides it once: the call counts, or it
does not. Only then the pushes go to the rounds of their keys, and only then a view without the worker counts.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

from msgspec import structs

from aiokv.core.effects import Effect, Refuse, Send, freed
from aiokv.core.roster import EXPECTED, LEADER
from aiokv.core.server.rounds.whole_call import GONE, LATE, Aside, Behind, CallName, Gathering, Verdict, WholeCall
from aiokv.core.waiting import Wait
from aiokv.errors import AiokvError, CallTimeoutError, ProtocolError, StaleEpochError, from_code
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator

    from aiokv.core.deadlines import Deadlines
    from aiokv.core.server.answers import AnyPush
    from aiokv.core.server.neighbours import Neighbours
    from aiokv.core.server.parked import RequestName
    from aiokv.core.server.rounds.chunk import Chunk
    from aiokv.core.server.rounds.decisions import Question
    from aiokv.core.stimuli import Received
    from aiokv.types import Key, Peer, Rank

REMEMBERED = 50_000
"""Of how many calls it is known what was decided, for pushes that come again."""


def identity(message: AnyPush) -> Hashable:
    """Tell a push from others of its call."""
    if isinstance(message, m.PushBundle):
        return message.bundle, message.sequence
    first = message.first if isinstance(message, m.PushRows) else 0
    return message.key, message.start, message.sequence, first


def _refusal(name: CallName, verdict: Verdict) -> AiokvError:
    """Return what the worker of a call is told that does not count."""
    rank, _, number = name
    if verdict == GONE:
        return StaleEpochError(f"the cluster has gone on without this process of rank {rank}", ranks=[rank])
    text = f"call {number} of rank {rank} has not come to all of its servers in time; nothing of it counts"
    return CallTimeoutError(text, ranks=[rank])


class WholeCalls:
    """The part of a `Coordinator` that lets the pushes of a call count together.

    Args:
        neighbours: the other servers.
        deadlines: where requests that wait are entered, under peer and request id.
        enter: lets a push of a rank count.
        again: looks at a request once more that had to wait.
    """

    def __init__(
        self,
        neighbours: Neighbours[Chunk | Question | WholeCall],
        deadlines: Deadlines[RequestName],
        enter: Callable[[Received, Rank, float], list[Effect]],
        again: Callable[[Received, float], list[Effect]],
    ) -> None:
        self._neighbours = neighbours
        self._deadlines = deadlines
        self._enter = enter
        self._again = again
        self._workers: dict[Rank, m.WorkerEntry] = {}
        self._patience = 0.0
        """Seconds for which a decision is waited for when the time of a push is over."""
        self._open: dict[Rank, list[WholeCall]] = {}
        """Calls in the order in which their worker has made them.

        Where one is more urgent they come to each server in another order, and each would wait for the other.
        """
        self._behind: dict[RequestName, Behind] = {}
        self._gatherings: dict[CallName, Gathering] = {}
        self.known: OrderedDict[CallName, Verdict] = OrderedDict()
        """What was decided."""
        self.is_resuming = False
        """Whether what counts of workers that are gone is not known yet, since this server has another one's place."""
        self.copy: Callable[[WholeCall], bool] | None = None
        """Has a standby get a call that is here; tells whether that has to be waited for, until `copied`."""
        self.on_settled: Callable[[CallName, Verdict], None] | None = None
        """Is told what is decided about a call, before anything is done with it."""

    def __bool__(self) -> bool:
        return bool(self._open)

    def __contains__(self, name: RequestName) -> bool:
        return name in self._behind or self._find(name) is not None

    def __iter__(self) -> Iterator[RequestName]:
        yield from self._behind
        for aside in self._all():
            if aside.due is not None:
                yield aside.name

    def _all(self) -> Iterator[Aside]:
        for calls in self._open.values():
            for call in calls:
                yield from call.pushes.values()

    def _find(self, name: RequestName) -> WholeCall | None:
        """Return the call of a push that waits here."""
        calls = itertools.chain.from_iterable(self._open.values())
        return next((call for call in calls if any(aside.name == name for aside in call.pushes.values())), None)

    @property
    def slots(self) -> list[int]:
        """The payloads that are kept aside."""
        return [slot for aside in self._all() if (slot := aside.received.slot) is not None]

    # --- what workers send ---

    def push(
        self,
        received: Received,
        message: AnyPush,
        keys: tuple[Key, ...],
        dtype: str,
        worker: m.WorkerEntry,
        now: float,
    ) -> list[Effect]:
        """Keep a push aside until all of its call is here.

        Raises:
            ProtocolError: it says something else than others of its call.
            StaleEpochError: its worker is gone.
            CallTimeoutError: its call was found not to count.
        """
        whole = message.whole
        assert whole is not None, "it belongs to a call"
        name = (worker.rank, worker.incarnation, whole.call)
        verdict = GONE if self._is_gone(name) else self.known.get(name)
        if verdict:
            raise _refusal(name, verdict)
        if verdict is not None:
            return self._enter(received, worker.rank, now)
        call = self._call(name, whole)
        aside = Aside(received, message, now + message.timeout, keys, dtype)
        before = call.pushes.get(identity(message))
        effects = [] if before is None else self._drop(before)
        call.pushes[identity(message)] = aside
        call.keys.update(dict.fromkeys(keys))
        self._deadlines.add(aside.name, now + message.timeout)
        return effects + self._look(worker.rank, now)

    def _call(self, name: CallName, whole: m.Whole) -> WholeCall:
        calls = self._open.setdefault(name[0], [])
        call = next((call for call in calls if call.name == name), None)
        if call is None:
            call = WholeCall(name, whole.parts, whole.servers)
            bisect.insort(calls, call, key=lambda other: other.name)
        if (whole.parts, whole.servers) != (call.parts, call.servers) or whole.servers < 1:
            text = f"call {whole.call} of rank {name[0]} has {call.parts} messages here, to {call.servers} servers"
            raise ProtocolError(f"{text}; got {whole.parts} and {whole.servers}")
        return call

    def comes_behind(self, received: Received, rank: Rank, timeout: float, now: float) -> bool:
        """Tell whether a request has to wait for pushes before it; keep it until they are decided."""
        calls = self._open.get(rank)
        if not calls:
            return False
        name = (received.peer, received.request)
        self._behind[name] = Behind(rank, received, now + timeout, list(calls))
        self._deadlines.add(name, now + timeout)
        return True

    def _look(self, rank: Rank, now: float) -> list[Effect]:
        """Ask about the calls of a rank that are here, and let those count of which is known that they do."""
        effects: list[Effect] = []
        if self.is_resuming and not any(self._is_gone(call.name) for call in self._open.get(rank, ())):
            return effects
        for call in tuple(self._open.get(rank, ())):
            if call.is_here and not call.asked and not call.copying:
                call.after.update(dict.fromkeys(self._undecided_before(call)))
                call.copying = self.copy is not None and self.copy(call)
                effects += [] if call.copying else self._ask(call, now)
        for call in tuple(self._open.get(rank, ())):
            if call.verdict is not None and not self._before(call):
                effects += self._end(call, now)
        return effects + self._go_on(rank, now)

    def _before(self, call: WholeCall) -> list[WholeCall]:
        """Return earlier calls that push some of its keys, and are not ended."""
        calls = self._open[call.name[0]]
        earlier = itertools.takewhile(lambda other: other is not call, calls)
        return [other for other in earlier if not other.keys.keys().isdisjoint(call.keys)]

    def _undecided_before(self, call: WholeCall) -> list[int]:
        """Return those of which is not known here that they count; the deciding server may never hear of the others."""
        return [other.name[2] for other in self._before(call) if other.verdict != ""]

    def _end(self, call: WholeCall, now: float) -> list[Effect]:
        """Let the pushes of a call count, or refuse them."""
        rank, call.ended = call.name[0], True
        left = [other for other in self._open[rank] if other is not call]
        if left:
            self._open[rank] = left
        else:
            del self._open[rank]
        effects: list[Effect] = []
        for aside in call.pushes.values():
            if not call.verdict:
                self._deadlines.discard(aside.name)
                time = 0.0 if aside.due is None else max(0.0, aside.due - now)
                aside.received.message = structs.replace(aside.message, whole=None, timeout=time)
                effects += self._enter(aside.received, rank, now)
            else:
                effects += self._drop(aside)
                effects += [] if aside.due is None else [Refuse(*aside.name, _refusal(call.name, call.verdict))]
        return effects

    def _drop(self, aside: Aside) -> list[Effect]:
        self._deadlines.discard(aside.name)
        return freed(aside.received.slot)

    def _go_on(self, rank: Rank, now: float) -> list[Effect]:
        """Look again at requests that have waited for pushes which are ended."""
        effects: list[Effect] = []
        still = self._open.get(rank, [])
        for name, behind in list(self._behind.items()):
            if behind.rank == rank and not any(call is other for call in behind.calls for other in still):
                del self._behind[name]
                self._deadlines.discard(name)
                received = behind.received
                left: dict[str, Any] = {"timeout": max(0.0, behind.due - now)}
                received.message = structs.replace(received.message, **left)
                effects += self._again(received, now)
        return effects

    # --- asking the server that decides ---

    def copied(self, call: WholeCall, now: float) -> list[Effect]:
        """Take note that a standby has the pushes of a call, or is none any longer."""
        call.copying = False
        if call.asked or not any(other is call for other in self._open.get(call.name[0], ())):
            return []
        return self._ask(call, now) + self._look(call.name[0], now)

    def _ask(self, call: WholeCall, now: float) -> list[Effect]:
        call.asked = True
        call.after.update(dict.fromkeys(self._undecided_before(call)))
        rank, incarnation, number = call.name
        servers = 0 if call.gives_up else call.servers
        message = m.Gathered(rank, incarnation, number, servers, tuple(call.after))
        # One that goes to this server alone is decided here, unless there are others before or after which it comes.
        alone = call.servers == 1 and len(self._open[rank]) == 1
        if self._neighbours.index == LEADER or alone:
            return self._gather(message, self._neighbours.index, None, now)
        error = self._neighbours.first_lost([LEADER])
        if error is not None:
            return self.refused(call, error, now)
        return self._neighbours.ask(LEADER, message, call, now)

    def answered(self, call: WholeCall, message: m.Message, now: float) -> list[Effect]:
        """Take in what was decided about a call."""
        match message:
            case m.Settled(verdict):
                return self._settle(call.name, verdict, now)
            case m.Error(code, text, details):
                return self.refused(call, from_code(code, text, details), now)
            case _:
                return self.refused(call, ProtocolError(f"unexpected {type(message).__name__}"), now)

    def link_lost(self, call: WholeCall, now: float) -> list[Effect]:
        """Ask again: as long as the deciding server is not lost it may have decided, and that counts."""
        return [] if call.verdict is not None else self._ask(call, now)

    def refused(self, call: WholeCall, error: AiokvError, now: float) -> list[Effect]:
        """Take in that nobody can say whether a call counts; what it has pushed stays until its worker is gone."""
        if self._is_gone(call.name):
            return self._settle(call.name, GONE, now)
        call.asked = False
        effects: list[Effect] = []
        for aside in call.pushes.values():
            if aside.due is not None:
                self._deadlines.discard(aside.name)
                aside.due = None
                effects.append(Refuse(*aside.name, error))
        return effects

    # --- deciding ---

    def asked(self, peer: Peer, request: int, message: m.Gathered, index: int, now: float) -> list[Effect]:
        """Take in that another server has all of a call, or gives it up.

        Raises:
            ProtocolError: this server does not decide.
        """
        if self._neighbours.index != LEADER:
            raise ProtocolError(f"server {self._neighbours.index} decides nothing; server {LEADER} does")
        return self._gather(message, index, (peer, request), now)

    def _gather(self, message: m.Gathered, index: int, asker: RequestName | None, now: float) -> list[Effect]:
        name = (message.rank, message.incarnation, message.call)
        if name in self.known:
            return [] if asker is None else [Send(*asker, m.Settled(self.known[name]))]
        gathering = self._gatherings.setdefault(name, Gathering())
        gathering.after.update(dict.fromkeys(message.after))
        if asker is not None:
            gathering.askers.append(asker)
        if not message.servers or self._is_gone(name):
            return self._settle(name, GONE if self._is_gone(name) else LATE, now)
        gathering.servers = message.servers
        gathering.here[index] = None
        return self._decide(name, now)

    def _decide(self, name: CallName, now: float) -> list[Effect]:
        """Decide a call if all is known that has to be."""
        gathering = self._gatherings[name]
        before = [self.known.get((*name[:2], number)) for number in gathering.after]
        failed = next((verdict for verdict in before if verdict), "")
        if not failed and (None in before or len(gathering.here) != gathering.servers):
            return []
        return self._settle(name, failed, now)

    def _settle(self, name: CallName, verdict: Verdict, now: float) -> list[Effect]:
        """Remember what was decided about a call, tell who has asked, and go on with what waited for it."""
        self.known[name] = verdict
        if len(self.known) > REMEMBERED:
            self.known.popitem(last=False)
        if self.on_settled is not None:
            self.on_settled(name, verdict)
        gathering = self._gatherings.pop(name, None)
        effects: list[Effect] = []
        if gathering is not None:
            effects += [Send(*asker, m.Settled(verdict)) for asker in gathering.askers]
        for call in self._open.get(name[0], ()):
            if call.name == name:
                call.asked, call.verdict = True, verdict
        for other, waiting in list(self._gatherings.items()):
            if other[:2] == name[:2] and name[2] in waiting.after and other in self._gatherings:
                effects += self._decide(other, now)
        return effects + self._look(name[0], now)

    # --- members ---

    def _is_gone(self, name: CallName) -> bool:
        """Tell whether nothing more comes of a worker's life."""
        entry = self._workers.get(name[0])
        if entry is None or entry.incarnation < name[1]:
            # It is in a view that has not reached this server.
            return False
        return entry.incarnation > name[1] or entry.state not in EXPECTED

    def viewed(self, view: m.View, now: float) -> list[Effect]:
        """Take over the members of a view: of those that are gone nothing more is to come."""
        self._workers = {entry.rank: entry for entry in view.workers}
        self._patience = view.death_timeout
        open_calls = [call for calls in self._open.values() for call in calls if not call.asked]
        effects: list[Effect] = []
        for name in [*(call.name for call in open_calls if not call.resumed), *self._gatherings]:
            if self._is_gone(name) and name not in self.known:
                effects += self._settle(name, GONE, now)
        # Of others the deciding server may have heard already that they are here.
        for rank in dict.fromkeys(call.name[0] for call in open_calls if call.resumed):
            effects += self._look(rank, now)
        return effects

    def resume(self, known: OrderedDict[CallName, Verdict], calls: Iterable[WholeCall], now: float) -> list[Effect]:
        """Go on from what the server knew in whose place this one is.

        What counts of workers that are gone comes first: rounds wait for them no longer.

        Args:
            known: what it had decided or heard.
            calls: what it may have said to be there, or had begun to let count.
            now: the time in seconds.
        """
        self.known, self.is_resuming = known, True
        for call in calls:
            call.resumed = True
            bisect.insort(self._open.setdefault(call.name[0], []), call, key=lambda other: other.name)
        return [effect for rank in list(self._open) for effect in self._look(rank, now)]

    def resumed(self, now: float) -> list[Effect]:
        """Let the others count, too, as soon as nothing is to be decided of those that are gone."""
        if not self.is_resuming or self.is_open:
            return []
        self.is_resuming = False
        return [effect for rank in list(self._open) for effect in self._look(rank, now)]

    @property
    def asked_about(self) -> list[WholeCall]:
        """The calls of which was said that they are here, and which are not ended."""
        return [call for calls in self._open.values() for call in calls if call.asked]

    @property
    def is_open(self) -> bool:
        """Whether something is to be decided of a worker that is gone; until then the rounds wait for it."""
        return any(self._is_gone(call.name) for calls in self._open.values() for call in calls)

    # --- ends ---

    def forget_peer(self, peer: Peer) -> None:
        """Nobody is there any longer to answer; what has come is kept."""
        for name in [name for name in self._behind if name[0] == peer]:
            del self._behind[name]
            self._deadlines.discard(name)
        for aside in self._all():
            if aside.received.peer == peer:
                self._deadlines.discard(aside.name)
                aside.due = None
        for gathering in self._gatherings.values():
            gathering.askers[:] = [name for name in gathering.askers if name[0] != peer]

    def expire(self, name: RequestName, now: float) -> list[Effect]:
        """Give up the call of a push that has waited too long, or what waited behind it."""
        behind = self._behind.pop(name, None)
        if behind is not None:
            text = f"rank {behind.rank}: pushes before this have not come to all of their servers in time"
            return [Refuse(*name, CallTimeoutError(text, ranks=[behind.rank]))]
        call = self._find(name)
        assert call is not None, "it waits here"
        aside = next(aside for aside in call.pushes.values() if aside.name == name)
        if aside.is_late:
            aside.due = None
            text = f"server {LEADER} does not say whether call {call.name[2]} of rank {call.name[0]} counts"
            return [Refuse(*name, CallTimeoutError(text, ranks=[call.name[0]]))]
        aside.is_late = True
        self._deadlines.add(name, now + self._patience)
        if call.gives_up:
            return []
        call.gives_up = True
        return self._ask(call, now)

    def wait(self, name: RequestName) -> Wait:
        """Return for what a request waits here."""
        if name in self._behind:
            behind = self._behind[name]
            timeout: float = getattr(behind.received.message, "timeout", 0.0)
            what = f"{type(behind.received.message).__name__} of rank {behind.rank}"
            return Wait(what, "pushes before it have not come to all of their servers", timeout, [behind.rank])
        call = self._find(name)
        assert call is not None, "it waits here"
        [aside] = [aside for aside in call.pushes.values() if aside.name == name]
        missing = call.parts - len(call.pushes)
        reason = f"{missing} of its {call.parts} pushes have not come" if missing else "it is not on all of its servers"
        what = f"call {call.name[2]} of rank {call.name[0]}"
        return Wait(what, reason, aside.message.timeout, [call.name[0]])

    # --- for tests ---

    def validate(self) -> None:
        """Check what must hold between any two stimuli.

        Raises:
            AssertionError: an invariant is broken.
        """
        for rank, calls in self._open.items():
            assert calls
            for call in calls:
                assert call.name[0] == rank
                # Where this server has another one's place, some of one that counts may be in values already.
                assert call.is_here or not call.asked or call.gives_up or call.verdict is not None
                assert call.verdict is None or self.is_resuming or self._before(call), "what is decided is ended"
        for behind in self._behind.values():
            assert self._open.get(behind.rank)
        assert not self._gatherings.keys() & self.known.keys()
