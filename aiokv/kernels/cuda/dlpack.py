"""DLPack: what a capsule of another library says of its memory, and capsules over memory of ours.

The layouts are those of DLPack's header: https://dmlc.github.io/dlpack/latest/c_api.html
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

VERSION = (1, 0)
"""The newest that is understood; the next major version may have another layout."""

READ_ONLY, IS_COPIED = 1, 2
"""Flags of a versioned tensor."""

INT, UINT, FLOAT, BFLOAT = 0, 1, 2, 4
KINDS = {INT: "int", UINT: "uint", FLOAT: "float", BFLOAT: "bfloat"}

PLAIN, VERSIONED = b"dltensor", b"dltensor_versioned"
"""Names of a capsule whose memory nobody has taken over."""


class Fields(ctypes.Structure):
    """A tensor; strides are counted in elements, and are none where it is contiguous."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    """A tensor, and what gives it back."""

    _fields_ = (("tensor", Fields), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class ManagedVersioned(ctypes.Structure):
    """The same since version 1."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Fields),
    )


class Described(NamedTuple):
    """What a capsule says. `is_copied`: its memory is not that of the array."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    code: int
    bits: int
    lanes: int
    device: tuple[int, int]
    read_only: bool = False
    is_copied: bool = False


_python = ctypes.pythonapi
_is_named = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _python))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", _python)
)
# Of a capsule that is being given back: nobody may refer to it any longer.
_is_named_still = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _python))
_pointer_still = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _python))


def request(array: Any, **more: Any) -> Any:
    """Return a capsule of an array: of version 1 where its library has that, with flags; else one without.

    A capsule that nobody renames gives the memory back when nobody refers to it any longer.
    """
    try:
        return array.__dlpack__(max_version=VERSION, **more)
    except TypeError:
        return array.__dlpack__(**more)


def describe(capsule: Any) -> Described:
    """Return what a capsule says.

    Raises:
        BufferError: it is of another major version, or somebody has taken its memory over.
    """
    flags = 0
    if _is_named(capsule, VERSIONED):
        versioned = ManagedVersioned.from_address(_pointer_of(capsule, VERSIONED))
        if versioned.major != VERSION[0]:
            raise BufferError(f"DLPack {versioned.major}.{versioned.minor} is not known, but {VERSION[0]}")
        tensor, flags = versioned.tensor, versioned.flags
    elif _is_named(capsule, PLAIN):
        tensor = Managed.from_address(_pointer_of(capsule, PLAIN)).tensor
    else:
        raise BufferError("a DLPack capsule that was used before")
    return Described(
        int(tensor.data or 0) + int(tensor.byte_offset),
        tuple(tensor.shape[: tensor.ndim]),
        tuple(tensor.strides[: tensor.ndim]) if tensor.strides else None,
        tensor.code,
        tensor.bits,
        tensor.lanes,
        (tensor.device_type, tensor.device_id),
        bool(flags & READ_ONLY),
        bool(flags & IS_COPIED),
    )


# --- memory of ours ---

_lent: dict[int, Any] = {}
"""By the address of a managed tensor: itself, and all that it refers to."""


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(address: int, lent: dict[int, Any] = _lent) -> None:
    lent.pop(address, None)


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _unused(capsule: int) -> None:
    # Who has taken the memory over has renamed the capsule, and calls the deleter.
    for name in (PLAIN, VERSIONED):
        if _is_named_still(capsule, name):
            _lent.pop(_pointer_still(capsule, name), None)


def lend(described: Described, owner: Any, *, versioned: bool) -> Any:
    """Return a capsule over contiguous memory, which `owner` keeps until the capsule's user has given it back.

    Raises:
        BufferError: it is read-only, and a capsule without a version can't say so.
    """
    if described.read_only and not versioned:
        raise BufferError("a read-only array can't be exported before DLPack 1.0: ask with max_version=(1, 0)")
    shape = (ctypes.c_int64 * len(described.shape))(*described.shape)
    tensor = Fields(
        described.address, *described.device, len(shape), described.code, described.bits, described.lanes, shape
    )
    deleter = ctypes.cast(_delete, ctypes.c_void_p)
    managed: Managed | ManagedVersioned
    if versioned:
        managed = ManagedVersioned(*VERSION, None, deleter, READ_ONLY * described.read_only, tensor)
    else:
        managed = Managed(tensor, None, deleter)
    address = ctypes.addressof(managed)
    _lent[address] = managed, shape, owner
    return _new_capsule(address, VERSIONED if versioned else PLAIN, ctypes.cast(_unused, ctypes.c_void_p))
