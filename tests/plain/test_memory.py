"""Benchmarks measure the memory of their own process."""

import subprocess
import sys

from tools.bench.memory import peak_mb, resident_mb


def test_the_memory_peak_is_kept_and_not_inherited_by_child_processes() -> None:
    memory = bytearray(b"x" * (200 << 20))
    del memory
    assert peak_mb() > 200
    assert 0 < resident_mb() <= peak_mb()
    code = "from tools.bench.memory import peak_mb; print(peak_mb())"
    assert float(subprocess.check_output([sys.executable, "-c", code])) < 100
