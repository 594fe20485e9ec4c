"""Lossy compression of gradients with error feedback: which codecs there are, as typed data.

    records      the codecs: a name, validated parameters, lengths of payloads; no arrays
    encoder      Encoder: gradients to payloads; keeps the residual of one key
    decoder      Decoder: a peer's payloads, checked, to values
    formats      what a codec is to the two: one class for each kind of payload
    backends     who computes them
    reference    NumPy: the oracle of the kernels
    compiled     Numba: the same bits in one pass over memory    pip install "aiokv[cpu]"

Importing this package imports no NumPy: a machine that takes decisions compares codecs and checks lengths with it.
"""

from __future__ import annotations

from aiokv.codec.records import (
    CODECS,
    PRECISIONS,
    QSGD,
    BFloat16,
    Codec,
    Float8,
    Float16,
    OneBit,
    RandomK,
    TopK,
    TwoBit,
    make_codec,
)

__all__ = [
    "CODECS",
    "PRECISIONS",
    "QSGD",
    "BFloat16",
    "Codec",
    "Float8",
    "Float16",
    "OneBit",
    "RandomK",
    "TopK",
    "TwoBit",
    "make_codec",
]
