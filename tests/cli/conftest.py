"""What all tests of the `aiokv` command begin with."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run every test as if nothing of the cluster were set in the environment."""
    for name in list(os.environ):
        if name.startswith(("AIOKV_", "DMLC_")):
            monkeypatch.delenv(name)
