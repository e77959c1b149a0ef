"""Parts of ``python -m tools.bench_gpu``."""
