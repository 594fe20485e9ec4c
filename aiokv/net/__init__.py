"""asyncio drivers: they move bytes, perform effects and feed stimuli; they decide nothing."""
