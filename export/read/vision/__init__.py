"""The vision towers of checkpoints."""
