"""A real model with its own tokenizer and chat template gives the texts of transformers."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandemrt import LLM, SamplingParams, StructuredOutputs
from tools.real.demo import SCHEMA, SENTENCE

CHATS = [
    "Say hello.",
    "What is the capital of France?",
    "Write a haiku about rain.",
    "Count from one to ten.",
    "Repeat after me: red green blue red green blue red green blue.",
    "Give me a recipe for pancakes in three steps.",
    "Write the Python function that adds two numbers.",
    "Complete: The quick brown fox",
    "Explain what a compiler does to a child.",
    "Write a sentence with the words moon, river and stone.",
    "¿Cómo estás? 你好 😀",
    "Summarize: Water boils at 100 degrees at sea level, and at less on a mountain, because the air is thinner there.",
]
TOKENS = 16


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def llm(bundle: Path):
    with LLM(bundle, threads=1) as opened:
        yield opened


@pytest.fixture(scope="module")
def autoregressive(llm: LLM) -> list[list[int]]:
    return greedy(llm, num_draft_tokens=0)


@pytest.fixture(scope="module")
def answers(autoregressive: list[list[int]], checkpoint: Path) -> list[list[int]]:
    """The greedy answers of transformers to CHATS.

    A forward pass over one of our answers predicts all of its tokens, and others where the answer is not greedy.
    """
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    token_ids = []
    for text, output in zip(CHATS, autoregressive, strict=True):
        prompt = tokenizer.apply_chat_template(chat(text), add_generation_prompt=True, return_dict=True)["input_ids"]
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output])).logits[0]
        token_ids.append(logits[len(prompt) - 1 : -1].argmax(-1).tolist())
    return token_ids


def greedy(llm: LLM, num_draft_tokens: int | None) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, num_draft_tokens=num_draft_tokens)
    return [output.token_ids for output in llm.generate([chat(text) for text in CHATS], params)]


@pytest.mark.timeout(600)
def test_greedy_answers_equal_those_of_transformers(
    llm: LLM, autoregressive: list[list[int]], answers: list[list[int]]
) -> None:
    assert autoregressive == answers
    assert greedy(llm, num_draft_tokens=None) == answers


def test_a_seed_gives_the_same_text_with_and_without_speculation(llm: LLM) -> None:
    for seed, text in enumerate(CHATS[:4]):
        drafted, autoregressive = (
            llm.generate(
                chat(text),
                SamplingParams(temperature=0.9, top_p=0.95, seed=seed, max_tokens=TOKENS, num_draft_tokens=w),
            )
            for w in (None, 0)
        )
        assert drafted.token_ids == autoregressive.token_ids


def test_a_schema_holds_and_drafts_are_accepted(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=256, structured_outputs=StructuredOutputs(json=SCHEMA))
    output = llm.generate(chat(SENTENCE), params)
    jsonschema.validate(json.loads(output.text), SCHEMA)
    assert output.finish_reason == "stop"
    assert output.speculation.num_accepted_draft_tokens > 0
    assert llm.generate(chat(SENTENCE), params.model_copy(update={"num_draft_tokens": 0})).token_ids == output.token_ids
