"""The command that talks with a model in the terminal."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.command_options import takes_options
from tandemrt.engines.errors import BadRequest, TandemError, clipped, named
from tandemrt.engines.fit import require_fit
from tandemrt.engines.options import RuntimeOptions
from tandemrt.engines.params import SamplingParams, StructuredOutputs
from tandemrt.runtime.cli.arguments import BundlePath, MaxTokens, Seed, Temperature, read_schema

if TYPE_CHECKING:
    from tandemrt.runtime.cli.conversation import Answer, Conversation

HELP = """\
/schema FILE   every answer obeys the JSON schema in FILE; /schema alone: text again
/budget N      at most N reasoning tokens; /budget alone: no limit
/window N      N drafted tokens per round, 0: none; /window alone: the bundle's
/new           forget the conversation
/help          this
Ctrl-C stops an answer, Ctrl-D leaves. Reasoning is dim; what was drafted is underlined."""


@takes_options(leave_out=("queue_limit", "profile"))  # one request waits for nobody, and no figures are shown
def chat(
    bundle: BundlePath,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Talk with a model: /schema, /budget, /window; Ctrl-C stops an answer, Ctrl-D leaves."""
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    options.require_fit(Bundle.read(bundle).limits)
    from tandemrt.runtime.cli.conversation import Conversation
    from tandemrt.runtime.llm import LLM

    console = Console(highlight=False)
    with suppress(ImportError):
        import readline  # noqa: F401  # edits and recalls lines
    with LLM(bundle, **options.given()) as llm:
        console.print(f"[dim]{llm.bundle.name}. /help says what else there is.[/]")
        talk = Conversation(llm, params)
        while (line := _next_line()) is not None:
            try:
                _react(console, talk, line)
            except TandemError as error:
                console.print(Text(named(error), style="red"), soft_wrap=True)


def _next_line() -> str | None:
    """What the user says; None at the end of the input. Ctrl-C leaves the line, and nothing else."""
    try:
        return input("> ").strip()
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _react(console: Console, talk: "Conversation", line: str) -> None:
    if not line.startswith("/"):
        if line:
            _show(console, talk.ask(line))
        return
    name, _, value = line[1:].partition(" ")
    value = value.strip()
    if name == "help":
        console.print(HELP, markup=False)
    elif name == "new":
        talk.messages = []
    elif name == "schema":
        shape = StructuredOutputs(json=read_schema(Path(value), "/schema")) if value else None
        _change(talk, structured_outputs=shape)
    elif name == "budget":
        _change(talk, thinking_token_budget=_number(line, value))
    elif name == "window":
        _change(talk, window=_number(line, value))
    else:
        raise BadRequest(f"/{clipped(name)}: is no command; /help lists them")


def _change(talk: "Conversation", **changed: object) -> None:
    params = talk.params.model_copy(update=changed)
    require_fit(params, talk.llm.bundle.manifest)
    talk.params = params


def _number(line: str, value: str) -> int | None:
    try:
        return int(value) if value else None
    except ValueError:
        raise BadRequest(f"{clipped(line)}: must be followed by a number, or by nothing") from None


def _show(console: Console, answer: "Answer") -> None:
    """Print an answer as it comes; Ctrl-C stops it."""
    kind, text = "", ""
    while answer.output is None:
        try:
            for said in answer:
                if kind and said.kind != kind:
                    console.print("" if text.endswith("\n") else "\n")
                kind, text = said.kind, said.text
                style = ("dim " if kind == "reasoning" else "") + ("underline" if said.drafted else "")
                console.print(Text(said.text, style=style), end="", soft_wrap=True)
        except KeyboardInterrupt:
            answer.stop()
    console.print()
    output = answer.output
    if output.error is not None:
        raise BadRequest(output.error)
    if output.finish_reason != "stop":
        console.print(f"[dim]({output.finish_reason})[/]")
