"""``tandemrt run``: answer one prompt."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.options.command_options import takes_options
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.engines.text.chat import ChatOptions
from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.runtime.cli.arguments import (
    Draft,
    Dtype,
    MaxModelLen,
    MaxTokens,
    Model,
    Seed,
    Temperature,
    Trace,
    read_json,
    read_schema,
    require_bundle_fit,
)
from tandemrt.runtime.llm.on_demand import bundle_folder

if TYPE_CHECKING:
    from tandemrt.runtime.cli.answer import StreamedAnswer
    from tandemrt.runtime.requests.prompt import Prompt
    from tandemrt.runtime.requests.request import RequestOutput

console = Console()
INTERRUPTED = 130  # exit code of a shell's command after Ctrl-C


@takes_options(leave_out=("queue_limit", "profile"))  # there is one request and no figures
def run(
    model: Model,
    prompt: Annotated[str, typer.Argument(help="User message; with --raw: text to continue.", metavar="PROMPT")],
    schema: Annotated[Path | None, typer.Option(help="File with a JSON schema for the answer.")] = None,
    image: Annotated[
        list[Path] | None, typer.Option(help="Image before the message, a PNG, JPEG, WebP or GIF file; repeatable.")
    ] = None,
    budget: Annotated[
        int | None, typer.Option(help="Largest number of reasoning tokens; 0: none, -1: no limit.")
    ] = None,
    seed: Seed = None,
    temperature: Temperature = 0.0,
    max_tokens: MaxTokens = None,
    rule: Annotated[
        Literal["coupled", "rejection"], typer.Option(help="Verification rule for draft tokens.")
    ] = "coupled",
    compare: Annotated[bool, typer.Option("--compare", help="Also run without speculation and compare.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Skip the chat template.")] = False,
    chat_template_kwargs: Annotated[
        str | None, typer.Option(help="Chat template variables as JSON, such as '{\"enable_thinking\": false}'.")
    ] = None,
    tools: Annotated[
        Path | None, typer.Option(help="File with a JSON list of functions that the model may call.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    trace: Trace = None,
    max_model_len: MaxModelLen = None,
    dtype: Dtype = None,
    draft: Draft = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Answer one prompt."""
    if compare and rule == "rejection" and temperature > 0:
        raise BadRequest(
            "--compare: the rejection rule keeps the distribution of autoregressive decoding, not its text per seed; "
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
    chat_options = _chat_options(chat_template_kwargs, tools)
    if raw and image:
        raise BadRequest("--raw: must not come with --image, images need the chat template")
    if raw and chat_options:
        raise BadRequest(f"--raw: must not come with chat template options, received {', '.join(chat_options)}")
    uses_own_template = not raw and options.chat_template is None
    bundle = bundle_folder(model, BuildOptions(max_model_len, dtype, draft), needs_chat_template=uses_own_template)
    require_bundle_fit(bundle, options, params, images=image or ())
    from tandemrt.runtime.cli.answer import StreamedAnswer, figures, print_answer
    from tandemrt.runtime.llm.llm import LLM
    from tandemrt.runtime.requests.prompt import Chat

    chat_or_text: Prompt = prompt if raw else Chat([_message(prompt, image or ())], **chat_options)
    with LLM(bundle, trace=trace, **options.arguments()) as llm:
        if compare:  # neither run pays for the prompt or the grammar then
            llm.generate(chat_or_text, params.model_copy(update={"max_tokens": 1}))
            if llm.recorder is not None:
                llm.recorder.clear()  # a trace begins with the answer
        answer = StreamedAnswer(llm, chat_or_text, params)
        if not as_json:
            print_answer(console, answer)
        output = answer.wait()
        if not as_json:
            console.print(f"[dim cyan]{figures(output, answer.seconds, sampled=temperature > 0)}[/]", soft_wrap=True)
        if output.finish_reason == "cancelled":
            raise typer.Exit(INTERRUPTED)
        without, same = None, True
        if compare:
            alone = params.model_copy(update={"num_draft_tokens": 0, "seed": output.seed})
            without = StreamedAnswer(llm, chat_or_text, alone)
            same = without.wait().token_ids == output.token_ids
    if as_json:
        report = _as_json(output) | {"seconds": answer.seconds}
        if without is not None:
            report |= {"same_as_autoregressive": same, "autoregressive_seconds": without.seconds}
        print(json.dumps(report, ensure_ascii=False))
    elif without is not None:
        _print_without(answer, without, same=same, sampled=temperature > 0)
    if not same:
        raise typer.Exit(1)


def _print_without(answer: "StreamedAnswer", without: "StreamedAnswer", *, same: bool, sampled: bool) -> None:
    """Print the run without speculation: its text if it differs, its figures, and the ratio of the two times."""
    from tandemrt.runtime.cli.answer import figures

    output = without.result()
    console.print("[green]without speculation: the same text[/]" if same else "[red]without speculation:[/]")
    if not same:
        console.print(escape(output.text.strip()), highlight=False, soft_wrap=True)
    ratio = without.seconds / max(answer.seconds, 1e-9)
    facts = figures(output, without.seconds, sampled=sampled)
    console.print(f"[dim cyan]{facts}; speculation: {ratio:.2f}x[/]", soft_wrap=True)


def _message(prompt: str, images: Sequence[Path]) -> dict[str, Any]:
    parts = [{"type": "image", "image": file} for file in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": prompt}] if images else prompt}


def _chat_options(variables: str | None, tools: Path | None) -> dict[str, Any]:
    chat: dict[str, Any] = {} if tools is None else {"tools": read_json(tools, "--tools")}
    if variables is not None:
        try:
            chat["chat_template_kwargs"] = json.loads(variables)
        except (ValueError, RecursionError) as error:
            raise BadRequest(
                f"--chat-template-kwargs: must be a JSON object, received {quoted(variables)}: {clipped(error)}"
            ) from error
    ChatOptions(**chat)  # validate before the bundle opens
    return chat


def _as_json(output: "RequestOutput") -> dict[str, Any]:
    return {
        "text": output.text,
        "reasoning": output.reasoning,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "speculation": output.speculation.to_json(),
    }
