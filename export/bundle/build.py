"""Build a bundle from a recipe: read the checkpoints, build, compile and check the graphs, write the manifest."""

import filecmp
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from tandemrt.engines.bundle.bundle import TOKENIZER
from tandemrt.engines.bundle.digest import combined_digest, file_digest, file_digests
from tandemrt.engines.bundle.lock import locked
from tandemrt.engines.bundle.manifest import (
    FILE_NAME,
    TARGET_IDS,
    VERSION,
    EngineEntry,
    EngineName,
    File,
    Limits,
    Manifest,
)
from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS, DraftEntry
from tandemrt.engines.options.build_listener import SILENT, BuildListener, Progress
from tandemrt.engines.parallel.threads import SharedWork, begun, map_in_threads
from tandemrt.engines.parameters.generation_config import recommended
from tandemrt.engines.recipe.models import ModelDraft
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.text.tokenizer import load_tokenizer, vocabulary_of
from tandemrt.engines.validation.errors import BadBundle, BadCheckpoint, clipped
from tandemrt.engines.validation.system_errors import system_advice
from tandemrt.export.bundle.gguf import with_unpacked_gguf
from tandemrt.export.bundle.graphs import further_ranks, graphs, weightless
from tandemrt.export.bundle.kernels import compile_into, kernels_for
from tandemrt.export.bundle.models import Model, Models
from tandemrt.export.bundle.opened_head import DraftHead
from tandemrt.export.bundle.opening import open_models, require_support
from tandemrt.export.bundle.provenance import collect
from tandemrt.export.bundle.shared_weights import with_shared_weights
from tandemrt.export.bundle.tokenizer_file import TOKENIZER_FILE, quick_form
from tandemrt.export.bundle.vision import ROLE as VISION
from tandemrt.export.bundle.vision import open_tower
from tandemrt.export.bundle.written_weights import WeightsWriter
from tandemrt.export.compile.backends import CompiledEngine, CompileOptions, compile_graph, is_cut
from tandemrt.export.quantize.columns import write_shards
from tandemrt.export.read.checkpoint import read_header
from tandemrt.export.read.hub import resolve_checkpoints
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names
from tandemrt.export.staging import check_destination, place, staged

_COPIES = 8  # files that are copied at the same time: one core copies 1.3 GB/s in memory


@dataclass(frozen=True)
class BuildStep:
    """One step of a build and how long it took."""

    title: str
    seconds: float


@dataclass(frozen=True)
class BuildReport:
    """Report of a build: folder, manifest, steps, notes for the user, and number of rewrites by engine and pass."""

    folder: Path
    manifest: Manifest
    steps: tuple[BuildStep, ...]
    notes: tuple[str, ...]
    rewrites: Mapping[EngineName, Mapping[str, int]]


def build(
    recipe: Recipe,
    out: Path,
    *,
    force: bool = False,
    listener: BuildListener = SILENT,
    timing_cache: Path | None = None,
) -> BuildReport:
    """Build the bundle of ``recipe`` at ``out``. ``timing_cache``: the file where TensorRT keeps what it measures.

    The build is atomic: a failed build leaves no files and does not change ``out``. It replaces an earlier build of the
    same name and, with ``force``, a bundle of another name, but no other folder. Raises
    BadRecipe, BadCheckpoint, BadBundle (about ``out``) or BackendUnavailable.
    """
    try:
        out = out.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a cycle of links, a zero byte
        raise BadBundle(f"out must be a place for a folder: {clipped(error)}. Choose another with --out") from error
    try:
        compiling = CompileOptions(timing_cache, None if listener is SILENT else listener.detail)
        return _build(recipe, out, force=force, clock=_Clock(listener), compiling=compiling)
    except OSError as error:  # a full disk, a checkpoint that disappears
        where = clipped(error.filename or out)  # a failed write does not name its file
        why = f"{where}: {system_advice(error) or error.strerror or error}"
        raise BadBundle(f"nothing was built: a file cannot be read or written: {why}. Build it again") from error


def _build(recipe: Recipe, out: Path, *, force: bool, clock: "_Clock", compiling: CompileOptions) -> BuildReport:
    check_destination(out, recipe.name, force=force)
    compiling.require_use(recipe)
    recipe = with_unpacked_gguf(recipe, clock.listener)
    recipe = resolve_checkpoints(recipe, clock.listener)
    with clock.step("Read the checkpoints"):
        models = open_models(recipe)
        tower, tower_notes = open_tower(recipe, models[0])
        if tower is not None:
            models = (tower.read_by(models[0]), *models[1:])
            require_support(models[0], recipe)
        vocabulary = models[0].vocabulary
        vocabulary_notes = [f"target: {note}" for note in vocabulary.notes(models[0].source.config)]
        stop_ids = vocabulary.stop_ids(models[0].checkpoint.config)
        delimiters = vocabulary.delimiters(recipe.reasoning, stop_ids) if recipe.reasoning else None
    with staged(out) as folder, ExitStack() as reading:
        for checkpoint in recipe.checkpoints().values():
            reading.enter_context(locked(checkpoint, shared=True))  # `models rm` removes no locked folder
        check_destination(out, recipe.name, force=force)  # another build may have finished since the first check
        ahead = _compile_ahead(recipe, models, folder, reading)
        with clock.step("Place the weights and the tokenizer"):
            _place_sources(models, folder)
            tower = None if tower is None else tower.placed(folder / VISION)
        models, notes = _write_weights(models, folder, clock)
        notes += tuple(f"{m.role}: {note}" for m in models for note in m.cache_notes())
        if isinstance(models[-1], DraftHead) and models[-1].borrowed:
            with clock.step("Copy the tensors that the draft shares with its target"):
                models = (models[0], models[-1].with_borrowed(folder / models[-1].role))
        if (ids := _target_ids(recipe, models)) is not None:
            np.save(folder / TARGET_IDS, ids)
        with clock.step("Open the tokenizer"):
            _require_tokenizer(folder / TOKENIZER, models[0])
        if recipe.ranks > 1:
            with clock.step(f"Split the target over {recipe.ranks} ranks"):
                models = (_split(models[0], recipe.ranks, folder, clock.listener.detail), *models[1:])
        engines: dict[EngineName, EngineEntry] = {}
        rewrites: dict[EngineName, Mapping[str, int]] = {}
        for graph in (*graphs(recipe, models), *(() if tower is None else (tower.graph(recipe.limits.length),))):
            cut = is_cut(graph, recipe)
            with clock.step(f"Build, cut and check {graph.name}" if cut else f"Build, compile and check {graph.file}"):
                work = ahead.get(graph.name)
                compiled = work.result() if work else compile_graph(graph, recipe, folder, compiling)
            engines[graph.name], rewrites[graph.name] = compiled.engine, compiled.rewrites
            notes += compiled.notes
        ranks: list[EngineEntry] = []
        for rank, graph in enumerate(further_ranks(recipe, models), 1):
            with clock.step(f"Build, cut and check the target of rank {rank}"):
                ranks.append(compile_graph(graph, recipe, folder, compiling).engine)
        engines = with_shared_weights(engines, models)
        kernels: dict[str, str] = {}
        for file in kernels_for(recipe, models, engines["target"]):
            with clock.step(f"Compile {file.name}.cu for {', '.join(file.compute_capabilities)}"):
                kernels |= compile_into(folder, file)
        with clock.step("Take the digest of every file"):
            unplaced = begun(partial(_unplaced_digests, models))
            files = _files(folder)
            checkpoints = _checkpoint_digests(models, files, unplaced.result())
        manifest = Manifest(
            manifest_version=VERSION,
            name=recipe.name,
            limits=_limits(recipe, models[0].spec),
            vocab=models[0].spec.vocab,
            valid_tokens=vocabulary.size,
            stop_ids=stop_ids,
            reasoning=delimiters,
            draft=_draft(recipe, models),
            specs={model.role: model.spec_json() for model in models},
            engines=engines,
            ranks=tuple(ranks),
            kernels=kernels,
            files=files,
            provenance=collect(recipe=recipe.digest, checkpoints=checkpoints),
            vision=None if tower is None else tower.spec.entry,
        )
        (folder / FILE_NAME).write_text(manifest.to_json(), encoding="utf-8")
    return BuildReport(out, manifest, tuple(clock.steps), (*vocabulary_notes, *tower_notes, *notes), rewrites)


@dataclass
class _Clock:
    listener: BuildListener
    steps: list[BuildStep] = field(default_factory=list)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        self.listener.begin(title)
        start = time.perf_counter()
        yield
        self.steps.append(BuildStep(title, time.perf_counter() - start))


def _compile_ahead(
    recipe: Recipe, models: Models, folder: Path, reading: ExitStack
) -> dict[EngineName, SharedWork[CompiledEngine]]:
    """Begin to compile the graphs without weights on a CPU, while weights are written; ``reading`` waits for it."""
    if not models[0].on_cpu:
        return {}
    works = {
        graph.name: SharedWork(partial(compile_graph, graph, recipe, folder)) for graph in weightless(recipe, models)
    }

    def run() -> None:
        for work in works.values():
            work.run()

    reading.callback(begun(run).result)
    return works


def _place_sources(models: Models, folder: Path) -> None:
    for model in models:
        (folder / model.role).mkdir()
        if model.packed:
            continue
        files = model.checkpoint.files
        copies = map_in_threads(partial(place, folder=folder / model.role), files, _COPIES)
        for file, placed in zip(files, copies, strict=True):
            was = {name: tensor for name, tensor in model.checkpoint.tensors.items() if tensor.file == file}
            if {name: replace(tensor, file=file) for name, tensor in read_header(placed).items()} != was:
                raise BadCheckpoint(f"{file} must not change while it is read, and it did; build again")
    for file in models[0].vocabulary.files():
        copy = folder / TOKENIZER / file.relative_to(models[0].vocabulary.folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if file.name == TOKENIZER_FILE:
            copy.write_bytes(quick_form(file.read_bytes()))
        else:
            shutil.copyfile(file, copy)


def _write_weights(models: Models, folder: Path, clock: "_Clock") -> tuple[Models, tuple[str, ...]]:
    """Write the weights in the dtypes of the recipe into ``folder``; return the models and notes, one line each."""
    notes = models[-1].notes() if isinstance(models[-1], DraftHead) else ()
    writer = WeightsWriter(folder, clock.step, clock.listener.detail, [*notes])
    target = writer.write(models[0])
    if len(models) == 1:
        return (target,), tuple(writer.notes)
    draft = writer.write(models[1]) if isinstance(models[1], Model) else models[1]
    return (target, draft), tuple(writer.notes)


def _split(target: Model, ranks: int, folder: Path, progress: Progress) -> Model:
    """Write what the ranks do not read from the checkpoint itself. Raises BadRecipe if the target cannot be split."""
    checkpoint = with_graph_names(target.checkpoint, target.spec)
    return replace(target, shards=write_shards(checkpoint, target.spec, folder / target.role, ranks, progress))


def _require_tokenizer(folder: Path, target: Model) -> None:
    """Raise BadCheckpoint unless the runtime can open the tokenizer in ``folder`` and its generation config."""
    vocabulary = target.vocabulary
    original, copy = vocabulary.folder / TOKENIZER_FILE, folder / TOKENIZER_FILE
    is_same = original.is_file() and copy.is_file() and filecmp.cmp(original, copy, shallow=False)
    try:
        tokenizer = load_tokenizer(folder, read=(lambda: vocabulary.opened) if is_same else None)
        vocabulary_of(tokenizer, folder, target.spec.vocab)
        recommended(folder)
    except BadBundle as error:
        raise BadCheckpoint(f"checkpoint {target.checkpoint.folder}: {error}") from error


def _limits(recipe: Recipe, target: ModelSpec) -> Limits:
    asked = recipe.limits
    return Limits(
        batch=asked.batch,
        length=asked.length,
        capacity=recipe.capacity,
        num_draft_tokens=recipe.draft.num_draft_tokens,
        prefill_chunk=recipe.prefill_chunk(large=target.large_calls),
        cache_blocks=recipe.cache_blocks,
    )


def _draft(recipe: Recipe, models: Models) -> DraftEntry:
    section = recipe.draft
    shared = DRAFT_KINDS[section.kind].entry.model_fields.keys() & type(section).model_fields.keys()
    fields = {name: getattr(section, name) for name in shared}
    for draft in models[1:]:
        fields |= draft.entry
    return TypeAdapter[DraftEntry](DraftEntry).validate_python(fields)


def _target_ids(recipe: Recipe, models: Models) -> npt.NDArray[np.int32] | None:
    """Return the target's ids of the tokens that the draft can propose; None: all, or there is no model that drafts."""
    if isinstance(models[-1], DraftHead):
        return models[-1].target_ids()
    vocab = recipe.draft.vocab if isinstance(recipe.draft, ModelDraft) else None
    return None if vocab is None else np.arange(vocab, dtype=np.int32)


def _files(folder: Path) -> dict[str, File]:
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): File(sha256=digest, size=path.stat().st_size)
        for path, digest in zip(paths, file_digests(paths), strict=True)
    }


def _checkpoint_digests(models: Models, files: dict[str, File], unplaced: Mapping[Path, str]) -> dict[EngineName, str]:
    # The digest covers config and weights. Files placed in the bundle have been hashed already.
    sources: dict[EngineName, str] = {}
    for model in models:
        if _has_targets_source(model, models):
            sources[model.role] = sources[models[0].role]
            continue
        digests = {
            file.name: files[f"{model.role}/{file.name}"].sha256 if _is_placed(model) else unplaced[file]
            for file in model.source.files
        }
        config = file_digest(model.source.folder / "config.json")
        sources[model.role] = combined_digest({**digests, "config.json": config})
    return sources


def _unplaced_digests(models: Models) -> dict[Path, str]:
    """Return the digests of the checkpoints' files that are not placed in the bundle."""
    read = [model for model in models if not (_is_placed(model) or _has_targets_source(model, models))]
    paths = [file for model in read for file in model.source.files]
    return dict(zip(paths, file_digests(paths), strict=True))


def _is_placed(model: Model | DraftHead) -> bool:
    return not model.packed if isinstance(model, Model) else model.checkpoint is model.source


def _has_targets_source(model: Model | DraftHead, models: Models) -> bool:
    """Whether ``model`` is an MTP layer in the target's checkpoint."""
    return model is not models[0] and model.source.folder == models[0].source.folder
