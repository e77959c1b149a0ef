"""``tandemrt batch``: answer a file of requests in the batch format of OpenAI."""

import asyncio
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.manifest import FILE_NAME
from tandemrt.engines.options.build_options import BuildOptions
from tandemrt.engines.options.command_options import takes_options
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.engines.validation.extras import pip_install
from tandemrt.runtime.cli.arguments import Draft, Dtype, MaxModelLen
from tandemrt.runtime.cli.run import INTERRUPTED

if TYPE_CHECKING:
    from tandemrt.runtime.servers.batch.answers import BatchAnswer
    from tandemrt.runtime.servers.batch.folder import BatchFolder
    from tandemrt.runtime.servers.batch.lines import CheckedFile
    from tandemrt.runtime.servers.openai.served_models import Models

console = Console()
IN_FLIGHT_PER_SLOT = 4  # requests: the next ones are parsed while others run


@takes_options(leave_out=("queue_limit", "profile"))  # the queue holds what is in flight; there are no figures
def batch(
    model: Annotated[
        str,
        typer.Argument(
            help="As for `serve`; NAME=MODEL sets the name that requests ask for.",
            metavar="MODEL",
        ),
    ],
    file: Annotated[
        Path, typer.Argument(help="Requests, one JSON object per line: custom_id, method, url, body.", metavar="FILE")
    ],
    out: Annotated[
        Path,
        typer.Option(help="Folder for output.jsonl and errors.jsonl. The same command continues what is there."),
    ],
    ordered: Annotated[
        bool, typer.Option("--ordered", help="Write answers in the order of the requests. Default: as they finish.")
    ] = False,
    max_answer: Annotated[
        int,
        typer.Option(
            min=1, help="Bytes that an answer may hold besides its texts: logprobs, token ids, repeated prompts."
        ),
    ] = 16 << 20,
    max_model_len: MaxModelLen = None,
    dtype: Dtype = None,
    draft: Draft = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Answer a file of requests in OpenAI's batch format."""
    try:
        from tandemrt.runtime.servers.batch.folder import BatchJob, open_folder
        from tandemrt.runtime.servers.batch.lines import check_file
        from tandemrt.runtime.servers.openai.server import bundles_by_name, open_models
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"batch: needs {error.name}; {pip_install('serve')}") from error
    folders = bundles_by_name([model], BuildOptions(max_model_len, dtype, draft))
    [(name, bundle)] = folders.items()
    options.require_fit(Bundle.read(bundle).limits)
    requests = check_file(file, [name])
    manifest = hashlib.sha256((bundle / FILE_NAME).read_bytes()).hexdigest()
    with open_folder(out, BatchJob(requests.sha256, name, manifest, ordered)) as folder:
        if len(folder.answered) < requests.count:
            with open_models(folders, options) as models:
                try:
                    _run(requests, models, folder, ordered=ordered, max_answer=max_answer)
                except KeyboardInterrupt:
                    console.print("interrupted; the same command continues", soft_wrap=True)
                    raise typer.Exit(INTERRUPTED) from None
        console.print(
            f"{requests.count - folder.errors} answers and {folder.errors} errors in {out}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )


def _run(requests: "CheckedFile", models: "Models", folder: "BatchFolder", *, ordered: bool, max_answer: int) -> None:
    """Answer the requests that have no answer yet, and show how many have one."""
    from tandemrt.runtime.servers.batch.answers import batch_engine
    from tandemrt.runtime.servers.batch.run import run_batch

    [llm] = models.llms.values()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())

    async def answer_all() -> None:
        async with batch_engine(models, max_answer) as engine:
            await run_batch(
                (line for line in requests.lines() if line.custom_id not in folder.answered),
                engine.answer,
                write,
                in_flight=IN_FLIGHT_PER_SLOT * llm.bundle.limits.batch,
                ordered=ordered,
            )

    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("answering", total=requests.count, completed=len(folder.answered))

        def write(answer: "BatchAnswer") -> None:
            folder.write(answer)
            progress.advance(task)

        asyncio.run(answer_all())
