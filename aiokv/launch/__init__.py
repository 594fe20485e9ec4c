"""Launchers: they start a scheduler, servers and workers, show what these print, and end them all together.

`LocalLauncher` starts them as processes on this machine. Another launcher is a class beside it that takes the same
`Job`.
"""

from __future__ import annotations

from aiokv.launch.base import Job, Launcher
from aiokv.launch.local import LocalLauncher
from aiokv.launch.supervisor import Outcome

__all__ = ["Job", "Launcher", "LocalLauncher", "Outcome"]
