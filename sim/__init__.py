"""The cluster in simulated time: the very state machines of `aiokv.core`, moved by SimPy instead of sockets.

Importing this package needs nothing but the standard library; its modules `node`, `network`, `workload` and `cluster` need
SimPy, `picture` needs Matplotlib (both come with the extra `aiokv[sim]`).
"""
