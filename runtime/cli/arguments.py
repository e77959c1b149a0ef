"""Arguments shared by several commands, and readers of their input files."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.command_options import BUILDING
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.parameters.fit import require_fit
from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.validation.errors import BadRequest, clipped, quoted

if TYPE_CHECKING:
    from tandemrt.runtime.requests.prompt import Prompt


def _writable(path: Path | None) -> Path | None:
    # Check before the work starts; its result would be lost.
    if path is not None and (path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK)):
        raise BadRequest(f"--json: must be a file that can be written, received {clipped(path)}; name another")
    return path


BundlePath = Annotated[Path, typer.Argument(help="Bundle folder from `tandemrt export build`.", metavar="BUNDLE")]
Model = Annotated[
    str,
    typer.Argument(
        help="A bundle; or a recipe, a checkpoint's folder or a name on the Hugging Face hub (OWNER/NAME), which is "
        "built first, once, into your cache folder.",
        metavar="MODEL",
    ),
]
MaxModelLen = Annotated[
    int | None,
    typer.Option(min=2, help="Tokens of prompt plus output. Default: what fits.", rich_help_panel=BUILDING),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Compute in this type; int8, int4: weights in 8 or 4 bits. Default: int4 on a CPU, the checkpoint's on a "
        "GPU.",
        rich_help_panel=BUILDING,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        help="ngram (default), none, a smaller checkpoint, or KIND:CHECKPOINT, such as eagle3:OWNER/NAME.",
        rich_help_panel=BUILDING,
    ),
]
Report = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.", callback=_writable)]
Temperature = Annotated[float, typer.Option(help="Sampling temperature; 0: greedy.")]
Seed = Annotated[int | None, typer.Option(help="Seed; the same seed gives the same text.")]
MaxTokens = Annotated[int | None, typer.Option(help="Largest number of output tokens.")]
Trace = Annotated[
    Path | None,
    typer.Option(help="Write where each token came from: an HTML page (.html) or a Chrome trace for Perfetto (.json)."),
]


def read_json(path: Path, name: str) -> Any:
    """Return the content of the JSON file ``path``, given as option ``name``. Raises BadRequest."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise BadRequest(f"{name}: must be a readable JSON file, received {clipped(path)}: {clipped(error)}") from error


def read_schema(path: Path, name: str = "--schema") -> dict[str, Any] | bool:
    """Return the JSON schema in the file ``path``, given as option ``name``. Raises BadRequest."""
    schema = read_json(path, name)
    if not isinstance(schema, dict | bool):
        raise BadRequest(
            f"{name}: must hold a JSON schema, which is an object or a boolean, received {quoted(schema)} in {path}"
        )
    return schema


def read_prompts(path: Path, count: int) -> tuple["list[Prompt]", list[Any]]:
    """Return the first ``count`` prompts of the file ``path`` and their schemas (None without). Raises BadRequest."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        raise BadRequest(f"--prompts: must be a readable file, received {clipped(path)}: {clipped(why)}") from error
    prompts: list[Prompt] = []
    schemas: list[Any] = []
    for number, line in enumerate(lines, 1):
        if line.strip() and len(prompts) < count:
            row = _row(line, f"{clipped(path)} line {number}")
            prompts.append(row["messages"] if "messages" in row else row["prompt"])
            schemas.append(row.get("schema"))
    if not prompts:
        raise BadRequest(f"--prompts: must hold at least one line, received {clipped(path)}, which has none")
    return prompts, schemas


def _row(line: str, where: str) -> dict[str, Any]:
    rule = "--prompts: must hold one JSON object per line with `prompt` or `messages`"
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{rule}, received {quoted(line)} in {where}: {clipped(error)}") from error
    if not isinstance(row, dict) or not {"prompt", "messages"} & row.keys():
        raise BadRequest(f"{rule}, received {quoted(line)} in {where}")
    return row


def require_bundle_fit(
    folder: Path, options: RuntimeOptions, *params: SamplingParams, images: Sequence[Path] = ()
) -> None:
    """Check options, parameters and images against the manifest in ``folder``. Raises BadBundle or BadRequest."""
    bundle = Bundle.read(folder)
    if images and bundle.manifest.vision is None:
        raise BadRequest(f"--image: this model reads text only, received {clipped(images[0])}; leave it out")
    options.require_fit(bundle.limits)
    for each in params:
        require_fit(each, bundle.manifest, options.max_draft_tokens)
