"""Replace GGUF files of a recipe by checkpoint folders, which are written once into the user's cache folder."""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandemrt.engines.options.build_listener import BuildListener
from tandemrt.engines.recipe.models import HeadDraft
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.user_cache import CHECKPOINTS, cache_folder
from tandemrt.engines.validation.errors import clipped
from tandemrt.export.quantize.gguf.checkpoint import KeptTypes, write_gguf_checkpoint
from tandemrt.export.quantize.gguf.split import only_model, parts_of, vision_files
from tandemrt.export.read.quantization.gguf import GGUF_TYPES, GPU_EXPERTS, GPU_TYPES, MATMUL_TYPES
from tandemrt.export.staging import sole_builder, staged, unwritable_cache
from tandemrt.plugins.onnxruntime.custom_operators import has_kernels
from tandemrt.plugins.operators.constants import LOW_BIT_OUTPUTS

_FORMAT = 5  # of the written folders; another number writes them again


@dataclass(frozen=True)
class GgufCheckpoint:
    """A GGUF file as a checkpoint folder in the user's cache. Types that are ``kept`` stay packed in it."""

    file: Path
    kept: KeptTypes

    @property
    def folder(self) -> Path:
        """The place of the checkpoint. Its name has a digest of the file's parts. Raises BadCheckpoint."""
        parts = [(str(part.resolve()), part.stat()) for part in parts_of(self.file)]
        stats = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in parts]
        kept = {name: sorted(of) if isinstance(of, frozenset) else of for name, of in vars(self.kept).items()}
        named = json.dumps([_FORMAT, kept, *stats])
        digest = hashlib.sha256(named.encode()).hexdigest()
        return cache_folder() / CHECKPOINTS / f"{self.file.stem}-{digest[:12]}"

    def unpacked(self, listener: BuildListener, *, needs_chat_template: bool = False) -> Path:
        """Return ``folder``, which is written unless an earlier build or another process does that.

        Raises BadCheckpoint, BadBundle for a cache that cannot be written, and as ``write_gguf_checkpoint`` does.
        """
        folder = self.folder
        if folder.is_dir():
            return folder
        with sole_builder(folder, listener.begin):
            if not folder.is_dir():
                listener.begin(f"Unpack {self.file.name}{_without_vision(self.file)}")
                try:
                    with staged(folder) as unpacked:
                        write_gguf_checkpoint(
                            self.file, unpacked, self.kept, listener.detail, needs_chat_template=needs_chat_template
                        )
                except OSError as error:
                    raise unwritable_cache(error) from error
        return folder


def gguf_checkpoints(recipe: Recipe) -> dict[str, GgufCheckpoint]:
    """Return the GGUF files that ``recipe`` names, by section.

    Types for which the backend has matmuls stay packed. Embeddings and heads do if the draft does not share them.
    """
    on_cpu, shares = recipe.backend.device == "cpu", isinstance(recipe.draft, HeadDraft)
    paged = recipe.cache == "paged" and recipe.ranks == 1
    checkpoints: dict[str, GgufCheckpoint] = {}
    for role, checkpoint in recipe.checkpoints().items():
        if (file := gguf_file(checkpoint)) is not None:
            dtype = str(recipe.target.dtype if role == "target" else recipe.draft_dtype)
            compute = recipe.computed_in(dtype)
            kept = kept_types(on_cpu=on_cpu, paged=paged, compute=compute, draft_shares=shares)
            checkpoints[role] = GgufCheckpoint(file, kept)
    return checkpoints


def with_unpacked_gguf(recipe: Recipe, listener: BuildListener, *, needs_chat_template: bool = False) -> Recipe:
    """Return ``recipe`` with a checkpoint folder for every GGUF file that it names.

    Raises as ``GgufCheckpoint.unpacked`` does; ``needs_chat_template`` is about the target.
    """
    changed: dict[str, Any] = {}
    for role, checkpoint in gguf_checkpoints(recipe).items():
        needed = needs_chat_template and role == "target"
        folder = checkpoint.unpacked(listener, needs_chat_template=needed)
        changed[role] = getattr(recipe, role).model_copy(update={"checkpoint": folder})
    return recipe.model_copy(update=changed)


def gguf_file(checkpoint: Path) -> Path | None:
    """Return the GGUF file that ``checkpoint`` is, or the only model in a folder without config.json; else None."""
    with suppress(OSError, ValueError):  # the path is too long or has a zero byte
        if checkpoint.is_file() and checkpoint.suffix == ".gguf":
            return checkpoint
        if checkpoint.is_dir() and not (checkpoint / "config.json").exists():
            return only_model(list(checkpoint.glob("*.gguf")))
    return None


def kept_types(*, on_cpu: bool, paged: bool, compute: str, draft_shares: bool) -> KeptTypes:
    """Return the types that stay packed in a checkpoint for a backend that computes in ``compute``.

    ``paged``: the kernels of a GPU multiply, in one rank. ``draft_shares``: the draft reads the target's embedding or
    head, and needs floats there.
    """
    if on_cpu and compute == "float32" and has_kernels():
        return KeptTypes(GGUF_TYPES, GGUF_TYPES, embedding=not draft_shares, head=not draft_shares)
    if paged and compute in ("bfloat16", "float16"):
        head = not draft_shares
        return KeptTypes(
            GPU_TYPES, GPU_EXPERTS, alike=True, embedding=False, head=head, outputs=LOW_BIT_OUTPUTS, floats=compute
        )
    return KeptTypes(MATMUL_TYPES, MATMUL_TYPES, embedding=False, head=False)


def _without_vision(file: Path) -> str:
    names = vision_files(file)
    return f" without {clipped(', '.join(names))}: images are not supported" if names else ""
