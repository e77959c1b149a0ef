"""The batch sizes that calls are made with: few, so that each is bound and captured once."""


def bucket(rows: int, slots: int) -> int:
    """The smallest of 1, 2, 4, 8, 12, 16, 24, 32, 48, 64, … that holds ``rows``, at most ``slots``."""
    power = 1 << (rows - 1).bit_length()
    between = power * 3 // 4  # halfway to the power below
    return min(slots, between if rows <= between and power > 8 else power)


def buckets(slots: int) -> list[int]:
    """All batch sizes of a runtime with ``slots`` slots, smallest first."""
    return sorted({bucket(rows, slots) for rows in range(1, slots + 1)})
