"""Choosing a backend, and what the wrapper refuses before anything is computed."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import aiokv.kernels
from aiokv.errors import ConfigError, MissingExtraError, OptimizerError, SpecMismatchError
from aiokv.kernels import Backend, get_backend
from aiokv.kernels.loops import digest
from aiokv.optim import DCASGD, LARS, RULES, SGD, Adam, Assign, Optimizer, Step

if TYPE_CHECKING:
    from pathlib import Path


def python(code: str, **variables: str) -> str:
    """Run the code in a process of its own and return what it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- choosing ---


@pytest.mark.parametrize(("asked", "got"), [("reference", "reference"), ("cpu", "cpu"), ("auto", "cpu")])
def test_a_backend_says_who_computes(asked: str, got: str) -> None:
    backend = get_backend(asked)
    assert backend.name == got
    assert repr(backend) == f"Backend({got!r})"


def test_unknown_backend() -> None:
    with pytest.raises(ConfigError, match=r"'fortran'.*auto, cpu, cuda, reference"):
        get_backend("fortran")


def test_importing_the_wrapper_imports_no_numba() -> None:
    assert (
        python("import sys, aiokv, aiokv.kernels as k; k.get_backend('reference'); print('numba' in sys.modules)")
        == "False"
    )


@pytest.mark.parametrize(
    ("extra", "module", "package"),
    [
        ("cpu", "aiokv.kernels.cpu", "numba"),
        ("cuda", "aiokv.kernels.cuda", "numba"),
        ("cuda", "aiokv.kernels.cuda", "numba_cuda"),
    ],
)
def test_missing_packages_name_their_extra(
    monkeypatch: pytest.MonkeyPatch, extra: str, module: str, package: str
) -> None:
    forget(monkeypatch, module, package)
    with pytest.raises(MissingExtraError, match=rf"{package}.*pip install \"aiokv\[{extra}\]\""):
        get_backend(extra)


def test_auto_is_the_cpu_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    aiokv.kernels._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "aiokv"):
        assert [get_backend().name for _ in range(3)] == ["cpu"] * 3
    assert caplog.messages == ["backend 'auto' is 'cpu'; say 'cuda' to use a device"]


def test_auto_does_without_numba_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget(monkeypatch, "aiokv.kernels.cpu", "numba")
    aiokv.kernels._say_once.cache_clear()
    with caplog.at_level(logging.INFO, "aiokv"):
        assert get_backend().name == "reference"
    assert "numba" in caplog.text


def forget(monkeypatch: pytest.MonkeyPatch, module: str, package: str) -> None:
    """Make the package impossible to import, and the module not yet imported."""
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name == module or name.startswith(f"{module}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(aiokv.kernels, module.rpartition(".")[2], raising=False)


CUDA_ERROR = """
from aiokv.errors import ConfigError
from aiokv.kernels import get_backend
{before}
try:
    get_backend("cuda")
except ConfigError as error:
    print(error)
"""


def test_a_missing_driver_is_named() -> None:
    message = python(CUDA_ERROR.format(before=""), NUMBA_DISABLE_CUDA="1", NUMBA_ENABLE_CUDASIM="0")
    assert "the Python packages are there, but this machine lacks the NVIDIA driver or a device" in message
    assert "NUMBA_DISABLE_CUDA=1" in message


def test_a_missing_toolkit_is_named() -> None:
    before = """
from numba.cuda import cuda_paths
def get_cuda_paths():
    raise RuntimeError("libnvvm.so is nowhere")
cuda_paths.get_cuda_paths = get_cuda_paths
"""
    message = python(CUDA_ERROR.format(before=before), NUMBA_ENABLE_CUDASIM="0")
    assert "the CUDA toolkit (libnvvm.so is nowhere)" in message


def test_compiled_code_need_not_be_kept() -> None:
    """Where no folder is writable each process compiles for itself."""
    code = """
import numpy as np
from aiokv.kernels import get_backend
total = np.ones(2)
get_backend("cpu").accumulate(total, np.ones(2))
print(total.tolist())
"""
    # Numba looks in the folder that NUMBA_CACHE_DIR names, if it does, and nowhere else.
    assert python(code, NUMBA_CACHE_LOCATOR_CLASSES="UserProvidedCacheLocator", NUMBA_CACHE_DIR="") == "[2.0, 2.0]"


# --- refusing ---


@pytest.fixture
def reference() -> Backend:
    return get_backend("reference")


def floats(size: int = 4, dtype: str = "float32") -> Any:
    return np.ones(size, dtype)


def read_only(array: Any) -> Any:
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("target", "source", "message"),
    [
        (floats(), [1.0, 1.0, 1.0, 1.0], "source must be a NumPy array; got list"),
        (floats(), floats(5), r"source must be float32\[4\] to fit target; got float32\[5\]"),
        (floats(), floats(dtype="float64"), r"source must be float32\[4\] to fit target; got float64\[4\]"),
        (floats().reshape(2, 2), floats().reshape(2, 2), r"target must be one-dimensional.*got shape \(2, 2\)"),
        (np.float32(1), np.float32(1), "target must be a NumPy array; got float32"),
        (floats(8)[::2], floats(), "target must be .*C-contiguous.*strides"),
        (floats(dtype=">f4"), floats(dtype=">f4"), "target must be one of .*in native byte order; got dtype >f4"),
        (floats(dtype="bool"), floats(dtype="bool"), r"target must be one of bfloat16, .*; got dtype \|b1"),
        (floats(dtype="complex64"), floats(dtype="complex64"), "target must be one of bfloat16, .*; got dtype <c8"),
        (floats(dtype="float64"), floats(dtype="float16"), r"source must be float64\[4\] .*got float16\[4\]"),
        (floats(), floats(dtype="int32"), r"source must be float32\[4\] .*got int32\[4\]"),
        (floats(dtype="float16"), floats(dtype="bfloat16"), r"source must be float16\[4\] .*got bfloat16\[4\]"),
        (read_only(floats()), floats(), "target must be writable; got a read-only array"),
    ],
)  # fmt: skip
def test_accumulate_refuses_other_arrays(reference: Backend, target: Any, source: Any, message: str) -> None:
    with pytest.raises(SpecMismatchError, match=message):
        reference.accumulate(target, source)


def test_accumulate_refuses_arrays_that_overlap(reference: Backend) -> None:
    memory = floats(5)
    with pytest.raises(SpecMismatchError, match="target must be apart from source in memory"):
        reference.accumulate(memory[1:], memory[:-1])


def test_parts_of_one_buffer_that_do_not_overlap_are_fine(reference: Backend) -> None:
    memory = floats(4)
    reference.accumulate(memory[:2], memory[2:])
    assert memory.tolist() == [2, 2, 1, 1]


MOMENTUM = SGD(momentum=0.9)


def update(backend: Backend, rule: Optimizer, **arrays: Any) -> None:
    """Make the first update; arrays that are not given fit, those of the state among them."""
    weight, total = arrays.pop("weight", floats()), arrays.pop("total", floats())
    backend.update(rule, weight, total, backend.new_state(rule, floats()) | arrays, Step(1))


@pytest.mark.parametrize(
    "names", [("total", "weight"), ("mean", "weight"), ("total", "variance"), ("variance", "mean")]
)
def test_updates_refuse_arrays_that_overlap(reference: Backend, names: tuple[str, str]) -> None:
    same = floats()
    with pytest.raises(SpecMismatchError, match=f"{names[0]} must be apart from {names[1]}"):
        update(reference, Adam(), **dict.fromkeys(names, same))


@pytest.mark.parametrize("rule", [Assign(), Adam()], ids=str)
@pytest.mark.parametrize(
    "wrong", [floats(5), floats(dtype="float64"), floats(dtype="int32")], ids=lambda a: str(a.dtype)
)
def test_updates_refuse_a_sum_that_is_not_like_the_weight(reference: Backend, rule: Optimizer, wrong: Any) -> None:
    with pytest.raises(SpecMismatchError, match=rf"total must be float32\[4\] to fit weight; got {wrong.dtype}"):
        update(reference, rule, total=wrong)


def test_float16_may_have_a_float32_sum_if_the_result_goes_elsewhere(reference: Backend) -> None:
    weight, total = floats(dtype="float16"), floats()
    with pytest.raises(SpecMismatchError, match=r"total must be float16\[4\] to fit weight; got float32\[4\]"):
        reference.update(SGD(), weight, total, {}, Step(1))
    reference.update(SGD(), weight, total, {}, Step(1, 0.5), out=floats(dtype="float16"))
    assert total.tolist() == [1] * 4


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (floats(), r"out must be float16\[4\] to fit weight; got float32\[4\]"),
        (floats(3, "float16"), r"out must be float16\[4\] to fit weight; got float16\[3\]"),
        (read_only(floats(dtype="float16")), "out must be writable"),
    ],
)
def test_updates_refuse_a_place_for_the_result_that_does_not_fit(reference: Backend, out: Any, message: str) -> None:
    with pytest.raises(SpecMismatchError, match=message):
        reference.update(SGD(), floats(dtype="float16"), floats(), {}, Step(1), out=out)


@pytest.mark.parametrize("name", ["weight", "total"])
def test_the_result_overlaps_nothing(reference: Backend, name: str) -> None:
    arrays = {"weight": floats(), "total": floats()}
    with pytest.raises(SpecMismatchError, match=f"out must be apart from {name}"):
        reference.update(SGD(), **arrays, state={}, step=Step(1), out=arrays[name][:])


@pytest.mark.parametrize("read", [floats(3), floats(dtype="float64")])
def test_what_a_worker_had_read_is_like_the_weight(reference: Backend, read: Any) -> None:
    with pytest.raises(SpecMismatchError, match=r"read must be float32\[4\] to fit weight"):
        reference.update(DCASGD(), floats(), floats(), {}, Step(1), read=read)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((floats(), floats(), floats(3)), r"read must be float32\[4\] to fit weight"),
        ((floats(dtype="float16"), floats(dtype="float16"), floats(dtype="float16")), r"gradient must be float32\[4\]"),
        ((read_only(floats()), floats(), floats()), "gradient must be writable"),
    ],
)
def test_what_is_compensated_is_like_the_weight(reference: Backend, arrays: Any, message: str) -> None:
    gradient, weight, read = arrays
    with pytest.raises(SpecMismatchError, match=message):
        reference.compensate(gradient, weight, read, 0.04)


@pytest.mark.parametrize("wrong", [floats(5), floats(dtype="float16"), floats(dtype="float64"), floats(8)[::2]])
@pytest.mark.parametrize("name", ["mean", "variance"])
def test_updates_refuse_a_state_that_does_not_fit(reference: Backend, name: str, wrong: Any) -> None:
    with pytest.raises(SpecMismatchError, match=f"^{name} must be"):
        update(reference, Adam(), **{name: wrong})


@pytest.mark.parametrize("name", ["total", "mean", "variance"])
def test_updates_refuse_to_write_read_only_arrays(reference: Backend, name: str) -> None:
    with pytest.raises(SpecMismatchError, match=f"{name} must be writable"):
        update(reference, Adam(), **{name: read_only(floats())})


@pytest.mark.parametrize("rule", [SGD(), MOMENTUM, Adam()], ids=str)
def test_updates_by_fractions_refuse_integers(reference: Backend, rule: Optimizer) -> None:
    ints = [floats(dtype="int32") for _ in range(2)]
    message = "weight must be one of bfloat16, float16, float32, float64; got dtype int32"
    with pytest.raises(SpecMismatchError, match=message):
        reference.update(rule, ints[0], ints[1], reference.new_state(rule, floats()), Step(1))


@pytest.mark.parametrize(
    ("rule", "state", "message"),
    [
        (MOMENTUM, {}, r"SGD\(.*\) keeps momentum, but the state has nothing; make one with new_state"),
        (SGD(), {"momentum": floats()}, r"SGD\(.*\) keeps nothing, but the state has momentum"),
        (Assign(), {"momentum": floats()}, r"Assign\(\) keeps nothing, but the state has momentum"),
        (Adam(), {"momentum": floats()}, r"Adam\(.*\) keeps mean, variance, but the state has momentum"),
        (Adam(), {"mean": floats()}, r"Adam\(.*\) keeps mean, variance, but the state has mean"),
    ],
    ids=str,
)
def test_the_state_of_another_rule_is_refused(
    reference: Backend, rule: Optimizer, state: dict[str, Any], message: str
) -> None:
    with pytest.raises(OptimizerError, match=message):
        reference.update(rule, floats(), floats(), state, Step(1))


@pytest.mark.parametrize("step", [0, -1])
def test_updates_are_counted_from_1(reference: Backend, step: int) -> None:
    with pytest.raises(OptimizerError, match=f"counted from 1, got {step}"):
        reference.update(Adam(), floats(), floats(), reference.new_state(Adam(), floats()), Step(step))
    with pytest.raises(OptimizerError, match=f"counted from 1, got {step}"):
        reference.norms(LARS(), 0, floats(), floats(), {}, Step(step))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (SGD(rescale_grad=-1e300), r"'sgd': rescale_grad must be a finite number .* float32, got -1e\+300"),
        (SGD(momentum=0.9999999999), r"'sgd': momentum must be a number in \[0, 1\) .* float32, got 0.9999999999"),
        (Adam(beta1=0.9999999999), r"'adam': beta1 must be a number in \[0, 1\) .* float32, got 0.9999999999"),
        (Adam(beta2=0.9999999999), r"'adam': beta2 must be a number in \[0, 1\) .* float32, got 0.9999999999"),
        (Adam(epsilon=1e-50), r"'adam': epsilon must be a finite number > 0 .* float32, got 1e-50"),
    ],
)
def test_parameters_that_the_precision_can_not_hold_are_refused(
    reference: Backend, rule: Optimizer, message: str, dtype: str
) -> None:
    weight = floats(dtype=dtype)
    with pytest.raises(OptimizerError, match=message):
        reference.update(rule, weight, floats(dtype=dtype), reference.new_state(rule, weight), Step(1))


def test_a_corrected_learning_rate_that_overflows_shows_it_in_the_weights(reference: Backend) -> None:
    rule, weight, total = Adam(learning_rate=1e38, beta1=0.9999, beta2=0.0), floats(), floats()
    step = rule.step_for("w", count=1, num_update=1)
    reference.update(rule, weight, total, reference.new_state(rule, weight), step)
    assert total.tolist() == [-np.inf] * 4


def test_a_rule_that_no_backend_knows_is_refused(reference: Backend) -> None:
    class Other(Optimizer, tag="other", frozen=True):
        pass

    with pytest.raises(OptimizerError, match=r"no backend can compute .*Other\(\)"):
        reference.new_state(Other(), floats())
    with pytest.raises(OptimizerError, match=r"no backend can compute .*Other\(\)"):
        reference.update(Other(), floats(), floats(), {}, Step(1))


# --- state ---


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"), ("float64", "float64")],
)
@pytest.mark.parametrize(
    ("rule", "names"), [(SGD(), []), (MOMENTUM, ["momentum"]), (Adam(), ["mean", "variance"])], ids=str
)
def test_a_new_state_is_zeros_in_the_precision_of_the_computation(
    reference: Backend, rule: Optimizer, names: list[str], dtype: str, kept: str
) -> None:
    state = reference.new_state(rule, floats(5, dtype))
    assert {name: (str(array.dtype), array.tolist()) for name, array in state.items()} == {
        name: (kept, [0.0] * 5) for name in names
    }


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_assign_keeps_nothing_whatever_the_dtype(reference: Backend, dtype: str) -> None:
    assert reference.new_state(Assign(), floats(dtype=dtype)) == {}


def test_no_state_for_integers(reference: Backend) -> None:
    with pytest.raises(
        SpecMismatchError, match="weight must be one of bfloat16, float16, float32, float64; got dtype int64"
    ):
        reference.new_state(Adam(), floats(dtype="int64"))


# --- before the first update ---


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", RULES)
def test_every_rule_can_be_warmed_up_and_computed(name: str, dtype: str) -> None:
    rule = RULES[name]()
    made = []
    for backend in (get_backend("reference"), get_backend("cpu")):
        backend.warm_up(rule, dtype)
        weight = floats(dtype=dtype)
        norms = [(1.0,) * count for count in rule.norm_counts]
        backend.update(rule, weight, floats(dtype=dtype), backend.new_state(rule, weight), Step(1), norms=norms)
        made.append(weight)
    np.testing.assert_array_equal(*made)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_after_warming_up_an_update_compiles_nothing(tmp_path: Path, dtype: str) -> None:
    """Neither the norms of a rule that needs them, nor sums in float32 with a result that goes elsewhere."""
    code = f"""
import numpy as np
from numba.core import event
from aiokv.kernels import get_backend
from aiokv.optim import LAMB, Step
backend, rule = get_backend("cpu"), LAMB()
backend.warm_up(rule, "{dtype}")
with event.install_recorder("numba:compile") as recorder:
    weight, total, out = np.ones(5, "{dtype}"), np.ones(5, np.float32), np.ones(5, "{dtype}")
    state = backend.new_state(rule, weight)
    backend.accumulate(total, weight)
    norms = [backend.norms(rule, 0, weight, total, state, Step(1))]
    backend.update(rule, weight, total, state, Step(1), out=None if weight.dtype == total.dtype else out, norms=norms)
print(len(recorder.buffer))
"""
    # With the cache of earlier runs nothing would be compiled anyway.
    assert python(code, NUMBA_CACHE_DIR=str(tmp_path)) == "0"


def test_what_one_process_has_compiled_the_next_one_loads(tmp_path: Path) -> None:
    code = """
from numba.core import event
from aiokv.kernels import get_backend
from aiokv.optim import Adam
with event.install_recorder("numba:compile") as recorder:
    get_backend("cpu").warm_up(Adam(), "float32")
print(len(recorder.buffer) > 0)
"""
    assert [python(code, NUMBA_CACHE_DIR=str(tmp_path)) for _ in range(2)] == ["True", "False"]


def test_compiled_code_goes_by_the_source_it_was_made_from() -> None:
    """Another version of a rule, with the same names, must not find the code of this one in the cache."""
    assert digest("w - rate * g") == digest("w - rate * g") != digest("w + rate * g")


def test_what_was_warmed_up_is_ready_for_memory_as_a_server_has_it() -> None:
    """Numba compiles for each combination of types anew."""
    code = """
import numpy as np
from aiokv.kernels import cpu, get_backend
from aiokv.kernels.plan import plan_update
from aiokv.optim import Adam, Step
def compiled():
    loop = cpu.update_loop(plan_update(Adam()), in_place=True, master=False)
    return [len(kernel.signatures) for kernel in (loop, cpu._accumulate)]
backend = get_backend("cpu")
backend.warm_up(Adam(), "float32")
ready = compiled()
weight, total, slot = (memory.view("float32") for memory in np.zeros((3, 28), np.uint8))
backend.accumulate(total, slot)
backend.update(Adam(), weight, total, backend.new_state(Adam(), weight), Step(5))
print(ready, compiled())
"""
    assert python(code) == "[1, 1] [1, 1]"


def test_integers_are_only_warmed_up_for_rules_that_take_them(reference: Backend) -> None:
    reference.warm_up(Assign(), "int32")
    with pytest.raises(SpecMismatchError, match="int32"):
        reference.warm_up(Adam(), "int32")


def test_float16_does_without_instructions_for_it() -> None:
    """Where Numba is told to make code for any processor, it may use none that only some have."""
    code = """
import numpy as np
from aiokv.kernels import cpu, get_backend
from aiokv.optim import LARS, SGD, Step
assert not cpu.HALF_PRECISION
weight, total = np.ones(2, np.float16), np.ones(2, np.float16)
backend = get_backend("cpu")
backend.accumulate(total, weight)
backend.update(SGD(), weight, total, {}, Step(1, 0.25))
print(total.tolist(), backend.norms(LARS(), 0, weight, weight, {}, Step(1)))
"""
    assert python(code, NUMBA_CPU_NAME="generic") == "[0.5, 0.5] (2.0, 2.0)"
