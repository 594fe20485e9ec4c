"""A folder of a machine for what compression leaves of the gradients of its workers, for those that replace them."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile

from aiokv.errors import ConfigError

RESIDUAL_FOLDER = "AIOKV_RESIDUAL_FOLDER"
SHARED_MEMORY = "/dev/shm"
"""A folder in memory, where the system has one."""


def parent() -> str:
    """Return where such folders are: in memory, if that can be."""
    return SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else tempfile.gettempdir()


def name_of(token: str) -> str:
    """Return the name of a job's folder on each of its hosts: nobody can guess it who does not know the token."""
    return f"aiokv-{hashlib.blake2b(token.encode(), digest_size=16, person=b'residuals').hexdigest()}"


def make(name: str) -> str:
    """Make the folder, unless it is there, and return its path.

    Raises:
        ConfigError: there is something else of that name, or it is somebody else's.
    """
    path = os.path.join(parent(), name)
    os.makedirs(path, mode=0o700, exist_ok=True)
    found = os.lstat(path)
    if os.path.islink(path) or (hasattr(os, "getuid") and found.st_uid != os.getuid()):
        raise ConfigError(f"{path} is not a folder of this user", key="residual_folder", got=path)
    return path


def remove(name: str) -> None:
    """Delete the folder with all that is in it, if it is there."""
    shutil.rmtree(os.path.join(parent(), name), ignore_errors=True)
