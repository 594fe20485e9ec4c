"""Update rules as typed data: a name and validated parameters. The arithmetic is in `aiokv.kernels`.

No arrays here: a server's decisions compare and log rules, the store carries them out.
"""

from __future__ import annotations

from aiokv.optim.adam import AdaBelief, Adam, Adamax, AdamW, Nadam
from aiokv.optim.adaptive import FTML, AdaDelta, AdaGrad, Ftrl, GroupAdaGrad, RMSProp
from aiokv.optim.base import PRECISIONS, FloatRule, LearningRule, Norms, Optimizer, Step
from aiokv.optim.layerwise import LAMB, LANS, LARS
from aiokv.optim.momentum import DCASGD, NAG, SGD, SGLD, Lion, Signum
from aiokv.optim.own import OwnRule
from aiokv.optim.plain import Accumulate, Assign
from aiokv.optim.registry import RULES, make_optimizer, register, rule_to_params
from aiokv.optim.schedules import (
    SCHEDULES,
    Cosine,
    Factor,
    Linear,
    MultiFactor,
    OneCycle,
    Poly,
    Schedule,
    StepDecay,
    make_schedule,
)

__all__ = [
    "DCASGD",
    "FTML",
    "LAMB",
    "LANS",
    "LARS",
    "NAG",
    "PRECISIONS",
    "RULES",
    "SCHEDULES",
    "SGD",
    "SGLD",
    "Accumulate",
    "AdaBelief",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Assign",
    "Cosine",
    "Factor",
    "FloatRule",
    "Ftrl",
    "GroupAdaGrad",
    "LearningRule",
    "Linear",
    "Lion",
    "MultiFactor",
    "Nadam",
    "Norms",
    "OneCycle",
    "Optimizer",
    "OwnRule",
    "Poly",
    "RMSProp",
    "Schedule",
    "Signum",
    "Step",
    "StepDecay",
    "make_optimizer",
    "make_schedule",
    "register",
    "rule_to_params",
]
