"""Greedy autoregressive decoding by transformers: a model's answers, and whether they are exact."""

from collections.abc import Sequence
from typing import Any

import torch

from tools.demo.corpus import Example
from tools.demo.tokenizer import THINK_END, prompt_ids


@torch.inference_mode()
def greedy(model: Any, tokenizer: Any, asked: Sequence[Example], *, limit: int = 320) -> list[list[int]]:
    """Return the token ids that the model answers to each example, its end token included, at most ``limit``."""
    prompts = [prompt_ids(tokenizer, example) for example in asked]
    width = max(map(len, prompts))
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    output = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=limit)
    answers = output[:, width:].tolist()
    return [answer[: answer.index(end) + 1] if end in answer else answer for answer in answers]


def record_of(tokenizer: Any, answer: Sequence[int]) -> str | None:
    """Return the text after the end of thinking, or None if the thinking or the answer has no end."""
    delimiter = tokenizer.convert_tokens_to_ids(THINK_END)
    if delimiter not in answer or answer[-1] != tokenizer.eos_token_id:
        return None
    return str(tokenizer.decode(answer[list(answer).index(delimiter) + 1 : -1]))


def exact(tokenizer: Any, example: Example, answer: Sequence[int]) -> bool:
    """Return whether the answer's record equals the example's, character for character."""
    return record_of(tokenizer, answer) == example.record
