"""Greedy autoregressive decoding by transformers: the target's answers, and the drafts that agree with them."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

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


@torch.inference_mode()
def accepted_per_round(draft: Any, prompt: Sequence[int], answer: Sequence[int], window: int) -> list[int]:
    """Return how many drafted tokens each round accepts when ``answer`` is the target's greedy text.

    Every round the draft writes ``window`` tokens greedily, one after another, after the text so far; the
    round emits those that agree with the target and one token of the target's own, or less where the answer ends.
    """
    cache, sequence = DynamicCache(config=draft.config), [*prompt, *answer]
    known, cached, rounds = len(prompt), 0, []
    while known < len(sequence):
        pending, drafted = sequence[cached:known], []
        for _ in range(window):
            ids = torch.tensor([pending], device=draft.device)
            logits = draft(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
            pending = [int(logits[0, -1].argmax())]
            drafted += pending
        truth = sequence[known : known + window]
        agree = [mine == theirs for mine, theirs in zip(drafted, truth, strict=False)]
        accepted = agree.index(False) if False in agree else len(agree)
        cached = known + min(accepted, window - 1)
        if surplus := cache.get_seq_length() - cached:
            cache.crop(-surplus)
        known += accepted + 1
        rounds.append(accepted)
    return rounds
