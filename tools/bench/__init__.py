"""Benchmarks: each is a command, and names its options with --help."""
