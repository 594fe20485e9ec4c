"""Updates of many tensors in one launch, against the reference. Only collected where CUDA is, or the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from aiokv.kernels import get_backend, reference
from aiokv.kernels.cuda import optimize
from aiokv.kernels.cuda.memory import SIMULATED
from aiokv.kernels.cuda.streaming import Launch
from aiokv.kernels.cuda.tensors import tensor_of
from aiokv.kernels.plan import plan_norms, plan_update, prepare
from aiokv.kernels.work import has_kernel
from aiokv.optim import LAMB, LARS, NAG, PRECISIONS, SGD, Adam, AdamW, Assign, LearningRule, Optimizer

Array = NDArray[Any]
Bits = Callable[[Array], bytes]
OnDevice = Callable[[Array], Any]
Read = Callable[[Any, Array], Array]

# Around the widths of vectors, warps and parts; prime, in several parts and blocks; and where no vector begins.
LENGTHS = [(size, 0) for size in (0, 1, 31, 32, 33, 255, 257, 1009 if SIMULATED else 100_003)] + [(1, 1), (70, 1)]

SIZES = [3, 257, 1, 64] if SIMULATED else [3, 257, 1, 64, 100_003]

RULES = [
    SGD(momentum=0.9, multi_precision=True),
    NAG(momentum=0.9, multi_precision=True),
    Adam(multi_precision=True),
    AdamW(multi_precision=True),
]


def tensors(dtype: str) -> tuple[list[Array], list[Array]]:
    """Return weights and gradients."""
    rng = np.random.default_rng(4)
    return (
        [rng.standard_normal(size).astype(dtype) for size in SIZES],
        [rng.standard_normal(size).astype(np.float32) for size in SIZES],
    )


@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:tid=:RuntimeWarning")
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_one_launch_updates_tensors_of_all_lengths(
    bits: Bits, on_device: OnDevice, read: Read, rule: Optimizer, dtype: str
) -> None:
    """Every third number is what bytes happen to mean: infinite, NaN, tiny."""
    if isinstance(rule, Assign) or not has_kernel(rule):
        return
    reference_backend, precision = get_backend("reference"), np.dtype(PRECISIONS[dtype])
    plan, prepared = plan_update(rule), prepare(rule, "update", precision)
    spec = optimize.update_spec(plan, precision.name, dtype, dtype, None)
    step = rule.step_for("w", count=1, num_update=1)
    devices, numbers, expected = [], [], []
    for size, offset in LENGTHS:
        rng = np.random.default_rng([size, offset])
        weight, total = (rng.standard_normal(size + offset).astype(dtype) for _ in range(2))
        total[::3] = np.frombuffer(rng.bytes(total[::3].nbytes), dtype)
        state = {name: np.zeros(size + offset, precision) for name in plan.state}
        devices.append([on_device(array) for array in (weight, total, *state.values())])
        kept = {name: array[offset:] for name, array in state.items()}
        norms: list[tuple[float, ...]] = []
        for phase in range(rule.norm_phases):
            norms.append(reference_backend.norms(rule, phase, weight[offset:], total[offset:], kept, step, norms))
        numbers.append(prepared.numbers(step, norms))
        reference_backend.update(rule, weight[offset:], total[offset:], kept, step, norms=norms)
        expected.append([total, *state.values()])
    Launch(spec, [[array[offset:] for array in row] for row, (_, offset) in zip(devices, LENGTHS, strict=True)]).run(
        numbers
    )
    for row, arrays in zip(devices, expected, strict=True):
        found = [read(device, array) for device, array in zip(row[1:], arrays, strict=True)]
        assert list(map(bits, found)) == list(map(bits, arrays))


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule.name))
def test_one_launch_updates_all_master_weights_and_their_copies(
    bits: Bits, on_device: OnDevice, read: Read, rule: LearningRule, low: str
) -> None:
    """Each tensor has a learning rate of its own, and two steps are made with one table."""
    reference_backend = get_backend("reference")
    weights, gradients = tensors(low)
    states = [reference_backend.new_state(rule, weight) for weight in weights]
    plan = plan_update(rule)
    prepared = prepare(rule, "update", np.dtype(np.float32))
    spec = optimize.update_spec(plan, "float32", "float32", "float32", low, master=True)
    outs = [np.empty_like(weight) for weight in weights]
    rows = [
        [state["master"].copy(), gradient, *(state[name].copy() for name in plan.state), out]
        for state, gradient, out in zip(states, gradients, outs, strict=True)
    ]
    devices = [[on_device(array) for array in row] for row in rows]
    launched = Launch(spec, devices)
    for count in (1, 2):
        step = rule.step_for("w", count=count, num_update=count)
        steps = [msgspec.structs.replace(step, learning_rate=0.1 * n) for n in range(1, len(rows) + 1)]
        launched.run([prepared.numbers(step, ()) for step in steps])
        for weight, gradient, state, out, step in zip(weights, gradients, states, outs, steps, strict=True):
            reference_backend.update(rule, weight, gradient, state, step, out=out)
    for row, device, state, out in zip(rows, devices, states, outs, strict=True):
        assert bits(read(device[-1], row[-1])) == bits(out)
        assert bits(read(device[0], row[0])) == bits(state["master"])
        for place, name in enumerate(plan.state, 2):
            assert bits(read(device[place], row[place])) == bits(state[name])


@pytest.mark.parametrize("offset", [0, 1])
def test_the_squares_of_many_tensors_have_the_bits_of_the_reference(on_device: OnDevice, offset: int) -> None:
    """More elements than lanes, tensors that start between two vectors, and a length that fills no vector."""
    rule = LAMB()
    plan, counted = plan_norms(rule, 0), rule.norm_counts[0]
    numbers = prepare(rule, "0", np.dtype(np.float32)).numbers(rule.step_for("w", count=1, num_update=1), ())
    rng = np.random.default_rng(5)
    rows = [[rng.random(size + offset).astype(np.float32) for _ in range(4)] for size in (2051, 5, 1024)]
    found = [[tensor_of("array", on_device(array)[offset:]) for array in row] for row in rows]
    lanes, totals = optimize.add_squares(plan, "float32", found, [numbers] * len(rows), counted)
    expected = []
    for row in rows:
        mine = [np.zeros(reference.LANES) for _ in range(counted)]
        weight, total, *state = (array[offset:] for array in row)
        reference.norms(plan, weight, total, state, (), numbers, mine)
        expected += mine
    np.testing.assert_array_equal(lanes.copy_to_host(), expected)
    np.testing.assert_array_equal(totals.copy_to_host(), [np.add.accumulate(lane)[-1] for lane in expected])


@pytest.mark.parametrize("rule", [LAMB(), LARS(momentum=0.9)], ids=lambda rule: str(rule.name))
def test_norms_of_all_tensors_and_then_their_updates(
    bits: Bits, on_device: OnDevice, read: Read, rule: LearningRule
) -> None:
    """Two launches for each phase of a step, whatever the number of tensors."""
    reference_backend = get_backend("reference")
    weights, gradients = tensors("float32")
    states = [reference_backend.new_state(rule, weight) for weight in weights]
    plan, plan_before, counted = plan_update(rule), plan_norms(rule, 0), rule.norm_counts[0]
    rows = [
        [weight, gradient, *(state[name] for name in plan.state)]
        for weight, gradient, state in zip(weights, gradients, states, strict=True)
    ]
    devices = [[on_device(array) for array in row] for row in rows]
    step = rule.step_for("w", count=1, num_update=1)
    before = prepare(rule, "0", np.dtype(np.float32)).numbers(step, ())
    found = [[device.tensor for device in row[: 2 + len(plan_before.state)]] for row in devices]
    _, totals = optimize.add_squares(plan_before, "float32", found, [before] * len(rows), counted)
    norms = [tuple(map(float, sums)) for sums in totals.copy_to_host().reshape(len(rows), counted)]

    prepared = prepare(rule, "update", np.dtype(np.float32))
    spec = optimize.update_spec(plan, "float32", "float32", "float32", None)
    Launch(spec, devices).run([prepared.numbers(step, (sums,)) for sums in norms])

    for weight, gradient, state, device, sums in zip(weights, gradients, states, devices, norms, strict=True):
        expected = reference_backend.norms(rule, 0, weight, gradient, state, step)
        assert sums == expected
        total = gradient.copy()
        reference_backend.update(rule, weight, total, state, step, norms=[expected])
        assert bits(read(device[1], total)) == bits(total)
        for place, name in enumerate(plan.state, 2):
            assert bits(read(device[place], state[name])) == bits(state[name])
