"""A recipe: what to build, from which checkpoints, within which limits, for which backend.

Recipes are TOML files (``engines/recipes/*.toml`` are the included ones). Paths in a recipe are relative to the file.
"""

import hashlib
import json
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tandemrt.engines.calls import capacity, longest_chunk, slack
from tandemrt.engines.contract import CacheKind, blocks_of
from tandemrt.engines.drafts import DRAFTS
from tandemrt.engines.dtypes import BITS, KV_DTYPES, computed_in
from tandemrt.engines.errors import BadRecipe, clipped, quoted
from tandemrt.engines.gpus import COMPUTE_CAPABILITIES, KernelCapability
from tandemrt.engines.tensorrt.recipe import TensorRt, TensorRtRtx, rtx_capabilities
from tandemrt.engines.validation import Section, explain, nearest, refuse

INCLUDED = Path(__file__).resolve().parent / "recipes"
HEADS = tuple(kind for kind, needs in DRAFTS.items() if needs.features)
KINDS = (*DRAFTS, "onnxruntime-cpu", "onnxruntime-cuda", "tensorrt", "tensorrt-rtx")

Dtype = Literal["float32", "float16", "bfloat16", "int8", "int4"]
KvDtype = Literal["float8_e4m3", "float32", "float16", "bfloat16"]
Text = Annotated[str, StringConstraints(min_length=1)]
Texts = Annotated[tuple[Text, ...], Field(strict=False)]
Window = Annotated[int, Field(ge=1, le=16)]


class _WithCheckpoint(Section):
    """``ignore_config_fields``: fields of config.json that change nothing, though the exporter does not know them."""

    checkpoint: Annotated[Path, Field(strict=False)]
    ignore_config_fields: Texts = ()

    @field_validator("checkpoint")
    @classmethod
    def _relative_to_the_recipe(cls, value: Path, info: ValidationInfo) -> Path:
        try:
            return (info.context["folder"] / value).resolve() if info.context else value
        except (OSError, RuntimeError, ValueError) as error:  # too long, links that lead in a circle, a zero byte
            raise refuse(f"must be a folder that can be read; got {quoted(str(value))}: {clipped(error)}") from None


class Target(_WithCheckpoint):
    """The model whose text is wanted.

    ``kv_dtype``: what its cache holds keys and values in; None: as its checkpoint says, else what it computes in.
    """

    dtype: Dtype = "float32"
    kv_dtype: KvDtype | None = None


class _Drawing(_WithCheckpoint):
    """A draft that draws its tokens.

    ``sampling`` "greedy": its likeliest tokens, whatever the temperature; None: drawn as a request's rule has it.
    ``greedy_below``: the same for requests of a lower temperature.
    ``temperature_scale``: what a request's temperature is multiplied by to draw them.
    """

    sampling: Literal["greedy"] | None = None
    greedy_below: Annotated[float, Field(ge=0.0, le=100.0, allow_inf_nan=False)] = 0.0
    temperature_scale: Annotated[float, Field(ge=0.01, le=10.0, allow_inf_nan=False)] = 1.0


class ModelDraft(_Drawing):
    """A smaller model of the same vocabulary drafts.

    ``dtype`` None: the target's. ``kv_dtype`` None: float8 if the recipe says so of the target, else as Target has it,
    by the draft's own checkpoint.
    """

    kind: Literal["model"]
    dtype: Dtype | None = None
    kv_dtype: KvDtype | None = None
    window: Window = 4


class Eagle3Draft(_Drawing):
    """An EAGLE-3 head drafts from the target's states. It computes in what the target computes in."""

    kind: Literal["eagle3"]
    window: Window = 4


class PEagleDraft(_Drawing):
    """A P-EAGLE head drafts a window at once from the target's states, computing in what the target computes in."""

    kind: Literal["peagle"]
    window: Window = 5


class MtpDraft(_Drawing):
    """A layer that predicts tokens further on drafts from the target's last states. ``checkpoint``: the target's, or
    one of its own. It computes in what the target computes in."""

    kind: Literal["mtp"]
    window: Window = 3


class DFlashDraft(_Drawing):
    """A block draft reads the target's states and drafts a window at once, computing in what the target computes in."""

    kind: Literal["dflash"]
    window: Window = 7


class DSparkDraft(_Drawing):
    """A block draft as DFlashDraft, whose tokens a Markov head draws one behind the other."""

    kind: Literal["dspark"]
    window: Window = 7


class PardDraft(_Drawing):
    """A smaller model that was trained to foresee a window at once (its config.json has ``pard_token``) drafts.

    ``dtype`` and ``kv_dtype`` as of ModelDraft.
    """

    kind: Literal["pard"]
    dtype: Dtype | None = None
    kv_dtype: KvDtype | None = None
    window: Window = 8


HeadDraft = Eagle3Draft | PEagleDraft | MtpDraft | DFlashDraft | DSparkDraft  # they read the target's states


class NgramDraft(Section):
    """Drafts are copied from the request's own tokens, after the longest repeated run of ngram_min to ngram_max."""

    kind: Literal["ngram"]
    window: Window = 4
    ngram_min: Annotated[int, Field(ge=1)] = 2
    ngram_max: Annotated[int, Field(ge=1)] = 4

    @model_validator(mode="after")
    def _ordered(self) -> "NgramDraft":
        if self.ngram_min > self.ngram_max:
            values = f"{quoted(self.ngram_min)} > {quoted(self.ngram_max)}"
            raise refuse(f"ngram_min must not exceed ngram_max; got {values}. Lower ngram_min or raise ngram_max")
        return self


class NoDraft(Section):
    """No model drafts: tokens that a constraint forces, at most ``window`` in a round; 0: plain decoding."""

    kind: Literal["none"]
    window: Annotated[int, Field(ge=0, le=16)] = 4


class Reasoning(Section):
    """Marker texts around reasoning; the tokenizer spells them when the bundle is built."""

    start: Text
    ends: Annotated[Texts, Field(min_length=1)]
    forced_end: Text
    implicit_ends: Texts = ()


class RecipeLimits(Section):
    """``batch`` slots, ``length`` tokens of prompt plus output, ``prefill_chunk`` prompt tokens per round.

    ``prefill_chunk`` None takes what suits the backend, see Recipe.prefill_chunk.
    ``cache_tokens``: what a paged cache holds for all slots together; None leaves room for the full length of each.
    """

    batch: Annotated[int, Field(ge=1)] = 8
    length: Annotated[int, Field(ge=2)] = 2048
    prefill_chunk: Annotated[int, Field(ge=1)] | None = None
    cache_tokens: Annotated[int, Field(ge=1)] | None = None


class OnnxRuntimeCpu(Section):
    name: Literal["onnxruntime-cpu"]


class OnnxRuntimeCuda(Section):
    """``cache``: *paged* runs attention in our own kernels between pieces of the graph, *linear* the graph as a whole.

    ``compute_capabilities`` are those the kernels are compiled for; newer GPUs translate those of the lowest.
    ``batch_invariant``: the target rounds a token the same among any others, so that speculation changes no text
    (docs/invariance.md).
    """

    name: Literal["onnxruntime-cuda"]
    cache: CacheKind = "paged"
    batch_invariant: bool = False
    compute_capabilities: Annotated[tuple[KernelCapability, ...], Field(strict=False, min_length=1)] = (
        COMPUTE_CAPABILITIES
    )

    @field_validator("compute_capabilities")
    @classmethod
    def _once_each(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return _distinct(value)


class Recipe(Section):
    """Everything that decides what a bundle is."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    target: Target
    draft: Annotated[
        ModelDraft | PardDraft | HeadDraft | NgramDraft | NoDraft,
        Field(discriminator="kind"),
    ] = NoDraft(kind="none")
    reasoning: Reasoning | None = None
    limits: RecipeLimits = RecipeLimits()
    backend: Annotated[OnnxRuntimeCpu | OnnxRuntimeCuda | TensorRt | TensorRtRtx, Field(discriminator="name")] = (
        OnnxRuntimeCpu(name="onnxruntime-cpu")
    )
    _digest: str = PrivateAttr(default="")
    _file: str = PrivateAttr(default="")

    @classmethod
    def load(
        cls, path: str | Path, *, backend: str | None = None, dtype: str | None = None, kv_dtype: str | None = None
    ) -> "Recipe":
        """Read and check a recipe file. Raises BadRecipe with one line per violation.

        ``backend`` takes the place of the file's [backend] section unless that has this name already (for tensorrt-rtx
        with every compute capability it builds for), ``dtype`` and ``kv_dtype`` the place of the target's and the
        draft's.
        """
        try:
            path = Path(path).resolve()
            content = path.read_bytes()
            data = tomllib.loads(content.decode("utf-8"))
        except (OSError, RuntimeError) as error:  # RuntimeError: links that lead in a circle, or tables nested too deep
            why = error.strerror if isinstance(error, OSError) else error
            raise BadRecipe(f"recipe {clipped(path)} cannot be read: {why}. Name an existing TOML file.") from error
        except ValueError as error:  # of UTF-8, of TOML, or of a number with thousands of digits
            raise BadRecipe(f"recipe {path} must be TOML in UTF-8: {clipped(error)}. Correct the file.") from error
        given = {"backend": backend, "dtype": dtype, "kv_dtype": kv_dtype}
        asked = {name: value for name, value in given.items() if value is not None}
        _override(data, **asked)
        try:
            recipe = cls.model_validate(data, context={"folder": path.parent})
        except ValidationError as error:
            options = "".join(f" with --{name.replace('_', '-')} {value}" for name, value in asked.items())
            raise BadRecipe(f"recipe {path}{options} must be corrected:\n{explain(error, tags=KINDS)}") from error
        recipe._file = str(path)
        recipe._digest = hashlib.sha256(content + (json.dumps(asked).encode() if asked else b"")).hexdigest()
        return recipe

    @property
    def digest(self) -> str:
        """The sha256 of the file this recipe was loaded from, and of what took the place of its values."""
        return self._digest

    def checkpoints(self) -> dict[str, Path]:
        """The folders that the recipe names, by section."""
        drafts = isinstance(self.draft, ModelDraft | PardDraft | HeadDraft)
        return {"target": self.target.checkpoint} | ({"draft": self.draft.checkpoint} if drafts else {})  # type: ignore[union-attr]

    def hub_name(self, checkpoint: Path) -> str | None:
        """What the recipe's file says of ``checkpoint`` if it may be a name of the Hugging Face hub: two words, and
        maybe a revision."""
        if not self._file or not checkpoint.is_relative_to(home := Path(self._file).parent):
            return None
        words = checkpoint.relative_to(home).parts
        return "/".join(words) if len(words) == 2 or (len(words) > 2 and "@" in words[1]) else None

    def require_checkpoints(self) -> None:
        """Raise BadRecipe for a checkpoint folder that does not exist, by the key that names it."""
        lines = [
            f"{section}.checkpoint: must be an existing folder; got {quoted(str(folder))}"
            for section, folder in self.checkpoints().items()
            if not folder.is_dir()
        ]
        if lines:
            where = f"recipe {self._file}" if self._file else f"recipe {self.name!r}"
            fix = "Put the checkpoint there, or copy the recipe and name its folder."
            raise BadRecipe(f"{where} names a checkpoint that is not there. {fix}\n" + "\n".join(lines))

    @property
    def draft_dtype(self) -> str | None:
        """The dtype of a draft model: its own, else the target's; of a head what the target computes in.

        None when neither drafts.
        """
        if isinstance(self.draft, HeadDraft):
            return self.computed_in(self.target.dtype)
        return (self.draft.dtype or self.target.dtype) if isinstance(self.draft, ModelDraft | PardDraft) else None

    def computed_in(self, dtype: str) -> str:
        """What a decoder of ``dtype`` computes in on the recipe's backend."""
        return computed_in(dtype, paged=self.cache == "paged")

    @property
    def draft_kv_dtype(self) -> KvDtype | None:
        """What the recipe says of the cache of a draft model: its own, else the target's float8.

        None: the draft's checkpoint says it. What else the target's cache holds need not be what the draft computes in.
        """
        if not isinstance(self.draft, ModelDraft | PardDraft):
            return None
        return self.draft.kv_dtype or (self.target.kv_dtype if self.target.kv_dtype in KV_DTYPES else None)

    @property
    def capacity(self) -> int:
        """Tokens one cache row holds: a text of full length and the slack of a round (engines/calls.py)."""
        return capacity(self.limits.length, slack(self.draft.kind, self.draft.window))

    @property
    def cache(self) -> CacheKind:
        """The layout of the caches of target and draft."""
        return self.backend.cache if isinstance(self.backend, OnnxRuntimeCuda) else "linear"

    @property
    def batch_invariant(self) -> bool:
        """Whether the target rounds a token the same among any others on a GPU."""
        return isinstance(self.backend, OnnxRuntimeCuda) and self.backend.batch_invariant

    @property
    def prefill_chunk(self) -> int:
        """Prompt tokens per round: the recipe's, else what suits the backend.

        A CPU computes a token about as fast in a call of 256 as in a longer one, which others only wait for longer. On
        a GPU a call of 2,048 is bound by its products. A call over a linear cache has few prompts at a time.
        """
        if self.limits.prefill_chunk is not None:
            return self.limits.prefill_chunk
        default = 2048 if self.cache == "paged" else 512 if self.backend.name == "onnxruntime-cuda" else 256
        return min(default, longest_chunk(self.limits.batch, self.limits.length, self.cache))

    @property
    def kernel_capabilities(self) -> tuple[str, ...]:
        """Compute capabilities that the recipe wants kernels for; none where they follow from the engines."""
        return self.backend.compute_capabilities if isinstance(self.backend, OnnxRuntimeCuda) else ()

    @property
    def cache_blocks(self) -> int | None:
        """Blocks of a paged cache, scratch not counted; None for a linear one."""
        if self.cache == "linear":
            return None
        tokens = self.limits.cache_tokens
        return self.limits.batch * blocks_of(self.capacity) if tokens is None else blocks_of(tokens)

    @model_validator(mode="after")
    def _agree(self) -> "Recipe":
        if self.draft.window >= self.limits.length:
            values = f"{quoted(self.draft.window)} >= {quoted(self.limits.length)}"
            raise refuse(f"draft.window must be below limits.length; got {values}. Lower one or raise the other")
        most = longest_chunk(self.limits.batch, self.limits.length, self.cache)
        if self.prefill_chunk > most:
            whose = "length" if self.cache == "linear" else "batch * length"
            values = f"{quoted(self.prefill_chunk)} > {quoted(most)}"
            raise refuse(
                f"limits.prefill_chunk must not exceed {whose}; got {values}. Lower prefill_chunk or raise length"
            )
        tokens = self.limits.cache_tokens
        if tokens is not None and self.cache == "linear":
            rule = "limits.cache_tokens needs backend.name 'onnxruntime-cuda' with cache = 'paged'"
            raise refuse(f"{rule}; got {quoted(tokens)} for a linear cache. Drop it or choose another backend")
        if tokens is not None and tokens < self.capacity:
            rule = f"limits.cache_tokens must hold one request: length + window + 1 = {quoted(self.capacity)}"
            raise refuse(f"{rule}; got {quoted(tokens)}. Raise it or lower limits.length")
        if self.batch_invariant and (self.cache == "linear" or self.target.dtype not in ("bfloat16", "float16")):
            raise refuse(
                "backend.batch_invariant needs backend.cache 'paged' and target.dtype 'bfloat16' or 'float16', which "
                f"have such products; got {self.cache!r} and {self.target.dtype!r}. Drop it or change these"
            )
        narrow = BITS.keys() & {self.target.dtype, self.draft_dtype}
        without = sorted(narrow - {"int4"} if self.cache == "paged" else narrow)
        if without and self.backend.name != "onnxruntime-cpu":
            raise refuse(
                "dtype must be float32, float16 or bfloat16 unless backend.name is 'onnxruntime-cpu', or "
                f"'onnxruntime-cuda' with cache = 'paged', which has 'int4'; got {quoted(without[0])} for "
                f"{self.backend.name!r} with a {self.cache} cache. Choose another dtype or backend"
            )
        self._require_kv_dtype("target", self.target.kv_dtype, self.target.dtype)
        self._require_kv_dtype("draft", self.draft_kv_dtype, self.draft_dtype)
        if self.backend.name == "onnxruntime-cpu" and "bfloat16" in (self.target.dtype, self.draft_dtype):
            raise refuse(
                "dtype must be float32, float16, int8 or int4 when backend.name is 'onnxruntime-cpu', whose kernels "
                "cannot run bfloat16; got 'bfloat16'. Choose another dtype or another backend"
            )
        if isinstance(self.draft, PardDraft | HeadDraft) and isinstance(self.backend, TensorRt | TensorRtRtx):
            raise refuse(
                f"draft.kind {self.draft.kind!r} needs backend.name 'onnxruntime-cpu' or 'onnxruntime-cuda'; got "
                f"{self.backend.name!r}, whose engines have no such calls. Choose another draft or backend"
            )
        if isinstance(self.backend, TensorRt | TensorRtRtx) and "float32" in (self.target.dtype, self.draft_dtype):
            raise refuse(
                f"dtype must be float16 or bfloat16 when backend.name is {self.backend.name!r}, whose attention has no "
                "other kernels; got 'float32'. Choose another dtype (export build: --dtype float16) or another backend"
            )
        oldest = isinstance(self.backend, TensorRtRtx) and "7.5" in self.backend.compute_capabilities
        if oldest and "bfloat16" in (self.target.dtype, self.draft_dtype):
            raise refuse(
                "dtype must be float16 for compute capability 7.5, which has no bfloat16; got 'bfloat16'. Choose "
                "float16 or drop 7.5 from backend.compute_capabilities"
            )
        return self

    def _require_kv_dtype(self, section: str, kv_dtype: KvDtype | None, dtype: str | None) -> None:
        compute = dtype and self.computed_in(dtype)
        if kv_dtype in KV_DTYPES and self.cache == "linear":
            raise refuse(
                f"{section}.kv_dtype {kv_dtype!r} needs backend.name 'onnxruntime-cuda' with cache = 'paged', which "
                f"alone attends over it; got {self.backend.name!r}. Drop it or choose another backend"
            )
        if kv_dtype is not None and kv_dtype not in KV_DTYPES and kv_dtype != compute:
            raise refuse(
                f"{section}.kv_dtype must be {', '.join(KV_DTYPES)} or what the model computes in, {compute!r}; got "
                f"{kv_dtype!r}. Drop it or choose one of these"
            )


def locate(recipe: str) -> Path:
    """Return the file of a recipe given as a path or as the name of an included one. Raises BadRecipe."""
    included = {file.stem: file for file in sorted(INCLUDED.glob("*.toml"), key=lambda file: file.stem)}
    with suppress(OSError, ValueError):  # a path that is too long, or holds a zero byte
        if Path(recipe).is_file():
            return Path(recipe)
    if recipe in included:
        return included[recipe]
    hint = nearest(recipe, list(included))
    raise BadRecipe(
        f"recipe must be a TOML file or the name of an included recipe; got {quoted(recipe)}{hint}. "
        f"Included: {', '.join(included)}"
    )


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(values)) < len(values):
        raise refuse(f"must name each capability once; got {', '.join(values)}")
    return values


def _override(
    data: dict[str, Any], *, backend: str | None = None, dtype: str | None = None, kv_dtype: str | None = None
) -> None:
    # A section that is no table is left for the check of the whole to refuse.
    models = [data[name] for name in ("target", "draft") if isinstance(data.get(name), dict)]
    for model in models:
        if "checkpoint" in model and model.get("kind") not in HEADS:
            model |= {} if dtype is None else {"dtype": dtype}
            model |= {} if kv_dtype is None else {"kv_dtype": kv_dtype}
    written = data.get("backend")
    if backend is not None and not (isinstance(written, dict) and written.get("name") == backend):
        data["backend"] = {"name": backend}
        if backend == "tensorrt-rtx":
            dtypes = {str(model.get("dtype")) for model in models}
            data["backend"]["compute_capabilities"] = rtx_capabilities(dtypes)
