"""Bytes <-> frames, without any I/O: header and limits, typed control messages, receiver, connection."""
