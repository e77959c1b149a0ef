"""Command-line options from RuntimeOptions: one option per field, with its name, help and default."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from tandemrt.engines.options.config_file import read_config
from tandemrt.engines.options.options import OpeningOptions, RuntimeOptions, draft_tokens_from_text

Command = Callable[..., None]

OPTIONS, SPECULATION, MEMORY, LIMITS, ADVANCED = "Options", "Speculation", "Memory", "Limits", "Advanced"
SERVER, BUILDING = "Server", "Building a checkpoint"  # of options of the commands
ORDER = (OPTIONS, SERVER, BUILDING, SPECULATION, MEMORY, LIMITS, ADVANCED)  # of panels in --help: common ones first
# Limits of requests, which change no result of a request within them.
REQUEST_LIMITS = (
    "queue_limit", "max_prompt_bytes", "prompt_timeout_s", "max_images", "max_image_bytes", "max_image_pixels",
    "max_image_memory", "allowed_media_domains", "max_grammar_bytes", "grammar_timeout_s", "fill_timeout_s",
)  # fmt: skip
# Panels of the options of RuntimeOptions; every other one is ADVANCED.
PANELS = {
    **dict.fromkeys(("device", "threads"), OPTIONS),
    **dict.fromkeys(("num_draft_tokens", "adaptive_draft_tokens", "lookup", "draft_masks"), SPECULATION),
    **dict.fromkeys(("cache_tokens", "prefix_caching"), MEMORY),
    **dict.fromkeys(("prefill_chunk", *REQUEST_LIMITS), LIMITS),
}


class CommandWithSections(TyperCommand):
    """A command whose ``--help`` has a section for each panel, in lines that fit into 80 columns."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            panel = getattr(parameter, "rich_help_panel", None) or OPTIONS
            panel = "Arguments" if parameter.param_type_name == "argument" else panel
            if (row := parameter.get_help_record(ctx)) is not None:
                sections.setdefault(panel, []).append(row)
        for panel in ("Arguments", *ORDER):
            if panel in sections:
                with formatter.section(panel):
                    formatter.write_dl(sections[panel])


def takes_options(*, leave_out: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Add ``--config`` to a command, and an option for each field of RuntimeOptions except ``leave_out``.

    The command receives the given values as ``options``. An invalid value raises BadRequest before the command runs.
    """
    names = [name for name in RuntimeOptions.model_fields if name not in leave_out]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(config: Path | None = None, **values: Any) -> None:
            del config  # its callback has read it
            options = {name: value for name in names if (value := values.pop(name)) is not None}
            if "num_draft_tokens" in options:
                options["num_draft_tokens"] = draft_tokens_from_text(options["num_draft_tokens"])
            command(**values, options=RuntimeOptions(**options))

        derived = [_CONFIG, *(_parameter(name) for name in names)]
        own = [parameter for name, parameter in signature(command).parameters.items() if name != "options"]
        run.__signature__ = signature(command).replace(parameters=[*own, *derived])  # type: ignore[attr-defined]
        hints = {name: hint for name, hint in get_type_hints(command, include_extras=True).items() if name != "options"}
        run.__annotations__ = hints | {parameter.name: parameter.annotation for parameter in derived}
        return run

    return decorate


def help_of(name: str) -> str:
    """Return the help of an option: its description, and its default unless the description names it."""
    field = RuntimeOptions.model_fields[name]
    default = {True: "on", False: "off"}.get(field.default, field.default)
    return f"{str(field.description)[0].upper()}{str(field.description)[1:]}" + (
        "." if field.default is None else f"; default: {default}."
    )


def _parameter(name: str) -> Parameter:
    kinds = get_args(get_type_hints(OpeningOptions)[name]) or (get_type_hints(OpeningOptions)[name],)
    kind: Any = next(kind for kind in (bool, float, int, str) if kind in kinds)
    panel = PANELS.get(name, ADVANCED)
    option = typer.Option(help=help_of(name), rich_help_panel=panel)
    if name == "num_draft_tokens":
        kind, option = str, typer.Option(help=help_of(name), metavar="NUMBER|TABLE", rich_help_panel=panel)
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])


_CONFIG = Parameter(
    "config",
    Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            help="TOML file with these options, such as num_draft_tokens = 2; the command line wins.",
            callback=read_config,
            is_eager=True,
        ),
    ],
)
