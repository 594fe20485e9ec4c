"""Devices that read each other's memory; where they can't, the driver copies through the host's memory."""

from __future__ import annotations

import functools
import logging
from typing import Any

from numba import cuda

_logger = logging.getLogger(__name__)


@functools.cache
def connect(device: int, other: int) -> bool:
    """Let a device read another one's memory; tell whether it can. Each pair is asked once in a process."""
    try:
        with cuda.gpus[other]:
            handle = _context().handle
        with cuda.gpus[device]:
            context = _context()
            if not context.can_access_peer(other):
                return False
            context.enable_peer_access(handle)
    except Exception as error:  # noqa: BLE001 - the driver's errors have many classes; copies are slower then
        _logger.warning("CUDA device %d can't read the memory of device %d: %s", device, other, error)
        return False
    return True


def _context() -> Any:
    return cuda.current_context()  # type: ignore[no-untyped-call]
