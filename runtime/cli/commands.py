"""The commands ``tandemrt bench`` and ``tandemrt doctor``."""

import json
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.options.command_options import takes_options
from tandemrt.engines.options.options import OpeningOptions, RuntimeOptions
from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.engines.text.tokenizer import read_chat_templates
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.cli.arguments import (
    Draft,
    Dtype,
    MaxModelLen,
    Model,
    Report,
    Temperature,
    read_prompts,
    require_bundle_fit,
)
from tandemrt.runtime.llm.on_demand import bundle_folder

if TYPE_CHECKING:
    from tandemrt.runtime.cli.bench import Comparison
    from tandemrt.runtime.llm.llm import LLM
    from tandemrt.runtime.requests.prompt import Prompt

SLOWER = (
    "[yellow]Speculation does not pay here.[/] Try --num-draft-tokens 2, --adaptive-draft-tokens, prompts of your own "
    "(--prompts), or another draft (docs/drafts.md)."
)
BENCH_PROMPTS = Path(__file__).with_name("bench_prompts.jsonl")

# Importing the runtime takes seconds. Commands import it after they have validated their arguments.
console = Console()


@takes_options(leave_out=("queue_limit", "profile"))  # the queue must hold all requests; host times are always measured
def bench(
    model: Model,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt` (text) or `messages`, and optionally `schema`; default: 16 questions."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Largest number of requests.")] = 16,
    length: Annotated[
        int | None, typer.Option(min=1, help="Measure prompts of this many random tokens instead.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Largest number of output tokens.")] = 128,
    temperature: Temperature = 0.0,
    budget: Annotated[int | None, typer.Option(help="Thinking-token budget of every request.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs with and without speculation.")] = 3,
    out: Report = None,
    max_model_len: MaxModelLen = None,
    dtype: Dtype = None,
    draft: Draft = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Measure tokens/s and acceptance with and without speculation. It also prints the host time per round."""
    if prompts is not None and length is not None:
        raise BadRequest(f"--length: must not come with --prompts, received {length}; drop one of them")
    bench_prompts, schemas = read_prompts(prompts or BENCH_PROMPTS, requests)
    bundle = bundle_folder(model, BuildOptions(max_model_len, dtype, draft))
    if length is not None:
        bench_prompts, schemas = _random_prompts(bundle, requests, length)
    params = [
        SamplingParams(
            temperature=temperature,
            seed=i,
            max_tokens=max_tokens,
            thinking_token_budget=budget,
            structured_outputs=StructuredOutputs(json=schema) if schema is not None else None,
        )
        for i, schema in enumerate(schemas)
    ]
    require_bundle_fit(bundle, options, *params)
    if prompts is None and length is None:
        bench_prompts = _as_bundle_takes_them(bundle, bench_prompts)
    from tandemrt.runtime.cli.bench import compare
    from tandemrt.runtime.llm.llm import LLM

    def open_llm(*, speculating: bool) -> "LLM":
        # Off by default: a repeat would find the prompts of the previous one in the cache.
        opening: OpeningOptions = {"prefix_caching": False, **options.arguments()}
        if not speculating:
            opening["num_draft_tokens"] = 0
        return LLM(bundle, **opening)

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=repeats + 1)
        result = compare(open_llm, bench_prompts, params, repeats=repeats, on_repeat=lambda: progress.advance(task))
    _show_comparison(result)
    if length is not None:
        console.print("[dim]prompts of random tokens: acceptance on real ones differs[/]", soft_wrap=True)
    if result.speedup < 1:
        console.print(SLOWER, soft_wrap=True)
    if out is not None:
        out.write_text(json.dumps(result.to_json(), indent=2) + "\n")


def doctor(
    what: Annotated[
        str | None,
        typer.Argument(help="A backend, an extra such as serve, or a bundle: check only that.", metavar="[WHAT]"),
    ] = None,
) -> None:
    """Print what this machine can build and run, and what is missing. With WHAT: exit code 1 if it lacks anything."""
    from tandemrt.runtime.cli import doctor as diagnosis

    if what is not None:
        missing = diagnosis.missing(what)
        for line in missing:
            console.print(Text(line, style="red"), soft_wrap=True)
        if not missing:
            console.print("[green]nothing is missing[/]")
        raise typer.Exit(1 if missing else 0)
    about = Table("machine", "", show_edge=False)
    for name, value in diagnosis.machine().items():
        about.add_row(name, value)
    console.print(about, "")
    statuses = diagnosis.backend_statuses()
    table = Table("backend", "version", "builds here", "runs here", show_edge=False)
    for status in statuses:
        answers = ("yes" if each.startswith("yes") else "no" for each in (status.builds, status.runs))
        table.add_row(status.backend, escape(status.version), *answers)
    console.print(table, "")
    for line in (line for status in statuses for line in status.notes()):
        console.print(escape(line), highlight=False, soft_wrap=True)  # so that a command can be copied


def _show_comparison(result: "Comparison") -> None:
    table = Table("", "autoregressive", "speculation", show_edge=False)
    ways = (result.autoregressive, result.speculative)
    table.add_row("tokens/s", *(f"{way.tokens_per_second:.0f}" for way in ways))
    table.add_row("rounds", *(str(way.rounds) for way in ways))
    table.add_row("device-to-host waits", *(str(way.waits) for way in ways))
    table.add_row("acceptance length", "1.00", f"{result.speculative.acceptance_length:.2f}")
    for phase in result.autoregressive.ms_per_round:
        table.add_row(f"{phase}, host ms per round", *(f"{way.ms_per_round[phase]:.3f}" for way in ways))
    console.print(table)
    positions = " ".join(f"{rate:.2f}" for rate in result.speculative.acceptance_per_position)
    console.print(f"accepted drafts at position 1, 2, ...: {positions}", highlight=False, soft_wrap=True)
    total = len(result.autoregressive.outputs)
    console.print(
        f"speculation / autoregressive, median of pairs of runs: [bold]{result.speedup:.2f}x[/]; "
        f"same text: {result.same_text} of {total}",
        soft_wrap=True,
    )


def _as_bundle_takes_them(folder: Path, chats: list["Prompt"]) -> list["Prompt"]:
    """Return the included chats, or their questions as texts if the bundle has no chat template."""
    if read_chat_templates(Bundle.read(folder).tokenizer_dir):
        return chats
    return [chat[0]["content"] for chat in chats]  # type: ignore[index]


def _random_prompts(bundle: Path, count: int, length: int) -> tuple["list[Prompt]", list[Any]]:
    valid = Bundle.read(bundle).valid_tokens
    draw = Random(0)
    return [[draw.randrange(valid) for _ in range(length)] for _ in range(count)], [None] * count
