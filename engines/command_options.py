"""RuntimeOptions on the command line: an option of the same name, help and default for every field."""

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, get_args, get_type_hints

import typer

from tandemrt.engines.options import OpeningOptions, RuntimeOptions, window_from_text

Command = Callable[..., None]


def takes_options(*, leave_out: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Give a command the fields of RuntimeOptions but ``leave_out``; it receives what was given as ``options``.

    A value that cannot be is refused (BadRequest) before the command's own code runs.
    """
    names = [name for name in RuntimeOptions.model_fields if name not in leave_out]

    def decorate(command: Command) -> Command:
        @wraps(command)
        def run(**values: Any) -> None:
            given = {name: value for name in names if (value := values.pop(name)) is not None}
            if "window" in given:
                given["window"] = window_from_text(given["window"])
            command(**values, options=RuntimeOptions(**given))

        derived = [_parameter(name) for name in names]
        own = [parameter for name, parameter in signature(command).parameters.items() if name != "options"]
        run.__signature__ = signature(command).replace(parameters=[*own, *derived])  # type: ignore[attr-defined]
        hints = {name: hint for name, hint in get_type_hints(command, include_extras=True).items() if name != "options"}
        run.__annotations__ = hints | {parameter.name: parameter.annotation for parameter in derived}
        return run

    return decorate


def help_of(name: str) -> str:
    """The help of an option: its description and, where that does not say it, its default."""
    field = RuntimeOptions.model_fields[name]
    default = {True: "on", False: "off"}.get(field.default, field.default)
    return f"{str(field.description)[0].upper()}{str(field.description)[1:]}" + (
        "." if field.default is None else f"; default: {default}."
    )


def _parameter(name: str) -> Parameter:
    kinds = get_args(get_type_hints(OpeningOptions)[name]) or (get_type_hints(OpeningOptions)[name],)
    kind: Any = next(kind for kind in (bool, float, int, str) if kind in kinds)
    option = typer.Option(help=help_of(name))
    if name == "window":
        kind, option = str, typer.Option(help=help_of(name), metavar="NUMBER|TABLE")
    return Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option])
