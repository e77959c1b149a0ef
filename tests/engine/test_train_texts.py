"""What drafts are trained on is what their target writes, and is kept for it alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.engine.training import model
from tools.drafts.texts import Text, kept, most_frequent, origin, write


@pytest.fixture(scope="module")
def target() -> Any:
    return model(layers=2, seed=3).requires_grad_(False)


def test_texts_are_prompts_with_the_targets_answers_and_are_kept(tmp_path: Path, target: Any) -> None:
    prompts = [[5, 6, 7, 8], [9], [1, 2]]
    texts = write(target, prompts, ends=62, longest=6, together=2)
    for text, prompt in zip(texts, sorted(prompts, key=len), strict=True):
        assert text.ids[: text.begin].tolist() == prompt
        assert 1 <= len(text.ids) - text.begin <= 6
    greedy = target.generate(torch.tensor([[9]]), max_new_tokens=6, do_sample=False, eos_token_id=62, pad_token_id=62)
    assert texts[0].ids.tolist() == greedy[0].tolist()
    path, made_of = tmp_path / "texts", origin(target, prompts, seed=0, longest=6)
    for written in (lambda: texts, list):
        again = kept(path, made_of, written)
        assert [(text.ids.tolist(), text.begin) for text in again] == [(t.ids.tolist(), t.begin) for t in texts]


def test_kept_texts_are_those_of_no_other_target_prompts_seed_or_length(tmp_path: Path, target: Any) -> None:
    prompts = [[5, 6], [9]]
    path = tmp_path / "texts"
    texts = [Text(torch.tensor([5, 6, 7]), 2)]
    kept(path, origin(target, prompts, seed=0, longest=6), lambda: texts)
    others = {
        "target": origin(model(layers=2, seed=8), prompts, seed=0, longest=6),
        "prompts": origin(target, [[5, 6], [8]], seed=0, longest=6),
        "count": origin(target, [[5, 6]], seed=0, longest=6),
        "seed": origin(target, prompts, seed=1, longest=6),
        "longest": origin(target, prompts, seed=0, longest=7),
    }
    for name, made_of in others.items():
        with pytest.raises(ValueError, match=f"must be those that would be written now, with {name} "):
            kept(path, made_of, lambda: texts)
    save_file({"ids": texts[0].ids}, path)
    with pytest.raises(ValueError, match="got texts with None"):
        kept(path, origin(target, prompts, seed=0, longest=6), lambda: texts)


def test_the_drafted_tokens_are_the_most_frequent_ones_of_answers() -> None:
    texts = [Text(torch.tensor([0, 0, 0, 5, 3, 3]), 3), Text(torch.tensor([0, 5, 5, 7]), 1)]
    drafted, share = most_frequent(texts, 2, 8)
    assert drafted.tolist() == [3, 5]
    assert share == pytest.approx(5 / 6)
