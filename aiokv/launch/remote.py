"""What a host is told that is to run a node for this one."""

from __future__ import annotations

import os
import shlex
import sys

import msgspec

HANDED_OVER = ("AIOKV_", "DMLC_", "PYTHON")
"""What variables that another host is to know begin with."""


class Order(msgspec.Struct, frozen=True):
    """What is to run: a command line, in which folder, and what its environment has besides that of the host.

    It goes over stdin, because every user of a machine can see command lines, and the environment has the token. With
    `scratch` the host has a folder of that name for what compression leaves (`aiokv.launch.scratch`), from the first
    order on until one comes without a command.
    """

    command: tuple[str, ...]
    folder: str
    environ: dict[str, str]
    scratch: str = ""

    def line(self) -> bytes:
        """Return it as it is sent."""
        return msgspec.json.encode(self) + b"\n"


def make_order(command: tuple[str, ...], environ: dict[str, str], scratch: str = "") -> Order:
    """Return what another host is to run for a node, in the folder with the same name as this one."""
    told = {name: value for name, value in environ.items() if name.startswith(HANDED_OVER)}
    return Order(command, os.getcwd(), told, scratch)


def command_line(remote: str, host: str) -> list[str]:
    """Return the command line that makes a host read an order, with the Python that has the same path as this one."""
    return [*shlex.split(remote.format(host=host)), sys.executable, "-m", "aiokv.launch.host"]
