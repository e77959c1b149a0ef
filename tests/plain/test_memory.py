"""What the benchmarks say of a process's memory is that process's."""

import subprocess
import sys

from tools.memory import peak_mb, resident_mb


def test_a_peak_is_remembered_and_not_handed_down_to_who_is_started() -> None:
    held = bytearray(b"x" * (200 << 20))
    del held
    assert peak_mb() > 200
    assert 0 < resident_mb() <= peak_mb()
    code = "from tools.memory import peak_mb; print(peak_mb())"
    assert float(subprocess.check_output([sys.executable, "-c", code])) < 100
