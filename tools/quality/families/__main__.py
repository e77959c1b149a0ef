"""Check every model family from checkpoint to text on this machine's CPU: ``python -m tools.quality.families``.

For each family (tools/quality/families/cases.py) and dtype the tool builds a bundle of a tiny random model and answers
prompts, with n-gram drafts and without. In float32 it also compares greedy texts with transformers. It prints a line
for each, and exits with 1 if any text differs.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from transformers import PreTrainedModel

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tools.models.filler_tokenizer import write_tokenizer
from tools.quality.families.cases import FAMILIES, of_config

VOCAB, TOKENS, LENGTH = 512, 40, 96
# Longer than the range of longrope's short factors: transformers uses the long factors for longer texts.
PROMPTS = ("a a a b a a a b a a a b a a", "the quick brown fox and the quick brown", "0123456789 0123456789 0")
console = Console()


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Families. Default: all.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="float32, float16 or int8; may be repeated.")] = None,
) -> None:
    """Build tiny models of families and compare their texts."""
    failed = False
    for name in names or list(FAMILIES):
        for kind in dtype or ["float32", "int8"]:
            with tempfile.TemporaryDirectory() as folder:
                difference = check(name, kind, Path(folder))
            failed |= bool(difference)
            console.print(f"{name} {kind}: {difference or 'the same texts'}", style="red" if difference else None)
    raise typer.Exit(int(failed))


def check(name: str, dtype: str, folder: Path) -> str:
    """Return the differences for one family; empty if all texts are equal."""
    model = write_checkpoint(name, folder / "checkpoint")
    recipe = folder / "recipe.toml"
    recipe.write_text(
        f'name = "{model.config.model_type}"\n[target]\ncheckpoint = "{folder / "checkpoint"}"\ndtype = "{dtype}"\n'
        f'[draft]\nkind = "ngram"\nnum_draft_tokens = 4\n[limits]\nbatch = 2\nlength = {LENGTH}\nprefill_chunk = 16\n'
        '[backend]\nname = "onnxruntime-cpu"\n'
    )
    bundle = build(Recipe.load(recipe), folder / "bundle").folder
    sampled = [SamplingParams(max_tokens=TOKENS, seed=seed, temperature=heat) for seed, heat in ((0, 0.0), (5, 1.0))]
    texts = []
    for window in (4, 0):
        with LLM(bundle, num_draft_tokens=window) as llm:
            texts.append([[out.token_ids for out in llm.generate(list(PROMPTS), params)] for params in sampled])
            prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    if texts[0] != texts[1]:
        return "drafts change a text"
    if dtype == "float32":
        for prompt, ids in zip(prompts, texts[0][0], strict=True):
            if list(ids) != greedy_tokens(model, list(prompt), len(ids)):
                return "transformers writes another text"
    return ""


def write_checkpoint(name: str, folder: Path) -> PreTrainedModel:
    """Write a random model of a family, with a tokenizer."""
    torch.manual_seed(1)
    config = FAMILIES[name]()
    config.get_text_config().update({"vocab_size": VOCAB, "eos_token_id": VOCAB - 1, "bos_token_id": None})
    model = of_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    return model


def greedy_tokens(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Return ``count`` greedy tokens of transformers after ``prompt``, without a KV cache."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


if __name__ == "__main__":
    typer.run(main)
