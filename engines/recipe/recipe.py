"""A recipe: the checkpoints, limits and backend of a bundle to build.

Recipes are TOML files; ``engines/recipes/*.toml`` are included. Paths in a recipe are relative to its file.
"""

import hashlib
import json
import tomllib
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

from pydantic import (
    Field,
    PrivateAttr,
    StringConstraints,
    ValidationError,
    model_validator,
)

from tandemrt.engines.contract.calls import capacity, longest_chunk, slack
from tandemrt.engines.contract.contract import CacheKind, blocks_of
from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS
from tandemrt.engines.contract.dtypes import BITS, KV_DTYPES, computed_in
from tandemrt.engines.contract.limits import DelimiterText, DelimiterTexts
from tandemrt.engines.recipe.backend import Backend
from tandemrt.engines.recipe.backends import BACKENDS, CPU, DEFAULT, PAGED, AnyBackend, backend_name
from tandemrt.engines.recipe.models import Draft, HeadDraft, KvDtype, ModelDraft, NoDraft, Target
from tandemrt.engines.recipe.tensorrt import TensorRt
from tandemrt.engines.validation.errors import BadRecipe, clipped, quoted
from tandemrt.engines.validation.records import Section, explain, nearest, reject

INCLUDED = Path(__file__).resolve().parents[1] / "recipes"
FEATURE_DRAFTS = tuple(kind for kind, needs in DRAFT_KINDS.items() if needs.features)
KINDS = (*DRAFT_KINDS, *BACKENDS)


class Reasoning(Section):
    """Texts that delimit reasoning. The build tokenizes them."""

    think_start: DelimiterText
    think_ends: Annotated[DelimiterTexts, Field(min_length=1)]
    forced_end: DelimiterText
    implicit_ends: DelimiterTexts = ()


class RecipeLimits(Section):
    """``batch`` slots, ``length`` tokens of prompt plus output, ``prefill_chunk`` prompt tokens per round.

    ``prefill_chunk`` None: the backend's default, see Recipe.prefill_chunk.
    ``cache_tokens``: tokens that a paged cache holds for all slots together; None: the full length of each slot.
    """

    batch: Annotated[int, Field(ge=1)] = 8
    length: Annotated[int, Field(ge=2)] = 2048
    prefill_chunk: Annotated[int, Field(ge=1)] | None = None
    cache_tokens: Annotated[int, Field(ge=1)] | None = None


class Recipe(Section):
    """All inputs of a build."""

    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    target: Target
    draft: Annotated[Draft, Field(discriminator="kind")] = NoDraft(kind="none")
    reasoning: Reasoning | None = None
    limits: RecipeLimits = RecipeLimits()
    backend: AnyBackend = DEFAULT
    _digest: str = PrivateAttr(default="")
    _file: str = PrivateAttr(default="")

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        backend: str | None = None,
        dtype: str | None = None,
        kv_dtype: str | None = None,
        tensorrt_python: str | None = None,
    ) -> "Recipe":
        """Read and validate a recipe file. Raises BadRecipe with one line per violation.

        Args:
            path: the recipe file.
            backend: replaces the file's [backend] section unless the section has this name, by the backend's
                default section for the dtypes.
            dtype: replaces the dtype of the target and of a draft model.
            kv_dtype: replaces the kv_dtype of the target and of a draft model.
            tensorrt_python: replaces backend.python of the section for TensorRT, which it stands for if there is none.
        """
        try:
            path = Path(path).resolve()
            content = path.read_bytes()
            data = tomllib.loads(content.decode("utf-8"))
        except (OSError, RuntimeError) as error:  # RuntimeError: a cycle of links, or tables nested too deep
            reason = error.strerror if isinstance(error, OSError) else error
            raise BadRecipe(f"recipe {clipped(path)} cannot be read: {reason}. Name an existing TOML file.") from error
        except ValueError as error:  # invalid UTF-8 or TOML, or a number with thousands of digits
            raise BadRecipe(f"recipe {path} must be TOML in UTF-8: {clipped(error)}. Correct the file.") from error
        arguments = {"backend": backend, "dtype": dtype, "kv_dtype": kv_dtype, "tensorrt_python": tensorrt_python}
        overrides = {name: value for name, value in arguments.items() if value is not None}
        _override(data, **overrides)
        try:
            recipe = cls.model_validate(data, context={"folder": path.parent})
        except ValidationError as error:
            options = "".join(f" with --{name.replace('_', '-')} {value}" for name, value in overrides.items())
            raise BadRecipe(f"recipe {path}{options} must be corrected:\n{explain(error, tags=KINDS)}") from error
        recipe._file = str(path)
        recipe._digest = hashlib.sha256(content + (json.dumps(overrides).encode() if overrides else b"")).hexdigest()
        return recipe

    @property
    def digest(self) -> str:
        """SHA-256 of the recipe file and of the values that override it."""
        return self._digest

    def checkpoints(self) -> dict[str, Path]:
        """Checkpoint folders by section."""
        drafts = {"draft": self.draft.checkpoint} if isinstance(self.draft, ModelDraft | HeadDraft) else {}
        return {"target": self.target.checkpoint, **drafts}

    def hub_name(self, checkpoint: Path) -> str | None:
        """Return the text of ``checkpoint`` in the recipe file if it may be a name on the Hugging Face hub, else None.

        Such a name has two parts ("Qwen/Qwen3-8B"), the second one with an optional revision ("@refs/pr/7").
        """
        if not self._file or not checkpoint.is_relative_to(home := Path(self._file).parent):
            return None
        words = checkpoint.relative_to(home).parts
        return "/".join(words) if len(words) == 2 or (len(words) > 2 and "@" in words[1]) else None

    def require_checkpoints(self) -> None:
        """Raise BadRecipe, with the key, for each checkpoint folder that does not exist."""
        lines = [
            f"{section}.checkpoint: must be an existing folder; got {quoted(str(folder))}"
            for section, folder in self.checkpoints().items()
            if not folder.is_dir()
        ]
        if lines:
            where = f"recipe {self._file}" if self._file else f"recipe {self.name!r}"
            fix = "Put the checkpoint there, or copy the recipe and name its folder."
            raise BadRecipe(f"{where} names a checkpoint that does not exist. {fix}\n" + "\n".join(lines))

    @property
    def draft_dtype(self) -> str | None:
        """Dtype of the draft's weights: a model's own, else the target's; a draft head has the target's compute dtype.

        None: no model drafts.
        """
        if isinstance(self.draft, HeadDraft):
            return self.computed_in(self.target.dtype)
        return (self.draft.dtype or self.target.dtype) if isinstance(self.draft, ModelDraft) else None

    def computed_in(self, dtype: str) -> str:
        """Return the compute dtype of a decoder of ``dtype`` on the recipe's backend."""
        return computed_in(dtype, paged=self.cache == "paged")

    @property
    def draft_kv_dtype(self) -> KvDtype | None:
        """Dtype of a draft model's keys and values: its own, else the target's if that is float8.

        None: the dtype of the draft's checkpoint. The draft does not inherit other dtypes of the target's cache, which
        may differ from the draft's compute dtype.
        """
        if not isinstance(self.draft, ModelDraft):
            return None
        return self.draft.kv_dtype or (self.target.kv_dtype if self.target.kv_dtype in KV_DTYPES else None)

    @property
    def capacity(self) -> int:
        """Tokens of a cache row: a text of full length and the slack of a round (engines/contract/calls.py)."""
        return capacity(self.limits.length, slack(self.draft.kind, self.draft.num_draft_tokens))

    @property
    def cache(self) -> CacheKind:
        """Layout of the KV caches of target and draft."""
        return self.backend.cache_kind

    @property
    def batch_invariant(self) -> bool | None:
        """Whether the target computes the same bits for a token whatever else is in the call, on a GPU.

        None: if all its operators support that without a large cost.
        """
        return self.backend.batch_invariance

    @property
    def ranks(self) -> int:
        """Processes that the target is split over."""
        return self.backend.ranks

    def prefill_chunk(self, *, large: bool = False) -> int:
        """Prompt tokens per round: the recipe's, else the backend's default; ``large``: see ModelSpec.large_calls.

        256 on a CPU: longer calls are not faster per token, and other requests wait longer for them. 2,048 over a paged
        cache on a GPU: matmuls bound a call of that size; 8,192 if ``large``. 512 over a linear cache on a GPU: a call
        has few prompts.
        """
        if self.limits.prefill_chunk is not None:
            return self.limits.prefill_chunk
        paged = 8192 if large else 2048
        default = paged if self.cache == "paged" else self.backend.linear_chunk
        return min(default, longest_chunk(self.limits.batch, self.limits.length, self.cache))

    @property
    def kernel_capabilities(self) -> tuple[str, ...]:
        """Compute capabilities to compile kernels for; empty: the engines determine them."""
        return self.backend.kernel_capabilities

    @property
    def cache_blocks(self) -> int | None:
        """Blocks of a paged cache, without the scratch block; None: the cache is linear."""
        if self.cache == "linear":
            return None
        tokens = self.limits.cache_tokens
        return self.limits.batch * blocks_of(self.capacity) if tokens is None else blocks_of(tokens)

    @model_validator(mode="after")
    def _consistent(self) -> "Recipe":
        if self.draft.num_draft_tokens >= self.limits.length:
            values = f"{quoted(self.draft.num_draft_tokens)} >= {quoted(self.limits.length)}"
            raise reject(
                f"draft.num_draft_tokens must be below limits.length; got {values}. Lower one or raise the other"
            )
        most = longest_chunk(self.limits.batch, self.limits.length, self.cache)
        if self.prefill_chunk() > most:
            bound = "length" if self.cache == "linear" else "batch * length"
            values = f"{quoted(self.prefill_chunk())} > {quoted(most)}"
            raise reject(
                f"limits.prefill_chunk must not exceed {bound}; got {values}. Lower prefill_chunk or raise length"
            )
        tokens = self.limits.cache_tokens
        if tokens is not None and self.cache == "linear":
            rule = f"limits.cache_tokens needs backend.name {PAGED}"
            raise reject(f"{rule}; got {quoted(tokens)} for a linear cache. Drop it or choose another backend")
        if tokens is not None and tokens < self.capacity:
            rule = f"limits.cache_tokens must hold one request: length + num_draft_tokens + 1 = {quoted(self.capacity)}"
            raise reject(f"{rule}; got {quoted(tokens)}. Raise it or lower limits.length")
        if self.batch_invariant and self.cache == "linear":
            raise reject(
                "backend.batch_invariant needs backend.cache 'paged', whose attention sums in a fixed order; got "
                "'linear'. Drop one of them"
            )
        if self.ranks > 1 and self.cache == "linear":
            raise reject(
                "backend.tensor_parallel needs backend.cache 'paged', whose decoders run in steps; got 'linear'. Drop "
                "tensor_parallel or choose 'paged'"
            )
        dtypes = {self.target.dtype, self.draft_dtype or self.target.dtype}
        if quantized := BITS.keys() & dtypes - set(self.backend.dtypes):
            raise reject(
                f"dtype must be float32, float16 or bfloat16 unless backend.name is {CPU!r}, or {PAGED}; got "
                f"{quoted(min(quantized))} for {self.backend.name!r} with a {self.cache} cache. Choose another dtype "
                "or backend"
            )
        self._require_unquantized_dtype("target", self.target, self.target.dtype)
        self._require_unquantized_dtype("draft", self.draft, self.draft_dtype)
        self._require_kv_dtype("target", self.target.kv_dtype, self.target.dtype)
        self._require_kv_dtype("draft", self.draft_kv_dtype, self.draft_dtype)
        if self.draft.kind not in self.backend.drafts:
            raise reject(
                f"draft.kind must be one of {', '.join(self.backend.drafts)} when backend.name is "
                f"{self.backend.name!r}; got {self.draft.kind!r}. Choose another draft or backend"
            )
        self.backend.require_dtypes(dtypes)
        return self

    def _require_unquantized_dtype(self, name: str, section: Section, dtype: str | None) -> None:
        if getattr(section, "dequantize", False) and dtype in BITS:
            raise reject(
                f"{name}.dequantize needs {name}.dtype float32, float16 or bfloat16, in which the weights are written; "
                f"got {dtype!r}, which rounds them again. Drop one of the two"
            )

    def _require_kv_dtype(self, section: str, kv_dtype: KvDtype | None, dtype: str | None) -> None:
        compute = dtype and self.computed_in(dtype)
        if kv_dtype in KV_DTYPES and self.cache == "linear":
            raise reject(
                f"{section}.kv_dtype {kv_dtype!r} needs backend.name {PAGED}; other "
                f"attention kernels do not read it; got {self.backend.name!r}. Drop it or choose another backend"
            )
        if kv_dtype is not None and kv_dtype not in KV_DTYPES and kv_dtype != compute:
            raise reject(
                f"{section}.kv_dtype must be {', '.join(KV_DTYPES)} or the compute dtype {compute!r}; got "
                f"{kv_dtype!r}. Drop it or choose one of these"
            )


def locate(recipe: str) -> Path:
    """Return the file of a recipe given as a path or as the name of an included one. Raises BadRecipe."""
    included = {file.stem: file for file in sorted(INCLUDED.glob("*.toml"), key=lambda file: file.stem)}
    with suppress(OSError, ValueError):  # the path is too long or has a zero byte
        if Path(recipe).is_file():
            return Path(recipe)
    if recipe in included:
        return included[recipe]
    hint = nearest(recipe, list(included))
    raise BadRecipe(
        f"recipe must be a TOML file or the name of an included recipe; got {quoted(recipe)}{hint}. "
        f"Included: {', '.join(included)}"
    )


def _override(
    data: dict[str, Any],
    *,
    backend: str | None = None,
    dtype: str | None = None,
    kv_dtype: str | None = None,
    tensorrt_python: str | None = None,
) -> None:
    # Validation rejects a section that is not a table.
    models = [data[name] for name in ("target", "draft") if isinstance(data.get(name), dict)]
    for model in models:
        if "checkpoint" in model and model.get("kind") not in FEATURE_DRAFTS:
            model |= {} if dtype is None else {"dtype": dtype}
            model |= {} if kv_dtype is None else {"kv_dtype": kv_dtype}
    section = data.get("backend")
    if backend is not None and not (isinstance(section, dict) and section.get("name") == backend):
        dtypes = {str(model.get("dtype")) for model in models}
        data["backend"] = BACKENDS.get(backend, Backend).default_section(backend, dtypes)
    tensorrt = {"name": backend_name(TensorRt)}
    if tensorrt_python is not None and isinstance(section := data.setdefault("backend", tensorrt), dict):
        section["python"] = tensorrt_python
