"""TensorRT and TensorRT-RTX: their libraries, and their section of a recipe."""
