"""What each picture shows."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tools.pictures.bars import bars
from tools.pictures.svg import arrow, box, picture, text

Measured = Mapping[str, Any]


def rounds(measured: Measured) -> str:
    """Milliseconds of a round with speculation, beside the peers'."""
    groups = [f"batch {batch}" for batch in measured["batches"]]
    series = measured["ms_per_round"]
    about = "milliseconds, one H200, an 8B shape, 4 drafted tokens; shorter is better"
    return bars("A round with speculation", about, groups, series, _labels(series, "{:.2f}"))


def tokens(measured: Measured) -> str:
    """Tokens per second with speculation and without."""
    groups = [f"batch {batch}" for batch in measured["batches"]]
    series = measured["tokens_per_second"]
    plain, drafted = series["plain"], series["4 drafts"]
    labels: dict[str, Sequence[str | None]] = {
        "plain": [f"{each:,}" for each in plain],
        "4 drafts": [f"{b:,} ({b / a:.2f} x)" for a, b in zip(plain, drafted, strict=True)],
    }
    about = "tokens/s of all requests, where a round keeps about 3.2 of its 5 tokens"
    return bars("Speculation against plain decoding", about, groups, series, labels)


def first_tokens(measured: Measured) -> str:
    """Milliseconds until all prompts have their first token, beside the peers'."""
    groups = [f"{count} prompt{'s' * (count > 1)}" for count in measured["prompts"]]
    series = measured["ms_to_first_tokens"]  # without drafts
    about = "milliseconds until all prompts of 1,000 tokens have one; shorter is better"
    return bars("First tokens", about, groups, series, _labels(series, "{:,.4g}"))


def weights(measured: Measured) -> str:
    """Milliseconds of a token of plain decoding by the weights' precision, beside a peer's."""
    groups = [f"batch {batch}" for batch in measured["batches_by_weights"]]
    series = measured["ms_per_token_by_weights"]
    about = "milliseconds of a plain token, one H200, an 8B shape"
    return bars("Weights in 8 bits", about, groups, series, _labels(series, "{:.2f}"))


def acceptance(measured: Measured) -> str:
    """Tokens that a round of four drafts emits, by temperature and by how the draft chooses."""
    groups = [f"at {each}" for each in measured["temperatures"]]
    series = measured["acceptance_length"]
    about = "tokens a round at a temperature, the demo, 4 drafted tokens"
    return bars("Acceptance by temperature", about, groups, series, _labels(series, "{:.2f}"))


def timeline(measured: Measured) -> str:
    """A round on the device, to scale, and what the host does meanwhile, in its order alone."""
    ms = measured["round_at_batch_16_ms"]
    left, right, y = 74.0, 470.0, 92.0
    scale = (right - left) / ms["round"]
    about = "device: milliseconds at batch 16, to scale; host: its order, not to scale"
    parts = [text(10, 24, "One round", "ink title"), text(10, 43, about, "faint small")]
    parts += [text(10, y + 24, "device"), text(10, y + 96, "host")]
    target = left + scale * ms["propose"]
    verify = target + scale * ms["target"]
    parts += [box(left, y, target - left - 1, 36, "c0"), text(left + 8, y + 23, "propose", "on")]
    parts += [box(target, y, verify - target - 1, 36, "c2"), text(target + 8, y + 23, "target scores 5 rows", "on")]
    parts += [box(verify, y, right - verify, 36, "c3"), text(right, y - 8, "verify 0.03", "ink small", "end")]
    parts += [
        text(left, y - 8, f"{ms['propose']:.2f}", "ink small"),
        text(target, y - 8, f"{ms['target']:.2f}", "ink small"),
    ]
    parts += [box(left, y + 72, target - left - 1, 36, "box"), text(left + 8, y + 95, "waits")]
    commit, fill = target + 108, target + 216
    parts += [box(target, y + 72, 107, 36), text(target + 8, y + 88, "commits the", "ink small")]
    parts += [text(target + 8, y + 102, "round before", "ink small")]
    parts += [box(commit, y + 72, 107, 36), text(commit + 8, y + 95, "fills masks", "ink small")]
    parts += [arrow(target, y + 37, target, y + 70), text(target + 5, y + 58, "drafts, tokens", "faint small")]
    parts += [arrow(fill - 4, y + 71, verify + 2, y + 39), text(fill - 40, y + 66, "masks", "faint small", "end")]
    return picture(y + 122, f"One round. {about}", parts)


def build(_: Measured) -> str:
    """From a recipe to what serves it."""
    steps = [
        ("recipe", "TOML: target, draft, limits, markers, backend"),
        ("checkpoints", "Hugging Face folders, read where they lie"),
        ("graphs", "ONNX opset 24: target, draft, adjust, verify, propose"),
        ("engines", "onnxruntime (CPU, CUDA) or TensorRT, kernels"),
        ("bundle", "one folder, a digest of every file"),
        ("served", "LLM(...), tandemrt serve, Triton"),
    ]
    parts = [text(10, 24, "From a recipe to a server", "ink title")]
    for at, (name, about) in enumerate(steps):
        y = 42 + 54 * at
        parts += [box(10, y, 106, 36), text(63, y + 23, name, "ink", "middle"), text(128, y + 23, about, "faint small")]
        if at:
            parts.append(arrow(63, y - 18, 63, y - 1))
    return picture(42 + 54 * len(steps), "From a recipe to a server: " + ", ".join(name for name, _ in steps), parts)


PICTURES: Mapping[str, Callable[[Measured], str]] = {
    "rounds": rounds,
    "tokens": tokens,
    "first-tokens": first_tokens,
    "weights": weights,
    "acceptance": acceptance,
    "timeline": timeline,
    "build": build,
}


def _labels(series: Mapping[str, Sequence[float | None]], form: str) -> dict[str, Sequence[str | None]]:
    return {
        name: [None if value is None else form.format(value) for value in values] for name, values in series.items()
    }
