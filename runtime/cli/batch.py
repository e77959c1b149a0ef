"""``tandemrt batch``: answer a file of requests in the batch format of OpenAI."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext
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
from tandemrt.runtime.cli.ray_cluster import ONE_REPLICA, Replicas, connected, require_one_replica, resolved
from tandemrt.runtime.cli.run import INTERRUPTED

if TYPE_CHECKING:
    from tandemrt.runtime.servers.batch.answers import BatchAnswer
    from tandemrt.runtime.servers.batch.folder import BatchFolder
    from tandemrt.runtime.servers.batch.lines import BatchLine, CheckedFile

    Answer = Callable[[BatchLine], Awaitable[BatchAnswer]]
    Answers = tuple[Callable[[], AbstractAsyncContextManager[Answer]], int]  # and how many requests at a time

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
    ray: Annotated[
        bool, typer.Option("--ray", help="Answer with replicas of a Ray cluster: this machine's, or one that starts.")
    ] = False,
    replicas: Replicas = ONE_REPLICA,
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
        from tandemrt.runtime.servers.http.server import bundles_by_name
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"batch: needs {error.name}; {pip_install('serve')}") from error
    if not ray:
        require_one_replica(replicas)
    folders = bundles_by_name([model], BuildOptions(max_model_len, dtype, draft))
    [(name, bundle)] = folders.items()
    options.require_fit(Bundle.read(bundle).limits)
    requests = check_file(file, [name])
    manifest = hashlib.sha256((bundle / FILE_NAME).read_bytes()).hexdigest()
    with open_folder(out, BatchJob(requests.sha256, name, manifest, ordered)) as folder:
        if len(folder.answered) < requests.count:
            answers = (
                _with_ray(folders, options, replicas, max_answer, out) if ray else _here(folders, options, max_answer)
            )
            try:
                with answers as (open_answer, in_flight):
                    _run(requests, folder, open_answer, in_flight, ordered=ordered)
            except KeyboardInterrupt:
                console.print("interrupted; the same command continues", soft_wrap=True)
                raise typer.Exit(INTERRUPTED) from None
        console.print(
            f"{requests.count - folder.errors} answers and {folder.errors} errors in {out}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )


@contextmanager
def _here(folders: Mapping[str, Path], options: RuntimeOptions, max_answer: int) -> Iterator["Answers"]:
    """Open the models in this process."""
    from tandemrt.runtime.servers.batch.answers import batch_engine
    from tandemrt.runtime.servers.http.server import open_models

    with open_models(folders, options) as models:

        @asynccontextmanager
        async def open_answer() -> AsyncIterator["Answer"]:
            async with batch_engine(models, max_answer) as engine:
                yield engine.answer

        yield open_answer, IN_FLIGHT_PER_SLOT * sum(llm.bundle.limits.batch for llm in models.llms.values())


@contextmanager
def _with_ray(
    folders: Mapping[str, Path], options: RuntimeOptions, replicas: str, max_answer: int, out: Path
) -> Iterator["Answers"]:
    """Open the models in replicas of a Ray cluster."""
    try:
        from tandemrt.runtime.servers.ray.batch import batch_replicas
        from tandemrt.runtime.servers.ray.deployment import ReplicaCount, slots_of
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"--ray: needs {error.name}; {pip_install('ray')}") from error
    count = ReplicaCount.from_text(replicas)
    with connected():
        in_flight = IN_FLIGHT_PER_SLOT * slots_of(folders)
        name = f"tandemrt-batch-{hashlib.sha256(bytes(out.resolve())).hexdigest()[:16]}"  # the same after a kill
        with batch_replicas(name, resolved(folders), options, count, in_flight, max_answer) as answer:
            yield lambda: nullcontext(answer), in_flight * count.most


def _run(
    requests: "CheckedFile",
    folder: "BatchFolder",
    open_answer: Callable[[], AbstractAsyncContextManager["Answer"]],
    in_flight: int,
    *,
    ordered: bool,
) -> None:
    """Answer the requests that have no answer yet, and show how many have one."""
    from tandemrt.runtime.servers.batch.run import run_batch

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())

    async def answer_all() -> None:
        async with open_answer() as answer:
            await run_batch(
                (line for line in requests.lines() if line.custom_id not in folder.answered),
                answer,
                write,
                in_flight=in_flight,
                ordered=ordered,
            )

    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("answering", total=requests.count, completed=len(folder.answered))

        def write(answer: "BatchAnswer") -> None:
            folder.write(answer)
            progress.advance(task)

        asyncio.run(answer_all())
