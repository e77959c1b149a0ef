"""Build engines of TensorRT and TensorRT-RTX."""
