"""The manifest of a bundle, ``bundle.json``: sizes, engines, files and digests."""

import hashlib
import json
import stat
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from tandemrt.engines.bundle.digest import holds_weights
from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.contract.calls import capacity, longest_chunk, slack
from tandemrt.engines.contract.contract import CacheKind, Contract, blocks_of
from tandemrt.engines.contract.decoder import Decoder
from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS, BlockEntry, DraftEntry, MaskedEntry
from tandemrt.engines.contract.limits import MAX_DELIMITERS, DelimiterText, VocabSize
from tandemrt.engines.contract.operators import COLLECTIVES, SCHEMAS
from tandemrt.engines.contract.vision import VisionEntry
from tandemrt.engines.validation.errors import BadBundle, clipped, quoted
from tandemrt.engines.validation.records import Record, RelativePath, explain, reject

FILE_NAME = "bundle.json"
VERSION: Literal[7] = 7
DIGEST = "manifest_sha256"
MAX_BYTES = 64 << 20  # of bundle.json
TARGET_IDS = "draft/target_ids.npy"  # int32 [draft.vocab], ascending
COLUMNS = "columns."  # begins the names of a split target's files of weights; its other files are the checkpoint's

EngineName = Literal[
    "target",
    "draft",
    "draft_2",
    "draft_3",
    "draft_4",
    "fuse",
    "context",
    "markov",
    "adjust",
    "verify",
    "verify_probs",
    "propose",
    "propose_probs",
    "vision",
]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=1)]
KernelTarget = Annotated[str, Field(pattern=r"^(sm|compute)_\d+$")]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1)]


class Limits(Record):
    """Sizes fixed at build time.

    Attributes:
        batch: slots, the most requests that run at the same time.
        length: the most tokens of prompt plus output.
        capacity: tokens of a cache row, with slack for the last draft window.
        num_draft_tokens: the most tokens drafted in a round (K); 0: no speculation.
        prefill_chunk: the most prompt tokens of a round.
        cache_blocks: blocks of a paged cache that all requests share, without the scratch block; None: a linear cache.
    """

    batch: Count
    length: Count
    capacity: Count
    num_draft_tokens: Annotated[int, Field(ge=0)]
    prefill_chunk: Count
    cache_blocks: Count | None = None

    @property
    def cache(self) -> CacheKind:
        """The kind of the caches of target and draft."""
        return "linear" if self.cache_blocks is None else "paged"

    @model_validator(mode="after")
    def _leave_slack(self) -> "Limits":
        if self.capacity < (needed := capacity(self.length, self.num_draft_tokens)):
            rule = f"capacity must be at least length + num_draft_tokens + 1 = {quoted(needed)}"
            raise reject(f"{rule}; got {quoted(self.capacity)}")
        most = longest_chunk(self.batch, self.length, self.cache)
        if self.prefill_chunk > most:
            rule = f"prefill_chunk must be at most {quoted(most)}, the most prompt tokens that one round can have"
            raise reject(f"{rule}; got {quoted(self.prefill_chunk)}")
        row = blocks_of(self.capacity)
        if self.cache_blocks is not None and self.cache_blocks < row:
            raise reject(f"cache_blocks must hold one full row, {quoted(row)} blocks; got {quoted(self.cache_blocks)}")
        return self


class Delimiter(Record):
    """A text and its token ids."""

    text: DelimiterText
    ids: TokenIds


class ReasoningDelimiters(Record):
    """Texts that start and end reasoning. The runtime writes ``forced_end`` when a thinking budget is exhausted."""

    think_start: Delimiter
    think_ends: Annotated[tuple[Delimiter, ...], Field(min_length=1, max_length=MAX_DELIMITERS)]
    forced_end: Delimiter
    implicit_ends: Annotated[tuple[Delimiter, ...], Field(max_length=MAX_DELIMITERS)] = ()


class SharedWeight(Record):
    """The location of a weight that sessions or processes share. A device holds it once. ``offset`` is in bytes."""

    file: RelativePath
    offset: Annotated[int, Field(ge=0)]
    dtype: str
    shape: tuple[Count, ...]


class EngineEntry(Record):
    """One compiled engine: one file, or a decoder in steps.

    Attributes:
        file: the engine's file; None: a decoder in steps.
        decoder: the steps, whose subgraphs are files; None: one file.
        backend: the backend that runs the engine.
        built_for: the devices that run the engine: ``cpu``, ``cuda`` or GPUs such as ``sm_86+sm_89``.
        dtype: the compute dtype.
        contract: the inputs and outputs.
        shared: shared weights by their names in the file or the subgraphs: those that several subgraphs read, and on a
            CPU those that kernels of the project read where they are mapped.
        batch_invariant: the decoder computes the same bits for a token whatever else is in the call; all its matmuls
            are steps.
        reports_aliases: an engine of TensorRT reports which outputs update an input in place. If not, every update
            writes the same as a second one would, so it may be in place.
        optimized: the file holds what onnxruntime's optimizer made of the graph, so sessions open without it.
    """

    file: RelativePath | None = None
    decoder: Decoder | None = None
    backend: str
    built_for: str
    dtype: str
    contract: Contract
    shared: dict[str, SharedWeight] = Field(default_factory=dict)
    batch_invariant: bool = False
    reports_aliases: bool = True
    optimized: bool = False

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """The kind of device that the engine was built for."""
        return "cpu" if self.built_for == "cpu" else "cuda"

    @property
    def files(self) -> tuple[str, ...]:
        """Every graph or engine file of this engine. Weights are in other files."""
        if self.decoder is not None:
            return tuple(subgraph.file for subgraph in self.decoder.subgraphs)
        assert self.file is not None
        return (self.file,)

    @model_validator(mode="after")
    def _one_file_or_steps(self) -> "EngineEntry":
        if (self.file is None) == (self.decoder is None):
            present = "neither" if self.file is None else "both"
            raise reject(f"an engine must have exactly one of file and decoder; got {present}")
        if self.decoder is not None:
            self.decoder.check(self.contract)
        return self


class File(Record):
    sha256: Sha256
    size: Annotated[int, Field(ge=0)]  # bytes


class Provenance(Record):
    """Sources and versions of a build. ``commit`` is None if tandemrt was not in a git checkout."""

    created: str  # UTC, ISO 8601
    tandemrt: str
    commit: str | None
    dirty: bool | None
    python: str
    packages: dict[str, str]
    recipe: Sha256
    checkpoints: dict[EngineName, Sha256]


class Manifest(Record):
    """Version 4 of ``bundle.json``.

    Attributes:
        vocab: width of the logits.
        valid_tokens: one past the tokenizer's largest token id; ids from here up to ``vocab`` are padding.
        specs: model specs as JSON.
        ranks: the target's decoders on ranks 1 and up of a tensor-parallel bundle; rank 0 runs ``engines["target"]``.
        kernels: compiled kernels among ``files``, each with its target: ``sm_90`` (a cubin) or ``compute_80`` (PTX).
        files: every other file of the bundle.
        vision: the images that the target reads; None: it reads text only.
    """

    manifest_version: Literal[7]
    name: str
    limits: Limits
    vocab: VocabSize
    valid_tokens: VocabSize
    stop_ids: TokenIds
    reasoning: ReasoningDelimiters | None
    draft: DraftEntry
    specs: dict[str, dict[str, Any]]
    engines: dict[EngineName, EngineEntry]
    ranks: tuple[EngineEntry, ...] = ()
    kernels: Annotated[dict[RelativePath, KernelTarget], Field(default_factory=dict)]
    files: dict[RelativePath, File]
    provenance: Provenance
    vision: VisionEntry | None = None

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read ``bundle.json``. Raises BadBundle if it is missing, damaged, inconsistent or of another version."""
        path = folder / FILE_NAME
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):  # reading a pipe or a device may never end
                raise BadBundle(f"{path} must be a regular file; it is a link, pipe or device. Copy the bundle anew")
            if status.st_size > MAX_BYTES:
                raise BadBundle(f"{path} must have at most {MAX_BYTES} bytes; it has {status.st_size}. Build it again")
            text = path.read_text(encoding="utf-8")
            data = json.loads(text)
        except OSError as error:
            raise BadBundle(
                f"{path} must be readable: {error.strerror}. Name a folder that export build made"
            ) from error
        except (ValueError, RecursionError) as error:
            raise BadBundle(
                f"{path} must be JSON: {clipped(error)}. The file is damaged; build the bundle again"
            ) from error
        _check_version(path, data)
        written = data.pop(DIGEST, None)
        try:
            manifest = cls.model_validate_json(json.dumps(data))
        except ValidationError as error:
            lines = explain(error, tags=DRAFT_KINDS)
            raise BadBundle(f"{path} must be a manifest; build the bundle again:\n{lines}") from error
        if written != _digest(data):
            rule = f"{DIGEST} must be {_digest(data)}; got {quoted(written)}"
            raise BadBundle(f"{path}: {rule}. The file was changed after the build; build the bundle again")
        return manifest

    def to_json(self) -> str:
        """Return the text of ``bundle.json``: this manifest and its digest, which reveals changed values."""
        return json.dumps({**self.model_dump(mode="json"), DIGEST: self.digest}, indent=2, ensure_ascii=False) + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 of the manifest, which has the digests of all files: equal digests mean equal bundles."""
        return _digest(self.model_dump(mode="json"))

    @property
    def delimiter_texts(self) -> tuple[str, ...]:
        """The texts of all reasoning delimiters."""
        return tuple(delimiter.text for delimiter in _all(self.reasoning))

    @property
    def caches(self) -> list[tuple[EngineName, Binding]]:
        """The KV caches and recurrent states of every engine.

        ``context`` writes into the draft's and has none. An assistant reads the target's and has none.
        """
        others = {"context", *(["draft"] if self.draft.traits.reads_cache else [])}
        engines = [(name, engine.contract) for name, engine in self.engines.items() if name not in others]
        updated = [(name, contract[source]) for name, contract in engines for _, source in contract.aliases]
        return [(name, binding) for name, binding in updated if binding.name.startswith("past_")]

    @property
    def weights(self) -> int:
        """Bytes of all files that hold weights."""
        return sum(file.size for name, file in self.files.items() if holds_weights(name))

    @model_validator(mode="after")
    def _consistent(self) -> "Manifest":
        needed = {"target", "adjust", "verify", "verify_probs", *self.draft.engines}
        needed |= {"vision"} if self.vision is not None else set()
        if set(self.engines) != needed:
            names = ", ".join(sorted(needed))
            raise reject(f"engines must be {names} for draft.kind {self.draft.kind!r}; got {', '.join(self.engines)}")
        each_rank = {f"ranks.{index}": engine for index, engine in enumerate(self.ranks)}
        for name, engine in ({f"engines.{name}": engine for name, engine in self.engines.items()} | each_rank).items():
            if missing := [file for file in engine.files if file not in self.files]:
                key = "file" if engine.decoder is None else "decoder"
                raise reject(f"{name}.{key} must be among files; got {quoted(missing[0])}")
        self._require_ranks_fit()
        compiled = {PurePosixPath(file).name.partition(".")[0] for file in self.kernels}
        operators = {o.name for engine in self.engines.values() if engine.decoder for o in engine.decoder.operators}
        needed_kernels = {kernels for name in operators if (kernels := SCHEMAS[name].kernels) is not None}
        if not needed_kernels <= compiled:
            has = ", ".join(sorted(compiled)) or "none"
            wanted = ", ".join(sorted(needed_kernels))
            raise reject(f"kernels must hold {wanted} for the operators of its decoders; got {clipped(has)}")
        if unlisted := [file for file in self.kernels if file not in self.files]:
            raise reject(f"kernels must be among files; got {quoted(unlisted[0])}")
        if self.valid_tokens > self.vocab:
            raise reject(f"valid_tokens must not exceed vocab {quoted(self.vocab)}; got {quoted(self.valid_tokens)}")
        if self.vision is not None and max(self.vision.tokens) >= self.valid_tokens:
            rule = f"tokens of vision must be below valid_tokens {quoted(self.valid_tokens)}"
            raise reject(f"{rule}; got {quoted(max(self.vision.tokens))}")
        needed_capacity = capacity(self.limits.length, slack(self.draft.kind, self.limits.num_draft_tokens))
        if self.limits.capacity < needed_capacity:
            rule = f"limits.capacity must be at least {quoted(needed_capacity)} for draft.kind {self.draft.kind!r}"
            raise reject(f"{rule}; got {quoted(self.limits.capacity)}. Build the bundle again")
        self._require_draft_fits()
        ids = [*self.stop_ids, *(token for delimiter in _all(self.reasoning) for token in delimiter.ids)]
        if max(ids) >= self.valid_tokens:
            rule = f"stop_ids and ids of reasoning must be below valid_tokens {quoted(self.valid_tokens)}"
            raise reject(f"{rule}; got {quoted(max(ids))}")
        return self

    def _require_ranks_fit(self) -> None:
        for index, decoder in enumerate([self.engines["target"].decoder, *(engine.decoder for engine in self.ranks)]):
            joins = decoder is not None and any(step.name in COLLECTIVES for step in decoder.operators)
            if joins != bool(self.ranks):
                actual = "has such operators" if joins else "has none"
                rule = "must have operators that all ranks run together exactly if ranks lists further ranks"
                raise reject(f"the target's decoder on rank {index} {rule}; it {actual}. Build the bundle again")
        parts = [_exchanged(engine) for engine in (self.engines["target"], *self.ranks)]
        if other := [rank for rank, each in enumerate(parts) if each != parts[0]]:
            rule = "must exchange the same parts as that on rank 0, of the same shapes and dtypes"
            raise reject(f"the target's decoder on rank {other[0]} {rule}; build the bundle again")

    def _require_draft_fits(self) -> None:
        draft, drafted = self.draft, self.limits.num_draft_tokens
        if isinstance(draft, BlockEntry) and drafted > draft.max_draft_tokens:
            rule = f"must not exceed {draft.max_draft_tokens} for draft.block {quoted(draft.block)}"
            raise reject(f"limits.num_draft_tokens {rule}; got {quoted(drafted)}")
        if isinstance(draft, MaskedEntry) and draft.mask_token >= self.vocab:
            rule = f"draft.mask_token must be below vocab {quoted(self.vocab)}"
            raise reject(f"{rule}; got {quoted(draft.mask_token)}")
        if (width := draft.draft_vocab) is None:
            return
        if width >= self.vocab:
            rule = f"draft.vocab must be below vocab {quoted(self.vocab)}, or left out"
            raise reject(f"{rule}; got {quoted(width)}")
        if TARGET_IDS not in self.files:
            raise reject(f"files must hold {TARGET_IDS} where draft.vocab is set; got none of that name")


def _all(reasoning: ReasoningDelimiters | None) -> tuple[Delimiter, ...]:
    if reasoning is None:
        return ()
    return (reasoning.think_start, *reasoning.think_ends, reasoning.forced_end, *reasoning.implicit_ends)


def _digest(data: dict[str, Any]) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _check_version(path: Path, data: Any) -> None:
    version = data.get("manifest_version") if isinstance(data, dict) else None
    if isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        rule = f"manifest_version must be at most {VERSION}; got {quoted(version)}"
        raise BadBundle(f"{path}: {rule}. Update tandemrt, or build the bundle again with this version")
    if type(version) is not int or version != VERSION:
        rule = f"manifest_version must be {VERSION}; got {quoted(version)}"
        raise BadBundle(f"{path}: {rule}. Build the bundle again with this version of tandemrt")


def _exchanged(target: EngineEntry) -> list[tuple[str, str, tuple[int | str, ...]]]:
    """Return the operators that all ranks run together, each with the dtype and the shape of a rank's part."""
    if target.decoder is None:
        return []
    bindings = target.decoder.bindings(target.contract)
    parts = [
        (step.name, bindings[str(step.inputs[0])]) for step in target.decoder.operators if step.name in COLLECTIVES
    ]
    return [(name, part.dtype, part.shape) for name, part in parts]
