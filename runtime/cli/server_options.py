"""Options of ``tandemrt serve`` from ServerConfig: one per field, with its name, type, bounds, help and default."""

from collections.abc import Callable
from dataclasses import Field, fields
from functools import wraps
from inspect import Parameter, signature
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from tandemrt.runtime.servers.http.config import ServerConfig

Command = Callable[..., None]


def option_name(field: str) -> str:
    """Return the name of the option that sets ``field`` of ServerConfig."""
    return field.removesuffix("_s")  # seconds


def takes_server_options(command: Command) -> Command:
    """Put an option for each field of ServerConfig in the place of a command's parameter ``server``, made of them."""
    hints = get_type_hints(ServerConfig, include_extras=True)

    @wraps(command)
    def run(**values: Any) -> None:
        server: dict[str, Any] = {}
        for name, hint in hints.items():
            if (value := values.pop(option_name(name))) is not None:
                server[name] = _listed(value) if _is_tuple(hint) else value
        command(**values, server=ServerConfig(**server))

    options = [_parameter(field, hints[field.name]) for field in fields(ServerConfig)]
    own = list(signature(command).parameters.values())
    place = next(index for index, parameter in enumerate(own) if parameter.name == "server")
    own[place : place + 1] = options
    run.__signature__ = signature(command).replace(parameters=own)  # type: ignore[attr-defined]
    run.__annotations__ = get_type_hints(command, include_extras=True) | {
        each.name: each.annotation for each in options
    }
    return run


def _parameter(field: Field[Any], hint: Any) -> Parameter:
    kind, option = get_args(hint)
    return Parameter(
        option_name(field.name),
        Parameter.POSITIONAL_OR_KEYWORD,
        default=None if field.default == () else field.default,
        annotation=Annotated[str | None if _is_tuple(hint) else kind, option],
    )


def _is_tuple(hint: Any) -> bool:
    kind = get_args(hint)[0]
    return any(get_origin(each) is tuple for each in (kind, *get_args(kind)))


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())
