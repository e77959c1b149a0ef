"""Bundles of every model family: drafts change no text, and in float32 transformers writes the same greedy texts."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tests.families.cases import FAMILIES, of_config
from tools.models.filler_tokenizer import write_tokenizer

VOCAB, TOKENS, LENGTH = 512, 40, 96
# Longer than the range of longrope's short factors: transformers uses the long factors for longer texts.
PROMPTS = ["a a a b a a a b a a a b a a", "the quick brown fox and the quick brown", "0123456789 0123456789 0"]
SAMPLED = [SamplingParams(max_tokens=TOKENS, seed=seed, temperature=heat) for seed, heat in ((0, 0.0), (5, 1.0))]


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_change_no_text_of_a_family(name: str, dtype: str, tmp_path: Path) -> None:
    model = write_checkpoint(name, tmp_path / "checkpoint")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        f'name = "{model.config.model_type}"\n[target]\ncheckpoint = "{tmp_path / "checkpoint"}"\ndtype = "{dtype}"\n'
        f'[draft]\nkind = "ngram"\nnum_draft_tokens = 4\n[limits]\nbatch = 2\nlength = {LENGTH}\nprefill_chunk = 16\n'
        '[backend]\nname = "onnxruntime-cpu"\n'
    )
    bundle = build(Recipe.load(recipe), tmp_path / "bundle").folder
    texts = []
    for window in (4, 0):
        with LLM(bundle, num_draft_tokens=window) as llm:
            texts.append([[out.token_ids for out in llm.generate(PROMPTS, params)] for params in SAMPLED])
            prompts = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert texts[0] == texts[1]
    if dtype == "float32":
        for prompt, ids in zip(prompts, texts[0][0], strict=True):
            assert list(ids) == greedy_tokens(model, list(prompt), len(ids))


def write_checkpoint(name: str, folder: Path) -> PreTrainedModel:
    """Write a random model of a family, with a tokenizer."""
    torch.manual_seed(1)
    config = FAMILIES[name]()
    text = config.get_text_config()
    text.update({"vocab_size": VOCAB, "eos_token_id": VOCAB - 1, "bos_token_id": VOCAB - 2})
    if hasattr(text, "vocab_size_per_layer_input"):
        text.vocab_size_per_layer_input = VOCAB
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
