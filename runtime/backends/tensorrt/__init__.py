"""Engines of TensorRT and TensorRT-RTX, run."""
