"""The TensorRT and TensorRT-RTX backends."""
