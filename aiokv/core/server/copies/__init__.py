"""How what a server has is on another one too (`replication = 2`), which can take its place."""
