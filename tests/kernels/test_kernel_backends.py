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
from aiokv.optim import SGD

if TYPE_CHECKING:
    from collections.abc import Callable


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


def test_auto_does_without_numba_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forget(monkeypatch, "aiokv.kernels.cpu", "numba")
    with caplog.at_level(logging.INFO, "aiokv"):
        assert get_backend().name == "reference"
    assert "numba" in caplog.text


def forget(monkeypatch: pytest.MonkeyPatch, module: str, package: str) -> None:
    """Make the package impossible to import, and the module not yet imported."""
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, module, raising=False)
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
        (floats(), floats(5), r"source must be like target, float32\[4\]; got float32\[5\]"),
        (floats(), floats(dtype="float64"), r"source must be like target, float32\[4\]; got float64\[4\]"),
        (floats().reshape(2, 2), floats().reshape(2, 2), r"target must be one-dimensional.*got shape \(2, 2\)"),
        (np.float32(1), np.float32(1), "target must be a NumPy array; got float32"),
        (floats(8)[::2], floats(), "target must be .*C-contiguous.*strides"),
        (floats(dtype=">f4"), floats(dtype=">f4"), "target must be one of .*in native byte order; got dtype >f4"),
        (floats(dtype="bool"), floats(dtype="bool"), "target must be one of float16, .*; got dtype |b1"),
        (floats(dtype="complex64"), floats(dtype="complex64"), "target must be one of float16, .*; got dtype <c8"),
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


@pytest.mark.parametrize(
    "arrays",
    [
        pytest.param(lambda a, b, c: (a, b, c, a), id="out is weight"),
        pytest.param(lambda a, b, c: (a, b, c, b), id="out is gradient"),
        pytest.param(lambda a, b, c: (a, b, c, c), id="out is momentum_state"),
        pytest.param(lambda a, b, c: (a, b, a, c), id="momentum_state is weight"),
        pytest.param(lambda a, b, c: (a, b, b, c), id="momentum_state is gradient"),
    ],
)
def test_sgd_refuses_arrays_that_overlap(reference: Backend, arrays: Callable[..., tuple[Any, Any, Any, Any]]) -> None:
    with pytest.raises(SpecMismatchError, match="must be apart from"):
        reference.sgd(*arrays(floats(), floats(), floats()), rule=SGD(momentum=0.9))


@pytest.mark.parametrize("name", ["weight", "gradient", "momentum_state", "out"])
def test_sgd_refuses_arrays_of_different_lengths(reference: Backend, name: str) -> None:
    arrays = {each: floats(5 if each == name else 4) for each in ("weight", "gradient", "momentum_state", "out")}
    with pytest.raises(SpecMismatchError, match=r"must be like weight, float32"):
        reference.sgd(**arrays, rule=SGD(momentum=0.9))


@pytest.mark.parametrize("name", ["out", "momentum_state"])
def test_sgd_refuses_to_write_read_only_arrays(reference: Backend, name: str) -> None:
    arrays = {each: floats() for each in ("weight", "gradient", "momentum_state", "out")}
    with pytest.raises(SpecMismatchError, match=f"{name} must be writable"):
        reference.sgd(**arrays | {name: read_only(floats())}, rule=SGD(momentum=0.9))


def test_sgd_refuses_integers(reference: Backend) -> None:
    ints = [floats(dtype="int32") for _ in range(3)]
    with pytest.raises(
        SpecMismatchError, match="weight must be one of float16, float32, float64 for sgd; got dtype int32"
    ):
        reference.sgd(ints[0], ints[1], None, ints[2], SGD())


def test_momentum_needs_a_state(reference: Backend) -> None:
    with pytest.raises(OptimizerError, match=r"momentum 0\.9 needs a momentum state, got None"):
        reference.sgd(floats(), floats(), None, floats(), SGD(momentum=0.9))


def test_a_state_may_be_kept_while_momentum_is_0(reference: Backend) -> None:
    """The rule was changed: the state goes on as the last step."""
    state, out = floats(), floats()
    reference.sgd(floats(), floats(), state, out, SGD(learning_rate=0.5))
    assert (out.tolist(), state.tolist()) == ([0.5] * 4, [-0.5] * 4)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_parameters_that_overflow_the_precision_are_refused(reference: Backend, dtype: str) -> None:
    arrays = [floats(dtype=dtype) for _ in range(3)]
    with pytest.raises(
        OptimizerError, match=rf"sgd on {dtype} arrays: rescale_grad must be at most 3\.4.*got -1e\+300"
    ):
        reference.sgd(arrays[0], arrays[1], None, arrays[2], SGD(rescale_grad=-1e300))
