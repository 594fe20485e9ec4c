"""Synchronisation policies by name."""

from __future__ import annotations

from aiokv.errors import PolicyError
from aiokv.policy.asp import ASP
from aiokv.policy.base import Policy
from aiokv.policy.bsp import BSP, Sum

__all__ = ["ASP", "BSP", "Policy", "Sum", "get_policy"]

_POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (ASP, BSP, Sum)}


def get_policy(name: str) -> Policy:
    """Return the policy of that name.

    Raises:
        PolicyError: no policy has the name; the message lists those that exist.
    """
    try:
        return _POLICIES[name]()
    except KeyError:
        known = ", ".join(sorted(_POLICIES))
        raise PolicyError(f"unknown policy {name!r}; known: {known}", expected=known, got=name) from None
