"""Expensive requests, as the fields of a request to /v1."""

from collections.abc import Callable, Mapping
from typing import Any

Fields = Mapping[str, Any]
Make = Callable[[], Fields]

_ANSWER = {"max_tokens": 200, "ignore_eos": True, "thinking_token_budget": 0}


def requests() -> dict[str, Make]:
    """Return a factory for each request by name: ``prompt`` or ``messages``, and sampling parameters."""
    return (
        {"an ordinary request": lambda: {**_ANSWER, "prompt": "x"}} | _prompts() | _lists() | _grammars() | _schemas()
    )


def _prompts() -> dict[str, Make]:
    return {
        "prompt of 1 MB": lambda: _request("word " * (1 << 18)),
        "prompt of 4 MB": lambda: _request("word " * 800_000),
        "prompt of 2 MB, spaces": lambda: _request(" " * (2 << 20)),
        "prompt of 100 kB, spaces": lambda: _request(" " * 100_000),
        "prompt of 4 MB, one word": lambda: _request("a" * 4_000_000),
        "prompt of 800,000 ids": lambda: _request([5] * 800_000),
        "chat of 20,000 messages": lambda: _chat(["x"] * 20_000),
        "chat of 80,000 messages": lambda: _chat(["x"] * 80_000),
        "chat of 4 MB": lambda: _chat(["word " * 800_000]),
        "chat with a name of 3 MB": lambda: {
            **_ANSWER,
            "messages": [{"role": "user", "content": "x", "name": "x" * (3 << 20)}],
        },
    }


def _lists() -> dict[str, Make]:
    return {
        "1,000 stop strings": lambda: _request(stop=[f"stop {i}" for i in range(1000)]),
        "50,000 stop strings": lambda: _request(stop=[f"stop {i}" for i in range(50_000)]),
        "stop strings that begin alike": lambda: _request(stop=["a" * i + "b" for i in range(1, 120)]),
        "500,000 banned ids": lambda: _request(banned_token_ids=[5] * 500_000),
        "500,000 stop ids": lambda: _request(stop_token_ids=[5] * 500_000),
        "100,000 biases": lambda: _request(logit_bias={str(i): 1.0 for i in range(100_000)}),
        "128 outputs with 20 logprobs": lambda: {**_request(n=128, logprobs=20), "max_tokens": 300},
        "128 outputs with 20 logprobs, short": lambda: {**_request(n=128, logprobs=20), "max_tokens": 97},
        "penalties over a long prompt": lambda: _request("word " * 80, presence_penalty=1.0, frequency_penalty=1.0),
    }


def _grammars() -> dict[str, Make]:
    aliases = "\n".join(f"a{i} ::= a{i + 1} | a{i + 1}" for i in range(30))
    doubled = "\n".join(f"a{i} ::= a{i + 1} a{i + 1}" for i in range(30))
    many = " | ".join("[^x]*" for _ in range(2000))
    ebnf = {
        "aliases of 30 rules": f"root ::= a0\n{aliases}\na30 ::= [a-z]",
        "30 rules, each twice the next": f"root ::= a0\n{doubled}\na30 ::= [a-z]?",
        "s ::= s s s | any": "root ::= s\ns ::= s s s | [^\\n]",
        "s ::= s s | a": 'root ::= s\ns ::= s s | "a"',
        "2,000 alternatives of any": f"root ::= {many}",
        "20,000 quotes": '"' * 20_000,
        "60,000 quotes": '"' * 60_000,
        "256,000 quotes": '"' * 256_000,
        "brackets 5,000 deep": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000,
        "100,000 rules": "\n".join(f'r{i} ::= "a"' for i in range(100_000)),
        "repetitions within one another": "root ::= ((([a-z]{1,100}){1,100}){1,100}){1,100}",
    }
    regexes = {
        "nested 3 deep, a*": "(((a*)*)*)*",
        "nested 6 deep": "((((((.*)*)*)*)*)*)*",
        "(.*.*.*.*)*x": "(.*.*.*.*)*x",
        "\\w{1,2000}": "\\w{1,2000}",
        "(a?){5000}": "(a?){5000}a{5000}",
        "repetitions within one another": "(((a{1,100}){1,100}){1,100}){1,100}",
        "brackets 5,000 deep": "(" * 5000 + "a" + ")" * 5000,
        "the n-th letter from the end": "(a|b)*a(a|b){40}",
        "20,000 words": "|".join(f"word{i}" for i in range(20_000)),
        "a character of value 0": "\\x00a",
        "2,300 sets of either case": "(?i)" + "[\u0100-\uffff]" * 2300,
    }
    choices = {
        "20,000": [f"choice {i}" for i in range(20_000)],
        "650 that begin alike": ["a" * i + "b" for i in range(650)],
        "3 of 80 kB": ["x" * 80_000 + str(i) for i in range(3)],
    }
    optional = {"type": "optional", "content": _tag("<a>", "</a>")}
    tags = {
        "an end of 100,000 equal letters": _tag("<", "e" * 100_000),
        "20,000 triggers": {
            "type": "triggered_tags",
            "triggers": [f"{i:05}" for i in range(20_000)],
            "tags": [_tag("00001<", ">")],
        },
        "1,500 parts that may be left out": {
            "type": "sequence",
            "elements": [_text("a"), {"type": "sequence", "elements": [*[optional] * 1500, _text("b")]}],
        },
    }
    return (
        {f"EBNF: {name}": _structured(grammar=text) for name, text in ebnf.items()}
        | {f"regex: {name}": _structured(regex=text) for name, text in regexes.items()}
        | {f"choice: {name}": _structured(choice=listed) for name, listed in choices.items()}
        | {f"tag: {name}": _structured(structural_tag={"format": tag}) for name, tag in tags.items()}
    )


def _schemas() -> dict[str, Make]:
    schemas = {
        "3,000 properties": _object(3000),
        "20,000 properties": _object(20_000),
        "2,000 patterns": {
            "type": "object",
            "properties": {
                f"p{i}": {"type": "string", "pattern": f"^[a-z{i % 10}]{{1,{i + 1}}}$"} for i in range(2000)
            },
        },
        "references in a row": {
            "$ref": "#/$defs/0",
            "$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(600)} | {"600": {"type": "integer"}},
        },
        "a text of 100,000 and more": {"type": "string", "minLength": 100_000},
        "two minProperties": {"allOf": [_object(300) | {"minProperties": 120}, _object(300) | {"minProperties": 150}]},
        "many allOf of anyOf": {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(40)]},
        "references that double": _doubling(30),
        "oneOf of 500": {"oneOf": [{"type": "string", "pattern": f"^a{{{i}}}b"} for i in range(500)]},
        "lists within lists, counted": _counted(8),
        "text that is no schema": "[" * 100_000,
        "a large prime multipleOf": {"type": "integer", "multipleOf": 9_999_991},
        "a large common multiple": {"allOf": [{"multipleOf": prime} for prime in (3, 5, 7, 11, 13, 17, 19, 23)]},
        "a large multipleOf that is admitted": {"type": "integer", "multipleOf": 9_973},
        "20 large multiples": _at_lexer_limit(multiples=20),
        "a lexer at its limit, slow to replace": _at_lexer_limit(multiples=2),
        "a lexer at its limit": _at_lexer_limit(),
        "a lexer at its limit after a long text": _at_lexer_limit(numbers=15),
    }
    checked = {
        "a pattern that backtracks": {"enum": ["a" * 40 + "!"], "not": {"pattern": "^(a+)+$"}},
        "a long enum": {"enum": [f"value {i}" for i in range(5000)], "not": {"type": "integer"}},
    }
    return {f"schema: {name}": _structured(json=schema) for name, schema in schemas.items()} | {
        f"validate_output: {name}": _structured(json=schema, validate_output=True) for name, schema in checked.items()
    }


def _request(prompt: Any = "x", **sampling: Any) -> Fields:
    return {**_ANSWER, "prompt": prompt, **sampling}


def _chat(contents: list[str]) -> Fields:
    return {**_ANSWER, "messages": [{"role": "user", "content": content} for content in contents]}


def _structured(**structured: Any) -> Make:
    sampling = {"max_tokens": 200, "thinking_token_budget": 0, "temperature": 1.0, "seed": 1}
    return lambda: {**sampling, "prompt": "x", "structured_outputs": structured}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def _tag(begin: str, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}


def _object(properties: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(properties)}}


def _doubling(levels: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {
        str(i): {"type": "array", "prefixItems": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(levels)
    }
    return {"$ref": "#/$defs/0", "$defs": definitions | {str(levels): {"type": "integer"}}}


def _counted(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema, "minItems": 50, "maxItems": 100}
    return schema


def _at_lexer_limit(multiples: int = 0, numbers: int = 0) -> dict[str, Any]:
    """A schema whose text reaches a limit of the lexer after ``numbers``.

    Its lexer takes as long to create as its ``multiples``.
    """
    limited = {"type": "string", "pattern": r"^([^,]+,\s*)*[^,]+$", "maxLength": 60_000}
    quick = {f"a{index}": {"type": "integer", "minimum": 1000, "maximum": 9999} for index in range(numbers)}
    slow = {f"b{index}": {"type": "integer", "multipleOf": 9_000 + index} for index in range(multiples)}
    properties = {**quick, "a": limited, **slow}
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
