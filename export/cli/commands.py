"""``tandemrt export``: build a bundle from a recipe, inspect a bundle, quantize a checkpoint, write a Triton
repository.
"""

import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tandemrt.engines.options.command_options import CommandWithSections, takes_options
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.validation.errors import BadRequest, quoted

export = typer.Typer(help="Build bundles from checkpoints, and look into them.", no_args_is_help=True)


@export.command()
def build(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A recipe file, the name of an included recipe such as 'demo', or a checkpoint: a folder or a name on "
            "the Hugging Face hub (OWNER/NAME), for which a recipe is written.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where the bundle goes. Default: engines/built/NAME if there is an engines folder here, else ./NAME."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also replace a bundle that was built under another name.")
    ] = False,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Build for this backend instead of the recipe's; ahead of time, for every compute capability it knows."
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Compute in this type instead of the recipe's, in target and draft; int8, int4: weights in 8 or 4 "
            "bits, on a CPU."
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        typer.Option(
            help="Hold keys and values in this type, in target and draft model: float8_e4m3, over a paged cache, or "
            "what is computed in. Default: as the recipe, else the checkpoint says."
        ),
    ] = None,
    timing_cache: Annotated[
        Path | None,
        typer.Option(help="File where TensorRT keeps what it measures. Default: one per GPU in your cache folder."),
    ] = None,
    tensorrt_python: Annotated[
        str | None,
        typer.Option(
            help="Interpreter whose TensorRT builds the engines, such as that of a container image; it needs numpy "
            "besides. Default: the recipe's backend.python, else this interpreter."
        ),
    ] = None,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="For a checkpoint: tokens of prompt plus output. Default: what fits.")
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(help="For a checkpoint: ngram (default), none, a smaller checkpoint, or KIND:CHECKPOINT."),
    ] = None,
) -> None:
    """Build the bundle of MODEL. An earlier build of the same name is replaced when the new one is complete."""
    start = time.perf_counter()
    # The exporter's imports take seconds; they are loaded by the commands that need them.
    from tandemrt.engines.options.build_options import BuildOptions
    from tandemrt.engines.options.model_name import is_recipe
    from tandemrt.engines.recipe.recipe import Recipe, locate
    from tandemrt.export.bundle.build import build as build_bundle
    from tandemrt.export.bundle.cached_build import write_default_recipe
    from tandemrt.export.bundle.sources import CheckpointSource
    from tandemrt.export.cli.progress import ConsoleListener
    from tandemrt.export.cli.report import print_build

    if is_recipe(model):
        if arguments := BuildOptions(max_model_len, draft=draft).chosen():
            raise BadRequest(f"{', '.join(arguments)}: a recipe defines these; change {quoted(model)} instead")
        wanted = Recipe.load(
            locate(model), backend=backend, dtype=dtype, kv_dtype=kv_dtype, tensorrt_python=tensorrt_python
        )
    else:
        options = BuildOptions(max_model_len, dtype, draft)
        with ConsoleListener() as listener:
            source = CheckpointSource.find(model, options, listener, backend=backend)
            file = write_default_recipe(source, listener)
        wanted = Recipe.load(file, kv_dtype=kv_dtype, tensorrt_python=tensorrt_python)
    place = out or default_out(wanted.name)
    with ConsoleListener() as listener:
        report = build_bundle(wanted, place, force=force, listener=listener, timing_cache=timing_cache)
    print_build(report, time.perf_counter() - start)


@export.command()
def inspect(
    bundle: Annotated[
        Path,
        typer.Argument(
            metavar="BUNDLE", help="The folder of a bundle; with --gpu also a recipe, or the folder of a checkpoint."
        ),
    ],
    verify: Annotated[bool, typer.Option("--verify", help="Take the digests of the weights too.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Print the whole manifest instead of a summary.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest and the findings as JSON.")] = False,
    gpu: Annotated[
        str | None, typer.Option(help="Say how much text a GPU of this memory holds, such as 80GB.", metavar="MEMORY")
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(help="With --gpu and a bundle: as many GPUs, with the target split over them. Default: as built."),
    ] = None,
) -> None:
    """Print a summary of BUNDLE and whether its files are intact. Exit code 1 if they are not."""
    from tandemrt.engines.bundle.bundle import Bundle
    from tandemrt.engines.bundle.manifest import FILE_NAME
    from tandemrt.export.bundle.capacity import fitting, memory_from_text
    from tandemrt.export.bundle.plan import plan
    from tandemrt.export.cli.report import findings, print_bundle, print_json, print_plan

    if gpus is not None and gpu is None:
        raise BadRequest(f"--gpus: must come with --gpu, the memory of each; received {quoted(gpus)}. Add --gpu 80GB")
    memory = None if gpu is None else memory_from_text(gpu)
    if memory is not None and not (bundle / FILE_NAME).is_file():
        if gpus is not None:
            raise BadRequest(
                f"--gpus: must come with a bundle, received {quoted(gpus)} for {quoted(str(bundle))}, which has no "
                f"{FILE_NAME}; build the bundle first, or leave out --gpus"
            )
        print_plan(plan(str(bundle), memory), as_json=as_json)
        return
    opened = Bundle.read(bundle)
    problems = findings(opened, verify=verify)
    fits = None if memory is None else fitting(opened.manifest, memory, gpus)
    if as_json:
        print_json(opened, problems, verify=verify, fits=fits)
    else:
        print_bundle(opened, problems, verify=verify, everything=everything, fits=fits)
    raise typer.Exit(1 if problems else 0)


class SchemeName(StrEnum):
    """Formats of weights that ``export quantize`` writes."""

    FP8 = "fp8"
    INT4 = "int4"


@export.command()
def quantize(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT", help="A Hugging Face folder: config.json, *.safetensors, tokenizer.")
    ],
    scheme: Annotated[
        SchemeName, typer.Option(help="fp8: 8-bit floats, a scale per output; int4: 4-bit integers in groups.")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where the new checkpoint goes. Default: ./NAME-SCHEME, after the old one.")
    ] = None,
    group: Annotated[int, typer.Option(help="With int4: inputs that share a scale, 32, 64 or 128.")] = 128,
) -> None:
    """Write CHECKPOINT anew with quantized matmuls. The format is that of compressed-tensors; no data is needed."""
    from tandemrt.export.bundle.publish import publish
    from tandemrt.export.cli.progress import ConsoleListener
    from tandemrt.export.cli.quantize_report import print_published

    place = out or Path(f"{checkpoint.resolve().name}-{scheme.value}")
    with ConsoleListener() as listener:
        listener.begin(f"Quantize the weights to {scheme.value}")
        report = publish(checkpoint, place, scheme.value, group=group, progress=listener.detail)
    print_published(report)


@export.command(cls=CommandWithSections)
@takes_options(leave_out=("device",))  # --device may name several GPUs here
def triton(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The folder of a bundle.")],
    repository: Annotated[Path, typer.Argument(metavar="REPOSITORY", help="The server's model repository.")],
    name: Annotated[str | None, typer.Option(help="The model's name. Default: the bundle's.")] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the bundle instead of linking it.")] = False,
    instances: Annotated[int, typer.Option(min=1, help="Instances on the CPU, or on each GPU.")] = 1,
    device: Annotated[
        str | None, typer.Option(help="cpu, cuda (all GPUs) or cuda:0,1. Default: what the bundle was built for.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; say what is wrong with what is there.")
    ] = False,
    backend_directory: Annotated[
        Path | None, typer.Option(help="With --check: the server's backends, to compare Python versions.")
    ] = None,
    *,
    options: RuntimeOptions,
) -> None:
    """Write BUNDLE into REPOSITORY as a Triton model, and check it. Exit code 1 on a fault."""
    from tandemrt.engines.bundle.bundle import Bundle
    from tandemrt.export.cli.report import print_repository
    from tandemrt.export.triton.check import problems
    from tandemrt.export.triton.repository import write_model

    opened = Bundle.open(bundle)
    folder = repository / (opened.name if name is None else name)
    if not check:
        write_model(
            opened,
            repository,
            name=name,
            copy=copy,
            instances=instances,
            device=device,
            **options.served(),
        )
    violations = problems(folder, bundle=opened, backends=backend_directory)
    print_repository(folder, violations)
    raise typer.Exit(1 if violations else 0)


def default_out(name: str) -> Path:
    """Return the default folder of a bundle: in the project's own folder for bundles, else in the working folder."""
    engines = Path("engines")
    return (engines / "built" if engines.is_dir() else Path()) / name
