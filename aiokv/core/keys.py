"""What a key may be, and what a tensor may be; checked on both sides of the wire."""

from __future__ import annotations

from aiokv.errors import KeyUseError, SpecMismatchError
from aiokv.types import ITEM_SIZES, MAX_INT_KEY, Key, TensorSpec

MAX_NAME_BYTES = 1024
MAX_DIMENSIONS = 64
MAX_SHOWN_BITS = 128
"""Longer ints are not written out in messages; Python refuses to for very long ones."""

BUNDLE_START = -1
"""First element of a bundle's chunk: it stands under the bundle's first key, and no chunk of a key begins there."""

SHOWN_KEYS = 3


def check_key(key: object) -> Key:
    """Return the key as a plain str or int, if it is one.

    Subclasses (enums, NumPy strings) are taken for what they contain, so that every worker finds the same place for it.

    Raises:
        KeyUseError: not a str or int, empty, too long, not encodable, negative or over 63 bits.
    """
    if isinstance(key, bool) or not isinstance(key, (str, int)):
        raise KeyUseError(f"a key is a str or an int, got {type(key).__name__} {key!r}", got=repr(key))
    if isinstance(key, int):
        if not 0 <= key <= MAX_INT_KEY:
            got = str(int(key)) if key.bit_length() <= MAX_SHOWN_BITS else f"a number of {key.bit_length()} bits"
            raise KeyUseError(f"an int key is 0 <= key < 2**63, got {got}", got=got)
        return int(key)
    try:
        size = len(key.encode())
    except UnicodeEncodeError as error:
        raise KeyUseError(f"a str key must be valid Unicode, got {key!r}: {error.reason}", got=repr(key)) from None
    if not 0 < size <= MAX_NAME_BYTES:
        raise KeyUseError(f"a str key has 1 to {MAX_NAME_BYTES} bytes, got {size}", got=key[:64])
    return str.__str__(key)


def check_kind(key: Key, kind: type | None) -> type:
    """Return the key's type, which has to be `kind` if one is fixed.

    Raises:
        KeyUseError: str and int keys are mixed.
    """
    if kind is not None and type(key) is not kind:
        raise KeyUseError(
            f"key {key!r} is {type(key).__name__}, but this cluster uses {kind.__name__} keys: never mix them",
            key=key,
            expected=kind.__name__,
            got=type(key).__name__,
        )
    return type(key)


def check_spec(key: Key, spec: TensorSpec) -> None:
    """Refuse a spec that can't be stored.

    Raises:
        SpecMismatchError: unknown dtype, negative length or too many dimensions.
    """
    if spec.dtype not in ITEM_SIZES:
        known = ", ".join(ITEM_SIZES)
        raise SpecMismatchError(
            f"key {key!r}: dtype {spec.dtype} is not supported; supported: {known}",
            key=key,
            expected=known,
            got=spec.dtype,
        )
    if len(spec.shape) > MAX_DIMENSIONS or any(length < 0 for length in spec.shape):
        raise SpecMismatchError(f"key {key!r}: shape {spec.shape} is not valid", key=key, got=str(spec))


def check_same_spec(key: Key, expected: TensorSpec, got: TensorSpec) -> None:
    """Refuse another shape or dtype than the key has.

    Raises:
        SpecMismatchError: they differ; names key, expected and got.
    """
    if expected != got:
        raise SpecMismatchError(
            f"key {key!r} has {expected}, got {got}: shape and dtype of a key never change",
            key=key,
            expected=str(expected),
            got=str(got),
        )


def name_keys(keys: tuple[Key, ...]) -> str:
    """Return the first keys, and how many more there are, for messages."""
    shown = ", ".join(repr(key) for key in keys[:SHOWN_KEYS])
    more = len(keys) - SHOWN_KEYS
    return shown + (f" and {more} more" if more > 0 else "")
