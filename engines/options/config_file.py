"""``--config FILE``: options of a command in a TOML file."""

import tomllib
from pathlib import Path
from typing import Any

import typer

from tandemrt.engines.options.vllm_names import own_name
from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.engines.validation.records import nearest


def read_config(context: typer.Context, file: Path | None) -> Path | None:
    """Let the values in ``file`` be the defaults of a command's parameters, so that the command line wins.

    Keys are names of options, with dashes or underscores, or of an argument. A value is read as on the command line.
    Raises BadRequest for a file that is no TOML, an unknown key, or a value that no command line can have.
    """
    if file is None:
        return None
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise BadRequest(f"--config: must be a readable TOML file, received {clipped(file)}: {clipped(why)}") from error
    parameters = {_key(parameter): parameter for parameter in context.command.params if parameter.name != "config"}
    defaults: dict[str, Any] = {}
    for written, value in values.items():
        key = own_name(written.replace("_", "-"))
        if key not in parameters:
            names = [name.replace("-", "_") for name in parameters]
            raise BadRequest(
                f"--config: {clipped(file)}: unknown key {quoted(written)}{nearest(written, names)}; `tandemrt "
                f"{context.info_name} --help` lists the options"
            )
        parameter = parameters[key]
        takes_several = parameter.nargs != 1 or getattr(parameter, "multiple", False)
        texts = [_text(file, written, one) for one in (value if takes_several and isinstance(value, list) else [value])]
        defaults[str(parameter.name)] = texts if takes_several else texts[0]
    context.default_map = defaults
    return file


def _key(parameter: Any) -> str:
    """Return the name that a user knows: the option's, or the argument's."""
    return str(max(parameter.opts, key=len)).lstrip("-").replace("_", "-")


def _text(file: Path, key: str, value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float | str):
        return str(value)
    raise BadRequest(
        f"--config: {clipped(file)}: {key} must be a text, a number, true or false, received {quoted(value)}"
    )
