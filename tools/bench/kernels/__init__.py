"""Time single kernels on a CUDA GPU: see ``__main__``."""
