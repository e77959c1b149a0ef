"""The manifest of a bundle, ``bundle.json``: everything the runtime needs to know without opening an engine."""

import hashlib
import json
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from tandemrt.engines.calls import capacity, longest_chunk, slack
from tandemrt.engines.contract import Contract, blocks_of
from tandemrt.engines.decoder import Decoder
from tandemrt.engines.digest import holds_weights
from tandemrt.engines.drafts import DRAFT_LAYERS, DRAFTS, LONGEST_BLOCK, DraftKind, longest_window
from tandemrt.engines.errors import BadBundle, clipped, quoted
from tandemrt.engines.operators import SCHEMAS
from tandemrt.engines.validation import Record, RelativePath, explain, refuse

FILE_NAME = "bundle.json"
VERSION: Literal[3] = 3
DIGEST = "manifest_sha256"
TARGET_IDS = "draft/target_ids.npy"  # int32 [draft.vocab], ascending
# Backends whose engines the runtime of this version runs.
RUNNABLE = ("onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx")

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
]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=1)]
KernelTarget = Annotated[str, Field(pattern=r"^(sm|compute)_\d+$")]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[tuple[TokenId, ...], Field(min_length=1)]


class Limits(Record):
    """Sizes fixed at build time, in rows (``batch``) and tokens (the others).

    ``length`` bounds prompt plus output; ``capacity`` is what a cache row holds, slack for the last window included;
    ``window`` is K, the most tokens drafted in a round (0 without a drafter). ``cache_blocks`` are the blocks that the
    requests share where the caches are paged (scratch not counted), None where they are linear.
    """

    batch: Count
    length: Count
    capacity: Count
    window: Annotated[int, Field(ge=0)]
    prefill_chunk: Count
    cache_blocks: Count | None = None

    @model_validator(mode="after")
    def _leave_slack(self) -> "Limits":
        if self.capacity < (needed := capacity(self.length, self.window)):
            raise refuse(
                f"capacity must be at least length + window + 1 = {quoted(needed)}; got {quoted(self.capacity)}"
            )
        most = longest_chunk(self.batch, self.length, "linear" if self.cache_blocks is None else "paged")
        if self.prefill_chunk > most:
            rule = f"prefill_chunk must be at most {quoted(most)}, the longest of all prompts in one round"
            raise refuse(f"{rule}; got {quoted(self.prefill_chunk)}")
        row = blocks_of(self.capacity)
        if self.cache_blocks is not None and self.cache_blocks < row:
            raise refuse(f"cache_blocks must hold one full row, {quoted(row)} blocks; got {quoted(self.cache_blocks)}")
        return self


class Marker(Record):
    """A text and the token ids that spell it."""

    text: str
    ids: TokenIds


class Markers(Record):
    """What starts and ends reasoning. ``forced_end`` is written when a thinking budget runs out."""

    start: Marker
    ends: Annotated[tuple[Marker, ...], Field(min_length=1)]
    forced_end: Marker
    implicit_ends: tuple[Marker, ...] = ()


class Draft(Record):
    """How tokens are drafted. The n-gram bounds are set for kind ``ngram`` only, the mask token for kinds that are fed
    one, ``block`` for block drafts: tokens of its calls, of which the first, the newest token of a text, foresees one
    if ``sample_from_anchor``. ``layers``: how many draft a token each, for ``mtp`` with several. ``vocab``: tokens of
    the target's vocabulary that the draft's logits are of, whose ids lie in TARGET_IDS; None: all of them.

    ``sampling``, ``greedy_below`` and ``temperature_scale`` are what SamplingParams.draft_sampling, draft_greedy_below
    and draft_temperature_scale are by default.
    """

    kind: DraftKind
    mask_token: TokenId | None = None
    vocab: Count | None = None
    block: Annotated[int, Field(ge=2, le=LONGEST_BLOCK)] | None = None
    sample_from_anchor: bool = False
    layers: Annotated[int, Field(ge=2, le=len(DRAFT_LAYERS))] | None = None
    ngram_min: Count | None = None
    ngram_max: Count | None = None
    sampling: Literal["greedy"] | None = None
    greedy_below: Annotated[float, Field(ge=0.0, le=100.0)] = 0.0
    temperature_scale: Annotated[float, Field(ge=0.01, le=10.0)] = 1.0

    @property
    def engines(self) -> tuple[str, ...]:
        """What it needs beside the target's engines and those that verify."""
        return (*DRAFTS[self.kind].engines, *DRAFT_LAYERS[1 : self.layers or 1])

    @property
    def behind(self) -> int:
        """Tokens behind a block of the cache that what it holds depends on."""
        return self.layers or DRAFTS[self.kind].behind

    @model_validator(mode="after")
    def _bounds_of_ngrams(self) -> "Draft":
        bounds = self.ngram_min or 0, self.ngram_max or 0
        if self.kind == "ngram" and not 0 < bounds[0] <= bounds[1]:
            raise refuse(f"ngram_min and ngram_max must be set for kind ngram, and in order; got {quoted(bounds)}")
        if DRAFTS[self.kind].masks != (self.mask_token is not None):
            kinds = ", ".join(kind for kind, needs in DRAFTS.items() if needs.masks)
            raise refuse(f"mask_token must be set for kinds {kinds}, and no other; got {quoted(self.mask_token)}")
        if self.layers is not None and self.kind != "mtp":
            raise refuse(f"layers must not be set for kind {self.kind}; got {quoted(self.layers)}")
        if DRAFTS[self.kind].block != (self.block is not None):
            kinds = ", ".join(kind for kind, needs in DRAFTS.items() if needs.block)
            raise refuse(f"block must be set for kinds {kinds}, and no other; got {quoted(self.block)}")
        if self.sample_from_anchor and self.block is None:
            raise refuse(f"sample_from_anchor must be false without block, for kind {self.kind}; got true")
        drawn = self.sampling, self.greedy_below, self.temperature_scale
        if not DRAFTS[self.kind].draws and drawn != (None, 0.0, 1.0):
            raise refuse(f"sampling, greedy_below and temperature_scale say how a model drafts; got {quoted(drawn)}")
        if self.vocab is not None and not DRAFTS[self.kind].features:
            kinds = ", ".join(kind for kind, needs in DRAFTS.items() if needs.features)
            raise refuse(f"vocab must be set for kinds {kinds} alone; got {quoted(self.vocab)}")
        return self


class SharedWeight(Record):
    """A weight that several sessions read, of this engine or of another one, and where it lies: once on a device."""

    file: RelativePath
    offset: Annotated[int, Field(ge=0)]
    dtype: str
    shape: tuple[Count, ...]


class Engine(Record):
    """One compiled engine. ``built_for`` says what it runs on: ``cpu``, ``cuda``, or ``sm_86+sm_89``.

    It is one ``file``, or a ``decoder``: steps, whose pieces are files. ``shared`` are weights by the names that its
    pieces have for them. ``batch_invariant``: of a decoder, that it rounds a token the same among any others; its
    products are all steps.
    """

    file: RelativePath | None = None
    decoder: Decoder | None = None
    backend: str
    built_for: str
    dtype: str
    contract: Contract
    shared: dict[str, SharedWeight] = Field(default_factory=dict)
    batch_invariant: bool = False

    @property
    def files(self) -> tuple[str, ...]:
        """Every file that is opened for this engine; weights lie in others beside it."""
        if self.decoder is not None:
            return tuple(piece.file for piece in self.decoder.pieces)
        assert self.file is not None
        return (self.file,)

    @model_validator(mode="after")
    def _one_file_or_steps(self) -> "Engine":
        if (self.file is None) == (self.decoder is None):
            found = "neither" if self.file is None else "both"
            raise refuse(f"an engine must be one file or a decoder; got {found}")
        if self.decoder is not None:
            self.decoder.check(self.contract)
        return self


class File(Record):
    sha256: Sha256
    size: Annotated[int, Field(ge=0)]  # bytes


class Provenance(Record):
    """What a bundle was built from and with. ``commit`` is None when it was not built from a git checkout."""

    created: str  # UTC, ISO 8601
    tandemrt: str
    commit: str | None
    dirty: bool | None
    python: str
    packages: dict[str, str]
    recipe: Sha256
    checkpoints: dict[EngineName, Sha256]


class Manifest(Record):
    """Version 3 of ``bundle.json``.

    ``vocab`` is the width of the logits; ids from ``valid_tokens`` up to it are padding that spells nothing.
    ``specs`` are the model specs as JSON, ``files`` every other file of the bundle. ``kernels`` says which of them
    are compiled kernels, and for what: ``sm_90`` (a cubin) or ``compute_80`` (PTX).
    """

    manifest_version: Literal[3]
    name: str
    limits: Limits
    vocab: Count
    valid_tokens: Count
    stop_ids: TokenIds
    markers: Markers | None
    draft: Draft
    specs: dict[str, dict[str, Any]]
    engines: dict[EngineName, Engine]
    kernels: Annotated[dict[RelativePath, KernelTarget], Field(default_factory=dict)]
    files: dict[RelativePath, File]
    provenance: Provenance

    @classmethod
    def read(cls, folder: Path) -> "Manifest":
        """Read ``bundle.json``. Raises BadBundle when it is missing, damaged, of another version or inconsistent."""
        path = folder / FILE_NAME
        try:
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
        said = data.pop(DIGEST, None)
        try:
            manifest = cls.model_validate_json(json.dumps(data))
        except ValidationError as error:
            raise BadBundle(f"{path} must be a manifest; build the bundle again:\n{explain(error)}") from error
        if said != _digest(data):
            rule = f"{DIGEST} must be {_digest(data)}; got {quoted(said)}"
            raise BadBundle(f"{path}: {rule}. The file was changed after the build; build the bundle again")
        return manifest

    def to_json(self) -> str:
        """Return the text of ``bundle.json``: this manifest and a digest of it, so that no value changes unseen."""
        return json.dumps({**self.model_dump(mode="json"), DIGEST: self.digest}, indent=2, ensure_ascii=False) + "\n"

    @property
    def digest(self) -> str:
        """SHA-256 of all that the manifest says: bundles with different digests may hold different weights."""
        return _digest(self.model_dump(mode="json"))

    @property
    def marker_texts(self) -> tuple[str, ...]:
        """Every marker of reasoning as text."""
        return tuple(marker.text for marker in _all(self.markers))

    @property
    def weights(self) -> int:
        """Bytes of all files that hold weights."""
        return sum(file.size for name, file in self.files.items() if holds_weights(name))

    @model_validator(mode="after")
    def _agree(self) -> "Manifest":
        needed = {"target", "adjust", "verify", "verify_probs", *self.draft.engines}
        if set(self.engines) != needed:
            names = ", ".join(sorted(needed))
            raise refuse(f"engines must be {names} for draft.kind {self.draft.kind!r}; got {', '.join(self.engines)}")
        for name, engine in self.engines.items():
            if missing := [file for file in engine.files if file not in self.files]:
                key = "file" if engine.decoder is None else "decoder"
                raise refuse(f"engines.{name}.{key} must be among files; got {quoted(missing[0])}")
        compiled = {PurePosixPath(file).name.partition(".")[0] for file in self.kernels}
        operators = {o.name for engine in self.engines.values() if engine.decoder for o in engine.decoder.operators}
        needed_kernels = {kernels for name in operators if (kernels := SCHEMAS[name].kernels) is not None}
        if not needed_kernels <= compiled:
            has = ", ".join(sorted(compiled)) or "none"
            wanted = ", ".join(sorted(needed_kernels))
            raise refuse(f"kernels must hold {wanted} for the operators of its decoders; got {clipped(has)}")
        if strangers := [file for file in self.kernels if file not in self.files]:
            raise refuse(f"kernels must be among files; got {quoted(strangers[0])}")
        if self.valid_tokens > self.vocab:
            raise refuse(f"valid_tokens must not exceed vocab {quoted(self.vocab)}; got {quoted(self.valid_tokens)}")
        room = capacity(self.limits.length, slack(self.draft.kind, self.limits.window))
        if self.limits.capacity < room:
            rule = f"limits.capacity must be at least {quoted(room)} for draft.kind {self.draft.kind!r}"
            raise refuse(f"{rule}; got {quoted(self.limits.capacity)}. A bundle of an earlier version: build it again")
        if (block := self.draft.block) is not None:
            most = longest_window(block, sample_from_anchor=self.draft.sample_from_anchor)
            if self.limits.window > most:
                rule = f"limits.window must not exceed {quoted(most)} for draft.block {quoted(block)}"
                raise refuse(f"{rule}; got {quoted(self.limits.window)}")
        if self.draft.mask_token is not None and self.draft.mask_token >= self.vocab:
            rule = f"draft.mask_token must be below vocab {quoted(self.vocab)}"
            raise refuse(f"{rule}; got {quoted(self.draft.mask_token)}")
        if self.draft.vocab is not None and self.draft.vocab >= self.vocab:
            rule = f"draft.vocab must be below vocab {quoted(self.vocab)}, or left out"
            raise refuse(f"{rule}; got {quoted(self.draft.vocab)}")
        if self.draft.vocab is not None and TARGET_IDS not in self.files:
            raise refuse(f"files must hold {TARGET_IDS} where draft.vocab is set; got none of that name")
        ids = [*self.stop_ids, *(token for marker in _all(self.markers) for token in marker.ids)]
        if max(ids) >= self.valid_tokens:
            rule = f"stop_ids and marker ids must be below valid_tokens {quoted(self.valid_tokens)}"
            raise refuse(f"{rule}; got {quoted(max(ids))}")
        return self


def _all(markers: Markers | None) -> tuple[Marker, ...]:
    return (markers.start, *markers.ends, markers.forced_end, *markers.implicit_ends) if markers else ()


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
