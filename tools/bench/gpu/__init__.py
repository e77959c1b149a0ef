"""Parts of ``python -m tools.bench.gpu``."""
