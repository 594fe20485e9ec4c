"""How contributions become updates: chunks, their rounds, and what is decided about these."""
