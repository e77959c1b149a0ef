"""Markdown table of a report, with the figures of vLLM on the same kind of GPU."""

from typing import Any

# vLLM 0.24.0 on one H200: the same shape in bfloat16 with random weights, prompts of 1,000 tokens, temperature 0.7, 256
# tokens after 32; a 1-layer EAGLE head of the same vocabulary, 4 drafted tokens, synthetic acceptance at a mean of 3.0
# tokens a round. Milliseconds per round: (autoregressive, speculative).
PEER = {1: (4.88, 6.76), 8: (5.20, 7.50), 16: (5.54, 7.98), 32: (6.33, 9.41), 64: (7.74, 14.68)}
_HEAD = (
    "batch",
    "draft tokens",
    "ms per round",
    "peer",
    "propose",
    "target",
    "verify",
    "rest",
    "target / floor",
    "tokens/s",
    "tokens per round",
    "speed-up",
)


def markdown(batches: dict[int, dict[str, Any]], window: int, *, with_peer: bool) -> str:
    """Return the table of ``batches``, the results of Lines.both by batch size."""
    rows = [_HEAD, ("---",) * len(_HEAD)]
    for batch, both in batches.items():
        for which, (name, drafted) in enumerate((("autoregressive", 0), ("speculative", window))):
            line = both[name]
            device = line["device_ms"]
            peer = f"{PEER[batch][which]:g}" if with_peer and batch in PEER else ""
            phases = [f"{device[phase]:.2f}" if device else "" for phase in ("propose", "target", "verify", "idle")]
            ratio = f"{device['target'] / line['target_floor_ms']:.2f}" if device else ""
            rest = (f"{line['tokens_per_second']:,.0f}", f"{line['acceptance_length']:.2f}")
            speedup = f"{both['speedup']:.2f}" if drafted else ""
            rows.append((str(batch), str(drafted), f"{line['ms_per_round']:.2f}", peer, *phases, ratio, *rest, speedup))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
