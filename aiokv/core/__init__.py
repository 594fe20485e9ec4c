"""Decisions, without any I/O and without arrays: stimuli in, effects out.

`Coordinator` decides for a server, `Session` for a worker, `Membership` for the scheduler. Each has one door that
changes its state, `handle(stimulus, now=...)`, and `deadline()`, the time at which it wants a `Tick`.
"""
