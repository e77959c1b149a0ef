"""Tokenizers of GGUF files split texts as the library does that made the vocabulary."""

import io
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from tandemrt.engines.text.tokenizer import read_tokenizer
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.quantize.gguf.byte_level import is_byte_level, write_byte_level
from tandemrt.export.quantize.gguf.checkpoint import ALL_KEPT, write_gguf_checkpoint
from tandemrt.export.quantize.gguf.reader import BoundedReader
from tandemrt.export.quantize.gguf.tokenizer import write_tokenizer
from tests.engine.gguf_files import write_gguf
from tests.makers import tiny_checkpoint

LONGEST = 9  # of the user-defined runs; Gemma has runs of 31
SENTENCES = ["the quick brown fox jumps over the lazy dog", "def f(x):", "    return x", "one\ttwo\nthree"] * 20
CONVERTED_SCORE = -1000.0  # what llama.cpp's converter writes for tokens that are not learned
TYPES = {"learned": 1, "unknown": 2, "control": 3, "user-defined": 4, "byte": 6}


@pytest.fixture(scope="module")
def sentencepiece_model() -> SentencePieceProcessor:
    """A model as Gemma's: runs of blanks and newlines are user-defined tokens."""
    runs = [symbol * length for symbol in ("\n", "▁", "\t") for length in range(2, LONGEST + 1)]
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES),
        model_writer=written,
        model_type="bpe",
        vocab_size=400,
        user_defined_symbols=["\n", "\t", *runs],
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return SentencePieceProcessor(model_proto=written.getvalue())


def kind_of(model: SentencePieceProcessor, index: int) -> str:
    piece = model.id_to_piece(index)
    if model.is_byte(index):
        return "byte"
    if model.is_control(index):
        return "control"
    if model.is_unknown(index):
        return "unknown"
    is_run = set(piece) in ({"\n"}, {"\t"}) or (len(piece) > 1 and set(piece) == {"▁"})
    return "user-defined" if is_run else "learned"


@pytest.fixture(scope="module")
def gemma(sentencepiece_model: SentencePieceProcessor, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer of a GGUF file of that model, as llama.cpp's converter writes it."""
    folder = tmp_path_factory.mktemp("gemma")
    model = sentencepiece_model
    kinds = [kind_of(model, index) for index in range(model.vocab_size())]
    pieces = [model.id_to_piece(index) for index in range(model.vocab_size())]
    writer = gguf.GGUFWriter(folder / "model.gguf", "gemma3")
    writer.add_tokenizer_model("llama")
    writer.add_token_list(
        [
            piece.replace("▁", " ") if kind == "user-defined" else piece
            for piece, kind in zip(pieces, kinds, strict=True)
        ]
    )
    writer.add_token_scores(
        [model.get_score(index) if kind == "learned" else CONVERTED_SCORE for index, kind in enumerate(kinds)]
    )
    writer.add_token_types([TYPES[kind] for kind in kinds])
    writer.add_unk_token_id(model.unk_id())
    writer.add_bos_token_id(model.bos_id())
    writer.add_eos_token_id(model.eos_id())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    write_tokenizer(folder / "model.gguf", metadata_of(folder / "model.gguf"), folder)
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def metadata_of(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in BoundedReader(file).fields.items()}


@given(st.lists(st.sampled_from(["\n", " ", "\t", " " * 9, "\n" * 9, "the", "x", "é", "(x):"]), max_size=30))
def test_a_tokenizer_of_gemma_splits_runs_of_blanks_as_sentencepiece(
    sentencepiece_model: SentencePieceProcessor, gemma: Tokenizer, parts: list[str]
) -> None:
    text = "".join(parts)
    assert gemma.encode(text, add_special_tokens=False).ids == sentencepiece_model.encode(text)


def test_a_tokenizer_of_qwen_composes_characters(tmp_path: Path) -> None:
    original = tiny_checkpoint(tmp_path / "hf")
    write_gguf(original, tmp_path / "model.gguf", "qwen3", pre="qwen2")
    write_gguf_checkpoint(tmp_path / "model.gguf", tmp_path / "found", ALL_KEPT)
    ours = Tokenizer.from_file(str(tmp_path / "found" / "tokenizer.json"))
    theirs = Qwen2Tokenizer.from_pretrained(original)
    for text in ("cafe\u0301", "\u1100\u1161", "A\u030a\u0301 \u212b", "plain"):
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text, add_special_tokens=False)


@pytest.fixture(scope="module", params=["qwen2", "llama-bpe"])
def byte_level(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a GGUF file that begins texts with a token, and a folder with its tokenizer."""
    folder = tmp_path_factory.mktemp(request.param)
    original = tiny_checkpoint(folder / "hf")
    begin = Tokenizer.from_file(str(original / "tokenizer.json")).token_to_id("<|endoftext|>")
    keys = {"pre": request.param, "bos_token_id": begin, "add_bos_token": True}
    write_gguf(original, folder / "model.gguf", "qwen3", **keys)
    metadata = metadata_of(folder / "model.gguf")
    assert is_byte_level(metadata)
    (folder / "ours").mkdir()
    write_tokenizer(folder / "model.gguf", metadata, folder / "ours")
    return folder


@given(
    st.lists(
        st.sampled_from(
            ["don't", "I'LL", "12345", " ", "\n", "\r\n\t ", "x=(1);", "Ünïcode", "漢字", "🙂", "<|im_end|>", "e\u0301"]
        )
        | st.text(max_size=3),
        max_size=12,
    )
)
def test_a_byte_level_tokenizer_equals_that_of_transformers(byte_level: Path, parts: list[str]) -> None:
    theirs = of_transformers(byte_level)
    text = unicodedata.normalize("NFC", "".join(parts))  # transformers leaves out the normalizer of Qwen
    ours = read_tokenizer(byte_level / "ours")
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.encode("".join(parts))[1:] == ours.encode("".join(parts), add_special_tokens=False)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs(text)["input_ids"])
    assert ours.special_tokens["bos_token"] == theirs.bos_token
    assert ours.special_tokens["eos_token"] == theirs.eos_token


@pytest.mark.parametrize("pre", ["gpt-2", "olmo", "smollm", "refact"])
def test_vocabularies_of_gpt2_split_texts_and_digits_as_published(byte_level: Path, tmp_path: Path, pre: str) -> None:
    """SmolLM and Granite split off each digit, which transformers does not do for their files."""
    write_byte_level(metadata_of(byte_level / "model.gguf") | {"tokenizer.ggml.pre": pre}, tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    splits = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if pre in ("smollm", "refact"):
        splits.insert(0, pre_tokenizers.Digits(individual_digits=True))
    theirs = pre_tokenizers.Sequence(splits)
    for text in ("in 2024,  12 and  345x", "don't\n\n  x=(1);\t", "é 漢字1", " ", "   7"):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)


@pytest.mark.parametrize("pre", ["gpt-4o", "tekken"])
def test_other_vocabularies_split_texts_as_transformers_does(tmp_path: Path, pre: str) -> None:
    write_gguf(tiny_checkpoint(tmp_path / "hf"), tmp_path / "model.gguf", "qwen3", pre=pre)
    metadata = metadata_of(tmp_path / "model.gguf")
    write_byte_level(metadata, tmp_path)
    ours = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    theirs = of_transformers(tmp_path).backend_tokenizer.pre_tokenizer
    for text in ("in 2024,  12 and\r\n 345x", "don't I'LL HTTPServer getURL/\n\n//", "É漢字1 日本e\u0301"):
        assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text)
    with pytest.raises(BadCheckpoint, match=r"tokenizer.ggml.pre is 'deepseek-llm', whose way to split texts is not"):
        write_tokenizer(tmp_path / "model.gguf", metadata | {"tokenizer.ggml.pre": "deepseek-llm"}, tmp_path)


@cache
def of_transformers(folder: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file="model.gguf")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model", "llama"),
        ("pre", "default"),
        ("add_eos_token", True),
        ("merges", ["#version 0"]),
        ("tokens", ["a", "not of the alphabet"]),
    ],
)
def test_transformers_converts_other_vocabularies(byte_level: Path, key: str, value: object) -> None:
    metadata = metadata_of(byte_level / "model.gguf")
    assert not is_byte_level(metadata | {f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(("key", "value"), [("eos_token_id", 10**6), ("token_type", [3] * 10**4), ("tokens", [1, 2])])
def test_a_damaged_byte_level_tokenizer_is_rejected(byte_level: Path, tmp_path: Path, key: str, value: object) -> None:
    metadata = metadata_of(byte_level / "model.gguf") | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(BadCheckpoint, match=r"model\.gguf: its tokenizer is damaged: .*; download it again"):
        write_tokenizer(byte_level / "model.gguf", metadata, tmp_path)
