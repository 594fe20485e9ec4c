"""The arithmetic on a CUDA device, compiled by numba-cuda; runs in Numba's simulator too (NUMBA_ENABLE_CUDASIM=1).

    memory      reading and writing by address, 16 bytes at a time
    rounding    `arithmetic`, with every operation rounded
    tensors     arrays on a device, whoever made them, and what they must be
    dlpack      capsules of other libraries and of ours
    exchange    arrays on a device for other libraries
    peers       devices that read each other's memory
    launch      geometry, the table of tensors that one launch goes over, and room for it on the device
    launches    launches that are run again and again, and those for other tensors each time
    simulator   launches in Numba's simulator
    streaming   every kernel that goes over memory once, made from what happens to one element
    reduce      sums, norms, clipping
    optimize    updates, and the squares for those that need norms
    codec       compression with residuals; float8 and select have parts of it
    encoding    gradients to payloads, as `aiokv.codec.encoder` does
    devices     the devices of this machine, as a worker uses them
    pools       memory on a device and page-locked memory, lent and used again
    sparse      rows: gathered, scattered, and added in the order of their duplicates
    work        the work of a server's memory, launched; engine has the thread that does so
    listing     every kernel, for compiling and measure

What is imported from here works on arrays in the host's memory, which each call copies to the device, as the other
backends' modules do. Every bit is as in `reference`, except in the payload of a NaN. Integers are added on the host.
"""

from __future__ import annotations

from aiokv.kernels.cuda.devices import all_devices
from aiokv.kernels.cuda.host import accumulate, add_integers, norms, update
from aiokv.kernels.cuda.launch import missing, missing_toolkit

__all__ = ["accumulate", "add_integers", "all_devices", "missing", "missing_toolkit", "norms", "update"]
