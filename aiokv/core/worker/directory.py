"""What a worker knows of its keys, and which messages a transfer of them is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import structs

from aiokv.core.effects import CallMemory, CallTensors
from aiokv.core.stimuli import KeyOptions, KeyRecord, Operation
from aiokv.core.worker.known_keys import KnownKeys
from aiokv.core.worker.layout import Layout
from aiokv.core.worker.open_pushes import OpenPushes
from aiokv.core.worker.parts import Known, KnownBundle, Part
from aiokv.core.worker.push_counts import PushCounts
from aiokv.core.worker.row_parts import init_rows, pull_rows, push_rows
from aiokv.core.worker.transfer_plans import Plans
from aiokv.errors import MembershipError, UnknownKeyError
from aiokv.policy import get_policy
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiokv.core.placement import Chunk
    from aiokv.core.stimuli import Rows
    from aiokv.core.worker.parts import Lane, Tensors
    from aiokv.types import Key, Peer, Round, TensorSpec, Version


class Directory:
    """The keys of one worker.

    Args:
        policy: name of the synchronisation policy of the keys that it initialises.
    """

    __slots__ = ("_known", "_plans", "counts", "keys", "layout", "pushes")

    def __init__(self, policy: str) -> None:
        self.keys = KnownKeys(policy)
        self.counts = PushCounts(self.keys)
        self.layout = Layout()
        self._known = self.keys.by_key
        self.pushes = OpenPushes()
        self._plans = Plans(self.keys, self.pushes, self.layout)

    def check(self, tensors: Tensors, sparse: int = 0) -> Tensors:
        """Return the tensors as `KnownKeys.check` does; it is not asked again about those that a plan has."""
        known = self._plans.known(tensors)
        return self.keys.check(tensors, sparse) if known is None else known

    # --- messages ---

    def init(
        self, call: int, tensors: Tensors, rows: list[Rows], wait: float, options: KeyOptions, *, values: bool
    ) -> list[Part]:
        """Return the messages of an init; `rows` are of the last tensors, `values`: this worker sends them."""
        policy, group = self.keys.policy_of(options), options.group
        digests = options.digests if values and options.digests else (b"",) * len(tensors)
        dense, clock = len(tensors) - len(rows), self.counts.clock
        bundles, singles = self._plans.group(tensors[:dense], joins=get_policy(policy).is_plain)
        parts: list[Part] = []
        for members in bundles:
            named = [tensors[tensor] for tensor in members]
            keys, shapes = tuple(key for key, _ in named), tuple(spec.shape for _, spec in named)
            dtype, nbytes = named[0][1].dtype, sum(spec.nbytes for _, spec in named)
            whole: m.Message = m.InitBundle(
                keys, shapes, dtype, policy, wait, group, tuple(digests[tensor] for tensor in members), clock
            )
            server = self.layout.place(*named[0])[0].server
            sends = CallTensors(call, tuple(members), nbytes) if values else None
            bundle = KnownBundle(server, -1, keys, nbytes)
            parts.append(Part(server, whole, sends, None, keys[0], bundle=bundle))
        for tensor in singles:
            key, spec = tensors[tensor]
            for chunk in self.layout.place(key, spec):
                head = (key, spec.shape, spec.dtype, chunk.start, chunk.stop)
                message = m.Init(*head, policy, wait, group, digests[tensor], clock)
                memory = _memory(call, tensor, chunk, spec) if values else None
                parts.append(Part(chunk.server, message, memory, None, key, chunk.start))
        options = structs.replace(options, policy=policy)
        for tensor, some in enumerate(rows, dense):
            key, spec = tensors[tensor]
            chunks = self.layout.place_rows(key, spec)
            counts = some.counts if values else [0] * len(chunks)
            created = init_rows(key, spec, chunks, counts, (call, tensor), wait, options, digests[tensor], clock)
            parts += [
                Part(chunk.server, head, memory if memory.stop > memory.start else None, None, key, chunk.start)
                for chunk, head, memory in created
            ]
        return parts

    def exchange(
        self, call: int, operation: Operation, tensors: Tensors, rows: list[Rows], wait: float, priority: int
    ) -> list[Part]:
        """Return the messages of a push, a pull or both; `rows` are of the last tensors."""
        dense = len(tensors) - len(rows)
        plan = self._plans.plan(tensors[:dense] if rows else tensors)
        pushes = operation is not Operation.PULL
        receives = operation is not Operation.PUSH
        if pushes:
            self.counts.advance(plan, [key for key, _ in tensors[dense:]] if rows else [])
        clock, begin = self.counts.clock, self.pushes.begin
        parts: list[Part] = []
        for bundle, members in plan.bundles:
            memory = CallTensors(call, members, bundle.nbytes)
            bundle.pushed += pushes
            push = None
            leaves = priority
            if pushes:
                push, leaves = begin(bundle.keys[0], priority, 1)
                self._known[bundle.keys[0]].goes_on = False
                message: m.Message = m.PushBundle(
                    bundle.number, bundle.pushed, bundle.version, receives, wait, priority, clock
                )
            else:
                before = self.counts.before(bundle.keys[0], bundle.pushed)
                message = m.PullBundle(bundle.number, bundle.pushed, wait, priority, 0, before)
            ends = memory if pushes else None, memory if receives else None
            parts.append(Part(bundle.server, message, *ends, bundle.keys[0], 0, bundle, push, leaves))
        for single in plan.singles:
            key = single.key
            known = self._known.get(key)
            if known is None:
                known = self._known[key] = Known()
            known.pushed += pushes
            push = None
            leaves, before = priority, 0
            if pushes:
                push, leaves = begin(key, priority, len(single.cuts))
                known.goes_on = False
            else:
                before = self.counts.before(key, known.pushed)
            for cut in single.cuts:
                start = cut.head[3]
                if pushes:
                    read = known.versions.get(start, 0)
                    message = m.Push(*cut.head, known.pushed, read, receives, wait, priority, clock)
                else:
                    message = m.Pull(*cut.head, known.pushed, wait, priority, 0, 0, before)
                of_chunk = CallMemory(call, single.tensor, cut.begin, cut.end)
                sends, lands = of_chunk if pushes else None, of_chunk if receives else None
                parts.append(Part(cut.server, message, sends, lands, key, start, None, push, leaves))
        for tensor, some in enumerate(rows, dense):
            key, spec = tensors[tensor]
            exchange = self._push_rows if pushes else self._pull_rows
            parts += exchange(key, spec, some, (call, tensor), wait, priority)
        return parts

    def _push_rows(
        self, key: Key, spec: TensorSpec, rows: Rows, memory: tuple[int, int], wait: float, priority: int
    ) -> list[Part]:
        known = self._known.setdefault(key, Known())
        known.pushed += 1
        rest, chunks = (wait, priority, self.counts.clock), self.layout.place_rows(key, spec)
        messages = push_rows(key, spec, chunks, rows, memory, known.pushed, known.versions, rest)
        # The last message of a chunk makes the push.
        last = [message.first + message.count == message.total for _, message, _ in messages]
        push, leaves = self.pushes.begin(key, priority, sum(last))
        known.goes_on = False
        return [
            Part(chunk.server, message, sends, None, key, chunk.start, None, push if is_last else None, leaves)
            for (chunk, message, sends), is_last in zip(messages, last, strict=True)
        ]

    def _pull_rows(
        self, key: Key, spec: TensorSpec, rows: Rows, memory: tuple[int, int], wait: float, priority: int
    ) -> list[Part]:
        known = self._known.setdefault(key, Known())
        rest = (known.pushed, wait, priority, 0, self.counts.before(key, known.pushed))
        chunks = self.layout.place_rows(key, spec)
        messages = pull_rows(key, spec, chunks, rows, memory, rest, self.layout.chunk_bytes)
        return [
            Part(chunk.server, message, None, receives, key, chunk.start, priority=priority)
            for chunk, message, receives in messages
        ]

    def push_counts(self, wait: float) -> list[Part]:
        """Return the messages that ask how often each chunk was pushed by whoever had this worker's place.

        Raises:
            UnknownKeyError: this worker has initialised no key.
            MembershipError: it has pushed already.
        """
        records = self.keys.records
        if not records:
            raise UnknownKeyError("resume_step: initialise the keys first")
        if any(self.counts.pushed(record.key) for record in records):
            raise MembershipError("resume_step: this worker has pushed already")
        made: list[Part] = []
        for record in records:
            key, spec = record.key, record.spec
            for chunk in self.layout.chunks(record):
                message = m.GetPushes(key, spec.shape, spec.dtype, chunk.start, chunk.stop, wait)
                made.append(Part(chunk.server, message, None, None, key, chunk.start))
        return made

    def learn(self, counts: Sequence[tuple[Key, m.Pushes]]) -> None:
        """Take over the policies that keys have got from others before this worker came.

        While some servers still follow the policy that the worker knows, it has to ask for the other one, as all do.
        """
        behind = {key for key, made in counts if made.policy == self.keys.policy_of(self._known[key].options)}
        for key, policy in {key: made.policy for key, made in counts if key not in behind}.items():
            self._let_go_alone([key])
            self.keys.follow(policy, [key])

    # --- pushes under way ---

    def full(self, tensors: Tensors, most: int, sparse: int = 0) -> Key | None:
        """Return a key of which as many pushes are under way as may be, if there is one."""
        if not self.pushes.open:
            return None
        dense = len(tensors) - sparse
        plan = self._plans.plan(tensors[:dense] if sparse else tensors)
        units = plan.keys + [key for key, _ in tensors[dense:]] if sparse else plan.keys
        return self.pushes.full(units, most)

    def answered(self, part: Part) -> tuple[Key, ...]:
        """Take note that a message is answered; return the keys of which one push less is under way."""
        push = part.push
        if push is None:
            return ()
        push.left -= 1
        if push.left:
            return ()
        if part.bundle is None:
            self.pushes.end(part.key)
            return (part.key,)
        keys = part.bundle.keys
        for key in keys if self._plans.is_apart(part) else keys[:1]:
            self.pushes.end(key)
        return keys

    # --- answers ---

    def initialized(self, tensors: Tensors, sparse: int, options: KeyOptions) -> None:
        """Remember keys whose init has succeeded; the last `sparse` of them are row-sparse."""
        self.keys.add(tensors, sparse, options)
        self._plans.forget()

    def adopt(self, records: Sequence[KeyRecord]) -> None:
        """Use keys as if this worker had initialised them."""
        for record in records:
            self.initialized([(record.key, record.spec)], int(record.is_sparse), record.options)

    def bundled(self, bundle: KnownBundle, number: int) -> None:
        """Use the server's number for keys that are initialised together, unless one of them has been used alone."""
        self._plans.bundled(bundle, number)

    def forget(self, keys: Sequence[Key]) -> None:
        """Know nothing of the keys any longer, because they were deleted."""
        self._let_go_alone(keys)
        for key in keys:
            self.counts.forget(key)
            self.keys.forget(key)
        self._plans.forget()

    def ask_for(self, keys: Sequence[Key]) -> None:
        """Take note that another policy is asked for; each key goes alone from now on."""
        self.keys.ask_for(keys)
        self._let_go_alone(keys)

    def _let_go_alone(self, keys: Sequence[Key]) -> None:
        for key in keys:
            known = self._known.get(key)
            if known is not None and known.bundle is not None:
                self._plans.take_apart(known.bundle)

    def received(self, part: Part, version: Version) -> None:
        """Remember the newest version that a value had; answers may overtake each other."""
        if part.bundle is None:
            if part.key in self._known:
                versions = self._known[part.key].versions
                versions[part.start] = max(version, versions.get(part.start, 0))
            return
        part.bundle.version = version = max(version, part.bundle.version)
        if self._plans.is_apart(part):
            for key in part.bundle.keys:
                if key in self._known:
                    self._known[key].versions[0] = version

    def read(self, part: Part, number: Round) -> Lane | None:
        """Remember the last round in a value; return with which keys its rounds are decided, None: with none."""
        known = self._known.get(part.key)
        if known is None or known.lane is None:
            return None
        if part.start == 0:
            known.round = max(known.round, number)
        return known.lane

    def newest(self, key: Key) -> tuple[Peer, Round | Version]:
        """Return where the first chunk of a key is, and what was read of it last: a round, or else a version.

        Raises:
            UnknownKeyError: this worker has not initialised the key.
        """
        known = self.keys.initialized(key)
        assert known.spec is not None, "it is initialised"
        server = (self.layout.place_rows if known.is_sparse else self.layout.place)(key, known.spec)[0].server
        if known.lane is not None:
            return server, known.round
        return server, known.versions.get(0, 0) if known.bundle is None else known.bundle.version

    def take_back(self, part: Part) -> None:
        """Do not count a push that the server did not take: the next one has its number.

        The clock goes on: others may have seen it.
        """
        if part.bundle is not None:
            part.bundle.pushed -= 1
            if self._plans.is_apart(part):
                for key in part.bundle.keys:
                    self._known[key].pushed -= 1
        elif part.start == 0:
            # Every tensor has one chunk that starts at 0.
            self._known[part.key].pushed -= 1


def _memory(call: int, tensor: int, chunk: Chunk, spec: TensorSpec) -> CallMemory:
    return CallMemory(call, tensor, chunk.start * spec.itemsize, chunk.stop * spec.itemsize)
