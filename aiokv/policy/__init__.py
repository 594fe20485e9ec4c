"""Synchronisation policies: which contributions make an update, and which reads wait."""

from __future__ import annotations

from aiokv.policy.asp import ASP
from aiokv.policy.base import (
    ChunkPolicy,
    Closed,
    Decider,
    Decision,
    Dropped,
    Gate,
    Policy,
    RoundPolicy,
    Token,
)
from aiokv.policy.bsp import BSP, Sum
from aiokv.policy.registry import get_policy, policy_class, policy_names

__all__ = [
    "ASP",
    "BSP",
    "ChunkPolicy",
    "Closed",
    "Decider",
    "Decision",
    "Dropped",
    "Gate",
    "Policy",
    "RoundPolicy",
    "Sum",
    "Token",
    "get_policy",
    "policy_class",
    "policy_names",
]
