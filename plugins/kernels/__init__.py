"""CUDA kernels of the operators: compiled ahead of time without a GPU, launched on torch's streams."""
