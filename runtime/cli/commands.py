"""The commands around a bundle that exists: run, chat, bench, calibrate, serve, doctor."""

import json
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.chat import ChatOptions
from tandemrt.engines.command_options import takes_options
from tandemrt.engines.errors import BadRequest, clipped, quoted
from tandemrt.engines.options import OpeningOptions, RuntimeOptions
from tandemrt.engines.params import SamplingParams, StructuredOutputs
from tandemrt.runtime.cli.arguments import (
    BundlePath,
    MaxTokens,
    Report,
    Seed,
    Temperature,
    Trace,
    read_json,
    read_prompts,
    read_schema,
    require_bundle_fit,
)
from tandemrt.runtime.cli.calibrate import calibrate
from tandemrt.runtime.cli.chat import chat
from tandemrt.runtime.cli.serve import serve

if TYPE_CHECKING:
    from tandemrt.runtime.cli.bench import Comparison
    from tandemrt.runtime.llm import LLM
    from tandemrt.runtime.requests.outputs import RequestOutput
    from tandemrt.runtime.requests.prompt import Prompt


# The runtime's own imports take seconds: a command loads them once nothing can be refused any more.
console = Console()


def register(app: typer.Typer) -> None:
    """Add the commands to the one application."""
    app.command()(run)
    app.command()(chat)
    app.command()(bench)
    app.command()(calibrate)
    app.command()(serve)
    app.command()(doctor)


@takes_options(leave_out=("queue_limit", "profile"))  # one request waits for nobody, and no figures are shown
def run(
    bundle: BundlePath,
    prompt: Annotated[str, typer.Argument(help="The user's message (with --raw: the text to continue).")],
    schema: Annotated[Path | None, typer.Option(help="File with a JSON schema that the answer must obey.")] = None,
    budget: Annotated[
        int | None, typer.Option(help="At most so many reasoning tokens, then the forced end; 0: none, -1: no limit.")
    ] = None,
    seed: Seed = None,
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = None,
    rule: Annotated[Literal["coupled", "rejection"], typer.Option(help="How drafts are verified.")] = "coupled",
    compare: Annotated[bool, typer.Option("--compare", help="Run without speculation as well, compare.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the chat template.")] = False,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="Variables of the chat template as JSON, such as '{\"enable_thinking\": false}'.")
    ] = None,
    tools: Annotated[Path | None, typer.Option(help="File with a JSON list of functions to call.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
    trace: Trace = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Answer one prompt."""
    if compare and rule == "rejection" and temperature > 0:
        raise BadRequest(
            "--compare: the rejection rule keeps the law of plain decoding, not its text per seed; "
            "use --rule coupled or --temperature 0"
        )
    params = SamplingParams(
        temperature=temperature,
        seed=seed,
        max_tokens=max_tokens,
        thinking_token_budget=budget,
        structured_outputs=StructuredOutputs(json=read_schema(schema)) if schema else None,
        rule=rule,
    )
    told = _chat_options(chat_template_kwargs, tools)
    if raw and told:
        raise BadRequest(f"--raw: must not come with what is said to a chat template, received {', '.join(told)}")
    require_bundle_fit(bundle, options, params)
    from tandemrt.runtime.llm import LLM
    from tandemrt.runtime.requests.prompt import Chat

    given: Prompt = prompt if raw else Chat([{"role": "user", "content": prompt}], **told)
    with LLM(bundle, trace=trace, **options.given()) as llm:
        output = llm.generate(given, params)
        plain = None
        if compare:
            plain = llm.generate(given, params.model_copy(update={"window": 0, "seed": output.seed}))
    same = plain is None or plain.token_ids == output.token_ids
    if as_json:
        print(json.dumps(_as_json(output) | ({"same_as_plain": same} if compare else {}), ensure_ascii=False))
    else:
        show(output)
        if plain is not None:
            console.print("[green]without speculation: the same text[/]" if same else "[red]without speculation:[/]")
            if not same:
                show(plain)
    if not same:
        raise typer.Exit(1)


@takes_options(leave_out=("queue_limit", "profile"))  # the requests wait however many they are; host times are shown
def bench(
    bundle: BundlePath,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with `prompt` (text) or `messages`, and optionally `schema`; default: random tokens."
        ),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="How many requests, at most.")] = 16,
    length: Annotated[int, typer.Option(min=1, help="Tokens per random prompt.")] = 64,
    max_tokens: MaxTokens = None,
    temperature: Temperature = 0.0,
    budget: Annotated[int | None, typer.Option(help="Thinking-token budget of every request.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs each way.")] = 3,
    out: Report = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Measure tokens/s with and without speculation, acceptance, and the host's time per round."""
    given, schemas = read_prompts(prompts, requests) if prompts else _random_prompts(bundle, requests, length)
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
    from tandemrt.runtime.cli.bench import compare
    from tandemrt.runtime.llm import LLM

    def open_llm(*, speculating: bool) -> "LLM":
        # Unless asked for: a repeat would find the prompts of the one before.
        opening: OpeningOptions = {"prefix_caching": False, **options.given()}
        if not speculating:
            opening["window"] = 0
        return LLM(bundle, **opening)

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=repeats + 1)
        result = compare(open_llm, given, params, repeats=repeats, on_repeat=lambda: progress.advance(task))
    _show_comparison(result)
    if prompts is None:
        console.print("[dim]prompts of random tokens: acceptance on real ones differs (--prompts)[/]", soft_wrap=True)
    if out is not None:
        out.write_text(json.dumps(result.to_json(), indent=2) + "\n")


def doctor(
    what: Annotated[
        str | None,
        typer.Argument(help="A backend, serve, triton, or a bundle: what is missing for that.", metavar="[WHAT]"),
    ] = None,
) -> None:
    """Say what this machine can build and run, and what is missing for the rest; of WHAT alone, exit code 1 if any."""
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
    table = Table("backend", "version", "builds here", "runs here", show_edge=False)
    for finding in diagnosis.findings():
        table.add_row(*(escape(cell) for cell in (finding.backend, finding.version, finding.builds, finding.runs)))
    console.print(table)


def show(output: "RequestOutput") -> None:
    """Print one output: reasoning dimmed, then the text, then how it came about."""
    if output.reasoning:
        console.print(f"[dim]{escape(output.reasoning.strip())}[/]", soft_wrap=True)
    console.print(escape(output.text.strip()), highlight=False, soft_wrap=True)
    facts = [f"{len(output.token_ids)} tokens", f"finish: {output.finish_reason}", f"seed: {output.seed}"]
    if output.speculation.num_spec_steps:
        facts.append(f"acceptance length: {output.speculation.mean_acceptance_length:.2f}")
    if output.forced_ends:
        facts.append("thinking budget cut in")
    console.print(f"[dim cyan]{', '.join(facts)}[/]", soft_wrap=True)


def _show_comparison(result: "Comparison") -> None:
    from tandemrt.runtime.cli.bench import ROUND

    table = Table("", "plain", "speculation", show_edge=False)
    ways = (result.plain, result.speculated)
    table.add_row("tokens/s", *(f"{way.tokens_per_second:.0f}" for way in ways))
    table.add_row("rounds", *(str(way.metrics.rounds) for way in ways))
    table.add_row("device-to-host waits", *(str(way.metrics.waits) for way in ways))
    table.add_row("acceptance length", "1.00", f"{result.speculated.acceptance_length:.2f}")
    positions = " ".join(f"{rate:.2f}" for rate in result.speculated.acceptance_per_position)
    table.add_row("accepted at position 1..", "", positions)
    for verb in ROUND:
        table.add_row(f"{verb}, host ms per round", *(f"{way.ms_per_round[verb]:.3f}" for way in ways))
    console.print(table)
    total = len(result.plain.outputs)
    console.print(f"speculation / plain: [bold]{result.speedup:.2f}x[/]; same text: {result.same_text} of {total}")


def _chat_options(variables: str | None, tools: Path | None) -> dict[str, Any]:
    given: dict[str, Any] = {} if tools is None else {"tools": read_json(tools, "--tools")}
    if variables is not None:
        try:
            given["chat_template_kwargs"] = json.loads(variables)
        except (ValueError, RecursionError) as error:
            raise BadRequest(
                f"--chat-template-kwargs: must be a JSON object, received {quoted(variables)}: {clipped(error)}"
            ) from error
    ChatOptions(**given)  # refused before anything opens
    return given


def _random_prompts(bundle: Path, count: int, length: int) -> tuple["list[Prompt]", list[Any]]:
    valid = Bundle.read(bundle).valid_tokens
    draw = Random(0)
    return [[draw.randrange(valid) for _ in range(length)] for _ in range(count)], [None] * count


def _as_json(output: "RequestOutput") -> dict[str, Any]:
    return {
        "text": output.text,
        "reasoning": output.reasoning,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "speculation": output.speculation.to_json(),
    }
