"""What is kept on disk: the checkpoints of a cluster, the files that `save` writes, and residuals of compression."""
