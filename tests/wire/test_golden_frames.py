"""The bytes of every frame type, written by hand from the header's layout and the MessagePack specification.

A frame of these bytes must mean the same in every release that speaks the same protocol version. When a test here
fails, the protocol has changed: raise `PROTOCOL_VERSION`, and only then write new bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest

from aiokv.types import Role
from aiokv.wire.frames import HEADER_BYTES, decode_header, decode_message, encode_frame
from aiokv.wire.messages import (
    FRAME_TYPES,
    PROTOCOL_VERSION,
    TYPE_OF,
    WITH_PAYLOAD,
    Accepted,
    Arrived,
    Attach,
    AttachServer,
    AttachStandby,
    AwaitRound,
    Barrier,
    Boundary,
    BoundaryClock,
    Bundled,
    Challenge,
    ChangeOptimizer,
    CheckpointAt,
    CheckpointClock,
    CheckpointDropped,
    CheckpointFile,
    CheckpointPart,
    CheckpointRest,
    Command,
    CommandResult,
    Copy,
    CopyContribution,
    CopyDecisions,
    CopyDropped,
    CopyPush,
    CopySettings,
    CopySettled,
    CopyTotals,
    Delete,
    Done,
    DropStandby,
    Enter,
    Entered,
    Error,
    FillAgain,
    Finish,
    ForgetKey,
    Freed,
    Gathered,
    GetPushes,
    GetRounds,
    GetRules,
    GetState,
    GetTally,
    GetView,
    GetWaiting,
    Goodbye,
    Heartbeat,
    Hello,
    HostStandby,
    Init,
    InitBundle,
    InitRows,
    Leave,
    LeaveServer,
    MemberState,
    Message,
    Met,
    Opened,
    Passed,
    Ping,
    PlanLeave,
    Pong,
    Proof,
    Pull,
    PullBundle,
    PullRows,
    Push,
    PushBundle,
    Pushes,
    PushRows,
    PutRules,
    PutState,
    RankCount,
    RankTally,
    Reached,
    Register,
    Replicate,
    Replicated,
    ReportLoss,
    RulesState,
    ServerEntry,
    SetCompression,
    SetOptimizer,
    SetPolicy,
    Settled,
    Share,
    Shared,
    StandbyEntry,
    StandbyReady,
    State,
    Stop,
    Sums,
    Switched,
    Tally,
    Totals,
    Value,
    Verdict,
    View,
    Waiting,
    WaitingCall,
    Welcome,
    Whole,
    WorkerEntry,
)

LOW = "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
HIGH = "e0e1e2e3e4e5e6e7e8e9eaebecedeeeff0f1f2f3f4f5f6f7f8f9fafbfcfdfeff"


class Golden(NamedTuple):
    """A frame as it is meant, and as it is written: header (magic, ..., checksum) and control part."""

    message: Message
    request: int
    payload_nbytes: int
    header: str
    control: str

    @property
    def data(self) -> bytes:
        return bytes.fromhex(self.header + self.control)


STANDBY = StandbyEntry(*("t/1", "t", 4, "i", 8, "ready"), StandbyEntry("v/1", "v", 5, "j", 9, "filling"))

GOLDEN = [
    Golden(
        Hello("ml", bytes.fromhex(LOW)),
        0,
        0,
        "41494f4b 01 01 0000  0000000000000000  0000000000000000 26000000  00000000",
        f"92  a2 6d6c  c4 20 {LOW}",
    ),
    Golden(
        Challenge(bytes.fromhex(HIGH), bytes.fromhex(LOW)),
        0,
        0,
        "41494f4b 01 02 0000  0000000000000000  0000000000000000 45000000  00000000",
        f"92  c4 20 {HIGH}  c4 20 {LOW}",
    ),
    Golden(
        Proof(bytes.fromhex(HIGH)),
        0,
        0,
        "41494f4b 01 03 0000  0000000000000000  0000000000000000 23000000  00000000",
        f"91  c4 20 {HIGH}",
    ),
    Golden(
        Welcome(),
        0,
        0,
        "41494f4b 01 04 0000  0000000000000000  0000000000000000 01000000  00000000",
        "90",
    ),
    Golden(
        Goodbye(12, "bye"),
        0,
        0,
        "41494f4b 01 05 0000  0000000000000000  0000000000000000 06000000  00000000",
        "92  0c  a3 627965",
    ),
    Golden(
        Share(7000, 11, 4194304, bytes.fromhex(LOW[:32])),
        0,
        0,
        "41494f4b 01 06 0000  0000000000000000  0000000000000000 1c000000  00000000",
        f"94  cd 1b58  0b  ce 00400000  c4 10 {LOW[:32]}",
    ),
    Golden(
        Shared(bytes.fromhex(HIGH[:32])),
        0,
        0,
        "41494f4b 01 07 0000  0000000000000000  0000000000000000 13000000  00000000",
        f"91  c4 10 {HIGH[:32]}",
    ),
    Golden(
        Freed(1048576),
        0,
        0,
        "41494f4b 01 08 0000  0000000000000000  0000000000000000 06000000  00000000",
        "91  ce 00100000",
    ),
    Golden(
        Ping(),
        0,
        0,
        "41494f4b 01 09 0000  0000000000000000  0000000000000000 01000000  00000000",
        "90",
    ),
    Golden(
        Pong(),
        0,
        0,
        "41494f4b 01 0a 0000  0000000000000000  0000000000000000 01000000  00000000",
        "90",
    ),
    Golden(
        Register(Role.WORKER, "w0", 1, "10.0.0.2", 7777, 30.0, 5, 3, 2, 4),
        1,
        0,
        "41494f4b 01 10 0000  0100000000000000  0000000000000000 25000000  00000000",
        "9a  a6 776f726b6572  a2 7730  01  a8 31302e302e302e32  cd 1e61  cb 403e000000000000  05  03  02  04",
    ),
    Golden(
        View(
            epoch=3,
            workers=(WorkerEntry(0, "w0", 1), WorkerEntry(1, "w1", 2, "lost", "no heartbeat", 7, 9)),
            servers=(
                ServerEntry(0, "s0", 1, "10.0.0.3", 9000),
                ServerEntry(1, "s", 2, "h", 9, standby=STANDBY, process="u"),
            ),
            heartbeat=0.5,
            chunk_bytes=524288,
            split_bytes=1048576,
            death_timeout=10.0,
            on_worker_loss="respawn",
            checkpoint_at=100,
            checkpoints="/ck",
            run=2,
            resume="/ck/r",
            replication=2,
            declared=1,
            barriers=5,
            founder=4,
            told=7,
        ),
        258,
        0,
        "41494f4b 01 11 0000  0201000000000000  0000000000000000 b5000000  00000000",
        "dc 0011  03"
        "  92  97 00 a2 7730 01 a5 616c697665 a0 00 00"
        "      97 01 a2 7731 02 a4 6c6f7374 ac 6e6f20686561727462656174 07 09"
        "  92  99 00 a2 7330 01 a8 31302e302e302e33 cd 2328 a5 616c697665 a0 c0 a0"
        "      99 01 a1 73 02 a1 68 09 a5 616c697665 a0  97 a3 742f31 a1 74 04 a1 69 08 a5 7265616479"
        "          97 a3 762f31 a1 76 05 a1 6a 09 a7 66696c6c696e67 c0  a1 75"
        "  cb 3fe0000000000000  ce 00080000  ce 00100000  cb 4024000000000000"
        "  a7 7265737061776e  64 a3 2f636b 02 a5 2f636b2f72 02 01 05 04 07",
    ),
    Golden(
        Heartbeat(),
        0,
        0,
        "41494f4b 01 12 0000  0000000000000000  0000000000000000 01000000  00000000",
        "90",
    ),
    Golden(
        Barrier("epoch", 10.0, (1, 3), {"n": 2}, 7),
        3,
        0,
        "41494f4b 01 13 0000  0300000000000000  0000000000000000 18000000  00000000",
        "95  a5 65706f6368  cb 4024000000000000  92 01 03  81 a1 6e 02  07",
    ),
    Golden(
        Leave(early=True, told=6),
        4,
        0,
        "41494f4b 01 14 0000  0400000000000000  0000000000000000 03000000  00000000",
        "92  c3 06",
    ),
    Golden(
        Stop("done"),
        0,
        0,
        "41494f4b 01 15 0000  0000000000000000  0000000000000000 06000000  00000000",
        "91  a4 646f6e65",
    ),
    Golden(
        Finish(told=6),
        4,
        0,
        "41494f4b 01 16 0000  0400000000000000  0000000000000000 02000000  00000000",
        "91  06",
    ),
    Golden(
        Opened("b", (1, 3), 7, ((0, {"n": 2}), (1, {}))),
        0,
        0,
        "41494f4b 01 17 0000  0000000000000000  0000000000000000 11000000  00000000",
        "94  a1 62  92 01 03  07  92  92 00 81 a1 6e 02  92 01 80",
    ),
    Golden(
        Attach(1, "w1", 300, 2, 30.0),
        5,
        0,
        "41494f4b 01 20 0000  0500000000000000  0000000000000000 12000000  00000000",
        "95  01  a2 7731  cd 012c  02  cb 403e000000000000",
    ),
    Golden(
        Init("w", (2, 3), "float32", 0, 6, "bsp", 30.0, (0, 2), b"\x01\xff", 3),
        6,
        24,
        "41494f4b 01 21 0000  0600000000000000  1800000000000000 25000000  00000000",
        "9a  a1 77  92 02 03  a7 666c6f61743332  00  06  a3 627370  cb 403e000000000000  92 00 02  c4 02 01ff  03",
    ),
    Golden(
        Push(2**63 - 1, (), "float64", 0, 1, 128, 65536, True, 1.5, 7, 300, 2**63 - 1),
        2**64 - 1,
        8,
        "41494f4b 01 22 0000  ffffffffffffffff  0800000000000000 35000000  00000000",
        "9e  cf 7fffffffffffffff  90  a7 666c6f61743634  00  01  cc 80  ce 00010000  c3  cb 3ff8000000000000  07"
        "cd 012c  cf 7fffffffffffffff  00  c0",
    ),
    Golden(
        Pull("w", (2, 3), "float32", 3, 6, 4, 30.0, -9, 0, 0, 5),
        7,
        0,
        "41494f4b 01 23 0000  0700000000000000  0000000000000000 1e000000  00000000",
        "9b  a1 77  92 02 03  a7 666c6f61743332  03  06  04  cb 403e000000000000  f7  00  00  05",
    ),
    Golden(
        SetOptimizer("sgd", {"lr": 0.1, "nesterov": False}, "mean", 30.0, "1/(1+tau)", trial=True),
        8,
        0,
        "41494f4b 01 24 0000  0800000000000000  0000000000000000 35000000  00000000",
        "96  a3 736764  82  a2 6c72 cb 3fb999999999999a  a8 6e65737465726f76 c2  a4 6d65616e  cb 403e000000000000"
        "  a9 312f28312b74617529  c3",
    ),
    Golden(
        InitBundle(("a", "b"), ((2,), ()), "float32", "bsp", 2.0, (), (b"\x01", b""), 4),
        9,
        12,
        "41494f4b 01 25 0000  0900000000000000  0c00000000000000 27000000  00000000",
        "98  92 a1 61 a1 62  92 91 02 90  a7 666c6f61743332  a3 627370  cb 4000000000000000  90  92 c4 01 01 c4 00  04",
    ),
    Golden(
        PushBundle(3, 4, 3, True, 2.0, 0, 5, 6, 7, Whole(5, 2, 3)),
        9,
        12,
        "41494f4b 01 26 0000  0900000000000000  0c00000000000000 16000000  00000000",
        "9a  03  04  03  c3  cb 4000000000000000  00  05  06  07  93 05 02 03",
    ),
    Golden(
        PullBundle(3, 4, 2.0, 0, 7, 5),
        9,
        0,
        "41494f4b 01 27 0000  0900000000000000  0000000000000000 0f000000  00000000",
        "96  03  04  cb 4000000000000000  00  07  05",
    ),
    Golden(
        ChangeOptimizer(7, {"wd": 0.5}, 2.0),
        9,
        0,
        "41494f4b 01 28 0000  0900000000000000  0000000000000000 18000000  00000000",
        "93  07  81 a2 7764 cb 3fe0000000000000  cb 4000000000000000",
    ),
    Golden(
        Delete(("a", "b"), 2.0, 5),
        9,
        0,
        "41494f4b 01 29 0000  0900000000000000  0000000000000000 10000000  00000000",
        "93  92 a1 61 a1 62  cb 4000000000000000  05",
    ),
    Golden(
        InitRows("w", (8, 1), "int8", 4, 8, 0, 1, 1, "bsp", 2.0, (0, 2), b"\x01", True, {"name": "zeros"}, 6),
        9,
        9,
        "41494f4b 01 2a 0000  0900000000000000  0900000000000000 31000000  00000000",
        "9f  a1 77  92 08 01  a4 696e7438  04  08  00  01  01  a3 627370  cb 4000000000000000  92 00 02  c4 01 01  c3"
        "  81 a4 6e616d65 a5 7a65726f73  06",
    ),
    Golden(
        PushRows("w", (8, 1), "int8", 4, 8, 2, 1, 3, 4, 3, 2.0, 0, 5),
        9,
        9,
        "41494f4b 01 2b 0000  0900000000000000  0900000000000000 1e000000  00000000",
        "9e  a1 77  92 08 01  a4 696e7438  04  08  02  01  03  04  03  cb 4000000000000000  00  05  c0",
    ),
    Golden(
        PullRows("w", (8, 1), "int8", 4, 8, (5).to_bytes(8, "little"), 4, 2.0, -1, 0, 5),
        9,
        0,
        "41494f4b 01 2c 0000  0900000000000000  0000000000000000 24000000  00000000",
        "9b  a1 77  92 08 01  a4 696e7438  04  08  c4 08 0500000000000000  04  cb 4000000000000000  ff  00  05",
    ),
    Golden(
        AwaitRound("w", 4, 2.0),
        9,
        0,
        "41494f4b 01 2d 0000  0900000000000000  0000000000000000 0d000000  00000000",
        "93  a1 77  04  cb 4000000000000000",
    ),
    Golden(
        ReportLoss(0.5, 2.0),
        9,
        0,
        "41494f4b 01 2e 0000  0900000000000000  0000000000000000 13000000  00000000",
        "92  cb 3fe0000000000000  cb 4000000000000000",
    ),
    Golden(
        Done(5),
        9,
        0,
        "41494f4b 01 30 0000  0900000000000000  0000000000000000 03000000  00000000",
        "92  05  a0",
    ),
    Golden(
        Value(70000, round=9),
        10,
        4,
        "41494f4b 01 31 0000  0a00000000000000  0400000000000000 09000000  00000000",
        "94  ce 00011170  00  a0  09",
    ),
    Golden(
        Error(42, "key 'w' has a value", {"key": "w", "ranks": [0, 2], "round": None}),
        11,
        0,
        "41494f4b 01 32 0000  0b00000000000000  0000000000000000 2d000000  00000000",
        "93  2a  b3 6b65792027772720686173206120 76616c7565"
        "  83  a3 6b6579 a1 77  a5 72616e6b73 92 00 02  a5 726f756e64 c0",
    ),
    Golden(
        Bundled(3),
        9,
        0,
        "41494f4b 01 33 0000  0900000000000000  0000000000000000 02000000  00000000",
        "91  03",
    ),
    Golden(
        Reached(5),
        9,
        0,
        "41494f4b 01 34 0000  0900000000000000  0000000000000000 02000000  00000000",
        "91  05",
    ),
    Golden(
        AttachServer(2, "server-2", 7, 3, 2.0),
        1,
        0,
        "41494f4b 01 40 0000  0100000000000000  0000000000000000 16000000  00000000",
        "95  02  a8 7365727665722d32  07  03  cb 4000000000000000",
    ),
    Golden(
        Sums("w", 100, 3, 1, (0.5, 2.0)),
        2,
        0,
        "41494f4b 01 41 0000  0200000000000000  0000000000000000 19000000  00000000",
        "95  a1 77  64  03  01  92 cb 3fe0000000000000 cb 4000000000000000",
    ),
    Golden(
        Totals((0.5,)),
        2,
        0,
        "41494f4b 01 42 0000  0200000000000000  0000000000000000 0b000000  00000000",
        "91  91 cb 3fe0000000000000",
    ),
    Golden(
        SetCompression(1, "2bit", {"threshold": 0.5}, "", {}, 2.0),
        9,
        0,
        "41494f4b 01 46 0000  0900000000000000  0000000000000000 26000000  00000000",
        "96  01  a4 32626974  81 a9 7468726573686f6c64 cb 3fe0000000000000  a0  80  cb 4000000000000000",
    ),
    Golden(
        GetState("w", (8, 1), "int8", 4, 8, True, 2.0, ("mean",)),
        9,
        0,
        "41494f4b 01 48 0000  0900000000000000  0000000000000000 1d000000  00000000",
        "98  a1 77  92 08 01  a4 696e7438  04  08  c3  cb 4000000000000000  91 a4 6d65616e",
    ),
    Golden(
        State(5),
        9,
        16,
        "41494f4b 01 49 0000  0900000000000000  1000000000000000 02000000  00000000",
        "91  05",
    ),
    Golden(
        PutState("w", (8, 1), "int8", 4, 8, 2.0, "bsp", (1,), True, 3, False, {"name": "zeros"}),
        9,
        16,
        "41494f4b 01 4a 0000  0900000000000000  1000000000000000 2b000000  00000000",
        "9c  a1 77  92 08 01  a4 696e7438  04  08  cb 4000000000000000"
        "  a3 627370  91 01  c3  03  c2  81 a4 6e616d65 a5 7a65726f73",
    ),
    Golden(
        GetRules(2.0),
        9,
        0,
        "41494f4b 01 4b 0000  0900000000000000  0000000000000000 0a000000  00000000",
        "91  cb 4000000000000000",
    ),
    Golden(
        Command("sum", {"of": [1, 2]}, 2.0),
        9,
        0,
        "41494f4b 01 4c 0000  0900000000000000  0000000000000000 15000000  00000000",
        "93  a3 73756d  81 a2 6f66 92 01 02  cb 4000000000000000",
    ),
    Golden(
        CommandResult({"n": 3}),
        9,
        0,
        "41494f4b 01 4d 0000  0900000000000000  0000000000000000 05000000  00000000",
        "91  81 a1 6e 03",
    ),
    Golden(
        RulesState("sgd", {"wd": 0.5}, "sum", ((4, {"wd": 1.0}),), 3, "1/(1+tau)"),
        9,
        0,
        "41494f4b 01 4e 0000  0900000000000000  0000000000000000 31000000  00000000",
        "96  a3 736764  81 a2 7764 cb 3fe0000000000000  a3 73756d  91 92 04 81 a2 7764 cb 3ff0000000000000  03"
        "  a9 312f28312b74617529",
    ),
    Golden(
        PutRules("sgd", {"wd": 0.5}, "sum", ((4, {"wd": 1.0}),), 3, 2.0, "1/(1+tau)"),
        9,
        0,
        "41494f4b 01 4f 0000  0900000000000000  0000000000000000 3b000000  00000000",
        "98  a3 736764  81 a2 7764 cb 3fe0000000000000  a3 73756d  91 92 04 81 a2 7764 cb 3ff0000000000000  03"
        "  cb 4000000000000000  a9 312f28312b74617529  c2",
    ),
    Golden(
        Met(((0, {"n": 2}), (1, {})), 7),
        9,
        0,
        "41494f4b 01 50 0000  0900000000000000  0000000000000000 0c000000  00000000",
        "92  92  92 00 81 a1 6e 02  92 01 80  07",
    ),
    Golden(
        GetRounds("k_sync:2", (0, 2), 3),
        9,
        0,
        "41494f4b 01 51 0000  0900000000000000  0000000000000000 0e000000  00000000",
        "93  a8 6b5f73796e633a32  92 00 02  03",
    ),
    Golden(
        Arrived("k_sync:2", (0, 2), 1, 7, 3, 2),
        9,
        0,
        "41494f4b 01 52 0000  0900000000000000  0000000000000000 11000000  00000000",
        "96  a8 6b5f73796e633a32  92 00 02  01  07  03  02",
    ),
    Golden(
        Accepted(),
        9,
        0,
        "41494f4b 01 53 0000  0900000000000000  0000000000000000 01000000  00000000",
        "90",
    ),
    Golden(
        Verdict(3, "", ((3, ((0, 5), (2, 4))),)),
        9,
        0,
        "41494f4b 01 54 0000  0900000000000000  0000000000000000 0d000000  00000000",
        "93  03  a0  91 92 03 92 92 00 05 92 02 04",
    ),
    Golden(
        GetTally(2.0),
        9,
        0,
        "41494f4b 01 55 0000  0900000000000000  0000000000000000 0a000000  00000000",
        "91  cb 4000000000000000",
    ),
    Golden(
        Tally({1: RankTally(2, {"late": 1}, {0: 2}, 0.5, 3)}),
        9,
        0,
        "41494f4b 01 56 0000  0900000000000000  0000000000000000 19000000  00000000",
        "91  81 01 95 02 81 a4 6c617465 01 81 00 02 cb 3fe0000000000000 03",
    ),
    Golden(
        SetPolicy("ssp:1", ("w", 7), "bsp", (0, 2), 2.0, 6),
        9,
        0,
        "41494f4b 01 57 0000  0900000000000000  0000000000000000 1d000000  00000000",
        "97  a5 7373703a31  92 a1 77 07  a3 627370  92 00 02  cb 4000000000000000  06  c2",
    ),
    Golden(
        Switched((7,), "k_sync:2", (), 2.0),
        9,
        0,
        "41494f4b 01 58 0000  0900000000000000  0000000000000000 16000000  00000000",
        "94  91 07  a8 6b5f73796e633a32  90  cb 4000000000000000",
    ),
    Golden(
        GetPushes("w", (2, 3), "float32", 3, 6, 2.0),
        9,
        0,
        "41494f4b 01 59 0000  0900000000000000  0000000000000000 19000000  00000000",
        "96  a1 77  92 02 03  a7 666c6f61743332  03  06  cb 4000000000000000",
    ),
    Golden(
        Pushes(4, 7, "bsp"),
        9,
        0,
        "41494f4b 01 5a 0000  0900000000000000  0000000000000000 07000000  00000000",
        "93  04  07  a3 627370",
    ),
    Golden(
        Enter(2.0),
        9,
        0,
        "41494f4b 01 5b 0000  0900000000000000  0000000000000000 0a000000  00000000",
        "91  cb 4000000000000000",
    ),
    Golden(
        Entered(7),
        9,
        0,
        "41494f4b 01 5c 0000  0900000000000000  0000000000000000 02000000  00000000",
        "91  07",
    ),
    Golden(
        Boundary(7, 2),
        0,
        0,
        "41494f4b 01 5d 0000  0000000000000000  0000000000000000 03000000  00000000",
        "92  07  02",
    ),
    Golden(
        BoundaryClock(7, 9, "no", waits=True),
        0,
        0,
        "41494f4b 01 5e 0000  0000000000000000  0000000000000000 07000000  00000000",
        "94  07  09  a2 6e6f  c3",
    ),
    Golden(
        Gathered(3, 7, 5, 2, (4,)),
        9,
        0,
        "41494f4b 01 5f 0000  0900000000000000  0000000000000000 07000000  00000000",
        "95  03  07  05  02  91 04",
    ),
    Golden(
        Settled("late"),
        9,
        0,
        "41494f4b 01 60 0000  0900000000000000  0000000000000000 06000000  00000000",
        "91  a4 6c617465",
    ),
    Golden(
        GetView(),
        0,
        0,
        "41494f4b 01 61 0000  0000000000000000  0000000000000000 01000000  00000000",
        "90",
    ),
    Golden(
        Passed(7),
        0,
        0,
        "41494f4b 01 62 0000  0000000000000000  0000000000000000 02000000  00000000",
        "91  07",
    ),
    Golden(
        PlanLeave(7),
        9,
        0,
        "41494f4b 01 63 0000  0900000000000000  0000000000000000 02000000  00000000",
        "91  07",
    ),
    Golden(
        CheckpointAt(7),
        0,
        0,
        "41494f4b 01 64 0000  0000000000000000  0000000000000000 02000000  00000000",
        "91  07",
    ),
    Golden(
        CheckpointClock(7, 9),
        0,
        0,
        "41494f4b 01 65 0000  0000000000000000  0000000000000000 03000000  00000000",
        "92  07  09",
    ),
    Golden(
        CheckpointPart(7, CheckpointFile("p", 300, "ab", 40, "cd"), ""),
        0,
        0,
        "41494f4b 01 66 0000  0000000000000000  0000000000000000 10000000  00000000",
        "93  07  95 a1 70 cd 012c a2 6162 28 a2 6364  a0",
    ),
    Golden(
        CheckpointRest(7),
        0,
        0,
        "41494f4b 01 67 0000  0000000000000000  0000000000000000 02000000  00000000",
        "91  07",
    ),
    Golden(
        CheckpointDropped(7),
        0,
        0,
        "41494f4b 01 68 0000  0000000000000000  0000000000000000 02000000  00000000",
        "91  07",
    ),
    Golden(
        GetWaiting(),
        10,
        0,
        "41494f4b 01 6a 0000  0a00000000000000  0000000000000000 01000000  00000000",
        "90",
    ),
    Golden(
        Waiting(
            3,
            (WaitingCall("rank 1 (b)", "key 7", "no norms", 0.5, (0,), 7, 2),),
            (MemberState(Role.SERVER, -1, "s", "lost", "gone", "h", 9, 2.0),),
            {"lost": 1},
        ),
        11,
        0,
        "41494f4b 01 6b 0000  0b00000000000000  0000000000000000 54000000  00000000",
        "94  03  91 97 aa 72616e6b203120286229 a5 6b65792037 a8 6e6f206e6f726d73 cb 3fe0000000000000 91 00 07 02"
        "  91 98 a6 736572766572 ff a1 73 a4 6c6f7374 a4 676f6e65 a1 68 09 cb 4000000000000000  81 a4 6c6f7374 01",
    ),
    Golden(
        HostStandby(1, "t/1"),
        0,
        0,
        "41494f4b 01 6e 0000  0000000000000000  0000000000000000 06000000  00000000",
        "92  01  a3 742f31",
    ),
    Golden(
        StandbyReady(1, "t/1"),
        0,
        0,
        "41494f4b 01 6f 0000  0000000000000000  0000000000000000 06000000  00000000",
        "92  01  a3 742f31",
    ),
    Golden(
        DropStandby(1, "t/1"),
        0,
        0,
        "41494f4b 01 70 0000  0000000000000000  0000000000000000 06000000  00000000",
        "92  01  a3 742f31",
    ),
    Golden(
        LeaveServer(),
        4,
        0,
        "41494f4b 01 71 0000  0400000000000000  0000000000000000 01000000  00000000",
        "90",
    ),
    Golden(
        AttachStandby(1, "s", 3, 2, 1.5),
        7,
        0,
        "41494f4b 01 72 0000  0700000000000000  0000000000000000 0f000000  00000000",
        "95  01  a1 73  03  02  cb 3ff8000000000000",
    ),
    Golden(
        Copy(
            *(5, ("w",), ((3,),), (b"d",), "float32", 0, 3, "bsp", (1,), 7, 2, (RankCount(1, 7, 2, 9, 6, 3),)),
            *(True, False, {}, 8, (4, 5), "asp", 6),
        ),
        5,
        20,
        "41494f4b 01 73 0000  0500000000000000  1400000000000000 34000000  00000000",
        "dc0013  05  91 a1 77  91 91 03  91 c4 01 64  a7 666c6f61743332  00  03  a3 627370  91 01  07  02"
        "  91 96 01 07 02 09 06 03  c3  c2  80  08  92 04 05  a3 617370  06",
    ),
    Golden(
        Replicate(6, "w", 0, 8, ((1, 8, 7, 9),), 9, 2, (((1.5,),),), True, (4,), (0.5,), 3),
        6,
        12,
        "41494f4b 01 74 0000  0600000000000000  0c00000000000000 28000000  00000000",
        "9c  06  a1 77  00  08  91 94 01 08 07 09  09  02  91 91 91 cb 3ff8000000000000  c3  91 04"
        "  91 cb 3fe0000000000000  03",
    ),
    Golden(
        CopySettings(
            4,
            RulesState("sgd", {}, "sum", (), 7),
            ((1, SetCompression(1, "2bit", {}, "", {}, 1.5)),),
            ((0, ("a",)),),
            1,
        ),
        4,
        0,
        "41494f4b 01 75 0000  0400000000000000  0000000000000000 2d000000  00000000",
        "95  04  96 a3 736764 80 a3 73756d 90 07 a1 31  91 92 01 96 01 a4 32626974 80 a0 80 cb 3ff8000000000000"
        "  91 92 00 91 a1 61  01",
    ),
    Golden(
        ForgetKey(9, "w"),
        9,
        0,
        "41494f4b 01 76 0000  0900000000000000  0000000000000000 04000000  00000000",
        "92  09  a1 77",
    ),
    Golden(
        Replicated(6),
        0,
        0,
        "41494f4b 01 77 0000  0000000000000000  0000000000000000 02000000  00000000",
        "91  06",
    ),
    Golden(
        CopyTotals(7, "w", ((2, 0, (1.5, 2.0)),)),
        7,
        0,
        "41494f4b 01 78 0000  0700000000000000  0000000000000000 1b000000  00000000",
        "93  07  a1 77  91  93 02 00 92 cb 3ff8000000000000 cb 4000000000000000",
    ),
    Golden(
        CopyDecisions(8, "a", (1,), ((1, 5, 4, ""), (0, 6, 0, "late")), ((1, 2),), ((("w",), (0,)),)),
        8,
        0,
        "41494f4b 01 79 0000  0800000000000000  0000000000000000 20000000  00000000",
        "96  08  a1 61  91 01  92 94 01 05 04 a0 94 00 06 00 a4 6c617465  91 92 01 02  91 92 91 a1 77 91 00",
    ),
    Golden(
        CopyDropped(9, "w", 0, 1, 5, 6, "late"),
        9,
        0,
        "41494f4b 01 7a 0000  0900000000000000  0000000000000000 0d000000  00000000",
        "97  09  a1 77  00  01  05  06  a4 6c617465",
    ),
    Golden(
        CopyPush(10, 1, 2, 3, (2,), 0, b"\x90", ("w",), "float32", 12, (4, 5)),
        10,
        12,
        "41494f4b 01 7b 0000  0a00000000000000  0c00000000000000 1a000000  00000000",
        "9b  0a  01  02  03  91 02  00  c4 01 90  91 a1 77  a7 666c6f61743332  0c  92 04 05",
    ),
    Golden(
        CopySettled(11, ((1, 2, 3, "gone"),)),
        11,
        0,
        "41494f4b 01 7c 0000  0b00000000000000  0000000000000000 0c000000  00000000",
        "92  0b  91 94 01 02 03 a4 676f6e65",
    ),
    Golden(
        FillAgain("t"),
        0,
        0,
        "41494f4b 01 7d 0000  0000000000000000  0000000000000000 03000000  00000000",
        "91  a1 74",
    ),
    Golden(
        CopyContribution(12, "w", 0, 1, 5, 4, 6, 12),
        12,
        12,
        "41494f4b 01 7e 0000  0c00000000000000  0c00000000000000 0a000000  00000000",
        "98  0c  a1 77  00  01  05  04  06  0c",
    ),
]

each_golden = pytest.mark.parametrize("golden", GOLDEN, ids=lambda golden: type(golden.message).__name__)


@each_golden
def test_a_frame_is_encoded_as_these_bytes(golden: Golden) -> None:
    assert encode_frame(golden.message, golden.request, golden.payload_nbytes).hex() == golden.data.hex()


@each_golden
def test_these_bytes_are_decoded_as_this_frame(golden: Golden) -> None:
    frame_type, request, payload_nbytes, control_nbytes, _, _ = decode_header(golden.data)
    assert (FRAME_TYPES[frame_type], request, payload_nbytes) == (
        type(golden.message),
        golden.request,
        golden.payload_nbytes,
    )
    assert control_nbytes == len(golden.data) - HEADER_BYTES
    assert decode_message(frame_type, golden.data[HEADER_BYTES:]) == golden.message


def test_every_frame_type_has_golden_bytes() -> None:
    assert [TYPE_OF[type(golden.message)] for golden in GOLDEN] == sorted(FRAME_TYPES)


def test_every_message_that_may_have_a_payload_has_one_here() -> None:
    assert {type(golden.message) for golden in GOLDEN if golden.payload_nbytes} == WITH_PAYLOAD


def test_the_golden_bytes_are_those_of_version_1() -> None:
    assert PROTOCOL_VERSION == 1
