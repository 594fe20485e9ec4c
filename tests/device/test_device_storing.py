"""A memory on devices does what one on the host does, with the same bits, however late the devices are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv import device_storing, storing
from aiokv.codec import make_codec
from aiokv.codec.encoder import Encoder
from aiokv.core import effects as ef
from aiokv.core.stimuli import Applied, Decoded, Normed, Restored
from aiokv.errors import AiokvError, DeviceMemoryError, NotFiniteError, OptimizerError, ProtocolError
from aiokv.kernels import get_backend
from aiokv.kernels.work import Add, Decode, Renew, runs_on_device
from aiokv.optim import DCASGD, LAMB, LARS, NAG, SGD, Adam, AdamW, Assign, GroupAdaGrad, Optimizer, OwnRule
from aiokv.store.device import DeviceStore
from aiokv.store.memory import ParameterStore
from aiokv.store.snapshots import Snapshots
from aiokv.types import Piece
from tests.device.late_engine import LateEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Array = NDArray[Any]
SIZE = 12

RULES: dict[str, Optimizer] = {
    "assign": Assign(),
    "sgd": SGD(learning_rate=0.1),
    "momentum": SGD(learning_rate=0.1, momentum=0.9, multi_precision=True),
    "nag": NAG(learning_rate=0.1, momentum=0.9, wd=0.01),
    "adam": Adam(multi_precision=True),
    "adamw": AdamW(wd=0.1, lr_mult={"b": 0.5}),
    "lamb": LAMB(multi_precision=True),
    "lars": LARS(momentum=0.9),
    "dcasgd": DCASGD(learning_rate=0.1, momentum=0.9),
    "groupadagrad": GroupAdaGrad(learning_rate=0.1),
}


def fail(error: AiokvError) -> None:
    raise error


class Side:
    """A store, and what its effects ended in."""

    def __init__(self, store: ParameterStore, engine: LateEngine | None = None) -> None:
        self.store, self.engine = store, engine
        self.ends: list[Any] = []

    def land(self, array: Array, near: tuple[Any, int] | None = None) -> int:
        slot, view = self.store.land(array.nbytes)
        view[:] = array.view(np.uint8).data
        if near is not None and isinstance(self.store, DeviceStore):
            self.store.arrived(slot, *near)
        return slot

    def do(self, *effects: ef.Effect) -> None:
        for effect in effects:
            if isinstance(self.store, DeviceStore):
                end = device_storing.perform(self.store, effect, self.ends.append)
            else:
                end = storing.perform(self.store, effect)
            if end is not None:
                self.ends.append(end)

    def finish(self) -> list[Any]:
        """Let the devices come to an end; return what effects ended in since the last time."""
        if self.engine is not None:
            assert isinstance(self.store, DeviceStore)
            self.engine.finish(self.store)
        ends, self.ends = self.ends, []
        return ends

    def read(self, payload: ef.Payload) -> bytes:
        """Return what is sent of a payload."""
        got: list[bytes] = []

        def then(view: memoryview, sent: Callable[[], None]) -> None:
            got.append(bytes(view))
            sent()

        if isinstance(self.store, DeviceStore) and device_storing.read(self.store, payload, then, fail):
            self.finish()
            return got[0]
        match payload:
            case ef.StoredChunk(key, start, version):
                value = self.store.acquire(key, start, version)
                self.store.release(value)
                return value.buffer.tobytes()
            case ef.StoredChunks(chunks):
                return b"".join(self.read(chunk) for chunk in chunks)
            case ef.StoredState():
                return storing.state_bytes(self.store, payload)
            case ef.StoredDifference(key, start, version, _, peer, codec):
                return bytes(self.store.difference(key, start, version, peer, codec))
            case ef.StoredSum(slot):
                return bytes(self.store.lend(slot)[0])
            case ef.StoredSlots(slots):
                return bytes(self.store.joined(slots))
            case ef.StoredCopy():
                return storing.copy_bytes(self.store, payload)
            case _:
                raise AssertionError(payload)


@pytest.fixture(params=range(3), ids=lambda seed: f"order {seed}")
def sides(request: pytest.FixtureRequest) -> tuple[Side, Side]:
    """The same memory on the host and on two devices."""
    engine = LateEngine([1 << 20] * 2, seed=request.param)
    backend = get_backend("reference")
    return Side(ParameterStore(backend)), Side(DeviceStore(backend, engine), engine)


def numbers(seed: int, dtype: str, size: int = SIZE) -> Array:
    return np.random.default_rng(seed).standard_normal(size).astype(dtype)


PIECES = [Piece("a", 0, 4, 2), Piece("b", 0, 6, 3), Piece("c", 0, 2, 1)]


def install(side: Side, dtype: str, pieces: Sequence[Piece] = ()) -> None:
    slot = side.land(numbers(0, dtype))
    side.do(ef.Install("w", 0, dtype, SIZE, slot, list(pieces)))


def make_round(
    side: Side, version: int, dtype: str, rule: Optimizer, *, divisor: int = 1, read: int | None = None
) -> None:
    """Sum three contributions, the second of which is not announced, then update."""
    near = ("w", 0)
    slots = [side.land(numbers(10 * version + n, dtype), None if n == 1 else near) for n in range(3)]
    side.do(ef.Weigh(slots[2], dtype, 0.3), ef.Fold(slots[0], slots[1], dtype), ef.Fold(slots[0], slots[2], dtype))
    head = ("w", 0, version, slots[0])
    gathered: list[ef.Sums] = []
    for phase in range(rule.norm_phases):
        side.do(ef.Norms(*head, phase, list(gathered), version, rule, divisor))
        (normed,) = side.finish()
        assert isinstance(normed, Normed)
        assert normed.error is None
        gathered.append(normed.sums)
    side.do(ef.Apply(*head, [0, 1, 2], [0, 0, 0], version, rule, divisor, gathered, read))
    (applied,) = side.finish()
    assert applied == Applied("w", 0, version, None)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("pieces", [(), PIECES], ids=["one key", "three keys"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_updates_have_the_bits_of_the_host(
    sides: tuple[Side, Side], rule: Optimizer, pieces: Sequence[Piece], dtype: str
) -> None:
    found = []
    for side in sides:
        install(side, dtype, pieces)
        side.do(ef.Configure(rule))
        for version in (1, 2, 3):
            make_round(side, version, dtype, rule, divisor=version)
        state = ef.StoredState("w", 0, 3, pieces[0].key if pieces else "w", 0, arrays=True)
        found.append((side.read(ef.StoredChunk("w", 0, 3, 0)), side.read(state)))
        assert side.store.open_slots == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("reduction", ["median", "trimmed_mean"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_robust_reductions_have_the_bits_of_the_host(sides: tuple[Side, Side], dtype: str, reduction: str) -> None:
    found = []
    for side in sides:
        install(side, dtype)
        slots = [side.land(numbers(n, dtype), ("w", 0) if n else None) for n in range(4)]
        side.do(ef.Weigh(slots[1], dtype, 0.5), ef.Combine(slots[0], slots[1:], dtype, reduction))
        side.do(ef.Apply("w", 0, 1, slots[0], [0], [0], 1, SGD(learning_rate=0.1), 1))
        assert side.finish() == [Applied("w", 0, 1, None)]
        found.append(side.read(ef.StoredChunk("w", 0, 1, 0)))
    assert found[0] == found[1]


def test_delayed_updates_look_at_the_value_that_was_read(sides: tuple[Side, Side]) -> None:
    rule, found = DCASGD(learning_rate=0.1), []
    for side in sides:
        install(side, "float32")
        make_round(side, 1, "float32", rule, read=0)
        make_round(side, 2, "float32", rule, read=0)
        side.do(ef.Retire("w", 0, [0, 1]))
        found.append(side.read(ef.StoredChunk("w", 0, 2, 0)))
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_each_part_of_a_sum_is_compensated_with_the_bits_of_the_host(sides: tuple[Side, Side], dtype: str) -> None:
    rule, found = DCASGD(learning_rate=0.1, lamda=0.5), []
    for side in sides:
        install(side, dtype)
        make_round(side, 1, dtype, rule, read=0)
        slots = [side.land(numbers(n, dtype), ("w", 0) if n else None) for n in range(3)]
        for slot in slots[:2]:
            side.do(ef.Weigh(slot, dtype, 0.5), ef.Compensate(slot, dtype, "w", 0, 0, rule.compensation))
        side.do(ef.Fold(slots[0], slots[1], dtype), ef.Fold(slots[0], slots[2], dtype))
        side.do(ef.Apply("w", 0, 2, slots[0], [0, 1, 2], [1, 1, 0], 2, rule, 3, [], 1))
        assert side.finish() == [Applied("w", 0, 2, None)]
        side.do(ef.Retire("w", 0, [0, 1]))
        found.append(side.read(ef.StoredChunk("w", 0, 2, 0)))
        assert side.store.open_slots == 0
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_keys_that_are_divided_go_on_where_they_were(sides: tuple[Side, Side], dtype: str) -> None:
    """An open sum, which is wider than its parts' bytes, is cut with them."""
    rule, found = LAMB(multi_precision=True), []
    for side in sides:
        install(side, dtype, PIECES)
        make_round(side, 1, dtype, rule)
        slots = [side.land(numbers(n, dtype), ("w", 0)) for n in range(2)]
        side.do(ef.Fold(slots[0], slots[1], dtype))
        side.do(ef.Divide("w", 0, [(piece.key, piece.size) for piece in PIECES]))
        itemsize = np.dtype(dtype).itemsize
        side.do(ef.Split(slots[0], [(-n - 1, piece.size * itemsize) for n, piece in enumerate(PIECES)]))
        sums: list[ef.Sums] = []
        side.do(ef.Norms("b", 0, 2, -2, 0, [], 2, rule, 1))
        (normed,) = side.finish()
        sums.append(normed.sums)
        side.do(ef.Apply("b", 0, 2, -2, [0], [0], 2, rule, 1, sums), ef.Free(-1), ef.Free(-3))
        assert side.finish() == [Applied("b", 0, 2, None)]
        chunks = [ef.StoredChunk(key, 0, version, 0) for key, version in (("a", 1), ("b", 2), ("c", 1))]
        found.append(side.read(ef.StoredChunks(chunks)))
        assert side.store.open_slots == 0
    assert found[0] == found[1]


def test_a_saved_state_is_taken_up_again(sides: tuple[Side, Side]) -> None:
    rule, found = Adam(), []
    for side in sides:
        install(side, "float32")
        make_round(side, 1, "float32", rule)
        saved = side.read(ef.StoredState("w", 0, 1, "w", 0, arrays=True))
        make_round(side, 2, "float32", rule)
        slot = side.land(np.frombuffer(saved, np.uint8))
        side.do(ef.Restore(0, 1, "w", 0, 0, rule, slot))
        assert side.finish() == [Restored(0, 1, None)]
        make_round(side, 3, "float32", rule)
        found.append((saved, side.read(ef.StoredChunk("w", 0, 3, 0)), side.store.described("w", 0, "w")))
    assert found[0] == found[1]


def test_what_is_saved_is_what_was_there_when_it_was_asked_for(sides: tuple[Side, Side]) -> None:
    """The update behind it waits until the state is copied."""
    host, device = sides
    rule = SGD(learning_rate=0.1, momentum=0.9)
    for side in sides:
        install(side, "float32")
        make_round(side, 1, "float32", rule)
    payload = ef.StoredState("w", 0, 1, "w", 0, arrays=True)
    expected, got = host.read(payload), []
    assert isinstance(device.store, DeviceStore)
    device_storing.read(device.store, payload, lambda view, sent: got.append(bytes(view)), fail)
    make_round(device, 2, "float32", rule)
    assert got == [expected]


def test_a_version_that_is_kept_can_be_sent_until_it_is_retired(sides: tuple[Side, Side]) -> None:
    found = []
    for side in sides:
        install(side, "float32")
        for version in (1, 2):
            slot = side.land(numbers(version, "float32"), ("w", 0))
            side.do(ef.Apply("w", 0, version, slot, [0], [0], version, SGD(learning_rate=0.1), 1, keep=True))
            assert side.finish() == [Applied("w", 0, version, None)]
        found.append([side.read(ef.StoredChunk("w", 0, version, 0)) for version in range(3)])
        side.do(ef.Retire("w", 0, [0, 1]))
    assert found[0] == found[1]
    assert found[0][0] == numbers(0, "float32").tobytes()
    _, device = sides
    assert isinstance(device.store, DeviceStore)
    assert sum(device.store._schedule._flow.memory.used) == 4 * SIZE


def test_a_value_that_is_being_sent_never_changes(sides: tuple[Side, Side]) -> None:
    _, device = sides
    assert isinstance(device.store, DeviceStore)
    install(device, "float32")
    views: list[tuple[memoryview, Any]] = []
    device_storing.read(device.store, ef.StoredChunk("w", 0, 0, 0), lambda view, sent: views.append((view, sent)), fail)
    for version in range(1, 5):
        make_round(device, version, "float32", SGD(learning_rate=0.1))
        device.read(ef.StoredChunk("w", 0, version, 0))
    ((view, sent),) = views
    assert bytes(view) == numbers(0, "float32").tobytes()
    sent()


CODECS: list[tuple[str, dict[str, Any], bool]] = [
    ("1bit", {}, True),
    ("2bit", {"threshold": 0.5}, True),
    ("fp16", {}, True),
    ("bf16", {}, True),
    ("fp8", {}, True),
    ("topk", {"fraction": 0.3}, False),
    ("qsgd", {}, False),
]


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("sizes", [[SIZE], [4, 0, 6, 2]], ids=["one tensor", "four tensors"])
@pytest.mark.parametrize(("name", "params", "decodes"), CODECS, ids=[name for name, _, _ in CODECS])
def test_compressed_contributions_are_decoded_where_they_are_needed(
    sides: tuple[Side, Side], name: str, params: dict[str, Any], decodes: bool, sizes: list[int], dtype: str
) -> None:
    """Where each value follows from its code alone, by the device: not in float64."""
    codec, found = make_codec(name, params), []
    for side in sides:
        install(side, dtype)
        side.do(ef.Prepare(codec))
        for n in range(2):
            payloads = []
            for place, size in enumerate(sizes):
                encoder = Encoder(codec, place, size, dtype, backend="reference")
                payloads += [bytes(part) for part in encoder.encode(numbers(n + place, dtype, size), [(0, size)])]
            slot = side.land(np.frombuffer(b"".join(payloads), np.uint8))
            if isinstance(side.store, DeviceStore):
                side.store.arrived(slot, "w", 0, encoded=True)
            side.do(ef.Decode(slot, -n - 1, codec, dtype, sizes))
        assert side.finish() == [Decoded(-1), Decoded(-2)]
        side.do(ef.Fold(-1, -2, dtype), ef.Apply("w", 0, 1, -1, [0], [0], 1, SGD(learning_rate=0.1), 1))
        assert side.finish() == [Applied("w", 0, 1, None)]
        found.append(side.read(ef.StoredChunk("w", 0, 1, 0)))
        assert side.store.open_slots == 0
    assert found[0] == found[1]
    engine = sides[1].engine
    assert engine is not None
    assert [isinstance(work, Decode) for work in engine.done].count(True) == 2 * (decodes and dtype != "float64")


@pytest.mark.parametrize(
    ("name", "payload", "problem"),
    [
        ("2bit", b"\x40" + bytes(3), "the codes 00, 10 and 11"),
        ("fp16", b"\x00\x7c" + bytes(2 * SIZE - 2), "finite numbers"),
        ("fp8", b"\x00\x00\xc0\x7f" + bytes(SIZE), "a scale from 0"),
    ],
)
def test_a_payload_that_is_malformed_is_refused_before_a_device_reads_it(
    name: str, payload: bytes, problem: str
) -> None:
    engine, codec = LateEngine(), make_codec(name, {})
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    install(side, "float32")
    side.do(ef.Prepare(codec))
    slot = side.land(np.frombuffer(payload, np.uint8))
    assert isinstance(side.store, DeviceStore)
    side.store.arrived(slot, "w", 0, encoded=True)
    side.do(ef.Decode(slot, -1, codec, "float32", [SIZE]))
    (decoded,) = side.finish()
    assert isinstance(decoded.error, ProtocolError)
    assert problem in str(decoded.error)
    assert side.store.open_slots == 0
    assert not side.store.has(-1)


def test_a_payload_for_which_there_is_no_room_is_decoded_on_the_host() -> None:
    """The value takes 48 of 50 bytes; the sum waits in the host's memory, until there is room or it is needed."""
    engine, codec = LateEngine([50]), make_codec("fp16", {})
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    install(side, "float32")
    side.do(ef.Prepare(codec))
    slot = side.land(np.ones(SIZE, np.float16))
    assert isinstance(side.store, DeviceStore)
    side.store.arrived(slot, "w", 0, encoded=True)
    side.do(ef.Decode(slot, -1, codec, "float32", [SIZE]))
    assert side.finish() == [Decoded(-1)]
    assert side.store.content(-1) == np.ones(SIZE, np.float32).tobytes()


def test_compressed_values_are_differences(sides: tuple[Side, Side]) -> None:
    codec, found = make_codec("2bit", {"threshold": 0.5}), []
    for side in sides:
        install(side, "float32")
        side.do(ef.Prepare(codec))
        first = side.read(ef.StoredDifference("w", 0, 0, 0, 7, None))
        make_round(side, 1, "float32", SGD(learning_rate=0.1))
        found.append((first, side.read(ef.StoredDifference("w", 0, 1, 0, 7, codec))))
    assert found[0] == found[1]


def test_a_difference_of_what_is_not_finite_is_refused(sides: tuple[Side, Side]) -> None:
    _, device = sides
    codec = make_codec("2bit", {"threshold": 0.5})
    install(device, "float32")
    device.do(ef.Prepare(codec))
    device.read(ef.StoredDifference("w", 0, 0, 0, 7, None))
    device.do(ef.Apply("w", 0, 1, device.land(np.full(SIZE, np.inf, np.float32)), [0], [0], 1, Assign(), 1))
    device.finish()
    with pytest.raises(NotFiniteError):
        device.read(ef.StoredDifference("w", 0, 1, 0, 7, codec))


def test_whole_numbers_and_keys_without_elements_stay_on_the_host(sides: tuple[Side, Side]) -> None:
    _, device = sides
    assert isinstance(device.store, DeviceStore)
    device.do(ef.Install("i", 0, "int32", 2, device.land(np.array([1, 2], np.int32)), []))
    device.do(ef.Install("e", 0, "float32", 0, None, []))
    device.do(ef.Apply("i", 0, 1, device.land(np.array([5, 6], np.int32)), [0], [0], 1, Assign(), 1))
    assert device.finish() == [Applied("i", 0, 1, None)]
    assert not device.store.is_on_device("i", 0)
    assert not device.store.is_on_device("e", 0)
    assert device.read(ef.StoredChunk("i", 0, 1, 0)) == np.array([5, 6], np.int32).tobytes()


def test_chunks_go_to_the_device_with_the_fewest_bytes() -> None:
    """40 bytes to the first, 20 and 10 to the second, 16 there too, which had fewer, 4 to the first: 44 and 46."""
    engine = LateEngine([1 << 20] * 2)
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    for key, size in (("a", 20), ("b", 10), ("c", 5), ("d", 8), ("e", 2)):
        side.do(ef.Install(key, 0, "float16", size, side.land(numbers(1, "float16", size)), []))
    side.finish()
    placed: dict[int, int] = {0: 0, 1: 0}
    for buffer, device in engine.places.items():
        placed[device] += engine.memory[buffer].nbytes
    assert placed == {0: 44, 1: 46}


# --- what goes wrong ---


def test_a_key_for_which_there_is_no_room_can_be_read_and_says_how_much_was_wanted() -> None:
    engine = LateEngine([100])
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    install(side, "float32")
    side.do(ef.Install("v", 0, "float64", SIZE, side.land(numbers(3, "float64")), []))
    assert side.read(ef.StoredChunk("v", 0, 0, 0)) == numbers(3, "float64").tobytes()
    side.do(ef.Apply("v", 0, 1, side.land(numbers(4, "float64")), [0], [0], 1, Assign(), 1))
    (applied,) = side.finish()
    assert isinstance(applied.error, DeviceMemoryError)
    assert applied.error.details == {"expected": 96, "got": 52}
    assert applied.error.counted
    assert side.store.open_slots == 0
    assert side.read(ef.StoredChunk("v", 0, 1, 0)) == numbers(3, "float64").tobytes()


def test_an_update_for_which_there_is_no_room_keeps_the_value() -> None:
    """Value and sum take 96 bytes, the mean and variance of Adam another 96."""
    engine = LateEngine([150])
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    install(side, "float32")
    side.do(ef.Apply("w", 0, 1, side.land(numbers(4, "float32")), [0], [0], 1, Adam(), 1))
    (applied,) = side.finish()
    assert isinstance(applied.error, DeviceMemoryError)
    assert applied.error.details == {"expected": 96, "got": 54}
    make_update(side, 2, Assign())
    assert side.read(ef.StoredChunk("w", 0, 2, 0)) == numbers(2, "float32").tobytes()


def make_update(side: Side, version: int, rule: Optimizer) -> None:
    side.do(ef.Apply("w", 0, version, side.land(numbers(version, "float32")), [0], [0], version, rule, 1))
    assert side.finish() == [Applied("w", 0, version, None)]


def test_contributions_for_which_there_is_no_room_make_the_update_fail() -> None:
    """They wait on the host as long as they may."""
    engine = LateEngine([100])
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    install(side, "float32")
    slots = [side.land(numbers(n, "float32"), ("w", 0)) for n in range(3)]
    side.do(ef.Fold(slots[0], slots[1], "float32"), ef.Fold(slots[0], slots[2], "float32"))
    side.do(ef.Apply("w", 0, 1, slots[0], [0], [0], 1, Assign(), 1))
    (applied,) = side.finish()
    assert isinstance(applied.error, DeviceMemoryError)
    assert side.store.open_slots == 0
    make_update(side, 2, Assign())


def test_what_a_device_can_not_do_is_told_to_who_has_pushed() -> None:
    engine = LateEngine(fails=lambda work: isinstance(work, Renew))
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    install(side, "float32")
    rule = SGD(learning_rate=0.1, momentum=0.9)
    side.do(ef.Apply("w", 0, 1, side.land(numbers(1, "float32")), [0], [0], 1, rule, 1))
    (applied,) = side.finish()
    assert str(applied.error) == "the device is broken"
    assert side.store.steps("w", 0) == 0
    assert side.read(ef.StoredChunk("w", 0, 1, 0)) == numbers(0, "float32").tobytes()
    engine.fails = lambda work: False
    make_update(side, 2, rule)


class Broken(OwnRule, frozen=True, kw_only=True, tag="broken"):
    def compute(self, weight: Array, gradient: Array, state: Any, step: Any) -> Array:
        raise ZeroDivisionError


def test_a_rule_of_a_users_own_is_computed_on_the_host() -> None:
    assert not runs_on_device(Renew(Broken(), (), (), (), "float32", "float32", False, (), False))


@pytest.mark.parametrize(("dtype", "adds"), [("float32", True), ("float16", False)])
def test_contributions_that_are_there_at_once_are_added_in_one_pass(dtype: str, adds: bool) -> None:
    """Nine in two passes: eight, then what is left. The sum of float16 is in float32, in a buffer of its own."""
    engine = LateEngine()
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    install(side, dtype)
    slots = [side.land(numbers(n, dtype), ("w", 0)) for n in range(9)]
    side.do(*[ef.Fold(slots[0], slot, dtype) for slot in slots[1:]])
    side.do(ef.Apply("w", 0, 1, slots[0], [0], [0], 1, SGD(learning_rate=0.1), 1))
    assert side.finish() == [Applied("w", 0, 1, None)]
    first, rest = [work for work in engine.done if isinstance(work, Add)]
    assert (first.adds, len(first.sources)) == (adds, 7 if adds else 8)
    assert (rest.adds, len(rest.sources)) == (True, 1)


def test_memory_is_used_again() -> None:
    """After some rounds all buffers that a round takes are there."""
    engine = LateEngine()
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    install(side, "float32")
    counts = []
    for version in range(1, 8):
        make_round(side, version, "float32", Adam())
        side.read(ef.StoredChunk("w", 0, version, 0))
        counts.append((len(engine.memory), len(engine.given)))
    assert counts[3:] == counts[3:4] * 4


def test_a_key_that_is_deleted_gives_its_memory_back() -> None:
    engine = LateEngine([300])
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    for _ in range(5):
        install(side, "float64")
        make_update_of(side)
        side.do(ef.Forget("w", 0))
    assert sum(memory.nbytes for memory in engine.memory.values()) <= 300


def make_update_of(side: Side) -> None:
    side.do(ef.Apply("w", 0, 1, side.land(numbers(1, "float64")), [0], [0], 1, Assign(), 1))
    side.finish()


def test_numbers_that_a_rule_refuses_are_an_error_of_the_update() -> None:
    engine = LateEngine()
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    install(side, "float32")
    rule = Adam(epsilon=1e-300)
    side.do(ef.Apply("w", 0, 1, side.land(numbers(1, "float32")), [0], [0], 1, rule, 1))
    (applied,) = side.finish()
    assert isinstance(applied.error, (OptimizerError, AiokvError))


def test_what_is_held_for_a_checkpoint_is_what_was_there(sides: tuple[Side, Side]) -> None:
    """An update that begins before the copies are there waits for them."""
    rule, found = SGD(learning_rate=0.1, momentum=0.9), []
    for side in sides:
        snapshots: Snapshots[str] = Snapshots(side.store)
        ready: list[AiokvError | None] = []
        install(side, "float16", PIECES)
        make_round(side, 1, "float16", rule)
        snapshots.hold(5, "w", 0, 1, ["of a", "of b", "of c"])
        make_round(side, 2, "float16", rule)
        snapshots.when_ready(5, ready.append)
        assert ready == [None]
        held = [(one.state, one.updates, one.arrays()) for one in snapshots.held(5)]
        found.append([(*others, {n: a.tobytes() for n, a in arrays.items()}) for *others, arrays in held])
        snapshots.release(5)
    assert found[0] == found[1]
    assert [(state, updates) for state, updates, _ in found[0]] == [("of a", 1), ("of b", 1), ("of c", 1)]


def test_what_is_held_for_nobody_is_released_when_it_comes() -> None:
    engine = LateEngine()
    side = Side(DeviceStore(get_backend("reference"), engine), engine)
    install(side, "float32")
    make_update(side, 1, Assign())
    snapshots: Snapshots[str] = Snapshots(side.store)
    snapshots.hold(5, "w", 0, 1, ["of w"])
    snapshots.release(5)
    side.finish()
    side.do(ef.Forget("w", 0))
    assert isinstance(side.store, DeviceStore)
    assert side.store._schedule._flow.memory.used == [0]


ON_HOST = {
    # There are others for what takes time.
    *("acquire", "apply", "before", "difference", "joined", "lend", "norms", "release", "saved", "whole"),
    *("apply_rows", "count_updated", "get_rows", "install_rows", "is_table", "join_rows", "make_room", "table"),
    *("backend", "content", "count_staleness", "land", "nbytes", "prepare", "row_ids", "skip", "use"),
    *("restore_before", "widen"),  # of what a standby has received, which keeps it on the host
}
"""What a memory has that does not have to know where chunks are."""


def test_all_that_a_memory_does_with_chunks_and_sums_is_done_on_devices_too() -> None:
    on_host = ParameterStore.__mro__
    every = {name for kind in on_host[:-1] for name in vars(kind) if not name.startswith("_")}
    own = {name for kind in DeviceStore.__mro__ if kind not in on_host for name in vars(kind)}
    assert every - own == ON_HOST
