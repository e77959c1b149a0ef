"""Tiny models made on the spot, and the bundles of them that are soaked."""

from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tandemrt.engines.errors import BackendUnavailable
from tandemrt.engines.recipe import Recipe
from tandemrt.export.build import build
from tools.filler_tokenizer import MARKERS, write_tokenizer
from tools.random_checkpoint import Dtype, Family, Size, write_checkpoint

LENGTH = 96  # tokens of prompt plus output
BATCH = 8
VOCAB = 320  # little more than bytes, what JSON is made of and markers: what is soaked is the runtime
WORDS = VOCAB - len(MARKERS)  # ids that are no marker
PAGED = 'name = "onnxruntime-cuda"\ncache = "paged"\ncompute_capabilities = ["9.0"]'
PAGED_TOKENS = 640  # for all slots: the longest requests wait for one another
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
_NOISE = 0.05  # of a draft's weights, in standard deviations: some of its tokens are refused


def build_bundles(folder: Path) -> dict[str, Path]:
    """Build a bundle for every kind of drafter and of cache that runs on a CPU; they have one target, of noise.

    ``paged`` is left out where the compiler of its kernels is not installed, though none of them runs here.
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
    model = f'kind = "model"\ncheckpoint = "{draft}"\nwindow = 4'
    bundles = {
        "model": _bundle(folder, "model", target, model),
        "ngram": _bundle(folder, "ngram", target, 'kind = "ngram"\nwindow = 4\nngram_min = 1'),
    }
    with suppress(BackendUnavailable):
        bundles["paged"] = _bundle(folder, "paged", target, model, PAGED)
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
start = "<think>"
ends = ["</think>"]
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
