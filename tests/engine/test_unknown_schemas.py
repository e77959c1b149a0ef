"""JSON of schemas that the demo's models were not trained for ends, because whitespace between tokens is bounded."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tandemrt import LLM, SamplingParams, StructuredOutputs

NAME = {"type": "string", "maxLength": 12}
WHOLE = {"type": "integer", "minimum": 0, "maximum": 999}
YES_OR_NO = {"type": "boolean"}
DAY = {"type": "string", "format": "date"}


def record(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties)}


def few(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": 1, "maxItems": 3}


# Strings and arrays are bounded: one that runs away would be the model's fault, not that of whitespace.
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("What is the weather in Lisbon?", record(city=NAME, degrees=WHOLE, sky={"enum": ["clear", "cloudy", "rain"]})),
    ("Is 97 a prime?", record(prime=YES_OR_NO)),
    ("Name two rivers.", few(NAME)),
    ("How many legs have three spiders?", {"type": "integer", "minimum": 0, "maximum": 100}),
    ("Rate this film: long, but good.", record(stars={"enum": [1, 2, 3, 4, 5]}, reason=NAME)),
    ("Where is the museum?", record(street=NAME, number=WHOLE, floor={"type": ["integer", "null"], "maximum": 9})),
    ("Translate cat into French.", record(word=NAME, language={"const": "French"})),
    ("Which days are free?", few({"enum": ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday"]})),
    ("A chair and a table stand in the hall.", record(room=NAME, furniture=few(record(name=NAME, legs=WHOLE)))),
    ("Turn on the lamp in the kitchen.", record(device=NAME, on=YES_OR_NO, level=WHOLE)),
    ("Anna is 31, Ben is 29.", few(record(name=NAME, age=WHOLE))),
    ("Write a commit message.", record(area=NAME, breaking=YES_OR_NO, files=few(NAME))),
    ("When was the bridge built?", record(built=DAY, closed={"anyOf": [DAY, {"type": "null"}]})),
    ("Measure the box.", record(size=record(width=WHOLE, height=WHOLE, depth=WHOLE), unit={"enum": ["cm", "in"]})),
    ("Play chess.", record(move={"type": "string", "pattern": "^[a-h][1-8][a-h][1-8]$"})),
    ("Sort 3, 1 and 2.", record(sorted=few(WHOLE), descending=YES_OR_NO)),
    ("Who wrote it?", record(author=record(first=NAME, last=NAME), year=WHOLE, tags=few(NAME))),
    ("Plan a route.", record(stops=few(record(place=NAME, minutes=WHOLE)), toll=YES_OR_NO)),
    ("Draw a matrix.", {"type": "array", "items": few(WHOLE), "minItems": 2, "maxItems": 2}),
    ("Describe the server.", record(host=NAME, port=WHOLE, tls=record(on=YES_OR_NO, version={"enum": ["1.2", "1.3"]}))),
]


@pytest.fixture(scope="module")
def llm(demo_bundle: Path) -> Iterator[LLM]:
    with LLM(demo_bundle, threads=1) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_answers_with_an_unknown_schema_end_and_are_valid(llm: LLM, temperature: float) -> None:
    params = [
        SamplingParams(
            temperature=temperature,
            seed=seed,
            thinking_token_budget=32,
            max_tokens=300,
            structured_outputs=StructuredOutputs(json=schema),
        )
        for seed, (_, schema) in enumerate(REQUESTS)
    ]
    prompts = [[{"role": "user", "content": question}] for question, _ in REQUESTS]
    for output, (question, schema) in zip(llm.generate(prompts, params), REQUESTS, strict=True):
        assert output.finish_reason == "stop", (question, output.text)
        jsonschema.validate(json.loads(output.text), schema)
