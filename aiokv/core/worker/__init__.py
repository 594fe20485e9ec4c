"""A worker's decisions: `session` is the machine, the others are its parts."""
