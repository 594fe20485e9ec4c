"""How keys come into being on a server: their root brings the values, the others wait for it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from aiokv.core.effects import Effect, Install, InstallRows, Refuse, Send, freed
from aiokv.core.keys import name_keys
from aiokv.core.roster import EXPECTED
from aiokv.core.server.catalog import specs_of
from aiokv.core.server.cuts import check_cut
from aiokv.core.server.parked import Parked
from aiokv.core.server.rounds.rows import check_norms, options_of
from aiokv.core.waiting import Wait
from aiokv.errors import AiokvError, CallTimeoutError, MembershipError, ProtocolError, UnknownKeyError
from aiokv.policy import get_policy
from aiokv.types import Piece, TensorSpec
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiokv.core.deadlines import Deadlines
    from aiokv.core.roster import Roster
    from aiokv.core.rules import Rules
    from aiokv.core.server.catalog import Catalog
    from aiokv.core.server.parked import RequestName
    from aiokv.core.stimuli import Received
    from aiokv.types import Key, Peer, Rank, Slot

AnyInit = m.Init | m.InitBundle | m.InitRows


class Creation:
    """The part of a `Coordinator` that deals with inits.

    Args:
        catalog: the server's keys.
        rules: which rule updates them.
        deadlines: where inits that wait are entered, under peer and request id.
    """

    def __init__(self, catalog: Catalog, rules: Rules, deadlines: Deadlines[RequestName]) -> None:
        self._catalog = catalog
        self._rules = rules
        self._deadlines = deadlines
        self._parked: Parked[AnyInit] = Parked()

    def __contains__(self, name: RequestName) -> bool:
        return name in self._parked

    def __iter__(self) -> Iterator[RequestName]:
        return iter(self._parked)

    def init(self, received: Received, message: AnyInit, rank: Rank, roster: Roster, now: float) -> list[Effect]:
        """Create what the root brings; let others wait for it.

        Raises:
            AlreadyInitializedError: there is another value.
            MembershipError: the rank is not in the keys' group.
            ProtocolError, KeyUseError, SpecMismatchError, PolicyError, OptimizerError: it can't be.
        """
        if message.group != roster.check_group(message.group):
            raise ProtocolError(f"{_named(message)}: a group is sorted, and empty when it is all workers")
        if message.group and rank not in message.group:
            text = f"{_named(message)}: ranks {list(message.group)} own it; rank {roster.label(rank)} is none of them"
            raise MembershipError(text, ranks=[rank])
        entry = roster.entry(rank)
        # The others may have given the keys another policy since they were made.
        self._catalog.check_init(message, learns=entry is not None and entry.state == "joining")
        if rank == _root(message):
            return self._create(received, message)
        if received.slot is not None:
            root = _root(message)
            raise ProtocolError(f"{_named(message)}: only rank {root} sends initial values, got some from rank {rank}")
        name = (received.peer, received.request)
        answered = self._answer(name, message)
        if answered:
            return answered
        self._deadlines.add(name, now + message.timeout)
        return self.roster_changed(roster)

    def create_empty(self, message: m.Init | m.InitRows, roster: Roster) -> list[Effect]:
        """Create a chunk that is about to get what was saved of it; it is not there.

        Raises:
            ProtocolError, MembershipError, KeyUseError, SpecMismatchError, PolicyError, OptimizerError: it can't be.
        """
        if message.group != roster.check_group(message.group):
            raise ProtocolError(f"{_named(message)}: a group is sorted, and empty when it is all workers")
        self._catalog.check_init(message)
        nbytes = TensorSpec((max(0, message.stop - message.start),), message.dtype).nbytes
        install, _ = self._enter(message, None, nbytes)
        return [install, *self._answer_parked((message.key,), message.start)]

    def _create(self, received: Received, message: AnyInit) -> list[Effect]:
        keys = message.keys if isinstance(message, m.InitBundle) else (message.key,)
        if self._catalog.has_values(message):
            return [*freed(received.slot), *self._answer((received.peer, received.request), message)]
        install, answer = self._enter(message, received.slot, received.nbytes)
        start = 0 if isinstance(message, m.InitBundle) else message.start
        return [install, Send(received.peer, received.request, answer), *self._answer_parked(keys, start)]

    def _enter(self, message: AnyInit, slot: Slot | None, nbytes: int) -> tuple[Effect, m.Message]:
        """Take new keys into the catalog; return how the store does that, and the answer to who brings them."""
        keys = message.keys if isinstance(message, m.InitBundle) else (message.key,)
        if not get_policy(message.policy).keeps_sum:
            for key in keys:
                self._rules.merging.check_dtype(key, message.dtype, self._rules.current)
        if isinstance(message, m.Init):
            spec = TensorSpec(message.shape, message.dtype)
            check_cut(self._rules.current, message.key, spec, message.start, message.stop, get_policy(message.policy))
        answer: m.Message = m.Done()
        if isinstance(message, m.InitRows):
            check_norms(message.key, self._rules.current)
            self._rules.merging.check_table(message.key)
            options = options_of(message)
            table = self._catalog.create_table(message, options)
            place = table.key, table.start, table.stop, table.spec
            return InstallRows(*place, options.initializer, options.lazy, slot), answer
        if isinstance(message, m.Init):
            chunk = self._catalog.create(message, nbytes)
        else:
            bundle = self._catalog.create_bundle(message, nbytes)
            assert bundle.chunk is not None, "a new bundle is one chunk"
            chunk, answer = bundle.chunk, m.Bundled(bundle.number)
        start = message.start if isinstance(message, m.Init) else 0
        pieces = [Piece(key, start, spec.size, spec.row_size) for key, spec in specs_of(message)]
        if isinstance(message, m.Init):
            pieces = [replace(pieces[0], size=chunk.size)]
        return Install(chunk.key, chunk.start, message.dtype, chunk.size, slot, pieces), answer

    def _answer_parked(self, keys: tuple[Key, ...], start: int) -> list[Effect]:
        """Look again at the inits that have waited for these keys."""
        effects: list[Effect] = []
        for key in keys:
            for name, parked in self._parked.take_place(key, start):
                effects += self._release(name, parked)
        return effects

    def _answer(self, name: RequestName, message: AnyInit) -> list[Effect]:
        """Answer an init if all that it names is there; else park it."""
        if not isinstance(message, m.InitBundle):
            chunk = self._catalog.find(message.key, message.start)
            missing = message.key if chunk is None else None
            answer: m.Message = m.Done(chunk.version if chunk else 0)
            start = message.start
        else:
            missing, start = self._catalog.first_missing(message.keys), 0
            answer = m.Done()
            if missing is None:
                answer = m.Bundled(self._catalog.bundle_like(message).number)
        if missing is not None:
            self._parked.add(name, message, missing, start)
            return []
        self._deadlines.discard(name)
        return [Send(*name, answer)]

    def _release(self, name: RequestName, message: AnyInit) -> list[Effect]:
        try:
            self._catalog.check_init(message)
            return self._answer(name, message)
        except AiokvError as error:
            self._deadlines.discard(name)
            return [Refuse(*name, error)]

    def roster_changed(self, roster: Roster) -> list[Effect]:
        """Refuse the inits whose root is gone."""
        effects: list[Effect] = []
        for name in list(self._parked):
            message = self._parked.get(name)
            root = roster.entry(_root(message))
            if root is None or root.state in EXPECTED:
                continue
            self._parked.take(name)
            self._deadlines.discard(name)
            what = f"init of {_named(message)}"
            key = message.keys[0] if isinstance(message, m.InitBundle) else message.key
            if root.state in {"lost", "evicted"}:
                error: AiokvError = roster.loss([root.rank], what, key)
            else:
                error = UnknownKeyError(f"{what}: rank {roster.label(root.rank)} left without it", key=key)
            effects.append(Refuse(*name, error))
        return effects

    def forget_peer(self, peer: Peer) -> None:
        """Take out the inits of a connection that is over."""
        for name, _ in self._parked.take_peer(peer):
            self._deadlines.discard(name)

    def expire(self, name: RequestName, roster: Roster) -> Effect:
        """Refuse an init whose time has come, and say for whom it has waited."""
        wait = self.wait(name, roster)
        self._parked.take(name)
        return Refuse(*name, CallTimeoutError(wait.late, ranks=wait.ranks, key=wait.key))

    def wait(self, name: RequestName, roster: Roster) -> Wait:
        """Return for what an init waits."""
        message = self._parked.get(name)
        root = _root(message)
        key = message.keys[0] if isinstance(message, m.InitBundle) else message.key
        reason = f"not initialized by rank {roster.label(root)}"
        return Wait(_named(message), reason, message.timeout, [root], key)


def _root(message: AnyInit) -> Rank:
    return message.group[0] if message.group else 0


def _named(message: AnyInit) -> str:
    return f"keys {name_keys(message.keys)}" if isinstance(message, m.InitBundle) else f"key {message.key!r}"
