"""The operators as CUDA kernels: compiled ahead of time without a GPU, launched on torch's streams."""
