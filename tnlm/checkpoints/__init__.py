"""Reading, writing, finding, verifying and publishing checkpoints."""
