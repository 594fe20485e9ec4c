"""The errors: what users can catch, and how an error travels."""

from __future__ import annotations

import re

import pytest

from aiokv import errors
from aiokv.errors import BY_CODE, AiokvError, from_code

RETRIABLE = {"CallTimeoutError", "JoinTimeoutError", "BarrierTimeoutError", "OverloadedError", "ChecksumError"}

CODES = {
    "AiokvError": 1,
    "ConfigError": 2,
    "MissingExtraError": 3,
    "BindError": 4,
    "ClosedError": 5,
    "StoreNameError": 6,
    "DeviceMemoryError": 7,
    "ProtocolError": 10,
    "LimitError": 11,
    "HandshakeError": 12,
    "OverloadedError": 13,
    "ChecksumError": 14,
    "MembershipError": 20,
    "ClusterFullError": 21,
    "WorkerLostError": 22,
    "ServerLostError": 23,
    "SchedulerLostError": 24,
    "StaleEpochError": 25,
    "OtherSettingsError": 26,
    "CallTimeoutError": 30,
    "JoinTimeoutError": 31,
    "RoundTimeoutError": 32,
    "BarrierTimeoutError": 33,
    "KeyUseError": 40,
    "UnknownKeyError": 41,
    "AlreadyInitializedError": 42,
    "KeyDeletedError": 44,
    "SpecMismatchError": 43,
    "OptimizerError": 50,
    "UpdateRefusedError": 52,
    "SumOverflowError": 53,
    "DataError": 60,
    "CodecError": 70,
    "NotFiniteError": 71,
    "NormLimitError": 72,
    "PolicyError": 51,
    "CommandError": 55,
}
"""A part of the protocol: numbers never change their meaning."""


def all_errors() -> list[type[AiokvError]]:
    """Return the classes that the module defines."""
    return [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, AiokvError)]


def drawn_tree() -> list[tuple[str, str]]:
    """Return (class, parent) for every line of the tree in the module's docstring."""
    assert errors.__doc__ is not None
    pairs: list[tuple[str, str]] = []
    parents: list[str] = []
    for line in errors.__doc__.splitlines():
        match = re.match(r"    ([│ ├└─]*)(\w+Error)\b", line)
        if match is None:
            continue
        depth = len(match[1]) // 4
        parents[depth:] = [match[2]]
        pairs.append((match[2], parents[depth - 1] if depth else "Exception"))
    return pairs


def test_docstring_draws_the_tree_as_it_is() -> None:
    assert drawn_tree() == [(cls.__name__, cls.__bases__[0].__name__) for cls in all_errors()]


def test_codes_are_those_of_the_protocol() -> None:
    assert {cls.__name__: cls.code for cls in all_errors()} == CODES


def test_codes_are_unique() -> None:
    codes = [cls.code for cls in all_errors()]
    assert len(set(codes)) == len(codes) == len(BY_CODE)


@pytest.mark.parametrize("cls", all_errors())
def test_error_survives_the_journey(cls: type[AiokvError]) -> None:
    error = cls("what was wrong", key="w", ranks=[1, 2], round=3)
    again = from_code(error.code, error.message, error.details)
    assert type(again) is cls
    assert str(again) == again.message == "what was wrong"
    assert again.details == {"key": "w", "ranks": [1, 2], "round": 3}


def test_code_of_a_later_version_becomes_a_plain_error() -> None:
    error = from_code(9999, "something new", {"key": "w"})
    assert type(error) is AiokvError
    assert (str(error), error.details) == ("something new", {"key": "w"})


@pytest.mark.parametrize("name", ["self", "message"])
def test_details_may_have_any_name(name: str) -> None:
    assert from_code(1, "text", {name: 1}).details == {name: 1}


def test_only_what_may_succeed_later_is_retriable() -> None:
    assert {cls.__name__ for cls in all_errors() if cls.retriable} == RETRIABLE


@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (errors.CallTimeoutError, TimeoutError),
        (errors.RoundTimeoutError, TimeoutError),
        (errors.JoinTimeoutError, TimeoutError),
        (errors.BarrierTimeoutError, TimeoutError),
        (errors.BindError, OSError),
        (errors.DeviceMemoryError, MemoryError),
        (errors.MissingExtraError, ImportError),
    ],
)
def test_error_can_be_caught_as_what_python_calls_it(cls: type[AiokvError], base: type[Exception]) -> None:
    with pytest.raises(base, match="what was wrong"):
        raise cls("what was wrong", address="127.0.0.1:80", errno=98)


@pytest.mark.parametrize("cls", all_errors())
def test_every_error_says_what_it_means(cls: type[AiokvError]) -> None:
    assert cls.__doc__
