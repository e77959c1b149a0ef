"""Write the tokenizer of a GGUF file that has byte-level BPE, without transformers, which takes seconds for it.

Source of the patterns: the tokenizer.json of Llama 3, of Qwen2 and of GPT-2, o200k of tiktoken, and llama.cpp's
src/llama-vocab.cpp.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

_CONTROL, _USER_DEFINED = 3, 4  # types of tokens: never part of a text, and found in a text before anything is merged
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_AFTER_LETTERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_WORDS = (rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+", rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*")
_ENDING, _AFTER_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"


@dataclass(frozen=True)
class _Split:
    """How a vocabulary splits a text before it merges: by ``pattern``, after composing characters if ``composes``.

    ``by_digit``: each digit is split off before.
    """

    pattern: str
    composes: bool = False
    by_digit: bool = False


_SPLITS = {  # by tokenizer.ggml.pre
    **dict.fromkeys(("llama-bpe", "glm4", "chatglm-bpe"), _Split(rf"{_LETTERS}|\p{{N}}{{1,3}}|{_AFTER_LETTERS}")),
    "qwen2": _Split(rf"{_LETTERS}|\p{{N}}|{_AFTER_LETTERS}", composes=True),
    "gpt-4o": _Split(rf"{_WORDS[0]}{_ENDING}|{_WORDS[1]}{_ENDING}|\p{{N}}{{1,3}}|{_AFTER_WORDS}"),  # gpt-oss
    "tekken": _Split(rf"{'|'.join(_WORDS)}|\p{{N}}|{_AFTER_WORDS}"),  # Mistral
    **dict.fromkeys(("gpt-2", "olmo"), _Split(_GPT2)),
    **dict.fromkeys(("smollm", "refact"), _Split(_GPT2, by_digit=True)),  # SmolLM, Granite
}
# Those that transformers splits in the same way as llama.cpp, among the families that are read.
_BY_TRANSFORMERS = (
    "default",
    "llama3",
    "llama-v3",
    "dbrx",
    "smaug-bpe",
    "falcon3",
    "pixtral",
    "deepseek-r1-qwen",
    "megrez",
    "kormo",
)
_ALPHABET = frozenset(ByteLevel.alphabet())  # the characters that stand for bytes


def is_byte_level(metadata: Mapping[str, Any]) -> bool:
    """Return whether ``write_byte_level`` writes the tokenizer of a file with ``metadata``."""
    tokens, merges = (metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "merges"))
    return (
        metadata.get("tokenizer.ggml.model") == "gpt2"
        and metadata.get("tokenizer.ggml.pre") in _SPLITS
        and not metadata.get("tokenizer.ggml.add_eos_token")
        and isinstance(tokens, list)
        and isinstance(merges, list)
        and _ALPHABET.issuperset("".join(tokens))
        and not any(merge.startswith("#version") for merge in merges)  # a comment where merges are texts
    )


def unknown_split(metadata: Mapping[str, Any]) -> str | None:
    """Return the name of a way to split texts that neither this module nor transformers knows; None: it is known."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    known = metadata.get("tokenizer.ggml.model") != "gpt2" or name in (*_SPLITS, *_BY_TRANSFORMERS)
    return None if known else str(name)


def write_byte_level(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template of a vocabulary into ``folder``.

    Raises LookupError or TypeError for metadata that does not fit together.
    """
    tokens, split = metadata["tokenizer.ggml.tokens"], _SPLITS[metadata["tokenizer.ggml.pre"]]
    named = {
        name: int(metadata[key])
        for name, kind in _NAMED.items()
        if (key := f"tokenizer.ggml.{kind}_token_id") in metadata
    }
    begin = named["bos_token"] if metadata.get("tokenizer.ggml.add_bos_token") else None
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, metadata.get("tokenizer.ggml.token_type") or (), named.values()),
        "normalizer": {"type": "NFC"} if split.composes else None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                *([{"type": "Digits", "individual_digits": True}] if split.by_digit else []),
                {"type": "Split", "pattern": {"Regex": split.pattern}, "behavior": "Isolated", "invert": False},
                _byte_level(add_prefix_space=False, use_regex=False),
            ],
        },
        "post_processor": None if begin is None else _beginning_with(tokens[begin], begin),
        "decoder": _byte_level(add_prefix_space=True, use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }
    content = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    config = {name: tokens[index] for name, index in named.items()} | {"tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")


def _byte_level(*, add_prefix_space: bool, use_regex: bool) -> dict[str, Any]:
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _added_tokens(tokens: Sequence[str], types: Sequence[int], named: Iterable[int]) -> list[dict[str, Any]]:
    """Return the tokens that are found in a text before it is split. Named and control tokens are special."""
    special = dict.fromkeys(named, True) | {
        index: kind == _CONTROL for index, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)
    }
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return [
        {"id": index, "content": tokens[index], **flags, "normalized": False, "special": special[index]}
        for index in sorted(special)
    ]


def _beginning_with(token: str, index: int) -> dict[str, Any]:
    """Return the post-processor that puts a token before a text."""
    first, text = ({"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}})
    second = [{"SpecialToken": {"id": token, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [first, text],
        "pair": [first, text, *second],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }
