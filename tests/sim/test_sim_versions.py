"""Equal seeds give equal runs under every Python that aiokv is for.

The interpreters are those of `make versions`, which makes environments for them, and others that are found and happen
to have what the simulator needs. A test is left out where there is none.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

import sim

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(next(iter(sim.__path__))).parent
SCRIPT: Final = Path(__file__).with_name("digests.py")
VERSIONS: Final = ("3.11", "3.12", "3.13")
NEEDED: Final = ("ml_dtypes", "msgspec", "numpy", "simpy")
PROBE: Final = f"""
import importlib.util as util, json, sys
lacking = [name for name in {NEEDED} if util.find_spec(name) is None]
print(json.dumps(["%d.%d" % sys.version_info[:2], lacking]))
"""


def places() -> Iterator[str]:
    """Yield where interpreters may be: environments of tox first, then this one, those of pyenv, and the path's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for folder, pattern in ((ROOT / ".tox", "*/bin/python"), (ROOT / ".tox", "*/Scripts/python.exe")):
        yield from map(str, sorted(folder.glob(pattern)))
    yield sys.executable
    yield from map(str, sorted(pyenv.glob("versions/3.1[1-9]*/bin/python")))
    yield from filter(None, (shutil.which(f"python{version}") for version in VERSIONS))


def output(python: str, *arguments: str, hash_seed: int = 0) -> str:
    """Return what a program prints."""
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    result = subprocess.run([python, *arguments], env=env, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


@functools.cache
def interpreters() -> tuple[dict[str, str], dict[str, str]]:
    """Return an interpreter of each version that has what is needed, and what others lack."""
    able: dict[str, str] = {}
    lacking: dict[str, str] = {}
    for python in dict.fromkeys(places()):
        try:
            version, lacks = json.loads(output(python, "-c", PROBE))
        except (OSError, AssertionError):
            # There may be names on the path behind which there is nothing, as pyenv has them.
            continue
        if lacks:
            lacking.setdefault(version, f"{python} lacks {', '.join(lacks)}; `make versions` makes one that has it")
        else:
            able.setdefault(version, python)
    return able, lacking


@pytest.mark.parametrize(("version", "hash_seed"), [(version, seed) for seed, version in enumerate(VERSIONS, start=1)])
def test_equal_seeds_give_equal_runs_under_this_python_and(version: str, hash_seed: int) -> None:
    able, lacking = interpreters()
    if version not in able:
        pytest.skip(lacking.get(version, f"no Python {version} was found"))
    here = json.loads(output(sys.executable, str(SCRIPT)))
    assert here
    assert json.loads(output(able[version], str(SCRIPT), hash_seed=hash_seed)) == here
