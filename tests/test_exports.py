"""The public names are a promise, and importing them costs little."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import aiokv

PUBLIC = [
    "AiokvError",
    "BatchBalancer",
    "Client",
    "Config",
    "ElasticAveraging",
    "KVStore",
    "LocalSGD",
    "LocalStore",
    "RowSparse",
    "Scheduler",
    "Server",
    "Trainer",
    "__version__",
    "blocking",
    "connect",
    "create",
    "load_config",
    "register_store",
    "split_and_load",
]


def test_public_names() -> None:
    assert aiokv.__all__ == PUBLIC
    assert dir(aiokv) == PUBLIC
    for name in PUBLIC:
        assert getattr(aiokv, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'conect'"):
        _ = aiokv.conect


def test_importing_everything_public_needs_none_of_the_extras() -> None:
    """And a role in the environment starts nothing (MXNet's import never returned)."""
    script = f"""
import sys
for extra in ("numba", "numba_cuda", "simpy", "matplotlib", "scipy", "sklearn"):
    sys.modules[extra] = None
import aiokv
for name in {PUBLIC}:
    getattr(aiokv, name)
aiokv.create("local").init("w", __import__("numpy").zeros(3))
assert "sim" not in sys.modules
"""
    environment = {**os.environ, "DMLC_ROLE": "server", "AIOKV_ROLE": "scheduler"}
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True, env=environment, timeout=50)
