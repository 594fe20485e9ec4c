"""The simulator against what is known on paper: `aiokv sim validate`."""
