"""Checkpoints that come quantized: what their configs say about how weights are stored, one file per way of saying."""
