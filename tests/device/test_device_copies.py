"""A standby gets from a memory on devices what it gets from one on the host, however late the devices are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aiokv import device_storing
from aiokv.core import effects as ef
from aiokv.core.stimuli import Applied, Restored
from aiokv.errors import AiokvError, DeviceMemoryError
from aiokv.kernels import get_backend
from aiokv.optim import LAMB, SGD, Adam, Optimizer
from aiokv.store.device import DeviceStore
from aiokv.store.memory import ParameterStore
from tests.device.late_engine import LateEngine
from tests.device.test_device_storing import PIECES, SIZE, Side, fail, numbers

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(params=range(3), ids=lambda seed: f"order {seed}")
def device(request: pytest.FixtureRequest) -> Side:
    engine = LateEngine([1 << 20] * 2, seed=request.param)
    return Side(DeviceStore(get_backend("reference"), engine), engine)


@pytest.fixture
def host() -> Side:
    return Side(ParameterStore(get_backend("reference")))


def install(side: Side, dtype: str) -> None:
    side.do(ef.Install("w", 0, dtype, SIZE, side.land(numbers(0, dtype)), PIECES))
    side.finish()


def summed(side: Side, dtype: str, count: int = 3) -> int:
    """Return a slot with a sum, none of whose parts need be there yet."""
    first, *others = (side.land(numbers(n, dtype), ("w", 0)) for n in range(1, 1 + count))
    side.do(*(ef.Fold(first, slot, dtype) for slot in others))
    return first


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
@pytest.mark.parametrize("rule", [SGD(learning_rate=0.1), Adam(), LAMB()], ids=lambda rule: str(rule.name))
def test_a_sum_is_sent_as_it_is_before_the_update_that_is_made_of_it(
    device: Side, host: Side, rule: Optimizer, dtype: str
) -> None:
    """Which is written over it. Of a rule that needs norms the sum was divided for these."""
    sent = []
    for side in (device, host):
        install(side, dtype)
        slot, norms = summed(side, dtype), list[Any]()
        head = ("w", 0, 1, slot)
        for phase in range(rule.norm_phases):
            side.do(ef.Norms(*head, phase, list(norms), 1, rule, 3))
            norms.append(side.finish()[0].sums)
        got: list[bytes] = []

        def then(view: memoryview, done: Callable[[], None], got: list[bytes] = got) -> None:
            got.append(bytes(view))
            done()

        payload = ef.StoredSum(slot, SIZE * np.dtype(dtype).itemsize)
        if isinstance(side.store, DeviceStore):
            assert device_storing.read(side.store, payload, then, fail)
        else:
            then(*side.store.lend(slot))
        side.do(ef.Apply(*head, [0, 1, 2], [0, 0, 0], 1, rule, 3, norms))
        assert side.finish() == [Applied("w", 0, 1, None)]
        sent += [got[0], side.read(ef.StoredCopy("w", 0, 1, SIZE))]
    assert sent[:2] == sent[2:]


def test_slots_are_sent_one_after_the_other_wherever_they_are(device: Side, host: Side) -> None:
    found = []
    for side in (device, host):
        install(side, "float16")
        slots = [side.land(numbers(9, "float16")), summed(side, "float16"), side.land(numbers(8, "float16"), ("w", 0))]
        found.append(side.read(ef.StoredSlots(slots, 3 * SIZE * 2)))
        assert all(side.store.has(slot) for slot in slots)
    assert found[0] == found[1]
    assert len(found[0]) == SIZE * (2 + 4 + 2)


def test_what_is_on_the_host_is_lent_by_the_host(device: Side) -> None:
    slot = device.land(numbers(1, "float32"))
    for payload in (ef.StoredSum(slot, 48), ef.StoredSlots([slot], 48), ef.StoredCopy("other", 0, 0, 48)):
        assert isinstance(device.store, DeviceStore)
        assert not device_storing.read(device.store, payload, lambda *_: None, fail)


def test_all_of_a_chunk_makes_a_copy_on_the_host_that_goes_on_with_the_same_bits(device: Side, host: Side) -> None:
    """As a standby does it: first all of the chunk, then the sum of each update."""
    rule = Adam(multi_precision=True)
    install(device, "bfloat16")
    device.do(ef.Apply("w", 0, 1, summed(device, "bfloat16"), [0], [0], 1, rule, 1))
    device.finish()
    copy = np.frombuffer(device.read(ef.StoredCopy("w", 0, 1, 2 * SIZE)), np.uint8)
    host.do(ef.Install("w", 0, "bfloat16", SIZE, None, PIECES), ef.Skip("w", 0, 1, None))
    host.do(ef.Restore(-1, 0, "w", 0, 0, rule, host.land(copy)))
    assert host.finish() == [Restored(-1, 0, None)]
    slot = summed(device, "bfloat16")
    total = np.frombuffer(device.read(ef.StoredSum(slot, 2 * SIZE)), np.uint8)
    device.do(ef.Apply("w", 0, 2, slot, [0], [0], 2, rule, 1, keep=True))
    received = host.land(total)
    host.do(ef.Widen(received, "bfloat16"), ef.Apply("w", 0, 2, received, [0], [0], 2, rule, 1, keep=True))
    assert device.finish() == host.finish() == [Applied("w", 0, 2, None)]
    for copied in (ef.StoredCopy("w", 0, 2, 24), ef.StoredCopy("w", 0, 2, 24, 1)):
        assert device.read(copied) == host.read(copied)


def test_a_copy_has_the_value_before_where_that_is_kept(device: Side, host: Side) -> None:
    install(device, "float32")
    first = device.read(ef.StoredChunk("w", 0, 0, SIZE * 4))
    device.do(ef.Apply("w", 0, 1, summed(device, "float32"), [0], [0], 1, SGD(), 1, keep=True))
    device.finish()
    copy = np.frombuffer(device.read(ef.StoredCopy("w", 0, 1, 4 * SIZE, 0)), np.uint8)
    host.do(ef.Install("w", 0, "float32", SIZE, None, PIECES), ef.Skip("w", 0, 1, None))
    host.do(ef.Restore(-1, 0, "w", 0, 0, SGD(), host.land(copy), 0))
    assert host.finish() == [Restored(-1, 0, None)]
    assert host.read(ef.StoredChunk("w", 0, 0, SIZE * 4)) == first
    assert host.read(ef.StoredChunk("w", 0, 1, SIZE * 4)) == device.read(ef.StoredChunk("w", 0, 1, SIZE * 4)) != first


def test_a_sum_for_which_a_device_has_no_room_is_an_error_and_nothing_is_sent() -> None:
    """A value and two contributions of float16 fit, but not their sum in float32."""
    engine = LateEngine([4 * 2 * SIZE])
    device = Side(DeviceStore(get_backend("reference"), engine), engine)
    assert isinstance(device.store, DeviceStore)
    install(device, "float16")
    slot, errors = summed(device, "float16", 2), list[AiokvError]()

    def then(*_: object) -> None:
        raise AssertionError("nothing is there")

    assert device_storing.read(device.store, ef.StoredSum(slot, 2 * SIZE), then, errors.append)
    device.finish()
    assert [type(error) for error in errors] == [DeviceMemoryError]
    device.do(ef.Free(slot))
    device.finish()
    assert device.store.open_slots == 0
