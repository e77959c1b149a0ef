"""``tandemrt chat``: chat with a model in the terminal."""

import json
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console
from rich.text import Text

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.options.command_options import takes_options
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.parameters.fit import require_fit
from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.engines.validation.errors import (
    BadRequest,
    ContextLengthExceeded,
    TandemError,
    clipped,
    named,
    quoted,
)
from tandemrt.runtime.cli.arguments import (
    Draft,
    Dtype,
    MaxModelLen,
    MaxTokens,
    Model,
    Seed,
    Temperature,
    read_schema,
)
from tandemrt.runtime.llm.on_demand import bundle_folder

if TYPE_CHECKING:
    from tandemrt.runtime.cli.chat_session import ChatSession

N = TypeVar("N", int, float)

HELP = """\
/system TEXT     system prompt of this chat and new ones; without TEXT: none
/schema FILE     answers obey the JSON schema in FILE; without FILE: free text
/temperature T   sampling temperature; 0, or without T: greedy
/budget N        at most N reasoning tokens; without N: no limit
/drafts N        N draft tokens per round; without N: the bundle's number
/save FILE       write the chat to a new file, as a line of JSON
/new             start a new chat
/help            print this help
/exit            quit, as Ctrl-D does; Ctrl-C stops an answer
Reasoning is dim. Drafted text is underlined."""


@takes_options(leave_out=("queue_limit", "profile"))  # one request at a time, and no statistics
def chat(
    model: Model,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    max_tokens: MaxTokens = None,
    max_model_len: MaxModelLen = None,
    dtype: Dtype = None,
    draft: Draft = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Chat with a model. /help lists commands; Ctrl-C stops an answer, /exit quits."""
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=max_tokens)
    uses_own_template = options.chat_template is None
    bundle = bundle_folder(model, BuildOptions(max_model_len, dtype, draft), needs_chat_template=uses_own_template)
    options.require_fit(Bundle.read(bundle).limits)
    from tandemrt.runtime.cli.chat_session import ChatSession
    from tandemrt.runtime.llm.llm import LLM

    console = Console(highlight=False)
    with suppress(ImportError):
        import readline  # noqa: F401  # enables line editing and history
    with LLM(bundle, **options.arguments()) as llm:
        console.print(f"[dim]{llm.bundle.name}. /help lists the commands.[/]")
        session = ChatSession(llm, params)
        while (line := _next_line()) is not None:
            try:
                _handle(console, session, line)
            except TandemError as error:
                console.print(Text(named(error), style="red"), soft_wrap=True)
                if isinstance(error, ContextLengthExceeded) and session.messages:
                    _say_full(console, session)


def _next_line() -> str | None:
    """Return the next line, None for exit or at the end of the input. Ctrl-C discards the line."""
    try:
        line = input("> ").strip()
        return None if line in ("exit", "/exit") else line
    except KeyboardInterrupt:
        print()
        return ""
    except EOFError:
        print()
        return None


def _handle(console: Console, session: "ChatSession", line: str) -> None:
    if not line.startswith("/"):
        if line:
            _answer(console, session, line)
        return
    name, _, value = line[1:].partition(" ")
    value = value.strip()
    if name == "help":
        console.print(HELP, markup=False)
    elif name == "new":
        session.messages = []
    elif name == "system":
        session.system = value
    elif name == "save":
        _save(session, value)
        console.print(Text(f"saved to {value}", style="dim"), soft_wrap=True)
    elif name == "temperature":
        _change(session, temperature=_number(line, value, float) or 0.0)
    elif name == "schema":
        constraint = StructuredOutputs(json=read_schema(Path(value), "/schema")) if value else None
        _change(session, structured_outputs=constraint)
    elif name == "budget":
        _change(session, thinking_token_budget=_number(line, value, int))
    elif name == "drafts":
        _change(session, num_draft_tokens=_number(line, value, int))
    else:
        raise BadRequest(f"/{clipped(name)}: is no command; /help lists them")


def _change(session: "ChatSession", **changed: object) -> None:
    params = session.params.model_copy(update=changed)
    require_fit(params, session.llm.bundle.manifest)
    session.params = params


def _number(line: str, value: str, kind: type[N]) -> N | None:
    try:
        return kind(value) if value else None
    except ValueError:
        raise BadRequest(f"{clipped(line)}: must be followed by a number, or by nothing") from None


def _answer(console: Console, session: "ChatSession", text: str) -> None:
    from tandemrt.runtime.cli.answer import figures, print_answer, wrapped

    answer = session.ask(text)
    print_answer(console, answer)
    output = answer.result()
    session.keep(text, output)
    facts = figures(output, answer.seconds, sampled=session.params.temperature > 0)
    console.print(f"[cyan]{wrapped(facts, console.width)}[/]")
    if len(output.prompt_token_ids) + len(output.token_ids) >= session.llm.bundle.limits.length:
        _say_full(console, session)


def _say_full(console: Console, session: "ChatSession") -> None:
    length = session.llm.bundle.limits.length
    console.print(f"[yellow]The context of {length} tokens is full: /new starts a new chat.[/]", soft_wrap=True)


def _save(session: "ChatSession", value: str) -> None:
    """Write the messages to a new file. ``tandemrt bench --prompts`` reads the format."""
    if not value:
        raise BadRequest("/save: must be followed by a new file, received nothing")
    try:
        with Path(value).open("x", encoding="utf-8") as file:
            file.write(json.dumps({"messages": session.conversation()}, ensure_ascii=False) + "\n")
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise BadRequest(f"/save: must be followed by a new file, received {quoted(value)}: {clipped(why)}") from error
