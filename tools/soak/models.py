"""Tiny models made on the spot, and the bundles of them that are soaked."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tandemrt.engines.recipe import Recipe
from tandemrt.export.build import build
from tools.filler_tokenizer import write_tokenizer
from tools.random_checkpoint import Dtype, Family, Size, vocab_of, write_checkpoint

LENGTH = 96  # tokens of prompt plus output
BATCH = 4
VOCAB = vocab_of(Family.QWEN3, Size.SMALL)
_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}<think>"
_NOISE = 0.05  # of a draft's weights, in standard deviations: some of its tokens are refused


def build_bundles(folder: Path) -> dict[str, Path]:
    """Build one bundle for every kind of drafter that runs on a CPU; their texts are noise and their target is one."""
    target = _checkpoint(folder / "target")
    draft = _checkpoint(folder / "draft")
    file = draft / "model.safetensors"
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + _NOISE * tensor.std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file)
    kinds = {
        "model": f'kind = "model"\ncheckpoint = "{draft}"\nwindow = 4',
        "ngram": 'kind = "ngram"\nwindow = 4\nngram_min = 1',
    }
    return {kind: _bundle(folder, kind, target, section) for kind, section in kinds.items()}


def _checkpoint(folder: Path) -> Path:
    write_checkpoint(folder, Family.QWEN3, Size.SMALL, layers=2, dtype=Dtype.FLOAT32)
    write_tokenizer(folder, VOCAB)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    return folder


def _bundle(folder: Path, kind: str, target: Path, draft: str) -> Path:
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
"""
    )
    return build(Recipe.load(recipe), folder / f"bundle-{kind}").folder
