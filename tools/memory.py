"""How much memory a process has in RAM, as Linux says it."""

from pathlib import Path


def resident_mb(process: int | str = "self") -> float:
    """What it has now, in MiB."""
    return _status_mb(process, "VmRSS")


def peak_mb(process: int | str = "self") -> float:
    """The most that it ever had, in MiB. Not what getrusage says: that begins with the memory of who started it."""
    return _status_mb(process, "VmHWM")


def _status_mb(process: int | str, name: str) -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024
