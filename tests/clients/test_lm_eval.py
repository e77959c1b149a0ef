"""lm-eval reads loglikelihoods of continuations, which are those of the checkpoint in transformers."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.clients.conftest import Ask
from tests.openai.client import EXAMPLES, Served

TARGET = Path(__file__).resolve().parents[2] / "engines" / "recipes" / "demo" / "target"


def test_lm_eval_reads_the_loglikelihoods_of_transformers(ask: Ask, calling: Served) -> None:
    texts = [example.prompt_messages()[0]["content"] for example in EXAMPLES[:4]]
    tokens = [calling.llm.tokenizer.encode(text) for text in texts]
    pairs = [(each[:at], each[at:]) for each in tokens for at in (1, len(each) // 2, len(each) - 1)]
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    expected = []
    for context, continuation in pairs:
        with torch.no_grad():
            logits = model(torch.tensor([[*context, *continuation]])).logits[0, len(context) - 1 : -1]
        scores = logits.double().log_softmax(-1)[range(len(continuation)), continuation]
        expected.append((float(scores.sum()), logits.argmax(-1).tolist() == continuation))
    scored = ask("ask_lm_eval.py", json.dumps(pairs))
    assert [logprob for logprob, _ in scored] == pytest.approx([logprob for logprob, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in scored] == [greedy for _, greedy in expected]
