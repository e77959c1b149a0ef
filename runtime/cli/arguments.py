"""Arguments that several commands take, and how the files that they name are read."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BadRequest, clipped, quoted
from tandemrt.engines.fit import require_fit
from tandemrt.engines.options import RuntimeOptions
from tandemrt.engines.params import SamplingParams

if TYPE_CHECKING:
    from tandemrt.runtime.requests.prompt import Prompt


def _writable(path: Path | None) -> Path | None:
    # Asked before the work: a report that cannot be written would be lost with it.
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise BadRequest(f"--json: must be a file that can be written, received {clipped(path)}; name another")
    return path


BundlePath = Annotated[Path, typer.Argument(help="A bundle, as `tandemrt export build` writes it.", metavar="BUNDLE")]
Report = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=_writable)]
Temperature = Annotated[float, typer.Option(help="0 is greedy.")]
Seed = Annotated[int | None, typer.Option(help="Same seed, same text.")]
MaxTokens = Annotated[int | None, typer.Option(help="At most so many output tokens.")]
Trace = Annotated[
    Path | None,
    typer.Option(
        help="Write at the end where each token came from: a page (.html), or a Chrome trace for Perfetto (.json)."
    ),
]


def read_json(path: Path, name: str) -> Any:
    """Return what the JSON file holds that was given as ``name``. Raises BadRequest."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequest(f"{name}: must be a readable JSON file, received {clipped(path)}: {clipped(error)}") from error


def read_schema(path: Path, name: str = "--schema") -> dict[str, Any] | bool:
    """Return the JSON schema in a file that was given as ``name``. Raises BadRequest."""
    schema = read_json(path, name)
    if not isinstance(schema, dict | bool):
        raise BadRequest(
            f"{name}: must hold a JSON schema, which is an object or a boolean, received {quoted(schema)} in {path}"
        )
    return schema


def read_prompts(path: Path, count: int) -> tuple["list[Prompt]", list[Any]]:
    """Return the first ``count`` prompts of a file given as --prompts, and their schemas or None. Raises BadRequest."""
    try:
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()][:count]
        given: list[Prompt] = [row["messages"] if "messages" in row else row["prompt"] for row in rows]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise BadRequest(
            f"--prompts: must hold one JSON object per line with `prompt` or `messages`, received {clipped(path)}: "
            f"{quoted(error)}"
        ) from error
    if not given:
        raise BadRequest(f"--prompts: must hold at least one line, received {clipped(path)}")
    return given, [row.get("schema") for row in rows]


def require_bundle_fit(folder: Path, options: RuntimeOptions, *params: SamplingParams) -> None:
    """Refuse what the manifest of the bundle in ``folder`` tells already. Raises BadBundle or BadRequest."""
    bundle = Bundle.read(folder)
    options.require_fit(bundle.limits)
    for each in params:
        require_fit(each, bundle.manifest, options.largest_window)
