"""The pictures of the documents, each drawn from the measured tables in docs/data."""

from collections.abc import Callable, Mapping, Sequence

from tools.pictures.architecture import architecture
from tools.pictures.bars import bars
from tools.pictures.data import rows, series
from tools.pictures.svg import arrow, box, picture, text

_BATCHES = ("1", "8", "16", "32", "64")
_FEW_BATCHES = ("1", "16", "64")


def rounds() -> str:
    """Milliseconds of a round with speculation, for TandemRT and two peers."""
    groups = [f"batch {batch}" for batch in _BATCHES]
    by_engine = series(rows("gpu-peers"), "round of 4 drafts", _BATCHES)
    about = "milliseconds, one H200, an 8B shape, 4 drafted tokens; shorter is better"
    return bars("A round with speculation", about, groups, by_engine, _labels(by_engine, "{:.2f}"))


def tokens() -> str:
    """Tokens per second with speculation and without."""
    table = rows("rounds-bf16")
    without, drafted = ([int(row["tokens/s"]) for row in table if row["draft tokens"] == size] for size in ("0", "4"))
    groups = [f"batch {row['batch']}" for row in table if row["draft tokens"] == "0"]
    labels: dict[str, Sequence[str | None]] = {
        "autoregressive": [f"{each:,}" for each in without],
        "4 drafts": [f"{b:,} ({b / a:.2f} x)" for a, b in zip(without, drafted, strict=True)],
    }
    about = "tokens/s of all requests, where a round keeps about 3.2 of its 5 tokens"
    rates = {"autoregressive": without, "4 drafts": drafted}
    return bars("Speculation against autoregressive decoding", about, groups, rates, labels)


def first_tokens() -> str:
    """Milliseconds until all prompts have their first token, for TandemRT and two peers."""
    groups = [f"{count} prompt{'s' * (count != '1')}" for count in _FEW_BATCHES]
    by_engine = series(rows("gpu-peers"), "first tokens of all", _FEW_BATCHES)
    about = "milliseconds until all prompts of 1,000 tokens have one; shorter is better"
    return bars("First tokens", about, groups, by_engine, _labels(by_engine, "{:,.4g}"))


def weights() -> str:
    """Milliseconds of a token of autoregressive decoding by the weights' precision, for TandemRT and vLLM."""
    table = rows("gpu-peers")
    groups = [f"batch {batch}" for batch in _FEW_BATCHES]
    fp8 = series(table, "autoregressive token, FP8 weights", _FEW_BATCHES)
    by_weights = {
        "bfloat16": series(table, "autoregressive token", _FEW_BATCHES)["TandemRT"],
        "FP8": fp8["TandemRT"],
        "vLLM, FP8": fp8["vLLM"],
    }
    about = "milliseconds of an autoregressive token, one H200, an 8B shape"
    return bars("Weights in 8 bits", about, groups, by_weights, _labels(by_weights, "{:.2f}"))


def acceptance() -> str:
    """Tokens that a round of four drafts emits, by temperature and by how the draft chooses."""
    table = [row for row in rows("acceptance") if row["draft"] == "model"]
    groups = list(dict.fromkeys(f"at {row['temperature']}" for row in table))
    by_way = {
        way: [float(row["acceptance_length"]) for row in table if row["drafting"] == way]
        for way in ("greedy", "probabilistic", "coupled")
    }
    about = "tokens a round at a temperature, the demo, 4 drafted tokens"
    return bars("Acceptance by temperature", about, groups, by_way, _labels(by_way, "{:.2f}"))


def timeline() -> str:
    """One round: the device's work to scale, and the host's work in its order."""
    row = next(row for row in rows("rounds-bf16") if (row["batch"], row["draft tokens"]) == ("16", "4"))
    ms = {name: float(row[name]) for name in ("propose", "target", "verify")} | {"round": float(row["ms per round"])}
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
    fill = max(target, left + 108)
    parts += [box(left, y + 72, 107, 36), text(left + 8, y + 88, "commits the", "ink small")]
    parts += [text(left + 8, y + 102, "round before", "ink small")]
    parts += [box(fill, y + 72, 107, 36), text(fill + 8, y + 95, "fills masks", "ink small")]
    parts += [arrow(left, y + 37, left, y + 70), text(left + 5, y + 58, "tokens", "faint small")]
    parts += [arrow(fill, y + 37, fill, y + 70), text(fill + 5, y + 58, "drafts", "faint small")]
    parts += [arrow(fill + 104, y + 71, verify + 2, y + 39), text(fill + 104, y + 66, "masks", "faint small", "end")]
    return picture(y + 122, f"One round. {about}", parts)


def build() -> str:
    """The steps from a recipe to a server."""
    steps = [
        ("recipe", "TOML: target, draft, limits, reasoning, backend"),
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


PICTURES: Mapping[str, Callable[[], str]] = {
    "rounds": rounds,
    "tokens": tokens,
    "first-tokens": first_tokens,
    "weights": weights,
    "acceptance": acceptance,
    "timeline": timeline,
    "build": build,
    "architecture": architecture,
}


def _labels(series: Mapping[str, Sequence[float | None]], form: str) -> dict[str, Sequence[str | None]]:
    return {
        name: [None if value is None else form.format(value) for value in values] for name, values in series.items()
    }
