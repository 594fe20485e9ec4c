"""What a worker knows of its keys, and which messages a transfer of them is."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from msgspec import structs

from aiokv.core.effects import CallBuffer, CallMemory, CallTensors
from aiokv.core.going_on import first_step
from aiokv.core.keys import check_key, check_kind, check_same_spec, check_spec
from aiokv.core.parts import Cut, Known, KnownBundle, Leaving, Part, Plan, Pushed, Single
from aiokv.core.placement import Chunk, place, place_rows
from aiokv.core.row_parts import init_rows, pull_rows, push_rows
from aiokv.core.rows import check_sparse, check_table
from aiokv.core.stimuli import KeyOptions, KeyRecord, Operation
from aiokv.errors import MembershipError, PolicyError, UnknownKeyError
from aiokv.policy import get_policy
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiokv.core.merging import Merging
    from aiokv.core.parts import Lane, Tensors
    from aiokv.core.stimuli import ReadState, Rows, StatePart, WriteState
    from aiokv.optim import Optimizer
    from aiokv.types import Key, Peer, Rank, Round, TensorSpec, Version

BUNDLED_BYTES = 16 * 1024
"""Tensors up to this size are initialised in bundles: their bytes cost less than their messages."""

MAX_PLANS = 64

MAX_SINGLES: Final = 8192
"""Of how many tensors it is remembered how they are cut."""


class Directory:
    """The keys of one worker.

    Args:
        policy: name of the synchronisation policy of the keys that it initialises.
    """

    def __init__(self, policy: str) -> None:
        self._policy = policy
        self.clock = 0
        """The most pushes of any key."""
        self._earlier: dict[Key, int] = {}
        """How many pushes of a key were made before those of this worker, and elsewhere: those of what was loaded."""
        self.has_steps = False
        """Whether rounds of a key are decided for all keys at once."""
        self._kind: type | None = None
        self._known: dict[Key, Known] = {}
        self._places: dict[tuple[Key, TensorSpec], list[Chunk]] = {}
        self._plans: dict[tuple[Key, ...], Plan] = {}
        self._planned: Plan | None = None
        """The plan that was used last; `_forget_plans` when it is not good any longer."""
        self._floors: dict[Key, int] = {}
        """Lowest priority of the pushes under way; that of a bundle stands under its first key."""
        self._open: dict[Key, int] = {}
        """How many pushes are under way; those of a bundle stand under its first key."""
        self._going_on = False
        """Whether another process had this worker's place before, and has pushed."""
        self._asking: dict[Key, None] = {}
        """Keys for which another policy was asked, and it is not known whether the servers have it."""
        self._servers = 0
        self._chunk_bytes = 0
        self._split_bytes = 0

    def settle(self, view: m.View) -> None:
        """Take over the cluster's settings, from the first view."""
        self._servers = len(view.servers)
        self._chunk_bytes, self._split_bytes = view.chunk_bytes, view.split_bytes

    def spec(self, key: Key) -> TensorSpec | None:
        """Return the spec of a key that this worker has initialised."""
        known = self._known.get(key)
        return known.spec if known else None

    @property
    def records(self) -> list[KeyRecord]:
        """The keys that this worker has initialised, with the policies that they have."""
        return [
            KeyRecord(
                key, known.spec, known.is_sparse, structs.replace(known.options, policy=self._policy_of(known.options))
            )
            for key, known in self._known.items()
            if known.spec is not None
        ]

    def adopt(self, records: Sequence[KeyRecord]) -> None:
        """Use keys as if this worker had initialised them."""
        for record in records:
            self.initialized([(record.key, record.spec)], int(record.is_sparse), record.options)

    def _policy_of(self, options: KeyOptions) -> str:
        """Return the policy's text as everybody writes it."""
        return str(get_policy(options.policy or self._policy))

    @property
    def waits_for_others(self) -> bool:
        """Whether workers wait for each other in a key that this worker has initialised, by their numbers of steps."""
        texts = {self._policy_of(known.options) for known in self._known.values() if known.spec is not None}
        policies = [get_policy(text) for text in texts]
        return any(policy.in_step or policy.gate() is not None for policy in policies)

    def is_sparse(self, key: Key) -> bool:
        """Return True when this worker has initialised a key as a row-sparse one."""
        return key in self._known and self._known[key].is_sparse

    def check(self, tensors: Tensors, sparse: int = 0) -> Tensors:
        """Return the tensors with their keys as plain str or int; the last `sparse` of them are row-sparse.

        Raises:
            KeyUseError: a key can't be, or str and int are mixed.
            SpecMismatchError: a spec can't be, or shape, dtype or storage is not the key's.
        """
        # Mostly the same tensors are named again.
        plan = self._planned
        if plan is not None and plan.tensors == tensors:
            return plan.tensors
        plan = self._plans.get(tuple([key for key, _ in tensors]))
        if plan is not None and plan.tensors == tensors:
            return plan.tensors
        kind = self._kind
        checked: Tensors = []
        for number, tensor in enumerate(tensors, sparse - len(tensors)):
            given, spec = tensor
            key = check_key(given)
            kind = check_kind(key, kind)
            (check_spec if number < 0 else check_table)(key, spec)
            known = self.spec(key)
            if known is not None:
                check_sparse(key, is_sparse=self.is_sparse(key), wanted=number >= 0)
                check_same_spec(key, known, spec)
            # Where it is the same tensor, comparing with it later takes no time.
            checked.append(tensor if key is given else (key, spec))
        self._kind = kind
        return checked

    def check_rule(self, rule: Optimizer, merging: Merging) -> None:
        """Refuse an update rule that some key which this worker has initialised can't have.

        The key's server would refuse it too, but servers without such a key would have set it by then.

        Raises:
            OptimizerError: names the key.
        """
        for key, known in self._known.items():
            if known.spec is not None and not get_policy(self._policy_of(known.options)).keeps_sum:
                merging.check_dtype(key, known.spec.dtype, rule)

    # --- messages ---

    def init(
        self, call: int, tensors: Tensors, rows: list[Rows], wait: float, options: KeyOptions, *, values: bool
    ) -> list[Part]:
        """Return the messages of an init; `rows` are of the last tensors, `values`: this worker sends them."""
        policy, group = self._policy_of(options), options.group
        digests = options.digests if values and options.digests else (b"",) * len(tensors)
        dense = len(tensors) - len(rows)
        bundles, singles = self._group(tensors[:dense], joins=get_policy(policy).is_plain)
        parts: list[Part] = []
        for members in bundles:
            named = [tensors[tensor] for tensor in members]
            keys, shapes = tuple(key for key, _ in named), tuple(spec.shape for _, spec in named)
            dtype, nbytes = named[0][1].dtype, sum(spec.nbytes for _, spec in named)
            whole: m.Message = m.InitBundle(
                keys, shapes, dtype, policy, wait, group, tuple(digests[tensor] for tensor in members), self.clock
            )
            server = self._place(*named[0])[0].server
            sends = CallTensors(call, tuple(members), nbytes) if values else None
            bundle = KnownBundle(server, -1, keys, nbytes)
            parts.append(Part(server, whole, sends, None, keys[0], bundle=bundle))
        for tensor in singles:
            key, spec = tensors[tensor]
            for chunk in self._place(key, spec):
                head = (key, spec.shape, spec.dtype, chunk.start, chunk.stop)
                message = m.Init(*head, policy, wait, group, digests[tensor], self.clock)
                memory = _memory(call, tensor, chunk, spec) if values else None
                parts.append(Part(chunk.server, message, memory, None, key, chunk.start))
        options = structs.replace(options, policy=policy)
        for tensor, some in enumerate(rows, dense):
            key, spec = tensors[tensor]
            chunks = self.place_rows(key, spec)
            counts = some.counts if values else [0] * len(chunks)
            created = init_rows(key, spec, chunks, counts, (call, tensor), wait, options, digests[tensor], self.clock)
            parts += [
                Part(chunk.server, head, memory if memory.stop > memory.start else None, None, key, chunk.start)
                for chunk, head, memory in created
            ]
        return parts

    def _group(self, tensors: Tensors, *, joins: bool) -> tuple[list[list[int]], list[int]]:
        """Put small new tensors together by server and dtype, the same way on every worker; and the rest.

        Unless the policy `joins` keys, each stays alone.
        """
        groups: dict[tuple[Peer, str], list[list[int]]] = {}
        room: dict[tuple[Peer, str], int] = {}
        singles: list[int] = []
        order = sorted(range(len(tensors)), key=lambda tensor: tensors[tensor][0])
        for tensor in order:
            key, spec = tensors[tensor]
            chunks = self._place(key, spec)
            is_small = len(chunks) == 1 and 0 < spec.nbytes <= BUNDLED_BYTES
            if not (joins and is_small) or self._is_used(key):
                singles.append(tensor)
                continue
            name = (chunks[0].server, spec.dtype)
            if room.get(name, 0) < spec.nbytes:
                groups.setdefault(name, []).append([])
                room[name] = self._chunk_bytes
            groups[name][-1].append(tensor)
            room[name] -= spec.nbytes
        bundles = [group for some in groups.values() for group in some]
        singles += [group[0] for group in bundles if len(group) == 1]
        return [group for group in bundles if len(group) > 1], singles

    def _is_used(self, key: Key) -> bool:
        known = self._known.get(key)
        return known is not None and bool(known.spec or known.bundle or known.pushed or known.versions)

    def exchange(
        self, call: int, operation: Operation, tensors: Tensors, rows: list[Rows], wait: float, priority: int
    ) -> list[Part]:
        """Return the messages of a push, a pull or both; `rows` are of the last tensors."""
        dense = len(tensors) - len(rows)
        plan = self._plan(tensors[:dense] if rows else tensors)
        pushes = operation is not Operation.PULL
        receives = operation is not Operation.PUSH
        if pushes:
            self._advance_clock(plan, [key for key, _ in tensors[dense:]] if rows else [])
        parts: list[Part] = []
        for bundle, members in plan.bundles:
            memory = CallTensors(call, members, bundle.nbytes)
            bundle.pushed += pushes
            push = None
            leaves = priority
            if pushes:
                push, leaves = self._begin_push(bundle.keys[0], priority, 1)
                message: m.Message = m.PushBundle(
                    bundle.number, bundle.pushed, bundle.version, receives, wait, priority, self.clock
                )
            else:
                before = self._before(bundle.keys[0], bundle.pushed)
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
                push, leaves = self._begin_push(key, priority, len(single.cuts))
            else:
                before = self._before(key, known.pushed)
            for cut in single.cuts:
                start = cut.head[3]
                if pushes:
                    read = known.versions.get(start, 0)
                    message = m.Push(*cut.head, known.pushed, read, receives, wait, priority, self.clock)
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
        rest = (wait, priority, self.clock)
        messages = push_rows(key, spec, self.place_rows(key, spec), rows, memory, known.pushed, known.versions, rest)
        # The last message of a chunk makes the push.
        last = [message.first + message.count == message.total for _, message, _ in messages]
        push, leaves = self._begin_push(key, priority, sum(last))
        return [
            Part(chunk.server, message, sends, None, key, chunk.start, None, push if is_last else None, leaves)
            for (chunk, message, sends), is_last in zip(messages, last, strict=True)
        ]

    def _pull_rows(
        self, key: Key, spec: TensorSpec, rows: Rows, memory: tuple[int, int], wait: float, priority: int
    ) -> list[Part]:
        known = self._known.setdefault(key, Known())
        rest = (known.pushed, wait, priority, 0, self._before(key, known.pushed))
        messages = pull_rows(key, spec, self.place_rows(key, spec), rows, memory, rest, self._chunk_bytes)
        return [
            Part(chunk.server, message, None, receives, key, chunk.start, priority=priority)
            for chunk, message, receives in messages
        ]

    def _advance_clock(self, plan: Plan, sparse: list[Key]) -> None:
        """Count what is about to be pushed: all keys of a call have the same clock."""
        keys = plan.keys + sparse if sparse else plan.keys
        if self._earlier:
            keys = keys + [key for bundle, _ in plan.bundles for key in bundle.keys[1:]]
        for key in keys:
            # Not by `counted`, which would be a call more for each key.
            count = self.pushed(key) + self._earlier.get(key, 0) if self._earlier else self.pushed(key)
            if count >= self.clock:
                self.clock = count + 1
        if not self.has_steps:
            return
        known = [self._known[key] for key in keys if key in self._known and self._known[key].lane]
        # A step has one push of a key, also of one that was made late and so has been pushed less often.
        self.clock = max([self.clock, *(1 + one.clock for one in known)])
        for one in known:
            one.clock = self.clock

    def next_clock(self, keys: Iterable[Key]) -> int:
        """Return the clock that a push of keys would have now."""
        return max([self.clock, *(self.counted(key) + 1 for key in keys)])

    def pushed(self, key: Key) -> int:
        """Return how often this worker has pushed a key."""
        known = self._known.get(key)
        if known is None:
            return 0
        return known.bundle.pushed if known.bundle else known.pushed

    @property
    def most(self) -> int:
        """The most pushes of a key."""
        return max((self.pushed(key) for key in self._known), default=0)

    def counted(self, key: Key) -> int:
        """Return how often a key was pushed, what was before a load included."""
        pushed = self.pushed(key)
        return pushed + self._earlier.get(key, 0) if self._earlier else pushed

    def resume(self, clock: int, updates: Mapping[Key, int]) -> None:
        """Let pushes go on from the clock of the key with the most updates; the others are as far behind as there."""
        shift = clock - max(updates.values(), default=0)
        self.clock = clock
        self._earlier = {key: shift + count - self.pushed(key) for key, count in updates.items()}

    def _before(self, key: Key, pushed: int) -> int:
        """Return the number of the push that a value must not have, for it may have been made before; 0: none."""
        return pushed + 1 if self._going_on and self._known[key].goes_on else 0

    def push_counts(self, wait: float) -> list[Part]:
        """Return the messages that ask how often each chunk was pushed by whoever had this worker's place.

        Raises:
            UnknownKeyError: this worker has initialised no key.
            MembershipError: it has pushed already.
        """
        named = {key: known for key, known in self._known.items() if known.spec is not None}
        if not named:
            raise UnknownKeyError("resume_step: initialise the keys first")
        if any(self.pushed(key) for key in named):
            raise MembershipError("resume_step: this worker has pushed already")
        made: list[Part] = []
        for key, known in named.items():
            assert known.spec is not None, "it was looked at"
            for chunk in (self.place_rows if known.is_sparse else self._place)(key, known.spec):
                message = m.GetPushes(key, known.spec.shape, known.spec.dtype, chunk.start, chunk.stop, wait)
                made.append(Part(chunk.server, message, None, None, key, chunk.start))
        return made

    def go_on(self, counts: Sequence[tuple[Key, m.Pushes]]) -> int:
        """Count the next pushes from where the one before in this worker's place was; return its complete steps.

        Raises:
            MembershipError: it has pushed some keys more often than others.
        """
        step, clock = first_step(counts)
        self.clock = clock
        begun = {key: None for key, made in counts if made.count}
        for key, known in self._known.items():
            known.pushed, known.clock, known.goes_on = step, clock, key in begun
            if known.bundle is not None:
                known.bundle.pushed = step
        self._earlier = dict.fromkeys(self._known, clock - step) if clock != step else {}
        self._going_on = any(known.goes_on for known in self._known.values())
        return step

    def admit(self, clock: int, counts: Sequence[tuple[Key, m.Pushes]]) -> int:
        """Count the first pushes from those of the others, behind a clock; return how many steps these have made.

        Keys may have been pushed a different number of times. The others have made fewer steps than to the clock if all
        of them have left before it.
        """
        self.clock = clock
        numbers = {key: made.count for key, made in counts}
        for key, number in numbers.items():
            known = self._known[key]
            known.pushed, known.clock = number, clock
            if known.bundle is not None:
                known.bundle.pushed = number
        step = max(numbers.values())
        self._earlier = dict.fromkeys(numbers, clock - step) if clock != step else {}
        return step

    def _begin_push(self, key: Key, priority: int, messages: int) -> tuple[Pushed, int]:
        """Begin a push of so many messages, and say when they may leave: none overtakes an earlier one of its key."""
        if self._going_on:
            self._known[key].goes_on = False
        self._open[key] = self._open.get(key, 0) + 1
        floor = self._floors.get(key)
        if floor is None or priority < floor:
            self._floors[key] = priority
            return Pushed(messages), priority
        return Pushed(messages), floor

    def full(self, tensors: Tensors, most: int, sparse: int = 0) -> Key | None:
        """Return a key of which as many pushes are under way as may be, if there is one."""
        if not self._open:
            return None
        dense = len(tensors) - sparse
        plan = self._plan(tensors[:dense] if sparse else tensors)
        units = plan.keys + [key for key, _ in tensors[dense:]] if sparse else plan.keys
        for key in units:
            if self._open.get(key, 0) >= most:
                return key
        return None

    def answered(self, part: Part) -> tuple[Key, ...]:
        """Take note that a message is answered; return the keys of which one push less is under way."""
        push = part.push
        if push is None:
            return ()
        push.left -= 1
        if push.left:
            return ()
        keys = (part.key,) if part.bundle is None else part.bundle.keys
        for key in keys if part.bundle is None or self._is_apart(part) else keys[:1]:
            left = self._open.pop(key) - 1
            if left:
                self._open[key] = left
            else:
                # Nothing of the key is under way, so there is nothing to overtake.
                self._floors.pop(key, None)
        return keys

    def _is_apart(self, part: Part) -> bool:
        """Tell whether the part's bundle was taken apart while it was under way."""
        known = self._known.get(part.key)
        return part.bundle is not None and (known is None or known.bundle is not part.bundle)

    def _plan(self, tensors: Tensors) -> Plan:
        plan = self._planned
        if plan is not None and plan.tensors is tensors:
            return plan
        keys = tuple([key for key, _ in tensors])
        plan = self._plans.get(keys)
        if plan is None or plan.tensors != tensors:
            if any(key in self._known and self._known[key].bundle for key in keys):
                plan = self._make_plan(keys, tensors)
            else:
                plan = _plan_of_singles(tuple(tensors), self._servers, self._chunk_bytes, self._split_bytes)
            if len(self._plans) >= MAX_PLANS:
                self._plans.clear()
            self._plans[keys] = plan
        self._planned = plan
        return plan

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._planned = None

    def _make_plan(self, keys: tuple[Key, ...], tensors: Tensors) -> Plan:
        index = {key: tensor for tensor, key in enumerate(keys)}
        bundles: list[tuple[KnownBundle, tuple[int, ...]]] = []
        singles: list[Single] = []
        planned: dict[KnownBundle, None] = {}
        for tensor, key in enumerate(keys):
            known = self._known.get(key)
            bundle = known.bundle if known else None
            if bundle is None:
                singles.append(self._single(tensor, *tensors[tensor]))
            elif bundle in planned:
                continue
            elif all(member in index for member in bundle.keys):
                planned[bundle] = None
                bundles.append((bundle, tuple(index[member] for member in bundle.keys)))
            else:
                # Only some of its keys are used: from here on each goes alone.
                self._take_apart(bundle)
                singles.append(self._single(tensor, *tensors[tensor]))
        # Of keys in one bundle only a load can have made the counts differ.
        firsts = [single.key for single in singles] + [bundle.keys[0] for bundle, _ in bundles]
        return Plan(tensors, bundles, singles, firsts)

    def _single(self, tensor: int, key: Key, spec: TensorSpec) -> Single:
        return _single(tensor, key, spec, self._servers, self._chunk_bytes, self._split_bytes)

    def _take_apart(self, bundle: KnownBundle) -> None:
        first = bundle.keys[0]
        if first in self._open:
            self._floors.update(dict.fromkeys(bundle.keys, self._floors[first]))
            self._open.update(dict.fromkeys(bundle.keys, self._open[first]))
        for key in bundle.keys:
            self._known[key].bundle = None
            self._known[key].pushed = bundle.pushed
            self._known[key].versions[0] = bundle.version
        self._forget_plans()

    def cuts(self, key: Key, spec: TensorSpec) -> list[tuple[int, int]]:
        """Return first element and end of each chunk of a key."""
        return [(chunk.start, chunk.stop) for chunk in self._place(key, spec)]

    def _place(self, key: Key, spec: TensorSpec) -> list[Chunk]:
        chunks = self._places.get((key, spec))
        if chunks is None:
            chunks = self._places[key, spec] = place(
                key, spec, servers=self._servers, chunk_bytes=self._chunk_bytes, split_bytes=self._split_bytes
            )
        return chunks

    def state_parts(self, record: KeyRecord) -> list[tuple[int, int]]:
        """Return first element, or row, and the end of each chunk of a key."""
        return [(chunk.start, chunk.stop) for chunk in self._state_chunks(record)]

    def _state_chunks(self, record: KeyRecord) -> list[Chunk]:
        return (self.place_rows if record.is_sparse else self._place)(record.key, record.spec)

    def keys_on(self, server: int) -> list[Key]:
        """Return the keys that this worker has initialised and of which a server has a part."""
        records = self.records
        return [record.key for record in records if any(part.server == server for part in self._state_chunks(record))]

    def read_states(self, asked: ReadState, wait: float) -> list[Part]:
        """Return the messages that read the state of some parts."""
        made: list[Part] = []
        for number, part in enumerate(asked.parts):
            key, spec, chunk = part.record.key, part.record.spec, self._state_chunk(part)
            head = (key, spec.shape, spec.dtype, part.start, part.stop)
            message = m.GetState(*head, arrays=asked.arrays, timeout=wait, names=part.names)
            buffer = CallBuffer(asked.call, number)
            made.append(Part(chunk.server, message, None, buffer, key, part.start, priority=0))
        return made

    def write_states(self, given: WriteState, wait: float) -> list[Part]:
        """Return the messages that write the state of some parts."""
        made: list[Part] = []
        for number, part in enumerate(given.parts):
            key, spec, chunk = part.record.key, part.record.spec, self._state_chunk(part)
            message = m.PutState(key, spec.shape, spec.dtype, part.start, part.stop, wait)
            if part.creates:
                options = part.record.options
                message.policy, message.group, message.lazy = options.policy, options.group, options.lazy
                message.sparse, message.first = part.record.is_sparse, chunk.start
                message.initializer = dict(options.initializer)
            memory = CallMemory(given.call, number, 0, given.nbytes[number])
            made.append(Part(chunk.server, message, memory, None, key, part.start, priority=0))
        return made

    def _state_chunk(self, part: StatePart) -> Chunk:
        return next(chunk for chunk in self._state_chunks(part.record) if chunk.stop == part.stop)

    def place_rows(self, key: Key, spec: TensorSpec) -> list[Chunk]:
        """Return the chunks of a row-sparse key."""
        return place_rows(key, spec, servers=self._servers, split_bytes=self._split_bytes)

    # --- other policies ---

    def leaving(self, policy: str, keys: Sequence[Key], rank: Rank) -> list[Leaving]:
        """Return which keys have to leave which policy, so that these keys, or all but sums, have another one.

        Raises:
            UnknownKeyError: this worker has not initialised a key.
            PolicyError: a key of policy "sum", or it can't become one.
            MembershipError: this worker is not in a key's group.
        """
        mine = [key for key, known in self._known.items() if known.spec is not None and self._is_of(rank, known)]
        sums = [key for key in mine if get_policy(self._policy_of(self._known[key].options)).keeps_sum]
        wanted = [check_key(key) for key in keys] or [key for key in mine if key not in sums]
        if get_policy(policy).keeps_sum or any(key in sums for key in wanted):
            text = f"no key can change its policy to or from {policy!r}: the update rule is not for keys of policy sum"
            raise PolicyError(text, expected="another policy than sum", got=policy)
        found: dict[tuple[str, tuple[Rank, ...]], list[Key]] = {}
        for key in dict.fromkeys(wanted):
            known = self._known.get(key)
            if known is None or known.spec is None:
                raise UnknownKeyError(f"key {key!r} is not initialized: call init first", key=key)
            if not self._is_of(rank, known):
                text = f"key {key!r} belongs to ranks {list(known.options.group)}; rank {rank} is none of them"
                raise MembershipError(text, ranks=[rank], key=key)
            old = self._policy_of(known.options)
            if old != policy or key in self._asking:
                found.setdefault((old, known.options.group), []).append(key)
        return [Leaving(old, group, tuple(some)) for (old, group), some in found.items()]

    def _is_of(self, rank: Rank, known: Known) -> bool:
        return not known.options.group or rank in known.options.group

    def ask_for(self, keys: Sequence[Key]) -> None:
        """Take note that another policy is asked for; each key goes alone from now on."""
        self._asking.update(dict.fromkeys(keys))
        for key in keys:
            bundle = self._known[key].bundle
            if bundle is not None:
                self._take_apart(bundle)

    def asking(self, tensors: Tensors) -> Key | None:
        """Return the first key of which it is not known whether it has the policy that was asked for."""
        return next((key for key, _ in tensors if key in self._asking), None) if self._asking else None

    def follow(self, policy: str, keys: Iterable[Key]) -> None:
        """Remember that keys have the policy that was asked for."""
        for key in keys:
            self._asking.pop(key, None)
            if key in self._known:
                known = self._known[key]
                known.options = structs.replace(known.options, policy=policy)
                self._find_lane(known)

    # --- answers ---

    def forget(self, keys: Sequence[Key]) -> None:
        """Know nothing of the keys any longer, because they were deleted."""
        for key in keys:
            known = self._known.get(key)
            self._earlier.pop(key, None)
            self._asking.pop(key, None)
            if known is not None and known.bundle is not None:
                self._take_apart(known.bundle)
            self._known.pop(key, None)
        self._forget_plans()

    def initialized(self, tensors: Tensors, sparse: int, options: KeyOptions) -> None:
        """Remember keys whose init has succeeded; the last `sparse` of them are row-sparse."""
        for number, (key, spec) in enumerate(tensors, sparse - len(tensors)):
            known = self._known.setdefault(key, Known())
            known.spec, known.is_sparse, known.options = spec, number >= 0, options
            self._find_lane(known)
        self._forget_plans()

    def _find_lane(self, known: Known) -> None:
        policy, known.round = get_policy(self._policy_of(known.options)), 0
        known.lane = (str(policy), tuple(known.options.group)) if policy.decides else None
        self.has_steps = self.has_steps or policy.decides

    def bundled(self, bundle: KnownBundle, number: int) -> None:
        """Use the server's number for keys that are initialised together, unless one of them has been used alone."""
        bundle.number = number
        if any(self._is_used(key) for key in bundle.keys):
            return
        for key in bundle.keys:
            self._known.setdefault(key, Known()).bundle = bundle
        self._forget_plans()

    def received(self, part: Part, version: Version) -> None:
        """Remember the newest version that a value had; answers may overtake each other."""
        if part.bundle is None:
            if part.key in self._known:
                versions = self._known[part.key].versions
                versions[part.start] = max(version, versions.get(part.start, 0))
            return
        part.bundle.version = version = max(version, part.bundle.version)
        if self._is_apart(part):
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
        known = self._known.get(key)
        if known is None or known.spec is None:
            raise UnknownKeyError(f"key {key!r} is not initialized by this worker", key=key)
        server = (self.place_rows if known.is_sparse else self._place)(key, known.spec)[0].server
        if known.lane is not None:
            return server, known.round
        return server, known.versions.get(0, 0) if known.bundle is None else known.bundle.version

    def take_back(self, part: Part) -> None:
        """Do not count a push that the server did not take: the next one has its number.

        The clock goes on: others may have seen it.
        """
        if part.bundle is not None:
            part.bundle.pushed -= 1
            if self._is_apart(part):
                for key in part.bundle.keys:
                    self._known[key].pushed -= 1
        elif part.start == 0:
            # Every tensor has one chunk that starts at 0.
            self._known[part.key].pushed -= 1


def _memory(call: int, tensor: int, chunk: Chunk, spec: TensorSpec) -> CallMemory:
    return CallMemory(call, tensor, chunk.start * spec.itemsize, chunk.stop * spec.itemsize)


@functools.lru_cache(maxsize=MAX_SINGLES)
def _single(tensor: int, key: Key, spec: TensorSpec, servers: int, chunk_bytes: int, split_bytes: int) -> Single:
    """Return how a tensor of a call is cut. All workers of a process have the same, where there are many."""
    size = spec.itemsize
    chunks = place(key, spec, servers=servers, chunk_bytes=chunk_bytes, split_bytes=split_bytes)
    cuts = [
        Cut(part.server, (key, spec.shape, spec.dtype, part.start, part.stop), part.start * size, part.stop * size)
        for part in chunks
    ]
    return Single(tensor, key, cuts)


@functools.lru_cache(maxsize=MAX_PLANS)
def _plan_of_singles(
    tensors: tuple[tuple[Key, TensorSpec], ...], servers: int, chunk_bytes: int, split_bytes: int
) -> Plan:
    """Return the plan of tensors that are in no bundle, which all workers of a process share, too."""
    singles = [_single(number, *tensor, servers, chunk_bytes, split_bytes) for number, tensor in enumerate(tensors)]
    return Plan(list(tensors), [], singles, [key for key, _ in tensors])
