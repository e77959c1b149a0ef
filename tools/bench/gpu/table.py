"""Markdown table of a report."""

from typing import Any

_HEAD = (
    "batch",
    "draft tokens",
    "ms per round",
    "propose",
    "target",
    "verify",
    "rest",
    "target / floor",
    "tokens/s",
    "tokens per round",
    "speed-up",
)


def markdown(batches: dict[int, dict[str, Any]], window: int) -> str:
    """Return the table of ``batches``, the results of Lines.both by batch size."""
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for batch, both in batches.items():
        for name, drafted in (("autoregressive", 0), ("speculative", window)):
            line = both[name]
            device = line["device_ms"]
            phases = [f"{device[phase]:.2f}" if device else "" for phase in ("propose", "target", "verify", "idle")]
            ratio = f"{device['target'] / line['target_floor_ms']:.2f}" if device else ""
            rest = (f"{line['tokens_per_second']:,.0f}", f"{line['acceptance_length']:.2f}")
            speedup = f"{both['speedup']:.2f}" if drafted else ""
            rows.append((str(batch), str(drafted), f"{line['ms_per_round']:.2f}", *phases, ratio, *rest, speedup))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
