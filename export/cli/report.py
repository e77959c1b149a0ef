"""The output of ``tandemrt export build``, ``inspect`` and ``triton``."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.bundle.digest import holds_weights
from tandemrt.engines.bundle.manifest import Delimiter, EngineEntry, EngineName, Limits, Manifest
from tandemrt.engines.contract.contract import BLOCK_SIZE, Contract, image_token_bytes
from tandemrt.engines.contract.decoder import Operator, Subgraph
from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.parameters.generation_config import recommended
from tandemrt.engines.validation.errors import BadBundle
from tandemrt.export.bundle.build import BuildReport
from tandemrt.export.bundle.capacity import SHARE, Capacity
from tandemrt.export.bundle.plan import PlannedCapacity
from tandemrt.export.bundle.stored_dtype import stored_dtype
from tandemrt.export.cli.progress import console
from tandemrt.export.compile.graph_contract import differences
from tandemrt.export.compile.tensorrt.summary import summaries


def print_build(report: BuildReport, seconds: float) -> None:
    """Print the summary of a build that took ``seconds``: engines and their sizes, limits, folder and time."""
    manifest = report.manifest
    console.print(_engines(manifest, report.folder))
    console.print(_limits(manifest))
    for note in report.notes:
        console.print(escape(note))
    console.print(f"Bundle [bold]{escape(manifest.name)}[/bold] built in {seconds:.1f} s: {escape(str(report.folder))}")


def findings(bundle: Bundle, *, verify: bool) -> list[str]:
    """Return the problems of a bundle, one line each: files, digests, and bindings of the ONNX graphs. Empty: none."""
    lines = bundle.problems(verify=verify)
    for name, engine in bundle.manifest.engines.items():
        for file, contract in _contracts(engine).items():
            if file.endswith(".onnx") and not any(line.startswith(f"{file} ") for line in lines):
                lines += [f"engine {name}: {line}" for line in differences(bundle.folder / file, contract)]
    return lines


def print_bundle(bundle: Bundle, problems: list[str], *, verify: bool, everything: bool, fits: Capacity | None) -> None:
    """Print a summary of the manifest, or ``everything`` in it; the problems; with ``fits`` what a GPU holds."""
    manifest = bundle.manifest
    console.print(f"[bold]{escape(manifest.name)}[/bold]  {escape(str(bundle.folder))}")
    console.print(_engines(manifest, bundle.folder))
    if everything:
        _print_models(bundle)
    console.print(_limits(manifest))
    if manifest.vision is not None:
        console.print(_images(manifest, manifest.vision))
    if everything:
        console.print(_vocabulary(manifest))
    if defaults := _defaults(bundle):
        console.print(_pairs("Default sampling parameters", {name: str(value) for name, value in defaults.items()}))
    if everything and (steps := _steps(manifest)):
        console.print(_pairs("Steps and kernels", steps))
    if fits is not None:
        console.print(_fitting(manifest, fits))
    if everything:
        console.print(_files(manifest))
        console.print(_provenance(manifest))
    else:
        console.print(_summary(manifest), highlight=False)
    for line in problems:
        console.print(f"[red]{escape(line)}[/red]")
    checked = "all digests" if verify else "all digests but those of the weights (--verify takes them too)"
    verdict = f"[red]{len(problems)} problem(s)[/red]" if problems else "[green]everything holds[/green]"
    console.print(f"Checked sizes, bindings and {checked}: {verdict}")


def _print_models(bundle: Bundle) -> None:
    """Print the specs of the models, and the bindings and compiler reports of the engines."""
    for name, spec in bundle.manifest.specs.items():
        console.print(_pairs(f"{name}: model", {key: _short(value) for key, value in spec.items()}))
    for engine, entry in bundle.manifest.engines.items():
        console.print(_bindings(engine, entry.contract))
    for title, rows in summaries(bundle):
        console.print(_pairs(title, rows))


def _summary(manifest: Manifest) -> str:
    origin, size = manifest.provenance, sum(file.size for file in manifest.files.values())
    return (
        f"{len(manifest.files)} files, {_bytes(size)}; built {origin.created} by tandemrt {escape(origin.tandemrt)}\n"
        "--all also prints models, bindings, delimiters, steps, files and provenance"
    )


def print_repository(model: Path, problems: list[str]) -> None:
    """Print whether a model of a repository is ready to be served."""
    for line in problems:
        console.print(f"[red]{escape(line)}[/red]")
    verdict = f"[red]{len(problems)} problem(s)[/red]" if problems else "[green]ready to be served[/green]"
    console.print(f"Model [bold]{escape(model.name)}[/bold] in {escape(str(model.parent))}: {verdict}")


def print_json(bundle: Bundle, problems: list[str], *, verify: bool, fits: Capacity | None) -> None:
    """Print the manifest and the problems as one JSON object."""
    manifest = bundle.manifest.model_dump(mode="json")
    result: dict[str, Any] = {
        "manifest": manifest,
        "default_sampling_params": _defaults(bundle),
        "verified": verify,
        "holds": not problems,
        "problems": problems,
    }
    if fits is not None:
        result["fits"] = asdict(fits)
    console.file.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def print_plan(fits: PlannedCapacity, *, as_json: bool) -> None:
    """Print what a GPU holds of a checkpoint that has no bundle yet."""
    if as_json:
        console.file.write(json.dumps(asdict(fits), indent=2) + "\n")
        return
    values = {
        "weights, as they are stored": _bytes(fits.weights),
        "logits and states": _bytes(fits.rounds),
        "keys and values of a token": f"{fits.token / 1024:.1f} KiB",
        "tokens that fit": str(fits.tokens),
    }
    console.print(_pairs(f"A GPU of {_bytes(fits.memory)}, {SHARE:.0%} of it, without a separate draft", values))


def _defaults(bundle: Bundle) -> dict[str, Any]:
    try:
        return recommended(bundle.tokenizer_dir)
    except BadBundle:  # the file was changed; the problems list it
        return {}


def _contracts(engine: EngineEntry) -> dict[str, Contract]:
    """The bindings that each file of an engine must have."""
    if engine.decoder is None:
        return dict.fromkeys(engine.files, engine.contract)
    return {
        subgraph.file: engine.decoder.contract_of(subgraph, engine.contract) for subgraph in engine.decoder.subgraphs
    }


def _engines(manifest: Manifest, folder: Path) -> Table:
    table = Table(title="Engines", title_justify="left", box=box.SIMPLE)
    table.add_column("engine", no_wrap=True)
    table.add_column("runs on", min_width=15)
    table.add_column("computes in")
    table.add_column("weights", overflow="fold")
    table.add_column("graph", justify="right", overflow="fold")
    for name, engine in manifest.engines.items():
        size = sum(manifest.files[file].size for file in engine.files)
        files = _bytes(size) + (f" in {len(engine.files)}" if len(engine.files) > 1 else "")
        place = engine.backend if engine.backend.endswith(engine.built_for) else f"{engine.backend} {engine.built_for}"
        table.add_row(name, place, engine.dtype, _weights(manifest, folder, engine.files[0]), files)
    return table


def _weights(manifest: Manifest, folder: Path, file: str) -> str:
    """Return dtype and size of the weights next to a graph; "" for an engine file, which contains its weights."""
    if not file.endswith(".onnx"):
        return ""
    neighbors = [name for name in manifest.files if Path(name).parent == Path(file).parent != Path()]
    files = [name for name in neighbors if name.endswith(".safetensors")]
    size = sum(manifest.files[name].size for name in files)
    return f"{stored_dtype(folder / name for name in files)}, {_bytes(size)}" if files else ""


def _limits(manifest: Manifest) -> Table:
    limits, draft = manifest.limits, manifest.draft
    values = {
        "batch": f"{limits.batch} requests at once",
        "length": f"{limits.length} tokens of prompt and output",
        "capacity": f"{limits.capacity} tokens in a cache row",
        "num_draft_tokens": f"{limits.num_draft_tokens} tokens drafted per round",
        "prefill_chunk": f"{limits.prefill_chunk} prompt tokens per round",
        **_cache(limits),
        "draft": draft.description,
    }
    return _pairs("Limits", values)


def _images(manifest: Manifest, vision: VisionEntry) -> Table:
    length, token_bytes = manifest.limits.length, image_token_bytes(manifest.engines["target"].contract)
    weights = sum(f.size for name, f in manifest.files.items() if name.startswith("vision/") and holds_weights(name))
    tokens, needs = vision.most_tokens(length), vision.working_bytes(length)
    values = {
        "largest image": f"{tokens} tokens of {vision.factor} x {vision.factor} pixels",
        "memory of the tower": f"{_bytes(weights)} of weights, about {_bytes(needs)} for this image",
        "memory of its states": _bytes(tokens * token_bytes),
    }
    return _pairs("Images", values)


def _cache(limits: Limits) -> dict[str, str]:
    if limits.cache_blocks is None:
        return {}
    tokens = limits.cache_blocks * BLOCK_SIZE
    return {"cache_blocks": f"{limits.cache_blocks} of {BLOCK_SIZE} tokens, {tokens} in all, shared by the requests"}


def _fitting(manifest: Manifest, fits: Capacity) -> Table:
    limits = manifest.limits
    has = f"{limits.batch} slots of {limits.capacity}"
    if limits.cache_blocks is not None:
        has = f"{limits.cache_blocks * BLOCK_SIZE}, shared by {limits.batch} slots"
    values = {
        "weights": _bytes(fits.weights),
        "logits, draft probabilities, states, images": _bytes(fits.rounds),
        "keys and values of a token": _bytes(fits.token),
        "tokens that fit": f"{fits.tokens} (this bundle's caches hold {has})",
        "requests that fit": f"{fits.requests} of {limits.length} tokens",
    }
    first = "A GPU" if fits.gpus == 1 else f"The first of {fits.gpus} GPUs"
    return _pairs(f"{first} of {_bytes(fits.memory)}, {SHARE:.0%} of it", values)


def _vocabulary(manifest: Manifest) -> Table:
    values = {
        "vocab": f"{manifest.vocab} logits, {manifest.valid_tokens} of them have a text",
        "stop_ids": ", ".join(map(str, manifest.stop_ids)),
    }
    if manifest.reasoning:
        delimiters = manifest.reasoning
        values["think_start"] = _delimiter(delimiters.think_start)
        values["think_ends"] = "; ".join(map(_delimiter, delimiters.think_ends))
        values["forced_end"] = _delimiter(delimiters.forced_end)
        values["implicit_ends"] = "; ".join(map(_delimiter, delimiters.implicit_ends))
    return _pairs("Vocabulary and delimiters", values)


def _delimiter(delimiter: Delimiter) -> str:
    return f"{delimiter.text!r} = {list(delimiter.ids)}"


def _bindings(name: EngineName, contract: Contract) -> Table:
    # The caches of all layers have one shape: one line for past_key.0, past_key.1, …
    sources = {output.split(".")[0]: source.split(".")[0] for output, source in contract.aliases}
    values, layers = {}, Counter(b.name.split(".")[0] for b in (*contract.inputs, *contract.outputs))
    for way, bindings in (("in", contract.inputs), ("out", contract.outputs)):
        for b in bindings:
            stem = b.name.split(".")[0]
            shared = f" in the memory of {sources[stem]}" if stem in sources else ""
            count = f" x {layers[stem]}" if "." in b.name else ""
            values[f"{way} {stem}"] = str(b).removeprefix(f"{b.name} ") + count + shared
    return _pairs(f"{name}: bindings", values)


def _steps(manifest: Manifest) -> dict[str, str]:
    """The steps of every decoder, counted by kind, and the kernels of the bundle."""
    values = {}
    for name, engine in manifest.engines.items():
        if (decoder := engine.decoder) is not None:
            kinds = Counter("subgraphs" if isinstance(step, Subgraph) else _operator(step) for step in decoder.steps)
            counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
            values[f"{name}: steps"] = f"{counts}; {len(decoder.values)} values between them"
    for kernel in sorted({Path(file).name.split(".")[0] for file in manifest.kernels}):
        targets = [target for file, target in manifest.kernels.items() if Path(file).name.split(".")[0] == kernel]
        values[f"kernels of {kernel}.cu"] = ", ".join(targets)
    return values


def _operator(step: Operator) -> str:
    said = ", ".join(f"{name} {value:g}" for name, value in step.attributes.items())
    return f"{step.name} ({said})" if said else step.name


def _files(manifest: Manifest) -> Table:
    values = {name: f"{file.sha256}  {_bytes(file.size)}" for name, file in manifest.files.items()}
    return _pairs("Files (sha256, size)", values)


def _provenance(manifest: Manifest) -> Table:
    origin = manifest.provenance
    state = {True: " with uncommitted changes", False: "", None: ""}[origin.dirty]
    values = {
        "created": origin.created,
        "tandemrt": origin.tandemrt,
        "commit": f"{origin.commit}{state}" if origin.commit else "not built from a git checkout",
        "python": origin.python,
        **origin.packages,
        "recipe": origin.recipe,
        **{f"{name} checkpoint": digest for name, digest in origin.checkpoints.items()},
    }
    return _pairs("Provenance", values)


def _pairs(title: str, values: dict[str, str]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for key, value in values.items():
        table.add_row(escape(key), escape(value))
    return table


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:59]}…"


def _bytes(size: int) -> str:
    units = ["B", "KB", "MB", "GB"]
    value, unit = float(size), 0
    while value >= 1000 and unit < len(units) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {units[unit]}" if unit == 0 else f"{value:.1f} {units[unit]}"
