"""Parameter memory: landing buffers, accumulators, immutable versions, optimizer state."""
