"""Measure rounds at scale: an 8B Llama shape and a draft that agrees with it, both with random weights.

    python -m tools.bench.gpu --json gpu.json                                    # one H200, bfloat16
    python -m tools.bench.gpu --device cpu --size small --batches 1,2 --prompt 64 --tokens 32     # a trial run

    python -m tools.bench.gpu --weights fp8                 # FP8 matmuls; or int4: 4-bit matmuls and lm_head
    python -m tools.bench.gpu --no-batch-invariant                               # bits that depend on the batch
    python -m tools.bench.gpu --kv-dtype float8_e4m3                             # FP8 KV cache
    python -m tools.bench.gpu --draft eagle3 --draft-weights fp8                 # another kind of draft
    python -m tools.bench.gpu --family qwen3_moe --size 30b-a3b --layers 12      # experts, in some of the layers
    python -m tools.bench.gpu --family qwen3_5_text --size 9b                    # three of four layers are recurrent
    python -m tools.bench.gpu --family gpt_oss --size 20b --weights mxfp4        # experts in 4-bit floats
    python -m tools.bench.gpu --tensor-parallel 2 --size 70b --layers 12         # the target on two GPUs
    python -m tools.bench.gpu --batches "" --constrained 0 --no-trace            # only the parts about prompts

Drafts of other kinds than ``model`` have random weights at published shapes (tools/models/random_drafts.py) and are
accepted by the rule ``synthetic``, --acceptance tokens a round. So are all drafts of a target with experts, because its
random routers choose almost uniformly. A target with fewer layers needs less disk, and proportionally less time.

The report has a line per batch size: milliseconds per round by phase, the target against its memory floor, tokens/s,
acceptance and speed-up. Then it measures a JSON grammar, a thinking budget and a seed on every request against none of
them; texts that differ from autoregressive decoding; GPU kernels of a round; first tokens of many prompts, of prompts
with a cached prefix and of a long one; the gaps that arriving prompts cause for decoding requests; and GPU utilization.
A part that fails is reported, and the others still run.
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
from tandemrt.engines.bundle.bundle import Bundle
from tools.bench.gpu import requests
from tools.bench.gpu.burst import WARM, Burst, Measured
from tools.bench.gpu.models import floor_ms, make_bundle, make_draft, make_models
from tools.bench.gpu.prompt_parts import PromptParts
from tools.bench.gpu.table import markdown
from tools.bench.gpu.ties import count_diverged
from tools.bench.gpu.trace import traced
from tools.bench.options import integers
from tools.bench.report import Json
from tools.models.quantized_weights import WeightFormat
from tools.models.random_checkpoint import Family, Size
from tools.models.random_drafts import Kind

console = Console(width=160, soft_wrap=True, highlight=False)
PHASES = ("propose", "target", "verify")


class Bench:
    """The results so far, written to a file after every part."""

    def __init__(self, out: Path | None) -> None:
        self.results: dict[str, Any] = {"seconds": {}}
        self._out = out

    def part(self, name: str, work: Callable[[], Any]) -> Any:
        """Run one part and keep its result; a failure is stored in its place."""
        begin = time.perf_counter()
        console.print(f"[bold]{name}[/]")
        try:
            result = work()
            self.results[name] = result if isinstance(result, dict | list) else None
        except Exception as error:  # the other parts still run
            result = None
            self.results[name] = {"failed": f"{type(error).__name__}: {error}"}
            console.print(traceback.format_exc(), style="red", markup=False)
        self.results["seconds"][name] = time.perf_counter() - begin
        console.print(f"[dim]{name}: {self.results['seconds'][name]:.1f} s[/]")
        if self._out is not None:
            self._out.write_text(json.dumps(self.results, indent=2) + "\n")
        return result


def main(
    device: Annotated[str, typer.Option(help="cuda, or cpu for a trial run with small shapes.")] = "cuda",
    size: Annotated[Size, typer.Option(help="Dimensions of the target.")] = Size.B8,
    family: Annotated[
        Family, typer.Option(help="Architecture of the target; its sizes are in tools/models/random_checkpoint.py.")
    ] = Family.LLAMA,
    layers: Annotated[int | None, typer.Option(help="Layers of the target. Default: those of the size.", min=2)] = None,
    router_skew: Annotated[
        float, typer.Option(help="Spread of the logarithms of routers' weights: some experts are chosen more often.")
    ] = 0.0,
    models: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the models; existing ones are used, or refused if they differ. Default: temporary."
        ),
    ] = None,
    draft: Annotated[Kind, typer.Option(help="Kind of the draft.")] = Kind.MODEL,
    weights: Annotated[
        WeightFormat, typer.Option(help="Format of the models' matmul weights.")
    ] = WeightFormat.UNQUANTIZED,
    batch_invariant: Annotated[
        bool | None,
        typer.Option(help="Round a token the same in any batch (backend.batch_invariant). Default: the recipe's."),
    ] = None,
    draft_weights: Annotated[
        WeightFormat | None,
        typer.Option(
            help="The same for a draft of another kind than model: unquantized or fp8. Default: as --weights."
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None, typer.Option(help="dtype of the KV cache: float8_e4m3. Default: the dtype.")
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="GPUs that the target is split over.", min=1)] = 1,
    reuse: Annotated[
        bool, typer.Option("--reuse", help="Use the bundle in --models; refused if its options differ.")
    ] = False,
    batch_sizes: Annotated[
        str, typer.Option("--batches", help="Concurrent requests of each line; empty: none.")
    ] = "1,8,16,32,64",
    window: Annotated[int, typer.Option("--num-draft-tokens", help="Drafted tokens per round.", min=1)] = 4,
    prompt: Annotated[int, typer.Option(help="Tokens per prompt.", min=2)] = 1000,
    tokens: Annotated[int, typer.Option(help="Measured tokens per request.", min=1)] = 256,
    length: Annotated[int, typer.Option(help="The engine's length, prompt and output.", min=16)] = 2048,
    chunk: Annotated[int, typer.Option(help="Prompt tokens per round.", min=1)] = 2048,
    temperature: Annotated[float, typer.Option(help="Temperature of every request.", min=0.01)] = 0.7,
    acceptance: Annotated[float, typer.Option(help="Tokens per round, by tuning or by the rule synthetic.")] = 3.0,
    constrained: Annotated[int, typer.Option(help="Requests of the constrained part; 0 leaves it out.", min=0)] = 16,
    pairs: Annotated[int, typer.Option(help="Runs each way of the constrained part.", min=1)] = 3,
    texts: Annotated[
        int, typer.Option(help="Texts to compare with and without speculation; 0 leaves it out.", min=0)
    ] = 256,
    trace: Annotated[bool, typer.Option(help="Record the GPU kernels of rounds.")] = True,
    prompts: Annotated[
        str, typer.Option(help="Concurrent prompts of each line of the parts about prompts; empty: none.")
    ] = "1,16,64",
    shared: Annotated[int, typer.Option(help="Tokens that prompts share in their part; 0 leaves it out.", min=0)] = 900,
    arrivals: Annotated[
        int, typer.Option(help="Prompts that arrive while as many requests decode; 0 leaves it out.", min=0)
    ] = 16,
    chunk_while_decoding: Annotated[
        str, typer.Option(help="Further limits on prompt tokens per round while requests decode; empty: none.")
    ] = "1024",
    long: Annotated[int, typer.Option(help="Tokens of a long prompt; 0 leaves it out.", min=0)] = 32_000,
    out: Json = None,
) -> None:
    """Build models and bundle, open it once, and measure every line."""
    bench, wanted, at_once = Bench(out), integers(batch_sizes), integers(prompts)
    weight_format = _draft_format(draft, weights, draft_weights)
    tuned = draft is Kind.MODEL and family is Family.LLAMA  # the draft is tuned to agree with its target
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
                acceptance=acceptance if tuned else None,
                temperature=temperature,
                window=window,
                weight_format=weights,
                family=family,
                layers=layers,
                router_skew=router_skew,
            )

        if bench.part("models", models_of_size) is None:
            raise typer.Exit(1)
        bench.part("draft", partial(make_draft, folder, draft, device=device, float8=weight_format is WeightFormat.FP8))
        if device.startswith("cuda"):
            torch.cuda.empty_cache()  # the weights are in files now

        def exported() -> Bundle:
            limits: dict[str, Any] = {"batch": slots, "length": length, "chunk": chunk, "window": window}
            limits |= {"kind": draft, "kv_dtype": kv_dtype, "batch_invariant": batch_invariant, "reuse": reuse}
            limits["tensor_parallel"] = tensor_parallel
            return make_bundle(folder, name, device=device, **limits)

        bundle = bench.part("bundle", exported)
        options: Any = {"device": device, "profile": True, "synthetic_rule": not tuned, "adaptive_draft_tokens": False}
        options["lookup"] = False
        llm = bundle and bench.part("open", lambda: LLM(bundle.folder, **options))
        if llm is None:
            raise typer.Exit(1)
        with llm:
            lines = Lines(llm, bundle, prompt, tokens, temperature, None if tuned else acceptance)
            batches = {batch: bench.part(f"batch {batch}", partial(lines.both, batch, window)) for batch in wanted}
            if constrained:
                bench.part("constrained", partial(lines.constrained, constrained, window, pairs))
            if texts:
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
                for budget in (
                    None,
                    *(min(each, bundle.limits.prefill_chunk) for each in integers(chunk_while_decoding)),
                ):
                    for drafted in (0, window):
                        name = f"arrivals, {drafted} draft tokens, chunk {budget or 'default'}"
                        bench.part(name, partial(parts.arrivals, arrivals, drafted, budget))
            if at_once and device.startswith("cuda"):
                bench.part("busy", partial(parts.busy, min(16, max(at_once))))
        if long:
            on_ranks = {"kv_dtype": kv_dtype, "tensor_parallel": tensor_parallel}
            bench.part("long prompt", lambda: long_prompt(folder, device, long, chunk, temperature, **on_ranks))
    console.print(markdown({b: both for b, both in batches.items() if both}, window), markup=False)
    failed = [name for name, result in bench.results.items() if isinstance(result, dict) and "failed" in result]
    outcome = f"[red]failed: {', '.join(failed)}[/]" if failed else "no part failed"
    console.print(f"{time.perf_counter() - begin:.0f} s in all, {outcome}")
    raise typer.Exit(1 if failed else 0)


def _draft_format(draft: Kind, weights: WeightFormat, asked: WeightFormat | None) -> WeightFormat:
    """Return the format of the draft's matmuls. Raises BadParameter for an unsupported format."""
    weight_format = asked or weights
    if draft is Kind.MODEL and weight_format is not weights:
        rule = f"a draft of kind model is stored in the format of its target, {weights}"
        raise typer.BadParameter(f"{rule}; got {weight_format}; leave it out", param_hint="--draft-weights")
    if draft is not Kind.MODEL and weight_format is WeightFormat.INT4:
        rule = f"must be {WeightFormat.UNQUANTIZED} or {WeightFormat.FP8} for a draft of kind {draft}"
        raise typer.BadParameter(f"{rule}; got {weight_format}; name one of them", param_hint="--draft-weights")
    return weight_format


def long_prompt(
    folder: Path, device: str, tokens: int, chunk: int, temperature: float, **options: Any
) -> dict[str, Any]:
    """Measure one prompt of ``tokens`` tokens, in a bundle of its own with one slot. ``options``: of make_bundle."""
    sizes: dict[str, Any] = {"batch": 1, "length": tokens + 16, "chunk": chunk, "window": 1}
    bundle = make_bundle(folder, "long", device=device, **sizes, **options)
    with LLM(bundle.folder, device=device, num_draft_tokens=0) as llm:
        return PromptParts(console, llm, bundle, tokens=tokens, temperature=temperature, window=0).long()


class Lines:
    """Measures the lines of the report on one opened bundle."""

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
        """Measure one batch size without and with speculation."""
        autoregressive, speculative = (self._line(batch, drafted) for drafted in (0, window))
        speedup = speculative["tokens_per_second"] / autoregressive["tokens_per_second"]
        console.print(f"  batch {batch}: speculation gives {speedup:.2f} times the tokens per second")
        return {"autoregressive": autoregressive, "speculative": speculative, "speedup": speedup}

    def constrained(self, batch: int, window: int, pairs: int) -> dict[str, Any]:
        """Measure a JSON grammar, a budget and a seed on every request against none of them, alternating."""
        budget = WARM + self._tokens // 4  # so that reasoning is cut off while it is measured, and JSON follows
        texts = requests.prompts(self._bundle, batch, self._prompt)
        sizes = (self._bundle, batch, self._prompt, self._temperature, window)
        ways = {
            "unconstrained": (texts, requests.unconstrained(*sizes)),
            "constrained": (requests.opened(self._bundle, texts), requests.constrained(*sizes, budget)),
        }
        figures: dict[str, list[dict[str, Any]]] = {name: [] for name in ways}
        for _ in range(pairs):
            for name, (prompts, params) in ways.items():
                measured = Burst(self._llm, self._tokens).run(prompts, params)
                figures[name].append(measured.to_json())
                self._print(name, batch, measured)
        ratios = [
            constrained["ms_per_round"] / unconstrained["ms_per_round"]
            for unconstrained, constrained in zip(figures["unconstrained"], figures["constrained"], strict=True)
        ]
        cost = statistics.median(ratios) - 1
        console.print(
            f"  grammar, budget and seed cost {100 * cost:+.2f} % of a round (runs: {[f'{r:.4f}' for r in ratios]})"
        )
        return {**figures, "cost": cost, "budget": budget}

    def ties(self, texts: int, window: int) -> dict[str, Any]:
        """Compare texts with and without speculation."""
        ties = count_diverged(self._llm, self._bundle, texts, self._temperature, window)
        console.print(
            f"  {ties['diverged']} of {texts} texts of {ties['tokens']} tokens differ from autoregressive decoding, "
            f"at {ties['at']}; {ties['accepted']} drafted tokens were accepted"
        )
        return ties

    def trace(self, batch: int, window: int) -> dict[str, Any]:
        """Return the GPU's records of a third of a second of rounds."""
        burst = Burst(self._llm, max(2 * self._tokens, 512))  # long enough to start the profiler
        texts = requests.prompts(self._bundle, batch, self._prompt)
        params = requests.unconstrained(self._bundle, batch, self._prompt, self._temperature, window, self._accepted)
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
        for gap in result["gaps"]:
            console.print(
                f"    {gap['ms_per_round']:7.3f} ms a round, {gap['us_each']:7.1f} us each  without work between "
                f"{gap['before']} and {gap['after']}",
                markup=False,
            )
        return result

    def _rounds(self) -> int:
        before = self._llm.metrics.rounds
        time.sleep(0.3)
        return self._llm.metrics.rounds - before

    def _line(self, batch: int, window: int) -> dict[str, Any]:
        params = requests.unconstrained(self._bundle, batch, self._prompt, self._temperature, window, self._accepted)
        measured = Burst(self._llm, self._tokens).run(requests.prompts(self._bundle, batch, self._prompt), params)
        floor = floor_ms(self._bundle, batch, measured.context, batch * (window + 1))
        self._print(f"window {window}", batch, measured, floor)
        return {**measured.to_json(), "target_floor_ms": floor}

    def _print(self, name: str, batch: int, measured: Measured, floor: float | None = None) -> None:
        device = measured.device_ms
        phases = ", ".join(f"{phase} {device[phase]:.3f}" for phase in PHASES if phase in device)
        idle = f", rest {device['idle']:.3f} = {100 * device['idle'] / device['round']:.1f} %" if device else ""
        ratio = f", target {device['target'] / floor:.2f} x floor {floor:.3f}" if floor and device else ""
        eager = {reason: count for reason, count in measured.metrics.eager_runs.items() if count}
        console.print(
            f"  {name:>11} x {batch:<3} {measured.ms_per_round:8.3f} ms a round ({phases}{idle}{ratio}), "
            f"{measured.tokens_per_second:8.0f} tokens/s, {measured.acceptance_length:.2f} a round"
            + (f", eager: {eager}" if eager else "")
            + (f", [red]{measured.finished} ended early[/]" if measured.finished else "")
        )


if __name__ == "__main__":
    typer.run(main)
