"""Throughput of a server against the Python API: see ``__main__``."""
