"""Measure the round at scale: an 8B Llama shape and a draft that agrees with it, both random, made on the spot.

    python -m tools.bench_gpu --json gpu.json                                    # one H200, bfloat16
    python -m tools.bench_gpu --device cpu --size small --batches 1,2 --prompt 64 --tokens 32     # a try

    python -m tools.bench_gpu --weights fp8                 # products in float8, or int4: 4 bits, the head's too
    python -m tools.bench_gpu --batch-invariant                                  # the same bits in any batch
    python -m tools.bench_gpu --kv-dtype float8_e4m3                             # keys and values in float8
    python -m tools.bench_gpu --draft eagle3 --draft-weights fp8                 # another kind of draft
    python -m tools.bench_gpu --family qwen3_moe --size 30b-a3b --layers 12      # experts, in a part of the layers
    python -m tools.bench_gpu --batches "" --constrained 0 --no-trace            # the parts about prompts alone

A draft of another kind than ``model`` has random weights too, at the shape of published ones (tools/random_drafts.py),
and is accepted by the rule synthetic, --acceptance tokens a round. So is any draft of a model with experts, whose
routers choose almost evenly; a fraction of its layers is for machines with less disk, and takes a fraction of the time.

Prints as it goes: milliseconds per round by piece of the device's work, the target against its memory floor, tokens/s,
acceptance and speed-up for every batch; then a JSON grammar, a thinking budget and a seed on every request against
none of them; then how many texts part from plain decoding's; then what the GPU does in a round; then first tokens of
many prompts, of prompts with a known beginning and of a long one, the gaps that prompts make for requests that decode,
and how busy the GPU is meanwhile. A part that fails is reported and does not hide the others.
"""

import json
import statistics
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from tandemrt import LLM
from tandemrt.engines.bundle import Bundle
from tools.gpu import requests
from tools.gpu.burst import Burst, Measured
from tools.gpu.models import floor_ms, make_bundle, make_draft, make_models
from tools.gpu.prompt_parts import PromptParts, numbers
from tools.gpu.table import markdown
from tools.gpu.ties import parted
from tools.gpu.trace import traced
from tools.narrow_weights import Stored
from tools.random_checkpoint import Family, Size
from tools.random_drafts import Kind

console = Console(width=160, soft_wrap=True, highlight=False)
WARM = 32  # tokens of every request before anything is measured
PIECES = ("propose", "target", "verify")


class Bench:
    """The results so far, and the file they are written to after every part."""

    def __init__(self, out: Path | None) -> None:
        self.results: dict[str, Any] = {"seconds": {}}
        self._out = out

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Run one part and keep what it returns; a failure is kept in its place."""
        begin = time.perf_counter()
        console.print(f"[bold]{name}[/]")
        try:
            result = work()
            self.results[name] = result if isinstance(result, dict | list) else None
        except Exception as error:  # the other parts are worth having
            result = None
            self.results[name] = {"failed": f"{type(error).__name__}: {error}"}
            console.print(traceback.format_exc(), style="red", markup=False)
        self.results["seconds"][name] = time.perf_counter() - begin
        console.print(f"[dim]{name}: {self.results['seconds'][name]:.1f} s[/]")
        if self._out is not None:
            self._out.write_text(json.dumps(self.results, indent=2) + "\n")
        return result


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu for a try with small shapes.")] = "cuda",
    size: Annotated[Size, typer.Option(help="Dimensions of the target.")] = Size.B8,
    family: Annotated[Family, typer.Option(help="Architecture of the target: llama or qwen3_moe.")] = Family.LLAMA,
    layers: Annotated[int | None, typer.Option(help="Layers of the target, if not the size's own.", min=2)] = None,
    models: Annotated[
        Path | None,
        typer.Option(help="Folder for the models; those it holds are used, or refused if others. Default: temporary."),
    ] = None,
    draft: Annotated[Kind, typer.Option(help="What drafts.")] = Kind.MODEL,
    weights: Annotated[Stored, typer.Option(help="How the models' products are stored.")] = Stored.WHOLE,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="Round a token the same in any batch (backend.batch_invariant).")
    ] = False,
    draft_weights: Annotated[
        Stored | None,
        typer.Option(help="The same for a draft of another kind than model: whole or fp8. Default: as --weights."),
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="What caches hold: float8_e4m3; default: the dtype.")] = None,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Also use the bundle that --models holds; refused if built otherwise.")
    ] = False,
    batch_sizes: Annotated[
        str, typer.Option("--batches", help="Requests that run together, per line; empty: none.")
    ] = "1,8,16,32,64",
    window: Annotated[int, typer.Option(help="Drafted tokens per round.", min=1)] = 4,
    prompt: Annotated[int, typer.Option(help="Tokens per prompt.", min=2)] = 1000,
    tokens: Annotated[int, typer.Option(help="Measured tokens per request.", min=1)] = 256,
    length: Annotated[int, typer.Option(help="The engine's length, prompt and output.", min=16)] = 2048,
    chunk: Annotated[int, typer.Option(help="Prompt tokens that a round takes in.", min=1)] = 2048,
    temperature: Annotated[float, typer.Option(help="Of every request.", min=0.01)] = 0.7,
    acceptance: Annotated[float, typer.Option(help="Tokens per round, by how models are tuned or by the rule.")] = 3.0,
    constrained: Annotated[int, typer.Option(help="Requests of the constrained part; 0 leaves it out.", min=0)] = 16,
    pairs: Annotated[int, typer.Option(help="Runs each way of the constrained part.", min=1)] = 3,
    texts: Annotated[
        int, typer.Option(help="Texts that are compared with and without speculation; 0 leaves it out.", min=0)
    ] = 256,
    trace: Annotated[bool, typer.Option(help="Record what the GPU does in rounds.")] = True,
    prompts: Annotated[
        str, typer.Option(help="Prompts that come at once, per line of the parts about prompts; empty: none.")
    ] = "1,16,64",
    shared: Annotated[int, typer.Option(help="Tokens that prompts share in their part; 0 leaves it out.", min=0)] = 900,
    arrivals: Annotated[
        int, typer.Option(help="Prompts that come beside as many requests that decode; 0 leaves it out.", min=0)
    ] = 16,
    beside: Annotated[
        str, typer.Option(help="Prompt tokens a round beside requests that decode, of further arrivals; empty: none.")
    ] = "1024",
    long: Annotated[int, typer.Option(help="Tokens of a long prompt; 0 leaves it out.", min=0)] = 32_000,
    out: Annotated[Path | None, typer.Option("--json", help="Write the figures here, after every part.")] = None,
) -> None:
    """Make the models and the bundle, open it once, measure every line."""
    bench, wanted, at_once = Bench(out), numbers(batch_sizes), numbers(prompts)
    stored = _stored(draft, weights, draft_weights)
    own = draft is Kind.MODEL and family is Family.LLAMA  # a draft that agrees with its target by itself
    name = "bundle" if draft is Kind.MODEL else f"bundle-{draft}"
    slots = max(*wanted, constrained, *at_once, 2 * arrivals, 1)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = models or Path(temporary)

        def models_of_size() -> Path:
            return make_models(
                folder,
                size,
                device=device,
                acceptance=acceptance if own else None,
                temperature=temperature,
                window=window,
                stored=weights,
                family=family,
                layers=layers,
            )

        if bench.part("models", models_of_size) is None:
            raise typer.Exit(1)
        bench.part("draft", partial(make_draft, folder, draft, device=device, float8=stored is Stored.FP8))
        if device.startswith("cuda"):
            torch.cuda.empty_cache()  # the weights lie in files now

        def exported() -> Bundle:
            given: dict[str, Any] = {"batch": slots, "length": length, "chunk": chunk, "window": window}
            given |= {"kind": draft, "kv_dtype": kv_dtype, "batch_invariant": batch_invariant, "reuse": reuse}
            return make_bundle(folder, name, device=device, **given)

        bundle = bench.part("bundle", exported)
        options: Any = {"device": device, "profile": True, "synthetic_rule": not own}
        llm = bundle and bench.part("open", lambda: LLM(bundle.folder, **options))
        if llm is None:
            raise typer.Exit(1)
        with llm:
            lines = Lines(llm, bundle, prompt, tokens, temperature, None if own else acceptance)
            batches = {batch: bench.part(f"batch {batch}", partial(lines.both, batch, window)) for batch in wanted}
            if constrained:
                bench.part("constrained", partial(lines.constrained, constrained, window, pairs))
            if texts and own:  # the rule synthetic changes texts
                bench.part("ties", partial(lines.ties, texts, window))
            if trace and device.startswith("cuda"):
                for batch in sorted({1, min(16, slots), slots}):
                    bench.part(f"trace {batch}", partial(lines.trace, batch, window))
            parts = PromptParts(console, llm, bundle, tokens=prompt, temperature=temperature, window=window)
            if at_once:
                bench.part("prompts", partial(parts.first_tokens, at_once))
            if at_once and shared:
                bench.part("shared beginnings", partial(parts.shared, at_once, shared))
            if arrivals:
                for budget in (None, *(min(each, bundle.limits.prefill_chunk) for each in numbers(beside))):
                    for drafted in (0, window):
                        name = f"arrivals, window {drafted}, {budget or 'default'} beside"
                        bench.part(name, partial(parts.arrivals, arrivals, drafted, budget))
            if at_once and device.startswith("cuda"):
                bench.part("busy", partial(parts.busy, min(16, max(at_once))))
        if long:
            bench.part("long prompt", lambda: long_prompt(folder, device, long, chunk, temperature, kv_dtype))
    with_peer = size is Size.B8 and weights is Stored.WHOLE and kv_dtype is None
    console.print(markdown({b: both for b, both in batches.items() if both}, window, with_peer=with_peer), markup=False)
    failed = [name for name, result in bench.results.items() if isinstance(result, dict) and "failed" in result]
    outcome = f"[red]failed: {', '.join(failed)}[/]" if failed else "no part failed"
    console.print(f"{time.perf_counter() - begin:.0f} s in all, {outcome}")
    raise typer.Exit(1 if failed else 0)


def _stored(draft: Kind, weights: Stored, asked: Stored | None) -> Stored:
    """How the draft's products are stored. Raises BadParameter for a way in which it is not made."""
    stored = asked or weights
    if draft is Kind.MODEL and stored is not weights:
        rule = f"a draft of kind model is stored as its target is, {weights}"
        raise typer.BadParameter(f"{rule}; got {stored}; leave it out", param_hint="--draft-weights")
    if draft is not Kind.MODEL and stored is Stored.INT4:
        rule = f"must be {Stored.WHOLE} or {Stored.FP8} for a draft of kind {draft}, which has no products in 4 bits"
        raise typer.BadParameter(f"{rule}; got {stored}; say which", param_hint="--draft-weights")
    return stored


def long_prompt(
    folder: Path, device: str, tokens: int, chunk: int, temperature: float, kv_dtype: str | None
) -> dict[str, Any]:
    """One prompt of ``tokens`` tokens, in a bundle of its own with a single slot."""
    sizes: dict[str, Any] = {"batch": 1, "length": tokens + 16, "chunk": chunk, "window": 1}
    bundle = make_bundle(folder, "long", device=device, **sizes, kv_dtype=kv_dtype)
    with LLM(bundle.folder, device=device, window=0) as llm:
        return PromptParts(console, llm, bundle, tokens=tokens, temperature=temperature, window=0).long()


class Lines:
    """The lines of the report, all measured on one opened bundle."""

    def __init__(
        self, llm: LLM, bundle: Bundle, prompt: int, tokens: int, temperature: float, accepted: float | None
    ) -> None:
        self._llm = llm
        self._bundle = bundle
        self._prompt = prompt
        self._tokens = tokens
        self._temperature = temperature
        self._accepted = accepted

    def both(self, batch: int, window: int) -> dict[str, Any]:
        """One batch size without and with speculation."""
        plain, speculated = (self._line(batch, drafted) for drafted in (0, window))
        speedup = speculated["tokens_per_second"] / plain["tokens_per_second"]
        console.print(f"  batch {batch}: speculation gives {speedup:.2f} times the tokens per second")
        return {"plain": plain, "speculated": speculated, "speedup": speedup}

    def constrained(self, batch: int, window: int, pairs: int) -> dict[str, Any]:
        """A JSON grammar, a budget and a seed on every request against none of them, in turns."""
        budget = WARM + self._tokens // 4  # so that reasoning is cut off while it is measured, and JSON follows
        texts = requests.prompts(self._bundle, batch, self._prompt)
        sizes = (self._bundle, batch, self._prompt, self._temperature, window)
        ways = {
            "plain": (texts, requests.plain(*sizes)),
            "constrained": (requests.opened(self._bundle, texts), requests.constrained(*sizes, budget)),
        }
        found: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for _ in range(pairs):
            for name, (given, params) in ways.items():
                measured = Burst(self._llm, WARM, self._tokens).run(given, params)
                found[name].append(measured.to_json())
                self._print(name, batch, measured)
        ratios = [
            constrained["ms_per_round"] / plain["ms_per_round"]
            for plain, constrained in zip(found["plain"], found["constrained"], strict=True)
        ]
        cost = statistics.median(ratios) - 1
        console.print(
            f"  grammar, budget and seed cost {100 * cost:+.2f} % of a round (runs: {[f'{r:.4f}' for r in ratios]})"
        )
        return {**found, "cost": cost, "budget": budget}

    def ties(self, texts: int, window: int) -> dict[str, Any]:
        """Texts with speculation against the same without."""
        found = parted(self._llm, self._bundle, texts, self._temperature, window)
        console.print(
            f"  {found['parted']} of {texts} texts of {found['tokens']} tokens parted from plain decoding's, "
            f"at {found['at']}"
        )
        return found

    def trace(self, batch: int, window: int) -> dict[str, Any]:
        """The GPU's own records of a third of a second of rounds."""
        burst = Burst(self._llm, WARM, max(2 * self._tokens, 512))  # long enough for the profiler to start
        texts = requests.prompts(self._bundle, batch, self._prompt)
        params = requests.plain(self._bundle, batch, self._prompt, self._temperature, window, self._accepted)
        runner = threading.Thread(target=burst.run, args=(texts, params))
        runner.start()
        burst.started.wait(60)
        result = traced(self._rounds)
        runner.join()
        console.print(
            f"  batch {batch}: GPU without work {100 * result['idle_share']:.2f} % of {result['rounds']} rounds, "
            f"{result['launches_per_round']:.0f} launches each"
        )
        for kernel in result["kernels"]:
            console.print(
                f"    {kernel['ms_per_round']:7.3f} ms a round, {kernel['us_each']:7.1f} us each  {kernel['name']}"
            )
        return result

    def _rounds(self) -> int:
        before = self._llm.metrics.rounds
        time.sleep(0.3)
        return self._llm.metrics.rounds - before

    def _line(self, batch: int, window: int) -> dict[str, Any]:
        params = requests.plain(self._bundle, batch, self._prompt, self._temperature, window, self._accepted)
        measured = Burst(self._llm, WARM, self._tokens).run(requests.prompts(self._bundle, batch, self._prompt), params)
        floor = floor_ms(self._bundle, batch, measured.context, batch * (window + 1))
        self._print(f"window {window}", batch, measured, floor)
        return {**measured.to_json(), "target_floor_ms": floor}

    def _print(self, name: str, batch: int, measured: Measured, floor: float | None = None) -> None:
        device = measured.device_ms
        pieces = ", ".join(f"{piece} {device[piece]:.3f}" for piece in PIECES if piece in device)
        idle = f", rest {device['idle']:.3f} = {100 * device['idle'] / device['round']:.1f} %" if device else ""
        ratio = f", target {device['target'] / floor:.2f} x floor {floor:.3f}" if floor and device else ""
        eager = {reason: count for reason, count in measured.metrics.eager_runs.items() if count}
        console.print(
            f"  {name:>11} x {batch:<3} {measured.ms_per_round:8.3f} ms a round ({pieces}{idle}{ratio}), "
            f"{measured.tokens_per_second:8.0f} tokens/s, {measured.acceptance_length:.2f} a round"
            + (f", eager: {eager}" if eager else "")
            + (f", [red]{measured.finished} ended early[/]" if measured.finished else "")
        )


if __name__ == "__main__":
    typer.run(main)
