"""Devices: what code that runs on every device asks of one, on the host and on a CUDA GPU."""
