"""Measure what batch invariance costs: bundles with and without it, in one process and in turns.

    python -m tools.bench.invariance                                             # 8B Llama shape, bfloat16
    python -m tools.bench.invariance --weights fp8                               # or int4
    python -m tools.bench.invariance --kv-dtype float8_e4m3 --layers 8           # FP8 KV cache, fewer layers
    python -m tools.bench.invariance --family qwen3_moe --size 30b-a3b --layers 8
    python -m tools.bench.invariance --device cpu --size small --batches 1 --prompts 1x20 --tokens 16     # a trial run

Both bundles are open at once, so their weights and caches must fit. On a CPU they are equal. Every figure is the least
of --repeats runs. Texts are compared with and without speculation. Models as in tools.bench.gpu.
"""

import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from tandemrt import LLM
from tandemrt.engines.bundle.bundle import Bundle
from tools.bench.gpu import requests
from tools.bench.gpu.burst import Burst
from tools.bench.gpu.models import make_bundle, make_models
from tools.bench.gpu.prompts import first_tokens
from tools.bench.gpu.ties import count_diverged
from tools.bench.options import integers
from tools.bench.report import Json, Report, Row
from tools.models.quantized_weights import WeightFormat
from tools.models.random_checkpoint import Family, Size

PROMPT = 1000  # tokens
WINDOW = 4  # drafted tokens
TEMPERATURE = 0.7
ACCEPTANCE = 3.0  # tokens per round
COLUMNS = {"what": "", "at once": "", "without, ms": ".3f", "with, ms": ".3f", "cost, %": "+.1f", "target, %": "+.1f"}


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial run with small shapes.")] = "cuda",
    size: Annotated[Size, typer.Option(help="Dimensions of the target.")] = Size.B8,
    family: Annotated[Family, typer.Option(help="Architecture of the target.")] = Family.LLAMA,
    layers: Annotated[int | None, typer.Option(help="Layers of the target. Default: those of the size.", min=2)] = None,
    weights: Annotated[WeightFormat, typer.Option(help="Format of matmul weights.")] = WeightFormat.UNQUANTIZED,
    kv_dtype: Annotated[str | None, typer.Option(help="float8_e4m3, or the dtype.")] = None,
    models: Annotated[Path | None, typer.Option(help="Folder for models and bundles. Default: temporary.")] = None,
    batches: Annotated[str, typer.Option(help="Concurrent requests that decode; empty: none.")] = "1,8,16,32,64",
    prompts: Annotated[
        str, typer.Option(help="Concurrent prompts x their tokens; empty: none.")
    ] = "1x1000,16x1000,64x1000,1x40",
    tokens: Annotated[int, typer.Option(help="Measured tokens per request.", min=1)] = 96,
    length: Annotated[int, typer.Option(help="The bundles' length.", min=16)] = 2048,
    repeats: Annotated[int, typer.Option(help="Runs of each figure.", min=1)] = 2,
    texts: Annotated[int, typer.Option(help="Texts to compare; 0: none.", min=0)] = 256,
    out: Json = None,
) -> None:
    """Build both bundles, open them, and measure each part in turns."""
    at_once = integers(batches)
    asked = [(int(count), int(each)) for count, _, each in (one.partition("x") for one in prompts.split(",") if one)]
    tuned = family is Family.LLAMA  # the draft is tuned to agree with its target
    sizes: dict[str, Any] = {"length": length, "chunk": min(2048, length), "window": WINDOW, "kv_dtype": kv_dtype}
    sizes["batch"] = max([*at_once, *(count for count, _ in asked), 1])
    with tempfile.TemporaryDirectory() as temporary:
        folder = models or Path(temporary)
        make_models(
            folder,
            size,
            device=device,
            acceptance=ACCEPTANCE if tuned else None,
            temperature=TEMPERATURE,
            window=WINDOW,
            weight_format=weights,
            family=family,
            layers=layers,
        )
        if device.startswith("cuda"):
            torch.cuda.empty_cache()  # the weights are in files now
        ways = {name: _Way.open(folder, name, device, tuned, sizes) for name in ("with", "without")}
        report = Report(out)
        report.add("seconds to open", dict.fromkeys(ways, ".1f"), [tuple(way.seconds for way in ways.values())])
        limit = min(PROMPT, length // 2)
        rows = [_line(ways, repeats, batch, drafted, limit, tokens) for batch in at_once for drafted in (0, WINDOW)]
        rows += [_first_tokens(ways, repeats, *each) for each in asked]
        report.add("cost of batch invariance", COLUMNS, rows)
        if texts and tuned:
            parted = (count_diverged(way.llm, way.bundle, texts, TEMPERATURE, WINDOW) for way in ways.values())
            diverged = tuple(each["diverged"] for each in parted)
            report.add(f"of {texts} texts differ with speculation", dict.fromkeys(ways, ""), [diverged])
        for way in ways.values():
            way.llm.close()


class _Way:
    """An opened bundle, and the seconds that it took to open. ``accepted``: tokens of a round by the rule synthetic."""

    def __init__(self, bundle: Bundle, llm: LLM, seconds: float, accepted: float | None) -> None:
        self.bundle, self.llm, self.seconds, self.accepted = bundle, llm, seconds, accepted

    @classmethod
    def open(cls, folder: Path, name: str, device: str, tuned: bool, sizes: Mapping[str, Any]) -> "_Way":
        invariant = name == "with" if device.startswith("cuda") else None
        bundle = make_bundle(folder, name, device=device, batch_invariant=invariant, reuse=True, **sizes)
        begin = time.perf_counter()
        llm = LLM(bundle.folder, device=device, profile=True, synthetic_rule=not tuned)
        seconds = time.perf_counter() - begin
        assert llm.loop  # has warmed up, which would disturb what is measured with the other bundle
        return cls(bundle, llm, seconds, None if tuned else ACCEPTANCE)

    def decode(self, batch: int, drafted: int, prompt: int, tokens: int) -> tuple[float, float]:
        """Return milliseconds of a round, and those of the target alone."""
        params = requests.unconstrained(self.bundle, batch, prompt, TEMPERATURE, drafted, self.accepted)
        measured = Burst(self.llm, tokens).run(requests.prompts(self.bundle, batch, prompt), params)
        return measured.ms_per_round, measured.device_ms["target"]

    def first_tokens(self, count: int, length: int, seed: int) -> float:
        params = requests.unconstrained(self.bundle, count, length, TEMPERATURE, 0, self.accepted)
        return first_tokens(self.llm, requests.prompts(self.bundle, count, length, seed), params)


def _line(ways: Mapping[str, _Way], repeats: int, batch: int, drafted: int, prompt: int, tokens: int) -> Row:
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for name in _in_turns(ways, repeats):
        times[name].append(ways[name].decode(batch, drafted, prompt, tokens))
    least = {name: tuple(map(min, zip(*each, strict=True))) for name, each in times.items()}
    without, invariant = least["without"], least["with"]
    costs = (100 * (one / other - 1) for one, other in zip(invariant, without, strict=True))
    return f"round of {drafted} drafts" if drafted else "token", batch, without[0], invariant[0], *costs


def _first_tokens(ways: Mapping[str, _Way], repeats: int, count: int, length: int) -> Row:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for seed, name in enumerate(_in_turns(ways, repeats + 1)):  # the first run binds the calls
        times[name].append(ways[name].first_tokens(count, length, seed))
    without, invariant = (min(times[name][1:]) for name in ("without", "with"))
    return f"first tokens of {length}", count, without, invariant, 100 * (invariant / without - 1), None


def _in_turns(ways: Mapping[str, _Way], repeats: int) -> list[str]:
    """Return each name ``repeats`` times, in an order that alternates."""
    names = list(ways)
    return [name for turn in range(repeats) for name in (names[::-1] if turn % 2 else names)]


if __name__ == "__main__":
    typer.run(main)
