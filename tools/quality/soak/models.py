"""Build bundles of tiny random models for the soak."""

from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BackendUnavailable
from tandemrt.export.bundle.build import build
from tools.models.filler_tokenizer import SPECIAL_TOKENS, write_tokenizer
from tools.models.random_checkpoint import Dtype, Family, Size, write_checkpoint

LENGTH = 128  # tokens of prompt plus output
BATCH = 8
VOCAB = 320  # bytes, JSON tokens, special tokens and few words
WORDS = VOCAB - len(SPECIAL_TOKENS)  # ids that are not special tokens
PAGED = 'name = "onnxruntime-cuda"\ncache = "paged"\ncompute_capabilities = ["9.0"]'
PAGED_TOKENS = 192  # for all slots: too few for the longest requests of all, so that some are preempted
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
_NOISE = 0.05  # added to the draft's weights, in standard deviations, so that some drafts are rejected


def build_bundles(folder: Path) -> dict[str, Path]:
    """Build a bundle of one random target for every kind of drafter and of cache that runs on a CPU.

    The paged ones are left out where the kernel compiler is not installed: the build needs it, although no kernel
    runs here.
    """
    target = _checkpoint(folder / "target")
    draft = _checkpoint(folder / "draft")
    file = draft / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + _NOISE * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file)
    model = f'kind = "model"\ncheckpoint = "{draft}"\nnum_draft_tokens = 4'
    ngram = 'kind = "ngram"\nnum_draft_tokens = 4\nngram_min = 1'
    bundles = {
        "model": _bundle(folder, "model", target, model),
        "ngram": _bundle(folder, "ngram", target, ngram),
    }
    with suppress(BackendUnavailable):
        bundles |= {
            "paged": _bundle(folder, "paged", target, model, PAGED),
            "paged ngram": _bundle(folder, "paged-ngram", target, ngram, PAGED),
        }
    return bundles


def _checkpoint(folder: Path) -> Path:
    write_checkpoint(folder, Family.QWEN3, Size.TINY, dtype=Dtype.FLOAT32, vocab_size=VOCAB)
    write_tokenizer(folder, VOCAB)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def _bundle(folder: Path, kind: str, target: Path, draft: str, backend: str = 'name = "onnxruntime-cpu"') -> Path:
    recipe = folder / f"{kind}.toml"
    recipe.write_text(
        f"""
name = "soak-{kind}"
[target]
checkpoint = "{target}"
[draft]
{draft}
[reasoning]
think_start = "<think>"
think_ends = ["</think>"]
forced_end = "enough.</think>"
[limits]
batch = {BATCH}
length = {LENGTH}
prefill_chunk = 16
[backend]
{backend}
"""
    )
    return build(Recipe.load(recipe), folder / f"bundle-{kind}").folder
