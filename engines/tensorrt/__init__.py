"""The libraries TensorRT and TensorRT-RTX."""
