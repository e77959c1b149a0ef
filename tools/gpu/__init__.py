"""What ``python -m tools.bench_gpu`` is made of."""
