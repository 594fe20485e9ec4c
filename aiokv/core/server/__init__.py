"""A server's decisions: `coordinator` is the machine, the others are its parts."""
