"""Policies by name: those of aiokv, and those that installed packages bring by an entry point."""

from __future__ import annotations

import functools
from importlib.metadata import entry_points
from typing import Any, Final

from aiokv.errors import PolicyError
from aiokv.policy.adasync import AdaSync
from aiokv.policy.asp import ASP
from aiokv.policy.base import ChunkPolicy, Policy, RoundPolicy
from aiokv.policy.bsp import BSP, Sum
from aiokv.policy.dssp import DSSP
from aiokv.policy.kofn import Backup, KAsync, KBatchAsync, KBatchSync, KSync
from aiokv.policy.options import parse
from aiokv.policy.quorum import Quorum
from aiokv.policy.ringmaster import Ringmaster
from aiokv.policy.round_robin import RoundRobin
from aiokv.policy.sampling import PBSP, PSSP
from aiokv.policy.ssp import ESSP, SSP
from aiokv.policy.sync_switch import SyncSwitch

ENTRY_POINTS: Final = "aiokv.policies"
"""Group of the entry points under which packages name their policies."""

_POLICIES: Final[dict[str, type[Policy]]] = {
    policy.name: policy
    for policy in (
        *(ASP, AdaSync, BSP, Backup, DSSP, ESSP, KAsync, KBatchAsync, KBatchSync, KSync, PBSP, PSSP),
        *(Quorum, Ringmaster, RoundRobin, SSP, Sum, SyncSwitch),
    )
}


_INSTALLED: Final = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
"""What packages bring. It is looked up once, when this is imported: later there may be an event loop to hold up."""


def policy_names() -> list[str]:
    """Return the names of all policies, those of installed packages included."""
    return sorted({*_POLICIES, *_INSTALLED})


def policy_class(name: str) -> type[Policy]:
    """Return the class of the policies of a name.

    Raises:
        PolicyError: no policy has the name, or what a package brings under it is none.
    """
    if name in _POLICIES:
        return _POLICIES[name]
    if name in _INSTALLED:
        point = _INSTALLED[name]
        found: Any = point.load()
        is_policy = isinstance(found, type) and issubclass(found, ChunkPolicy | RoundPolicy)
        if not is_policy or found.name != name:
            text = f"entry point {name!r} of {ENTRY_POINTS} is {point.value}, which is no policy of that name"
            raise PolicyError(text, expected=f"a ChunkPolicy or RoundPolicy named {name}", got=point.value)
        return _POLICIES.setdefault(name, found)
    known = ", ".join(policy_names())
    raise PolicyError(f"unknown policy {name!r}; known: {known}", expected=known, got=name)


@functools.lru_cache(maxsize=256)
def get_policy(text: str) -> Policy:
    """Return the policy that a text names, such as "bsp", "ssp:3" or "quorum:k=6:deadline=0.5".

    Raises:
        PolicyError: no policy has the name, or an option can't be; the message says how it is written.
    """
    name, *options = text.split(":")
    return parse(policy_class(name), text, options)
