"""Only for the processes of `tests/device/test_simulated_devices.py`, in which the simulator is used, or a device."""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("DEVICE_TESTS") else ["test_*.py"]
