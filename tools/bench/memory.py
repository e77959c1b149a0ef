"""Memory of a process, from /proc (Linux)."""

from pathlib import Path


def resident_mb(process: int | str = "self") -> float:
    """Return the resident memory now, in MiB."""
    return _status_mb(process, "VmRSS")


def peak_mb(process: int | str = "self") -> float:
    """Return the peak of resident memory, in MiB.

    getrusage differs: its value starts with the memory of the parent process.
    """
    return _status_mb(process, "VmHWM")


def _status_mb(process: int | str, name: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
