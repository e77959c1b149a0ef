"""Quantize the matrices of a checkpoint and write them in the layouts that kernels read."""
