"""What a store on devices does when: whatever the order in which devices get to it, and in which they say so."""

from __future__ import annotations

import functools
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiokv.device import records as r
from aiokv.device.schedule import Schedule
from aiokv.errors import AiokvError, DeviceMemoryError
from tests.device.fake_device import FakeDevices, Term

SIZE = 8


class Added:
    """What an addition leaves in the sum and the sources, one after the other, and in another buffer if it grows."""

    def __init__(self, count: int, *, grows: bool = False) -> None:
        self.count, self.grows = count, grows

    def __call__(self, *terms: Term) -> list[Term]:
        arrays = terms[self.grows :]
        assert len(arrays) == 1 + self.count
        total, *sources = arrays
        return [added(total, *sources), *(arrays if self.grows else sources)]

    def joined(self, other: Added) -> Added | None:
        return Added(self.count + other.count, grows=self.grows) if self.count + other.count <= 5 else None


def added(*terms: Term) -> Term:
    return functools.reduce(lambda total, source: ("sum", total, source), terms)


def updated(weight: Term, total: Term, *state: Term) -> list[Term]:
    """Return what an update leaves in value, sum and state, when the new value goes where the sum was."""
    return [weight, ("new", weight, total, *state), *(("kept", each, total) for each in state)]


def begun(_: Term, weight: Term) -> list[Term]:
    return [("begun", weight), weight]


def measured(_: Term, weight: Term, total: Term, *state: Term) -> list[Term]:
    return [("norms", weight, total), weight, total, *state]


class Devices(RuleBasedStateMachine):
    """A store's owner who does anything that may be done, and devices that are late in any way."""

    @initialize(count=st.integers(1, 2), limit=st.integers(4, 30))
    def begin(self, count: int, limit: int) -> None:
        # Works of one kind are done together where the schedule finds that they may be.
        self.schedule = Schedule([limit * SIZE] * count, lambda work: type(work) if isinstance(work, Added) else work)
        self.devices = FakeDevices()
        self.slots: dict[int, Term] = {}
        self.values: dict[Any, Term] = {}
        self.states: dict[Any, Term] = {}
        self.versions: dict[Any, int] = {}
        self.keeping: set[Any] = set()
        self.kept: dict[tuple[Any, int], Term] = {}
        self.updating: dict[Any, tuple[Term, Term]] = {}
        self.expected: dict[int, Term] = {}
        self.measured: dict[int, Any] = {}
        self.names = 0
        self.failed = False

    def name(self) -> int:
        self.names += 1
        return self.names

    def handle(self, stimulus: r.Stimulus) -> bool:
        """Give a stimulus to the schedule; False if memory was missing, and then nothing has changed."""
        try:
            effects = self.schedule.handle(stimulus)
        except DeviceMemoryError as error:
            wanted, left = error.details["expected"], error.details["got"]
        else:
            self.devices.perform(effects)
            self.look()
            return True
        assert wanted > left >= 0
        if self.values:
            assert self.schedule.handle(r.Renumbered(*self.any_version())) == [], "nothing is left over"
        return False

    def any_version(self) -> tuple[Any, int]:
        chunk = next(iter(self.values))
        return chunk, self.schedule.version_of(chunk)

    def look(self) -> None:
        """Take in what was published and what is ready."""
        for said in self.devices.published:
            value, state = self.updating.pop(said.chunk)
            self.versions[said.chunk] += 1
            assert said.version == self.versions[said.chunk]
            if said.error is None:
                if said.chunk in self.keeping:
                    self.kept[said.chunk, said.version - 1] = self.values[said.chunk]
                self.values[said.chunk], self.states[said.chunk] = value, state
                # It is there, not only ordered.
                made = self.schedule._chunks[said.chunk].value.buffer
                assert self.devices.content[made] in (value, ("wrong",))
            else:
                assert self.failed
        self.devices.published.clear()

    # --- the owner ---

    @rule(with_slot=st.booleans())
    def install(self, with_slot: bool) -> None:
        chunk, slot = (f"key {self.name()}", 0), self.name()
        self.devices.landed[slot] = ("first", slot)
        zero = lambda _: [("zeros",)]  # noqa: E731 - it is data here
        if self.handle(r.Install(chunk, SIZE, slot if with_slot else None, zero)):
            self.values[chunk] = ("first", slot) if with_slot else ("zeros",)
            self.states[chunk], self.versions[chunk] = None, 0

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def land(self, data: st.DataObject) -> None:
        slot = self.name()
        self.devices.landed[slot] = ("pushed", slot)
        device = data.draw(st.integers(0, len(self.schedule.loads) - 1))
        if self.handle(r.Landed(slot, SIZE, device)):
            self.slots[slot] = ("pushed", slot)

    @precondition(lambda self: self.values)
    @rule(data=st.data(), first=st.integers(0, 2))
    def unpack(self, data: st.DataObject, first: int) -> None:
        slot, target = self.name(), self.name()
        self.devices.landed[slot] = ("encoded", slot)
        device = data.draw(st.integers(0, len(self.schedule.loads) - 1))
        work = lambda _, payload: [("decoded", payload), payload]  # noqa: E731 - it is data here
        if self.handle(r.Unpack(slot, target, device, first, 4, work, SIZE)):
            payload = ("encoded", slot)
            self.slots[target] = ("decoded", ("part", first, payload) if first else payload)

    @precondition(lambda self: len(self.slots) > 1)
    @rule(data=st.data(), grows=st.booleans(), joins=st.booleans())
    def fold(self, data: st.DataObject, grows: bool, joins: bool) -> None:
        target, *sources = data.draw(st.permutations(list(self.slots)))[:4]
        grows = grows and self.nbytes(target) != 2 * SIZE
        nbytes = 2 * SIZE if grows else self.nbytes(target)
        if self.handle(r.Fold(target, sources, Added(len(sources), grows=grows), nbytes, joins)):
            self.slots[target] = added(self.slots[target], *(self.slots.pop(source) for source in sources))

    def nbytes(self, slot: int) -> int:
        return self.schedule.nbytes_of(slot)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def cut(self, data: st.DataObject) -> None:
        slot, first, second = data.draw(st.sampled_from(list(self.slots))), self.name(), self.name()
        half = self.nbytes(slot) // 2
        if half and self.handle(r.Cut(slot, [(first, 0, half), (second, half, half)])):
            term = self.slots.pop(slot)
            self.slots[first], self.slots[second] = term, ("part", half, term)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(list(self.slots)))
        del self.slots[slot]
        assert self.handle(r.Freed(slot))

    def idle_chunks(self) -> list[Any]:
        return [chunk for chunk in self.values if chunk not in self.updating]

    @precondition(lambda self: self.slots and self.idle_chunks())
    @rule(data=st.data(), assigns=st.booleans(), out=st.booleans(), saves=st.booleans(), keeps=st.booleans())
    def update(self, data: st.DataObject, assigns: bool, out: bool, saves: bool, keeps: bool) -> None:
        chunk = data.draw(st.sampled_from(self.idle_chunks()))
        self.keeping.discard(chunk)
        if keeps:
            self.keeping.add(chunk)
        if saves:
            # What is copied for somebody is what was there when it was asked for.
            self.ask(chunk, state=True)
        slot = data.draw(st.sampled_from(list(self.slots)))
        head = (chunk, self.versions[chunk] + 1, slot)
        value, state, total = self.values[chunk], self.states[chunk], self.slots[slot]
        if assigns:
            self.updating[chunk] = total, state
            done = self.handle(r.Update(*head, None, keeps=keeps))
        else:
            fresh = {} if state else {"kept": r.Fresh(SIZE, begun)}
            state = state or ("begun", value)
            new = updated(value, total, state)
            self.updating[chunk] = new[1], new[2]
            if out:
                work = lambda w, g, s, _: [w, g, *reversed(updated(w, g, s)[1:])]  # noqa: E731
                done = self.handle(r.Update(*head, work, SIZE, ("kept",), fresh, keeps=keeps))
            else:
                done = self.handle(r.Update(*head, updated, 0, ("kept",), fresh, keeps=keeps))
        if done:
            del self.slots[slot]
        else:
            del self.updating[chunk]

    @precondition(lambda self: self.slots and self.idle_chunks())
    @rule(data=st.data())
    def measure(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(self.idle_chunks()))
        slot, ticket = data.draw(st.sampled_from(list(self.slots))), self.name()
        self.expected[ticket] = ("norms", self.values[chunk], self.slots[slot])
        if not self.handle(r.Measure(ticket, chunk, slot, measured, SIZE)):
            del self.expected[ticket]

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def borrow(self, data: st.DataObject) -> None:
        """Whatever is done with them afterwards."""
        first, second = (data.draw(st.sampled_from(list(self.slots))) for _ in range(2))
        ticket = self.name()
        self.expected[ticket], self.measured[ticket] = self.slots[first], self.slots[second]
        assert self.handle(r.Borrowed(ticket, {"": first, "kept": second}))

    @precondition(lambda self: self.values)
    @rule(data=st.data(), state=st.booleans())
    def request(self, data: st.DataObject, state: bool) -> None:
        self.ask(data.draw(st.sampled_from(list(self.values))), state=state)

    def ask(self, chunk: Any, *, state: bool) -> None:
        ticket = self.name()
        self.expected[ticket] = self.values[chunk]
        state = state and chunk not in self.updating and self.states[chunk] is not None
        if state:
            self.measured[ticket] = self.states[chunk]
        assert self.handle(r.Requested(ticket, chunk, self.versions[chunk], state))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def request_earlier(self, data: st.DataObject) -> None:
        chunk, version = data.draw(st.sampled_from(list(self.kept)))
        ticket = self.name()
        self.expected[ticket] = self.kept[chunk, version]
        assert self.handle(r.Requested(ticket, chunk, version))

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def retire(self, data: st.DataObject) -> None:
        chunk, version = data.draw(st.sampled_from(list(self.kept)))
        del self.kept[chunk, version]
        assert self.handle(r.Retired(chunk, [version]))

    @precondition(lambda self: self.devices.ready)
    @rule(data=st.data())
    def send(self, data: st.DataObject) -> None:
        self.take(data.draw(st.sampled_from(list(self.devices.ready))))

    def take(self, ticket: int) -> None:
        """Look at what was asked for, and say that it is not needed any longer."""
        ready = self.devices.ready.pop(ticket)
        if ready.error is None:
            assert self.devices.content[ready.buffers[""]] == self.expected[ticket]
            if ticket in self.measured:
                assert self.devices.content[ready.buffers["kept"]] == self.measured[ticket]
        else:
            assert self.failed
        assert self.handle(r.Sent(ticket))
        del self.expected[ticket]

    @precondition(lambda self: self.idle_chunks())
    @rule(data=st.data(), with_value=st.booleans())
    def restore(self, data: st.DataObject, with_value: bool) -> None:
        chunk = data.draw(st.sampled_from(self.idle_chunks()))
        value, state = self.name(), self.name()
        self.devices.landed |= {value: ("saved", value), state: ("saved", state)}
        if self.handle(r.Restore(chunk, value if with_value else None, {"kept": (state, SIZE)})):
            self.states[chunk] = ("saved", state)
            if with_value:
                self.values[chunk] = ("saved", value)

    @precondition(lambda self: self.idle_chunks())
    @rule(data=st.data())
    def divide(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(self.idle_chunks()))
        name, half, state = self.name(), SIZE // 2, self.states[chunk]
        parts = [((f"part {name}", place), (first, half)) for place, first in ((0, 0), (1, half))]
        kept = [{"kept": place} if state else {} for _, place in parts]
        if self.handle(r.Divide(chunk, [(*part, each) for part, each in zip(parts, kept, strict=True)])):
            # Parts of a part would have other sizes: their numbers are not followed any further.
            self.lose(chunk)
            for address, _ in parts:
                assert self.handle(r.Forgotten(address))

    @precondition(lambda self: self.values)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        chunk = data.draw(st.sampled_from(list(self.values)))
        assert self.handle(r.Forgotten(chunk))
        self.updating.pop(chunk, None)
        self.lose(chunk)

    def lose(self, chunk: Any) -> None:
        """Know nothing of a chunk any longer."""
        del self.values[chunk], self.states[chunk], self.versions[chunk]
        self.kept = {name: term for name, term in self.kept.items() if name[0] != chunk}

    # --- the devices ---

    @precondition(lambda self: self.devices.free_streams())
    @rule(data=st.data(), fails=st.sampled_from([False] * 19 + [True]))
    def execute(self, data: st.DataObject, fails: bool) -> None:
        self.failed = self.failed or fails
        self.devices.execute(
            data.draw(st.sampled_from(self.devices.free_streams())), AiokvError("out of order") if fails else None
        )

    @precondition(lambda self: self.devices.unreported)
    @rule(data=st.data())
    def report(self, data: st.DataObject) -> None:
        event = data.draw(st.sampled_from(self.devices.unreported))
        self.devices.unreported.remove(event)
        assert self.handle(r.Completed(event, self.devices.executed[event]))

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "schedule"):
            self.schedule.validate()

    def teardown(self) -> None:
        """All that is under way ends, and all memory is given back."""
        if not hasattr(self, "schedule"):
            return
        while self.devices.free_streams() or self.devices.unreported:
            while streams := self.devices.free_streams():
                self.devices.execute(streams[0])
            assert not any(self.devices.queues.values()), "a stream waits for ever"
            # What was waited for lets other things begin.
            reported, self.devices.unreported = self.devices.unreported, []
            for event in reported:
                assert self.handle(r.Completed(event, self.devices.executed[event]))
        assert not self.updating
        for ticket in list(self.devices.ready):
            self.take(ticket)
        assert not self.expected
        for chunk in list(self.values):
            assert self.handle(r.Forgotten(chunk))
        for slot in list(self.slots):
            assert self.handle(r.Freed(slot))
        assert self.schedule.is_idle
        assert not self.devices.on_host
        assert self.schedule._flow.memory.used == [0] * len(self.schedule.loads)


TestDevices = Devices.TestCase
TestDevices.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
