"""``tandemrt export``: build a bundle from a recipe, inspect one, quantize a checkpoint."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tandemrt.engines.command_options import takes_options
from tandemrt.engines.options import RuntimeOptions

export = typer.Typer(help="Build bundles from checkpoints, and look into them.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Mount the ``export`` commands on the project's command line."""
    app.add_typer(export, name="export")


@export.command()
def build(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of an included recipe such as 'demo'.")
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
            help="Build for this backend instead of the recipe's [backend] section; tensorrt-rtx: for every compute "
            "capability it knows."
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
) -> None:
    """Build the bundle of RECIPE. An earlier build of the same recipe name is replaced once the new one is whole."""
    # The exporter's imports take a second; they are loaded by the commands that need them.
    from tandemrt.engines.recipe import Recipe, locate
    from tandemrt.export.build import build as build_bundle
    from tandemrt.export.compile.backends import CompileOptions
    from tandemrt.export.progress import Progress
    from tandemrt.export.report import print_build

    wanted = Recipe.load(locate(recipe), backend=backend, dtype=dtype, kv_dtype=kv_dtype)
    with Progress() as progress:
        report = build_bundle(
            wanted,
            out or default_out(wanted.name),
            force=force,
            progress=progress.begin,
            compiling=CompileOptions(timing_cache, progress.detail),
        )
    print_build(report)


@export.command()
def inspect(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="The folder of a bundle.")],
    verify: Annotated[bool, typer.Option("--verify", help="Take the digests of the weights too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest and the findings as JSON.")] = False,
    gpu: Annotated[
        str | None, typer.Option(help="Say how much text a GPU of this memory holds, such as 80GB.", metavar="MEMORY")
    ] = None,
) -> None:
    """Print what BUNDLE holds and whether it still holds. Exit code 1 when it does not."""
    from tandemrt.engines.bundle import Bundle
    from tandemrt.export.capacity import fitting, memory_from_text
    from tandemrt.export.report import findings, print_bundle, print_json

    memory = None if gpu is None else memory_from_text(gpu)
    opened = Bundle.read(bundle)
    problems = findings(opened, verify=verify)
    fits = None if memory is None else fitting(opened.manifest, memory)
    (print_json if as_json else print_bundle)(opened, problems, verify=verify, fits=fits)
    raise typer.Exit(1 if problems else 0)


class SchemeName(StrEnum):
    """What ``export quantize`` makes of weights."""

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
    """Write CHECKPOINT anew with quantized products, in the format of compressed-tensors. It needs no data."""
    from tandemrt.export.progress import Progress
    from tandemrt.export.quantize.publish import publish
    from tandemrt.export.quantize.report import print_published

    place = out or Path(f"{checkpoint.resolve().name}-{scheme.value}")
    with Progress() as progress:
        progress.begin(f"Quantize the weights to {scheme.value}")
        report = publish(checkpoint, place, scheme.value, group=group, progress=progress.detail)
    print_published(report)


@export.command()
@takes_options(leave_out=("device",))  # where the instances run, which may be several GPUs
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
    """Write BUNDLE into REPOSITORY as a model for Triton Inference Server, and check it. Exit code 1 on a fault."""
    from tandemrt.engines.bundle import Bundle
    from tandemrt.export.report import print_repository
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
    found = problems(folder, bundle=opened, backends=backend_directory)
    print_repository(folder, found)
    raise typer.Exit(1 if found else 0)


def default_out(name: str) -> Path:
    """Return where a bundle goes when nobody says: the project's own folder for bundles, else the working folder."""
    engines = Path("engines")
    return (engines / "built" if engines.is_dir() else Path()) / name
