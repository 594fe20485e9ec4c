"""A coverage-guided fuzz target: whatever bytes come in, a connection delivers frames or fails as it should.

    python tests/wire/fuzz.py -max_total_time=600 tests/wire/corpus

needs atheris, which takes the options of libFuzzer. What it finds goes into the corpus, which `test_fuzz.py` replays.

The first byte of an input says what the others are: the first bytes that a listener or an initiator hears, what comes
after the handshake, with or without checksums, or one control part behind its frame type.
"""

from __future__ import annotations

import functools
import itertools
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from aiokv.wire.receiver import Frame, Head, Landing


def _load() -> None:
    """Import what is tested; under atheris it is instrumented then."""
    from aiokv.wire import connection, frames, messages, receiver  # noqa: F401, PLC0415


MAX_PAYLOAD = 1 << 16
SIZES = (1, 7, 33, 500, 100_000)
"""How many bytes are received at a time; the second byte of an input chooses where to begin."""


def _sum(data: memoryview | bytes, begun: int) -> int:
    """Stand for a checksum that a fuzzer can guess, as it must to get behind it."""
    return (begun + sum(bytes(data))) & 0xFF


def _ends(*, checksums: bool = False) -> tuple[_Wire, _Wire]:
    initiator, listener = (_Wire(initiator=side, checksums=checksums) for side in (True, False))
    return initiator, listener


class _Wire:
    """A connection, how much memory it was given, and what it delivered."""

    def __init__(self, *, initiator: bool, checksums: bool = False) -> None:
        from aiokv.wire.connection import Connection  # noqa: PLC0415 - see `_load`
        from aiokv.wire.limits import Limits  # noqa: PLC0415

        self.taken = 0
        self.fed = 0
        self.frames: list[Frame] = []
        self.connection = Connection(
            initiator=initiator,
            cluster="c",
            token=b"t",
            nonce=bytes([initiator]) * 32,
            land=self._land,
            limits=Limits(max_control_bytes=1 << 18, max_payload_bytes=MAX_PAYLOAD),
            checksum=_sum if checksums else None,
            now=0.0,
        )

    def _land(self, head: Head) -> Landing:
        from aiokv.wire.receiver import Landing  # noqa: PLC0415 - see `_load`

        assert 0 < head.payload_nbytes <= MAX_PAYLOAD, "a length was not checked"
        self.taken += head.payload_nbytes
        return Landing(memoryview(bytearray(head.payload_nbytes)), head.request)

    def feed(self, data: bytes, sizes: int = len(SIZES) - 1) -> None:
        """Receive all of it; raises what the connection raises."""
        rest = memoryview(data)
        for size in itertools.islice(itertools.cycle(SIZES), sizes, None):
            if not rest:
                return
            buffer = self.connection.get_buffer()
            nbytes = min(len(buffer), len(rest), size)
            assert nbytes, "no memory to receive into"
            buffer[:nbytes] = rest[:nbytes]
            rest = rest[nbytes:]
            self.fed += nbytes
            self.frames += self.connection.buffer_updated(nbytes)

    def check(self, data: bytes) -> None:
        """Feed it and see that all promises hold."""
        from aiokv.errors import AiokvError, ProtocolError  # noqa: PLC0415 - see `_load`

        was_established = self.connection.established
        try:
            self.feed(data[1:], data[0] % len(SIZES))
        except AiokvError:
            try:
                self.connection.get_buffer()
            except ProtocolError:
                pass
            else:
                raise AssertionError("a connection goes on after an error") from None
        assert was_established or not self.connection.established, "the peer did not prove anything"
        assert was_established or not (self.frames or self.taken), "something was interpreted before authentication"
        assert self.taken <= MAX_PAYLOAD * (1 + self.fed // 32), "memory was taken for nothing"
        self.connection.data_to_send()


def _established(data: bytes, *, checksums: bool) -> None:
    initiator, listener = _ends(checksums=checksums)
    for first, second in ((initiator, listener), (listener, initiator)) * 2:
        second.feed(first.connection.data_to_send())
    assert listener.connection.established
    listener.check(data)


def _control(data: bytes) -> None:
    """Decode one control part; what is good can be encoded, and means the same then."""
    from aiokv.errors import ProtocolError  # noqa: PLC0415 - see `_load`
    from aiokv.wire.frames import HEADER_BYTES, decode_message, encode_frame  # noqa: PLC0415
    from aiokv.wire.messages import FRAME_TYPES  # noqa: PLC0415

    types = sorted(FRAME_TYPES)
    frame_type = data[0] if data[0] in FRAME_TYPES else types[data[0] % len(types)]
    try:
        message = decode_message(frame_type, data[1:])
    except ProtocolError:
        return
    encoded = encode_frame(message)[HEADER_BYTES:]
    # Compared as bytes: NaN is not equal to itself.
    assert encode_frame(decode_message(frame_type, encoded))[HEADER_BYTES:] == encoded


MODES: tuple[Callable[[bytes], None], ...] = (
    lambda data: _Wire(initiator=False).check(data),
    lambda data: _Wire(initiator=True).check(data),
    functools.partial(_established, checksums=False),
    functools.partial(_established, checksums=True),
    _control,
)


def one_input(data: bytes) -> None:
    """Test one input."""
    if len(data) > 1:
        MODES[data[0] % len(MODES)](data[1:])


def main() -> None:
    """Run the fuzzer."""
    import atheris  # noqa: PLC0415 - the tests that replay the corpus do not need it

    with atheris.instrument_imports(include=["aiokv.wire"]):
        _load()
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
