"""Who computes payloads: NumPy, or compiled code with the same bits."""

# ruff: noqa: D102 - the kernels are described in `reference`

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Protocol

from aiokv.codec import reference
from aiokv.errors import ConfigError, MissingExtraError

if TYPE_CHECKING:
    import numpy as np

    from aiokv.codec.reference import Array

BACKENDS = ("auto", "cpu", "reference")

_logger = logging.getLogger(__name__)


class Kernels(Protocol):
    """What `reference` and `compiled` have."""

    def fits(self, gradient: Array, residual: Array | None, /) -> bool: ...

    def largest(self, gradient: Array, residual: Array | None, /) -> np.floating[Any]: ...

    def has_code(self, codes: Array, mask: np.unsignedinteger[Any], /) -> bool: ...

    def encode_1bit(
        self, gradient: Array, residual: Array | None, threshold: np.float32, payload: Array, /
    ) -> None: ...

    def encode_2bit(
        self, gradient: Array, residual: Array | None, threshold: np.float32, payload: Array, /
    ) -> None: ...

    def decode_1bit(self, payload: Array, out: Array, /) -> None: ...

    def decode_2bit(self, payload: Array, threshold: np.float32, out: Array, /) -> None: ...

    def accumulate_1bit(self, payload: Array, target: Array, /) -> None: ...

    def accumulate_2bit(self, payload: Array, threshold: np.float32, target: Array, /) -> None: ...

    def encode_half(self, gradient: Array, residual: Array | None, codes: Array, /) -> None: ...

    def decode_half(self, codes: Array, out: Array, /) -> None: ...

    def accumulate_half(self, codes: Array, target: Array, /) -> None: ...

    def encode_fp8(self, gradient: Array, residual: Array | None, scale: np.float32, codes: Array, /) -> None: ...

    def decode_fp8(self, scale: np.float32, codes: Array, out: Array, /) -> None: ...

    def accumulate_fp8(self, scale: np.float32, codes: Array, target: Array, /) -> None: ...

    def largest_places(self, corrected: Array, count: int, /) -> Array: ...

    def encode_levels(
        self,
        gradient: Array,
        residual: Array | None,
        unit: np.float32,
        levels: np.float32,
        generator: np.random.Generator,
        codes: Array,
        /,
    ) -> float: ...

    def subtract_levels(
        self, gradient: Array, residual: Array, unit: np.float32, levels: np.float32, codes: Array, /
    ) -> None: ...

    def decode_levels(self, codes: Array, levels: np.float32, unit: np.float32, out: Array, /) -> None: ...

    def accumulate_levels(self, codes: Array, levels: np.float32, unit: np.float32, target: Array, /) -> None: ...

    def pack(self, codes: Array, bits: int, packed: Array, /) -> None: ...

    def unpack(self, packed: Array, bits: int, codes: Array, /) -> None: ...


def get_kernels(backend: str) -> Kernels:
    """Return the kernels of a backend.

    Raises:
        ConfigError: there is no such backend.
        MissingExtraError: its packages are not installed.
    """
    match backend:
        case "auto":
            try:
                return get_kernels("cpu")
            except MissingExtraError as error:
                _logger.info("backend 'auto' is 'reference' here: %s", error)
                return reference
        case "reference":
            return reference
        case "cpu":
            try:
                from aiokv.codec import compiled  # noqa: PLC0415 - Numba is optional and slow to import
            except ImportError as error:
                raise MissingExtraError(
                    f"backend 'cpu' needs a package that can't be imported ({error}); "
                    'install it: pip install "aiokv[cpu]"'
                ) from error
            return compiled
        case _:
            known = ", ".join(BACKENDS)
            raise ConfigError(f"unknown backend {backend!r}; known: {known}", expected=known, got=backend)
