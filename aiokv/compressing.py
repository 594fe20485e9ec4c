"""A worker's effects on what it compresses, carried out: what the client and the store in this process share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import ml_dtypes  # noqa: F401 - with it NumPy knows the name "bfloat16"
import numpy as np

from aiokv.arrays import Array, bytes_of, scatter
from aiokv.codec import PRECISIONS, Codec, make_codec
from aiokv.codec.decoder import Decoder
from aiokv.codec.encoder import Encoder
from aiokv.core import effects as ef
from aiokv.core.stimuli import Encoded
from aiokv.errors import AiokvError, SpecMismatchError
from aiokv.list_sums import Resident

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from aiokv.types import Key, Peer, Rank
    from aiokv.worker_device import Device

Cuts = list[tuple[int, int]]


@dataclass(slots=True, eq=False)
class Kept:
    """What is kept of one key: an encoder with its residual, and what is to be added to the next gradient besides."""

    size: int
    dtype: str
    encoder: Any = None
    """An `Encoder`, or what the device has in its place."""
    device: Device | None = None
    """Where it encodes, and keeps the residual; None: in the host's memory."""
    left: Array | None = None
    returned: Array | None = None
    """What was left before a job that has failed."""

    def add(self, values: Array, start: int = 0) -> None:
        """Add values, from an element on, to what goes with the next gradient."""
        if self.left is None:
            self.left = np.zeros(self.size, PRECISIONS[self.dtype])
        self.left[start : start + values.size] += values

    def residual(self) -> Array:
        """Return a copy of all that was pushed and not sent."""
        residual = np.zeros(self.size, PRECISIONS[self.dtype])
        if self.encoder is not None:
            residual += self.encoder.state().get("residual", 0)
        for left in (self.left, self.returned):
            if left is not None:
                residual += left
        return residual

    def state(self) -> dict[str, Any]:
        """Return copies of what the next payloads of the key depend on."""
        state: dict[str, Any] = {"dtype": self.dtype, "residual": self.residual()}
        if self.encoder is not None:
            codec = self.encoder.codec
            state |= {"codec": codec.name, "params": codec.params, "step": self.encoder.step}
        return state

    @property
    def nbytes(self) -> int:
        """How many bytes a residual of the key has."""
        return self.size * np.dtype(PRECISIONS[self.dtype]).itemsize


@dataclass(slots=True, eq=False)
class Piece:
    """An encoded part of a tensor; `values` are its bytes."""

    kept: Kept
    codec: Codec | None
    start: int
    stop: int
    values: memoryview


@dataclass(slots=True, eq=False)
class Tensor:
    """A tensor that is to be encoded, and what becomes of it. Its gradient is an array, or lies on a device.

    What is left goes with it: `left`, `returned`, and the residual of the encoder `replaced`. `merge` adds them up.
    """

    number: int
    cuts: Cuts
    gradient: Any
    kept: Kept
    left: Array | None
    returned: Array | None = None
    replaced: Any = None
    pieces: list[memoryview] = field(default_factory=list)

    def merge(self) -> None:
        """Put all that is left into one array."""
        replaced, self.replaced = self.replaced, None
        others = [self.returned, None if replaced is None else replaced.flush()]
        self.returned = None
        for values in others:
            if values is None:
                continue
            if self.left is None:
                self.left = np.zeros(values.size, values.dtype)
            self.left += values

    def corrected(self) -> Array:
        """Return the gradient with what is left, in the gradient's precision, in the host's memory."""
        gradient: Array = self.gradient.to_host() if isinstance(self.gradient, Resident) else self.gradient
        if self.left is None:
            return gradient
        return (gradient.reshape(-1) + self.left).astype(gradient.dtype)

    def copy(self) -> None:
        """Cut the tensor as it is."""
        values = self.corrected().reshape(-1)
        self.pieces = [memoryview(values[start:stop].tobytes()) for start, stop in self.cuts]


class Job:
    """An `Encode` effect on its way. `run` may be called in any thread, all else belongs to the owner of the arrays."""

    def __init__(self, effect: ef.Encode, tensors: list[Tensor]) -> None:
        self.call = effect.call
        self.codec = effect.codec
        self.tensors = tensors
        self.kept = [(key, tensor.kept) for (_, key, _), tensor in zip(effect.tensors, tensors, strict=True)]
        """What is kept of each key that it encodes."""
        self.nbytes = sum(tensor.gradient.nbytes for tensor in tensors)
        self.waits = any(isinstance(tensor.gradient, Resident) for tensor in tensors)
        """Whether it has to wait for a device."""
        self.error: AiokvError | None = None

    def run(self) -> None:
        """Encode all of the tensors, or none: an error is kept for `Compressor.finish`."""
        try:
            self._encode()
        finally:
            for tensor in self.tensors:
                if isinstance(tensor.gradient, Resident):
                    tensor.gradient.release()

    def _encode(self) -> None:
        for tensor in self.tensors:
            tensor.merge()
        if self.codec is None:
            for tensor in self.tensors:
                tensor.copy()
            return
        checked = []
        by_device: dict[Device, list[Tensor]] = {}
        try:
            for tensor in self.tensors:
                encoder = tensor.kept.encoder
                assert encoder is not None, "it was made when the job was"
                if self.codec.error_feedback and tensor.left is not None:
                    encoder.put_back(tensor.left)
                    tensor.left = None
                if tensor.kept.device is not None:
                    by_device.setdefault(tensor.kept.device, []).append(tensor)
                else:
                    checked.append((tensor, encoder, encoder.check(tensor.corrected())))
            on_devices = [
                (
                    device,
                    tensors,
                    device.check([(each.kept.encoder, each.gradient.values, each.cuts) for each in tensors]),
                )
                for device, tensors in by_device.items()
            ]
            # A device may have too little memory for payloads: then nothing has changed yet.
            for device, tensors, found in on_devices:
                for tensor, pieces in zip(tensors, device.encode(found), strict=True):
                    tensor.pieces = pieces
        except AiokvError as error:
            self.error = error
            return
        for tensor, encoder, flat in checked:
            tensor.pieces = encoder.encode_checked(flat, tensor.cuts)


class Compressor:
    """The residuals of one worker's gradients, what it has encoded, and its replicas of values.

    Args:
        backend: who computes; see `aiokv.codec.formats.make_format`.
    """

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._kept: dict[Key, Kept] = {}
        self._pieces: dict[tuple[int, int, int], Piece] = {}
        self._decoders: dict[Codec, Decoder] = {}
        self._replicas: dict[tuple[Peer, Key, int], Array] = {}
        self._held: tuple[int, dict[Key, dict[str, Any] | None]] = (0, {})
        """The clock of a checkpoint, and what was left of keys then; None: nothing."""

    @property
    def backend(self) -> str:
        """Who computes."""
        return self._backend

    @property
    def keys(self) -> list[Key]:
        """The keys of which something may be left."""
        return list(self._kept)

    # --- what is pushed ---

    def begin(self, effect: ef.Encode, sources: Sequence[Array], rank: Rank) -> Job:
        """Return a job; while it runs no other one may have the same keys."""
        tensors = []
        for number, key, cuts in effect.tensors:
            gradient = sources[number]
            kept = self._kept_of(key, gradient.size, gradient.dtype.name)
            device = self._device_for(gradient, kept, effect.codec)
            replaced = kept.encoder
            if replaced is not None and (replaced.codec, kept.device) == (effect.codec, device):
                replaced = None
            elif effect.codec is None:
                kept.encoder, kept.device = None, None
            else:
                # A codec goes on where it was when the gradient comes from elsewhere.
                step = 0 if replaced is None or replaced.codec != effect.codec else replaced.step
                kept.encoder = self._new_encoder(effect.codec, key, kept, rank, device, step)
                kept.device = device
            # To add them up takes long where tensors are large: the job does it.
            tensors.append(Tensor(number, cuts, gradient, kept, kept.left, kept.returned, replaced))
            kept.left = kept.returned = None
        return Job(effect, tensors)

    def _device_for(self, gradient: Any, kept: Kept, codec: Codec | None) -> Device | None:
        """Return where a gradient is encoded; without error feedback, what is left is added in the host's memory."""
        if codec is None or not isinstance(gradient, Resident):
            return None
        residual = kept.encoder is not None and kept.encoder.codec != codec and kept.encoder.codec.error_feedback
        if not codec.error_feedback and (residual or kept.left is not None or kept.returned is not None):
            return None
        return gradient.device

    def _new_encoder(self, codec: Codec, key: Key, kept: Kept, rank: Rank, device: Device | None, step: int) -> Any:
        if device is not None:
            return device.new_encoder(codec, key, kept.size, kept.dtype, step)
        return Encoder(codec, key, kept.size, kept.dtype, rank=rank, backend=self._backend, step=step)

    def _kept_of(self, key: Key, size: int, dtype: str) -> Kept:
        kept = self._kept.get(key)
        if kept is None or (kept.size, kept.dtype) != (size, dtype):
            kept = self._kept[key] = Kept(size, dtype)
        return kept

    def finish(self, job: Job) -> Encoded:
        """Keep what a job has encoded until it is sent and answered; return the stimulus that its effect ends in."""
        for tensor in job.tensors:
            if job.error is not None:
                tensor.kept.returned = tensor.left
                continue
            for (start, stop), values in zip(tensor.cuts, tensor.pieces, strict=True):
                self._pieces[job.call, tensor.number, start] = Piece(tensor.kept, job.codec, start, stop, values)
        return Encoded(job.call, job.error)

    def memory(self, payload: ef.EncodedParts) -> memoryview:
        """Return the bytes of encoded parts; nobody else writes them."""
        views = [self._pieces[payload.call, *part].values for part in payload.parts]
        return views[0] if len(views) == 1 else memoryview(b"".join(views))

    def settle(self, effect: ef.Settle) -> None:
        """Drop parts; where they were not counted, what they say goes with the next gradient.

        Without error feedback nothing is kept of a gradient that was not counted, as when it is sent as it is.
        """
        for part in effect.parts.parts:
            piece = self._pieces.pop((effect.parts.call, *part))
            if effect.counted or (piece.codec is not None and not piece.codec.error_feedback):
                continue
            if piece.codec is None:
                values = np.frombuffer(piece.values, piece.kept.dtype)
            else:
                values = self._decoder(piece.codec).decode(piece.values, piece.stop - piece.start)
            piece.kept.add(values, piece.start)

    def _decoder(self, codec: Codec) -> Decoder:
        decoder = self._decoders.get(codec)
        if decoder is None:
            decoder = self._decoders[codec] = Decoder(codec, backend=self._backend)
        return decoder

    def forget(self, keys: Iterable[Key]) -> None:
        """Drop what is left of keys."""
        for key in keys:
            self._kept.pop(key, None)

    # --- what is received ---

    def receive(self, replica: ef.Replica, codec: int, payload: memoryview, targets: Sequence[Array]) -> None:
        """Bring a replica up to date and copy it to where it is wanted.

        Args:
            replica: which one.
            codec: number of the codec of the difference; 0: the payload is the value itself.
            payload: what came.
            targets: the arrays of the call that waits for it, if there is one.

        Raises:
            ProtocolError: the payload is malformed.
        """
        name = (replica.server, replica.key, replica.start)
        kept = self._replicas.get(name)
        if codec == 0 or kept is None:
            kept = np.frombuffer(payload, replica.dtype).astype(PRECISIONS[replica.dtype])
            self._replicas[name] = kept
        else:
            self._decoder(replica.codec).accumulate_into(payload, kept)
        match replica.target:
            case ef.CallMemory(_, tensor, start, stop):
                target = targets[tensor].reshape(-1)
                itemsize = target.itemsize
                target[start // itemsize : stop // itemsize] = kept
            case ef.CallTensors(_, tensors):
                values = kept.astype(replica.dtype)
                scatter(bytes_of(values), [targets[tensor] for tensor in tensors])

    # --- checkpoints ---

    def keep(self, clock: int, keys: Iterable[Key]) -> None:
        """Keep what is left of keys, before more is encoded, until it is taken, or more is kept for another clock."""
        if clock != self._held[0]:
            self._held = (clock, {})
        held = self._held[1]
        for key in keys:
            if key not in held:
                held[key] = self._kept[key].state() if key in self._kept else None

    def take(self, clock: int) -> dict[Key, dict[str, Any]]:
        """Return what was kept for a clock, and what is left of all other keys. See `Kept.state`."""
        self.keep(clock, list(self._kept))
        held, self._held = self._held[1], (0, {})
        return {key: state for key, state in held.items() if state is not None}

    @property
    def kept(self) -> dict[Key, Kept]:
        """What is kept of each key."""
        return self._kept

    def restored(self, key: Key, state: Mapping[str, Any], rank: Rank) -> Kept:
        """Return what the worker of a rank keeps of a key, from `Kept.state`; any thread may call it.

        Raises:
            SpecMismatchError, CodecError: the state is none.
        """
        dtype, residual = state.get("dtype"), state.get("residual")
        if (
            not isinstance(dtype, str)
            or dtype not in PRECISIONS
            or not isinstance(residual, np.ndarray)
            or residual.ndim != 1
        ):
            expected = "a dtype of floats and a residual of one dimension"
            raise SpecMismatchError(f"state of key {key!r} must have {expected}", key=key, expected=expected)
        kept = Kept(residual.size, dtype)
        if "codec" not in state:
            kept.add(residual)
            return kept
        codec = make_codec(state["codec"], state.get("params", {}))
        kept.encoder = Encoder(codec, key, residual.size, dtype, rank=rank, backend=self._backend)
        if codec.error_feedback:
            kept.encoder.restore({"step": state.get("step"), "residual": residual})
        else:
            kept.encoder.restore({"step": state.get("step")})
            kept.add(residual)
        return kept
