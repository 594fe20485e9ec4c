"""What a state machine wants done. Drivers perform these, in order; none of them decides anything.

The modules are by what they are about. All are used from here.
"""

from __future__ import annotations

from aiokv.core.effects.checkpoints import (
    DropSnapshots,
    LoadSnapshots,
    ReadCheckpoint,
    RemoveCheckpoints,
    Snapshot,
    WantedChunk,
    WriteManifest,
    WriteSnapshots,
)
from aiokv.core.effects.chunks import (
    Apply,
    ApplyRows,
    Divide,
    Forget,
    Install,
    InstallRows,
    Norms,
    Restore,
    Retire,
    Skip,
    Sums,
)
from aiokv.core.effects.node import Connect, Disconnect, Log, Refuse, Report, Send, Stop
from aiokv.core.effects.payloads import (
    URGENT,
    CallBuffer,
    CallMemory,
    CallTensors,
    EncodedParts,
    Payload,
    Replica,
    StoredChunk,
    StoredChunks,
    StoredCopy,
    StoredDifference,
    StoredRows,
    StoredSlots,
    StoredState,
    StoredSum,
)
from aiokv.core.effects.server import Configure, Execute, ForgetReplicas, Hold, LetGo, Prepare, StartNode
from aiokv.core.effects.slots import Combine, Compensate, Decode, Fold, Free, JoinRows, Split, Weigh, Widen, freed
from aiokv.core.effects.worker import (
    Allocate,
    Complete,
    Deallocate,
    Deliver,
    Discard,
    Encode,
    Fail,
    ForgetResiduals,
    KeepResiduals,
    Release,
    Settle,
    WriteResiduals,
)

__all__ = [
    "URGENT",
    "Allocate",
    "Apply",
    "ApplyRows",
    "CallBuffer",
    "CallMemory",
    "CallTensors",
    "Combine",
    "Compensate",
    "Complete",
    "Configure",
    "Connect",
    "Deallocate",
    "Decode",
    "Deliver",
    "Discard",
    "Disconnect",
    "Divide",
    "DropSnapshots",
    "Effect",
    "Encode",
    "EncodedParts",
    "Execute",
    "Fail",
    "Fold",
    "Forget",
    "ForgetReplicas",
    "ForgetResiduals",
    "Free",
    "Hold",
    "Install",
    "InstallRows",
    "JoinRows",
    "KeepResiduals",
    "LetGo",
    "LoadSnapshots",
    "Log",
    "Norms",
    "Payload",
    "Prepare",
    "ReadCheckpoint",
    "Refuse",
    "Release",
    "RemoveCheckpoints",
    "Replica",
    "Report",
    "Restore",
    "Retire",
    "Send",
    "Settle",
    "Skip",
    "Snapshot",
    "Split",
    "StartNode",
    "Stop",
    "StoredChunk",
    "StoredChunks",
    "StoredCopy",
    "StoredDifference",
    "StoredRows",
    "StoredSlots",
    "StoredState",
    "StoredSum",
    "Sums",
    "WantedChunk",
    "Weigh",
    "Widen",
    "WriteManifest",
    "WriteResiduals",
    "WriteSnapshots",
    "freed",
]

Effect = (
    Connect
    | Send
    | Refuse
    | Disconnect
    | Log
    | Stop
    | Complete
    | Fail
    | Release
    | Discard
    | Allocate
    | Deliver
    | Deallocate
    | Encode
    | Settle
    | ForgetResiduals
    | KeepResiduals
    | WriteResiduals
    | Install
    | Prepare
    | Decode
    | ForgetReplicas
    | Fold
    | Weigh
    | Compensate
    | Combine
    | Norms
    | Apply
    | Skip
    | Retire
    | InstallRows
    | ApplyRows
    | JoinRows
    | Split
    | Divide
    | Restore
    | Snapshot
    | DropSnapshots
    | WriteSnapshots
    | ReadCheckpoint
    | LoadSnapshots
    | WriteManifest
    | RemoveCheckpoints
    | Forget
    | Hold
    | LetGo
    | Widen
    | Free
    | Configure
    | Execute
    | StartNode
)
