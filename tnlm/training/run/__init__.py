"""One training run: start, loop, checkpoints, metrics, branch and export."""
