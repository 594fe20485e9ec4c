"""Which messages read and write what the servers have of keys: values, and state of the update rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiokv.core.effects import CallBuffer, CallMemory
from aiokv.core.worker.parts import Part
from aiokv.wire import messages as m

if TYPE_CHECKING:
    from aiokv.core.placement import Chunk
    from aiokv.core.stimuli import ReadState, StatePart, WriteState
    from aiokv.core.worker.layout import Layout


def read_states(layout: Layout, asked: ReadState, wait: float) -> list[Part]:
    """Return the messages that read the state of some parts."""
    made: list[Part] = []
    for number, part in enumerate(asked.parts):
        key, spec, chunk = part.record.key, part.record.spec, _chunk(layout, part)
        head = (key, spec.shape, spec.dtype, part.start, part.stop)
        message = m.GetState(*head, arrays=asked.arrays, timeout=wait, names=part.names)
        buffer = CallBuffer(asked.call, number)
        made.append(Part(chunk.server, message, None, buffer, key, part.start, priority=0))
    return made


def write_states(layout: Layout, given: WriteState, wait: float) -> list[Part]:
    """Return the messages that write the state of some parts."""
    made: list[Part] = []
    for number, part in enumerate(given.parts):
        key, spec, chunk = part.record.key, part.record.spec, _chunk(layout, part)
        message = m.PutState(key, spec.shape, spec.dtype, part.start, part.stop, wait)
        if part.creates:
            options = part.record.options
            message.policy, message.group, message.lazy = options.policy, options.group, options.lazy
            message.sparse, message.first = part.record.is_sparse, chunk.start
            message.initializer = dict(options.initializer)
        memory = CallMemory(given.call, number, 0, given.nbytes[number])
        made.append(Part(chunk.server, message, memory, None, key, part.start, priority=0))
    return made


def _chunk(layout: Layout, part: StatePart) -> Chunk:
    return next(chunk for chunk in layout.chunks(part.record) if chunk.stop == part.stop)
