"""Tokenizers without tokenizer.json: converted once, with the ids of the library that wrote them."""

import base64
import importlib.util
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken

from tandemrt.engines.text.tokenizer import read_tokenizer
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read import converted_tokenizer
from tandemrt.export.read.original_tokenizers import FORMATS, find_original
from tandemrt.export.read.tokenizer import CheckpointTokenizer
from tandemrt.export.read.tokenizer_class import TEXTS

LINES = [
    "the quick brown fox jumps over the lazy dog",
    "hello world, how are you?",
    "12 boxes; é ü 漢字 x = [1, 2]",
] * 20
LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+"
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]"]


def sentencepiece_folder(folder: Path, rule: str = "identity") -> sentencepiece.SentencePieceProcessor:
    folder.mkdir()
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES),
        model_writer=model,
        vocab_size=400,
        hard_vocab_limit=False,
        model_type="bpe",
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name=rule,
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    (folder / "tokenizer_config.json").write_text(json.dumps(LLAMA | {"chat_template": "{{ messages[0].content }}"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": 2}))
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def tekken_folder(folder: Path) -> tiktoken.Encoding:
    folder.mkdir()
    ranks = [bytes([byte]) for byte in range(256)] + [
        b"th",
        b" th",
        b"the",
        b" the",
        b"llo",
        b" w",
        b"or",
        "漢".encode(),
    ]
    stored = [*ranks, b"ll", b"ox"]  # a file may hold more tokens than the vocabulary has
    vocabulary = [{"rank": at, "token_bytes": base64.b64encode(each).decode()} for at, each in enumerate(stored)]
    config = {"pattern": WORDS, "default_vocab_size": len(ranks) + 4, "default_num_special_tokens": 4, "version": "v7"}
    special = [{"rank": at, "token_str": each, "is_control": True} for at, each in enumerate(SPECIAL)]
    data = {"config": config, "vocab": vocabulary, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(data))
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral", "eos_token_id": 2}))
    return tiktoken.Encoding(
        "test", pat_str=WORDS, mergeable_ranks={each: at for at, each in enumerate(ranks)}, special_tokens={}
    )


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("TANDEMRT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_sentencepiece_model_keeps_its_ids(tmp_path: Path) -> None:
    original = sentencepiece_folder(tmp_path / "model")
    opened = CheckpointTokenizer.open(tmp_path / "model")
    for text in (*LINES[:3], *TEXTS):
        assert opened.tokenizer.encode(text, add_special_tokens=False).ids == original.encode(text)
    assert opened.size == original.vocab_size()
    assert opened.stop_ids({"eos_token_id": 2}) == (2,)
    assert read_tokenizer(opened.folder).chat_templates == {"default": "{{ messages[0].content }}"}
    assert {path.name for path in opened.files()} >= {"tokenizer.json", "tokenizer_config.json", "config.json"}
    assert "sentencepiece splits" in opened.notes({"model_type": "llama"})[0]
    written = (opened.folder / "tokenizer.json").stat().st_mtime_ns
    assert CheckpointTokenizer.open(tmp_path / "model").folder == opened.folder
    assert (opened.folder / "tokenizer.json").stat().st_mtime_ns == written


def test_a_tekken_file_keeps_its_ids_after_the_special_tokens(tmp_path: Path) -> None:
    original = tekken_folder(tmp_path / "model")
    opened = CheckpointTokenizer.open(tmp_path / "model")
    for text in (*LINES[:3], *TEXTS):
        assert opened.tokenizer.encode(text, add_special_tokens=False).ids == [
            4 + each for each in original.encode(text)
        ]
    assert [opened.tokenizer.token_to_id(each) for each in SPECIAL] == [0, 1, 2, 3]
    assert opened.stop_ids({"eos_token_id": 2}) == (2,)
    assert opened.notes({})[0].endswith("tiktoken splits 15 texts alike")


def test_a_tiktoken_file_of_kimi_keeps_its_ids_and_has_its_reserved_tokens(tmp_path: Path) -> None:
    tokens = [bytes([byte]) for byte in range(256)] + [b"th", b" th", b"the", b" the", "漢".encode(), "漢字".encode()]
    tokens += [b"12", b"123", "é".encode(), b"\n\n"]
    (tmp_path / "model").mkdir()
    ranks = "".join(f"{base64.b64encode(token).decode()} {at}\n" for at, token in enumerate(tokens))
    (tmp_path / "model" / "tiktoken.model").write_text(ranks)
    named = {0: ("[BOS]", True), 1: ("[EOS]", True), 5: ("<|tool_call_begin|>", False)}
    added = {str(len(tokens) + at): {"content": text, "special": special} for at, (text, special) in named.items()}
    config = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "chat_template": "{{ 1 }}"}
    config |= {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(config | {"tokenizer_class": "X"}))
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "kimi_k2", "eos_token_id": 267}))
    opened = CheckpointTokenizer.open(tmp_path / "model")
    encode = opened.tokenizer.encode
    assert encode("12345中文the 漢字's x\n\n", add_special_tokens=False).ids[:1] == [tokens.index(b"123")]
    assert [opened.tokenizer.token_to_id(text) - len(tokens) for text, _ in named.values()] == [0, 1, 5]
    assert (opened.size, opened.stop_ids({"eos_token_id": 267})) == (len(tokens) + 256, (len(tokens) + 1,))
    assert opened.tokenizer.decode(encode("<|tool_call_begin|>[EOS]").ids) == "<|tool_call_begin|>"
    assert opened.notes({})[0].endswith("tiktoken splits 15 texts alike")
    assert read_tokenizer(opened.folder).chat_templates == {"default": "{{ 1 }}"}


def test_a_conversion_that_splits_texts_differently_is_reported(tmp_path: Path) -> None:
    sentencepiece_folder(tmp_path / "model", "nmt_nfkc")  # Llama's class has no such rule
    [note, *_] = CheckpointTokenizer.open(tmp_path / "model").notes({})
    assert "tokenizer.model was converted" in note
    assert "it splits 'Hello  world\\n\\nfoo' into" in note


def test_a_missing_library_is_named_with_its_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sentencepiece_folder(tmp_path / "model")
    there = importlib.util.find_spec

    def without(name: str, *more: Any) -> Any:
        return None if name == "sentencepiece" else there(name, *more)

    monkeypatch.setattr(converted_tokenizer.importlib.util, "find_spec", without)
    with pytest.raises(BadCheckpoint, match=r"sentencepiece is not installed: pip install '\.\[tokenizers\]'"):
        CheckpointTokenizer.open(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("tokenizer.model", b"no model", "must be a tokenizer that transformers converts"),
        ("tekken.json", b"{}", "must be a tokenizer that transformers converts"),
        ("tiktoken.model", b"IQ== 0\n", "tiktoken.model, which only the repository's own code can read"),
        ("qwen.tiktoken", b"IQ== 0\n", "qwen.tiktoken, which only the repository's own code can read"),
        ("vocab.txt", b"a\n", "tokenizer.json is missing; save it with transformers"),
    ],
)
def test_a_tokenizer_that_cannot_be_converted_is_rejected(
    tmp_path: Path, cache: Path, name: str, data: bytes, message: str
) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / name).write_bytes(data)
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(BadCheckpoint, match=message):
        CheckpointTokenizer.open(tmp_path / "model")
    assert list(cache.rglob("tokenizer.json")) == []


def test_a_folder_with_tokenizer_json_has_no_original_to_convert(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    sentencepiece_folder(folder)
    assert find_original(folder) is not None
    (folder / "tokenizer.json").write_text("{}")
    assert find_original(folder) is None


def test_a_conversion_that_writes_no_tokenizer_is_rejected(tmp_path: Path) -> None:
    form = replace(FORMATS[0], convert=lambda *_: None)
    with pytest.raises(BadCheckpoint, match=r"without writing tokenizer\.json; save one by hand"):
        converted_tokenizer._convert(tmp_path / "tokenizer.model", form, tmp_path)
