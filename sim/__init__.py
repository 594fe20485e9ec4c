"""The cluster in simulated time: the very state machines of `aiokv.core`, moved by SimPy instead of sockets.

Importing this package needs the standard library only. Its modules `cluster` and `workload` need SimPy, `picture` needs
Matplotlib; both come with the extra `aiokv[sim]`.
"""
