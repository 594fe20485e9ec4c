"""Arrays on a device for other libraries, which use the memory where it lies."""

from __future__ import annotations

from typing import Any

from numba import cuda

from aiokv.kernels.cuda import dlpack
from aiokv.kernels.cuda.memory import BFLOAT16, SIMULATED
from aiokv.kernels.cuda.tensors import CPU_DEVICE, DEFAULT_STREAMS, tensor_of
from aiokv.kernels.foreign import CUDA_DEVICE

NO_ORDER = -1
"""By which a consumer says that it takes care itself of what is still under way."""

CODES = {"i": dlpack.INT, "u": dlpack.UINT, "f": dlpack.FLOAT}


class Exported:
    """An array on a device with both protocols: DLPack and `__cuda_array_interface__`.

    Args:
        array: one of Numba, or of any other library.

    Raises:
        SpecMismatchError: its memory can't be used.
    """

    def __init__(self, array: Any) -> None:
        self._tensor = tensor_of("array", array)
        self._device = (CPU_DEVICE, 0) if SIMULATED else (CUDA_DEVICE, self._tensor.device or 0)
        self.shape, self.dtype, self.nbytes = self._tensor.shape, self._tensor.dtype, self._tensor.nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if SIMULATED or self.dtype == BFLOAT16:
            raise AttributeError("in the simulator, and of bfloat16, there is no __cuda_array_interface__")
        data = (self._tensor.address, self._tensor.read_only)
        return {"shape": self.shape, "typestr": self.dtype.str, "data": data, "strides": None, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        """Return DLPack's number of the kind of device, and the device's own."""
        return self._device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Return a capsule.

        Args:
            stream: the consumer's: what it does there comes after what was begun on the default stream. None is that
                one, -1 asks for no order.
            max_version: the newest version of DLPack that the consumer knows.
            dl_device: where it wants the array: where that is.
            copy: whether it wants a copy: no.

        Raises:
            BufferError: what it wants can't be had.
        """
        if copy or (dl_device is not None and tuple(dl_device) != self._device):
            raise BufferError("the array is exported where it lies, and not copied")
        self._order(stream)
        kind = dlpack.BFLOAT if self.dtype == BFLOAT16 else CODES.get(self.dtype.kind)
        if kind is None:
            raise BufferError(f"arrays of {self.dtype} are not exported")
        found = self._tensor
        described = dlpack.Described(
            found.address, self.shape, None, kind, self.dtype.itemsize * 8, 1, self._device, found.read_only
        )
        versioned = max_version is not None and max_version[0] >= dlpack.VERSION[0]
        return dlpack.lend(described, found, versioned=versioned)

    def _order(self, stream: int | None) -> None:
        if SIMULATED:
            if stream is not None:
                raise BufferError(f"the host's memory has no streams; got stream={stream}")
            return
        if stream == 0 or (stream is not None and stream < NO_ORDER):
            raise BufferError(f"stream={stream} is ambiguous; expected 1 for the default stream, or another stream's")
        if stream not in (*DEFAULT_STREAMS, NO_ORDER):
            new_event: Any = cuda.event
            with cuda.gpus[self._device[1]]:
                mark = new_event(timing=False)
                mark.record()
                mark.wait(cuda.external_stream(stream))
