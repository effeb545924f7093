"""A training run: start, loop, losses, checkpoints, metrics, cost, branch and export."""
