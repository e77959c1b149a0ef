"""A build reports when transformers would split a text differently from tokenizer.json, and only then."""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer

from tandemrt.engines.text.tokenizer import read_tokenizer
from tandemrt.export.read.tokenizer_class import TEXTS, find_split_difference, split_notes

Json = dict[str, Any]
QWEN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
# Normalizers and splitting rules of published tokenizer files.
FILES: dict[str, tuple[Any, Any]] = {
    "qwen": (
        normalizers.NFC(),
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(QWEN), behavior="isolated"), BYTES]),
    ),
    "digits and bytes": (
        None,
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        ),
    ),
    "gpt2": (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "one token": (None, BYTES),
    "llama 2": (normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), None),
    "metaspace": (None, pre_tokenizers.Metaspace("▁", "first", split=False)),
    "gemma": (normalizers.Replace(" ", "▁"), pre_tokenizers.Split(" ", behavior="merged_with_previous")),
}


@lru_cache
def trained(by_bytes: bool) -> str:
    """Return a vocabulary with merges across all cuts of the splitting rules."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=not by_bytes))
    tokenizer.pre_tokenizer = BYTES if by_bytes else pre_tokenizers.Metaspace("▁", "never", split=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet() if by_bytes else []
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([text + text for text in TEXTS] * 2, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>", "<pad>")])
    return str(tokenizer.to_str())


def write(folder: Path, rules: str, config: Json, said: Json, *, filler: int = 0) -> None:
    """Write a tokenizer with these rules and ``filler`` additional tokens, and the two configs."""
    tokenizer = Tokenizer.from_str(trained(rules in ("qwen", "digits and bytes", "gpt2", "one token")))
    normalizer, splitter = FILES[rules]
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    stored = json.loads(tokenizer.to_str())
    stored["model"]["vocab"] |= {f"filler {number}": 1000 + number for number in range(filler)}
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | said))
    (folder / "config.json").write_text(json.dumps(config))


def opened(folder: Path) -> Tokenizer:
    return read_tokenizer(folder).backend


def kind(name: str, **config: str) -> Json:
    return {"model_type": name, **config}


def by(name: str, **said: object) -> Json:
    return {"tokenizer_class": name, **said}


@pytest.mark.parametrize(
    ("rules", "config", "said", "opened_by"),
    [
        ("qwen", kind("qwen2"), by("LlamaTokenizerFast"), None),
        ("digits and bytes", kind("qwen2"), by("LlamaTokenizerFast"), "Qwen2Tokenizer"),
        ("gpt2", kind("qwen2"), {}, "Qwen2Tokenizer"),
        ("qwen", kind("qwen3"), by("Qwen2Tokenizer"), None),
        ("one token", kind("qwen3"), by("Qwen2TokenizerFast"), "Qwen2Tokenizer"),
        ("gpt2", kind("qwen3"), by("PreTrainedTokenizerFast"), None),
        ("gpt2", kind("llama"), by("GPT2Tokenizer"), None),
        ("digits and bytes", kind("llama"), by("GPT2Tokenizer"), "GPT2Tokenizer"),
        ("gpt2", kind("llama", tokenizer_class="GPTNeoXTokenizer"), {}, "GPTNeoXTokenizer"),
        ("llama 2", kind("llama"), by("LlamaTokenizer"), "LlamaTokenizer"),
        ("llama 2", kind("llama"), by("LlamaTokenizer", legacy=True), "LlamaTokenizer"),
        ("metaspace", kind("llama"), by("LlamaTokenizer"), None),
        ("metaspace", kind("llama"), by("LlamaTokenizerFast", add_prefix_space=False), "LlamaTokenizer"),
        ("one token", kind("llama"), by("LlamaTokenizerFast"), None),
        ("llama 2", kind("llama"), by("PreTrainedTokenizerFast"), None),
        ("one token", kind("gpt_oss"), {}, None),
        ("digits and bytes", kind("olmo2"), by("GPT2Tokenizer"), None),
        ("llama 2", kind("phi3"), by("LlamaTokenizer"), None),
        ("llama 2", kind("mistral"), by("LlamaTokenizer"), None),
        ("gemma", kind("gemma3_text"), by("GemmaTokenizer"), None),
        ("metaspace", kind("gemma3_text"), by("GemmaTokenizer"), "GemmaTokenizer"),
        ("metaspace", kind("gemma2"), by("PreTrainedTokenizerFast"), None),
    ],
)
def test_a_text_that_transformers_splits_differently_is_reported(
    tmp_path: Path, rules: str, config: Json, said: Json, opened_by: str | None
) -> None:
    write(tmp_path, rules, config, said)
    assert what_transformers_does(tmp_path, config, said) == opened_by


@pytest.mark.parametrize(
    ("rules", "config", "named"),
    [
        ("gpt2", kind("llama"), "GPT2Tokenizer"),
        ("gpt2", kind("llama"), "GPTNeoXTokenizer"),
        ("qwen", kind("qwen2"), "Qwen2Tokenizer"),
    ],
)
def test_a_file_that_takes_whole_words_before_merges_is_reported(
    tmp_path: Path, rules: str, config: Json, named: str
) -> None:
    write(tmp_path, rules, config, by(named))
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["model"]["ignore_merges"] = True
    stored["model"]["vocab"]["caf\u00c3\u00a9"] = len(stored["model"]["vocab"]) + 4  # "cafe" with an accent, in bytes
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    assert what_transformers_does(tmp_path, config, by(named)) == named


def test_a_pattern_fixed_by_transformers_is_reported(tmp_path: Path) -> None:
    config, said = (
        kind("mistral3", transformers_version="4.57.1"),
        by("PreTrainedTokenizerFast", fix_mistral_regex=True),
    )
    write(tmp_path, "qwen", config, said, filler=100_000)
    assert what_transformers_does(tmp_path, config, said) == "TokenizersBackend (fix_mistral_regex)"


def what_transformers_does(folder: Path, config: Json, said: Json) -> str | None:
    """Return the reported class, if transformers splits some text differently, in the reported way."""
    theirs, ours = AutoTokenizer.from_pretrained(folder), opened(folder)
    splits = {
        text: tuple(
            tuple(ids)
            for ids in (theirs.encode(text, add_special_tokens=False), ours.encode(text, add_special_tokens=False).ids)
        )
        for text in TEXTS
    }
    difference = find_split_difference(ours, folder, config, said)
    if difference is None:
        assert not [text for text, (split, by_file) in splits.items() if split != by_file]
        return None
    assert (difference.theirs, difference.ours) == splits[difference.text]
    assert difference.theirs != difference.ours
    assert type(theirs).__name__ in difference.opened_by
    return difference.opened_by


def test_the_note_names_the_class_and_a_text(tmp_path: Path) -> None:
    config, said = kind("qwen2"), by("LlamaTokenizerFast")
    write(tmp_path, "digits and bytes", config, said)
    [note] = split_notes(opened(tmp_path), tmp_path, config, said)
    assert note.startswith(
        "transformers opens this tokenizer with Qwen2Tokenizer, which splits 'Hello  world\\n\\nfoo'"
    )
    assert "the bundle splits it by tokenizer.json" in note
    assert len(note) < 600


def test_a_tekken_file_is_mentioned(tmp_path: Path) -> None:
    write(tmp_path, "qwen", kind("mistral"), {})
    assert split_notes(opened(tmp_path), tmp_path, kind("mistral"), {}) == []
    (tmp_path / "tekken.json").write_text("{}")
    [note] = split_notes(opened(tmp_path), tmp_path, kind("mistral"), {})
    assert "transformers reads tekken.json; the bundle follows tokenizer.json" in note
