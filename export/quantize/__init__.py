"""Narrow weights: a checkpoint's matrices as integers in blocks, written anew, in the layout that kernels read."""
