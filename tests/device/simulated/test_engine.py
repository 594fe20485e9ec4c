"""What the engine does on a device, or in Numba's simulator, against the same memory on the host, bit by bit."""

from __future__ import annotations

import functools
import queue
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numba import cuda

from aiokv import device_storing, storing
from aiokv.core import effects as ef
from aiokv.core.stimuli import Applied
from aiokv.errors import AiokvError, ConfigError, UpdateRefusedError
from aiokv.kernels import engine_for, get_backend
from aiokv.kernels.cuda import launch
from aiokv.kernels.cuda.engine import Engine
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.cuda.work import Works
from aiokv.optim import DCASGD, LAMB, LARS, NAG, SGD, SGLD, Adam, AdamW, Assign, Optimizer, RMSProp
from aiokv.store.device import DeviceStore
from aiokv.store.host_work import do_on_host
from aiokv.store.memory import ParameterStore
from aiokv.types import Piece

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

SIZE = 37
PIECES = [Piece("a", 0, 5), Piece("b", 0, 31), Piece("c", 0, 1)]

RULES: dict[str, Optimizer] = {
    "assign": Assign(),
    "sgd": SGD(learning_rate=0.1, clip_gradient=0.5),
    "momentum": SGD(learning_rate=0.1, momentum=0.9, multi_precision=True),
    "nag": NAG(learning_rate=0.1, momentum=0.9, wd=0.01),
    "adam": Adam(multi_precision=True),
    "adamw": AdamW(wd=0.1, lr_mult={"b": 0.5}),
    "lamb": LAMB(multi_precision=True),
    "lars": LARS(momentum=0.9),
    "rmsprop": RMSProp(),
    "sgld": SGLD(),
    "dcasgd": DCASGD(momentum=0.9, multi_precision=True),
}


def fail(error: AiokvError) -> None:
    raise error


class OnDevice:
    """A store with an engine; events are taken in by this thread."""

    def __init__(self, engine: Any = None) -> None:
        backend = get_backend("reference")
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        engine = engine or engine_for("cuda:0", functools.partial(do_on_host, backend=backend))
        self.store = DeviceStore(backend, engine)
        self.store.start(self.events.put)
        self.ends: list[Any] = []

    def do(self, *effects: ef.Effect) -> None:
        for effect in effects:
            end = device_storing.perform(self.store, effect, self.ends.append)
            if end is not None:
                self.ends.append(end)

    def finish(self) -> list[Any]:
        while not self.store.is_idle:
            for event, error in self.events.get(timeout=60):
                self.store.completed(event, error)
        ends, self.ends = self.ends, []
        return ends

    def read(self, payload: ef.Payload) -> bytes:
        got: list[bytes] = []

        def then(view: memoryview, sent: Callable[[], None]) -> None:
            got.append(bytes(view))
            sent()

        assert device_storing.read(self.store, payload, then, fail)
        self.finish()
        return got[0]


class OnHost:
    """The same on the host."""

    def __init__(self) -> None:
        self.store = ParameterStore(get_backend("reference"))
        self.ends: list[Any] = []

    def do(self, *effects: ef.Effect) -> None:
        self.ends += [end for effect in effects if (end := storing.perform(self.store, effect)) is not None]

    def finish(self) -> list[Any]:
        ends, self.ends = self.ends, []
        return ends

    def read(self, payload: ef.Payload) -> bytes:
        assert isinstance(payload, ef.StoredState)
        return storing.state_bytes(self.store, payload)


Side = OnDevice | OnHost


@pytest.fixture
def device() -> Iterator[OnDevice]:
    side = OnDevice()
    yield side
    side.store.close()


def land(side: Side, seed: int, dtype: str) -> int:
    array = np.random.default_rng(seed).standard_normal(SIZE).astype(dtype)
    slot, view = side.store.land(array.nbytes)
    view[:] = array.view(np.uint8).data
    return slot


def train(side: Side, rule: Optimizer, dtype: str, pieces: Sequence[Piece]) -> bytes:
    """Make three updates; return value and state."""
    side.do(ef.Install("w", 0, dtype, SIZE, land(side, 0, dtype), list(pieces)))
    for version in (1, 2, 3):
        make_round(side, version, rule, dtype)
    return side.read(ef.StoredState("w", 0, 3, pieces[-1].key if pieces else "w", 0, arrays=True))


def make_round(side: Side, version: int, rule: Optimizer, dtype: str) -> None:
    """Make an update of three contributions, the third of which is not announced."""
    slots = [land(side, 10 * version + n, dtype) for n in range(3)]
    if isinstance(side, OnDevice):
        side.store.arrived(slots[0], "w", 0)
        side.store.arrived(slots[1], "w", 0)
    side.do(ef.Weigh(slots[2], dtype, 0.3), *(ef.Fold(slots[0], slot, dtype) for slot in slots[1:]))
    head = ("w", 0, version, slots[0])
    gathered: list[ef.Sums] = []
    for phase in range(rule.norm_phases):
        side.do(ef.Norms(*head, phase, list(gathered), version, rule, version))
        (normed,) = side.finish()
        assert normed.error is None
        gathered.append(normed.sums)
    side.do(ef.Apply(*head, [0, 1, 2], [0, 0, 0], version, rule, version, gathered))
    assert side.finish() == [Applied("w", 0, version, None)]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_updates_have_the_bits_of_the_host(device: OnDevice, rule: Optimizer, dtype: str) -> None:
    assert train(device, rule, dtype, ()) == train(OnHost(), rule, dtype, ())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("multi_precision", [False, True])
def test_delayed_gradients_have_the_bits_of_the_host(
    device: OnDevice, dtype: str, multi_precision: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single one, compared in the update, and two that are compensated before they are added. All is done there."""
    rule = DCASGD(learning_rate=0.1, momentum=0.5, lamda=0.5, multi_precision=multi_precision)
    monkeypatch.setattr(Engine, "_do_on_host", None)

    def weights(side: Side) -> bytes:
        side.do(ef.Install("w", 0, dtype, SIZE, land(side, 0, dtype), PIECES))
        side.do(ef.Apply("w", 0, 1, land(side, 1, dtype), [0], [0], 1, rule, 1, [], 0))
        side.finish()
        side.do(ef.Apply("w", 0, 2, land(side, 2, dtype), [0], [1], 2, rule, 1, [], 0))
        side.finish()
        slots = [land(side, n, dtype) for n in (3, 4)]
        side.do(*(ef.Compensate(slot, dtype, "w", 0, 0, rule.compensation) for slot in slots))
        side.do(ef.Fold(slots[0], slots[1], dtype), ef.Apply("w", 0, 3, slots[0], [0, 1], [2, 2], 3, rule, 2, [], 2))
        side.finish()
        return side.read(ef.StoredState("w", 0, 3, "b", 0, arrays=True))

    assert weights(device) == weights(OnHost())


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("count", [9, 16, 17, 64])
def test_more_contributions_than_one_pass_adds(device: OnDevice, count: int, dtype: str) -> None:
    """In the order of the ranks, whatever goes out together."""

    def total(side: Side) -> bytes:
        side.do(ef.Install("w", 0, dtype, SIZE, land(side, 0, dtype), []))
        side.finish()
        first, *others = (land(side, n, dtype) for n in range(1, 1 + count))
        side.do(*(ef.Fold(first, slot, dtype) for slot in others))
        side.do(ef.Apply("w", 0, 1, first, list(range(count)), [0] * count, 1, Assign(), 1))
        assert side.finish() == [Applied("w", 0, 1, None)]
        return side.read(ef.StoredState("w", 0, 1, "w", 0, arrays=True))

    assert total(device) == total(OnHost())


@pytest.mark.parametrize("rule", ["momentum", "adamw", "lamb"])
def test_keys_in_one_chunk_are_rows_of_one_launch(device: OnDevice, rule: str) -> None:
    assert train(device, RULES[rule], "float16", PIECES) == train(OnHost(), RULES[rule], "float16", PIECES)


def test_a_step_allocates_nothing_on_the_device(device: OnDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first few steps; to free memory of a device would stop it."""
    train(device, RULES["lamb"], "float16", PIECES)

    def allocate(*_: Any, **__: Any) -> Any:
        raise AssertionError("it should have been there")

    for owner, name in ((launch, "to_device"), (launch, "new_on_device"), (cuda, "device_array")):
        monkeypatch.setattr(owner, name, allocate)
    for version in (4, 5, 6):
        make_round(device, version, RULES["lamb"], "float16")


def test_what_fails_is_reported_and_what_needs_it_fails_too(device: OnDevice) -> None:
    """The device goes on with everything else."""
    side = device
    side.do(ef.Install("w", 0, "float32", SIZE, land(side, 0, "float32"), []))
    side.finish()

    def break_down(*_: Any) -> None:
        raise ZeroDivisionError("no such kernel")

    engine: Any = side.store._engine
    launch, engine._works[0].launch = engine._works[0].launch, break_down
    slots = [land(side, n, "float32") for n in range(2)]
    side.store.arrived(slots[0], "w", 0)
    side.do(ef.Fold(slots[0], slots[1], "float32"))
    side.do(ef.Apply("w", 0, 1, slots[0], [0, 1], [0, 0], 1, Assign(), 1))
    (applied,) = side.finish()
    assert isinstance(applied.error, UpdateRefusedError)
    assert "CUDA device 0: ZeroDivisionError: no such kernel" in str(applied.error)
    engine._works[0].launch = launch
    slots = [land(side, n, "float32") for n in range(2)]
    side.do(ef.Apply("w", 0, 2, slots[0], [0], [0], 2, SGD(learning_rate=0.1), 1), ef.Free(slots[1]))
    assert side.finish() == [Applied("w", 0, 2, None)]


CHUNKS = 6


def train_many(side: Side, rule: Optimizer, dtype: str) -> list[bytes]:
    """Make two updates of chunks of several lengths, all of whose gradients are there; return values and states."""
    sizes = [SIZE, 5, 300, SIZE, 0, 1][:CHUNKS]
    for n, size in enumerate(sizes):
        slot = land_of(side, n, dtype, size) if size else None
        side.do(ef.Install(f"k{n}", 0, dtype, size, slot, []))
    side.finish()
    with_elements = [n for n, size in enumerate(sizes) if size]
    for version in (1, 2):
        slots = {}
        for n in with_elements:
            slots[n], second = (land_of(side, 100 * version + 10 * n + k, dtype, sizes[n]) for k in range(2))
            side.do(ef.Fold(slots[n], second, dtype))
        sums: dict[str, list[ef.Sums]] = {f"k{n}": [] for n in with_elements}
        for phase in range(rule.norm_phases):
            for n in with_elements:
                side.do(ef.Norms(f"k{n}", 0, version, slots[n], phase, [], version, rule, 2))
            for normed in side.finish():
                sums[normed.key].append(normed.sums)
        for n in with_elements:
            side.do(ef.Apply(f"k{n}", 0, version, slots[n], [0, 1], [0, 0], version, rule, 2, sums[f"k{n}"]))
        assert sorted(side.finish(), key=str) == [Applied(f"k{n}", 0, version, None) for n in with_elements]
    return [side.read(ef.StoredState(f"k{n}", 0, 2, f"k{n}", 0, arrays=True)) for n in with_elements]


def land_of(side: Side, seed: int, dtype: str, size: int) -> int:
    array = np.random.default_rng(seed).standard_normal(size).astype(dtype)
    slot, view = side.store.land(array.nbytes)
    view[:] = array.view(np.uint8).data
    return slot


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("rule", ["sgd", "adam", "lamb"])
def test_chunks_that_are_ready_together_are_updated_in_one_launch(
    device: OnDevice, rule: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the bits of the host; nothing is reported before all is wanted, so all but the first wait for each other."""
    together: list[int] = []
    launch_all = Works.launch

    def watch(works: Works, given: Any, stream: Any) -> None:
        together.append(len(given))
        launch_all(works, given, stream)

    monkeypatch.setattr(Works, "launch", watch)
    assert train_many(device, RULES[rule], dtype) == train_many(OnHost(), RULES[rule], dtype)
    assert max(together) >= CHUNKS - 3


def test_what_one_chunk_can_not_have_does_not_hold_up_those_beside_it(device: OnDevice) -> None:
    """The numbers of a rule are made when it is launched; those of one of three are refused."""
    for n in range(4):
        device.do(ef.Install(f"k{n}", 0, "float32", SIZE, land(device, n, "float32"), []))
    device.finish()
    rules = [SGD(learning_rate=0.1), SGD(learning_rate=0.1), SGD(learning_rate=1e300), SGD(learning_rate=0.1)]
    for n, rule in enumerate(rules):
        device.do(ef.Apply(f"k{n}", 0, 1, land(device, 9, "float32"), [0], [0], 1, rule, 1))
    errors = {applied.key: applied.error for applied in device.finish()}
    assert [name for name, error in sorted(errors.items()) if error is not None] == ["k2"]


def test_two_devices_have_a_part_of_the_keys_each() -> None:
    """In the simulator both are the same one; a sum that is on the other device than its chunk is copied there."""
    backend = get_backend("reference")
    numbers = [0, 0] if SIMULATED else list(range(min(2, len(cuda.gpus))))
    side = OnDevice(Engine(numbers, functools.partial(do_on_host, backend=backend)))
    for key in ("w", "v"):
        side.do(ef.Install(key, 0, "float32", SIZE, land(side, 0, "float32"), []))
    slots = [land(side, n, "float32") for n in (1, 2)]
    side.store.arrived(slots[0], "w", 0)
    side.store.arrived(slots[1], "v", 0)
    side.do(ef.Fold(slots[0], slots[1], "float32"), ef.Apply("v", 0, 1, slots[0], [0], [0], 1, Assign(), 1))
    assert side.finish() == [Applied("v", 0, 1, None)]
    expected = sum(np.random.default_rng(n).standard_normal(SIZE).astype(np.float32) for n in (1, 2))
    assert side.read(ef.StoredChunk("v", 0, 1, 0)) == np.asarray(expected).tobytes()
    side.store.close()


@pytest.mark.parametrize("device_name", ["cuda:0,0", "cuda:99", "gpu"])
def test_devices_that_are_not_there_are_an_error(device_name: str) -> None:
    with pytest.raises(ConfigError, match="no device"):
        engine_for(device_name, lambda *_: None)
