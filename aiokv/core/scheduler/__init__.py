"""The scheduler's decisions: `membership` is the machine, the others are its parts."""
