"""Hostile tokenizer.json: files that expand a text beyond measure are rejected before any text is tokenized."""

import base64
import json
import shutil
import time
import unicodedata
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.text import expansion
from tandemrt.engines.text.expansion import MAX_ADDED, MAX_EXPANSION, is_linear
from tandemrt.engines.text.tokenizer import open_tokenizer
from tandemrt.engines.validation.errors import BadBundle, BadRequest
from tandemrt.runtime.requests.prompt import QUICK_BYTES, PromptReader, prompt_processes
from tests.waiting import PATIENCE_S
from tools.demo.models import CHECKPOINTS

END = "<|im_end|>"


def replace(content: str, searched: str = "e") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": searched}, "content": content}


def write_tokenizer(folder: Path, **parts: Any) -> Path:
    """Write the demo's tokenizer with other parts of its pipeline."""
    source = CHECKPOINTS / "target"
    shutil.copy(source / "tokenizer_config.json", folder)
    data = json.loads((source / "tokenizer.json").read_text()) | parts
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(
    "parts",
    [
        {"normalizer": {"type": "Sequence", "normalizers": [replace("e" * 3000)] * 3}},
        {"normalizer": {"type": "Sequence", "normalizers": [replace("e" * 5)] * 3}},
        {"normalizer": replace("e" * (MAX_EXPANSION + 1))},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": "x*"}, "content": "e" * MAX_EXPANSION}},
        {"normalizer": {"type": "Prepend", "prepend": "e" * 2000}},
        {"decoder": {"type": "Sequence", "decoders": [*[replace("e" * 3000)] * 2, {"type": "ByteFallback"}]}},
    ],
    ids=["chain of 3,000", "chain of 5", "one past the bound", "empty matches", "prefix", "decoder"],
)
def test_a_tokenizer_that_expands_texts_too_far_is_rejected(tmp_path: Path, parts: dict[str, Any]) -> None:
    with pytest.raises(BadBundle, match=r"tokenizer\.json: its (normalizer|decoder) must (expand|add)"):
        open_tokenizer(write_tokenizer(tmp_path, **parts), 2048)


def test_the_longest_text_of_a_compiled_map_counts(tmp_path: Path) -> None:
    def normalizer(longest: int) -> dict[str, Any]:
        charsmap = (2048).to_bytes(4, "little") + bytes(2048) + b"zz\0" + b"a" * longest + b"\0"
        return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()}

    open_tokenizer(write_tokenizer(tmp_path, normalizer=normalizer(MAX_EXPANSION)), 2048)
    with pytest.raises(BadBundle, match=f"its normalizer must expand .* got {MAX_EXPANSION + 1} times"):
        open_tokenizer(write_tokenizer(tmp_path, normalizer=normalizer(MAX_EXPANSION + 1)), 2048)


def test_a_probe_may_have_as_many_tokens_as_the_bound_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begun_by(count: int) -> dict[str, Any]:
        begin, text = ({kind: {"id": name, "type_id": 0}} for kind, name in (("SpecialToken", END), ("Sequence", "A")))
        special = {END: {"id": END, "ids": [263], "tokens": [END]}}
        single = [begin] * count + [text]
        return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": special}

    monkeypatch.setattr(expansion, "PROBES", ("é",))  # two bytes, and two tokens
    most = 2 * MAX_EXPANSION + MAX_ADDED
    open_tokenizer(write_tokenizer(tmp_path, post_processor=begun_by(most - 2)), 2048)
    with pytest.raises(BadBundle, match=f"must give at most {most} tokens for 1 characters, got {most + 1}"):
        open_tokenizer(write_tokenizer(tmp_path, post_processor=begun_by(most - 1)), 2048)


@pytest.mark.parametrize("content", ["e" * MAX_EXPANSION, "", "x"])
def test_an_expansion_up_to_the_bound_is_accepted(tmp_path: Path, content: str) -> None:
    tokenizer, _ = open_tokenizer(write_tokenizer(tmp_path, normalizer=replace(content)), 2048)
    assert tokenizer.decode(tokenizer.encode("aeb")) == f"a{content}b"
    assert tokenizer.quick


def test_a_pattern_that_backtracks_is_ended_at_the_time_limit_of_the_request(tmp_path: Path) -> None:
    """Each piece takes 10 ms, and there are 10,000: native code that nothing in this process could interrupt."""
    split = {"type": "Split", "pattern": {"Regex": "(?:a|a)*(?=[^ab])"}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    pre_tokenizer = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    tokenizer, _ = open_tokenizer(write_tokenizer(tmp_path, pre_tokenizer=pre_tokenizer), 2048)
    assert not tokenizer.quick
    processes = prompt_processes(tokenizer, processes=1)
    reader = PromptReader(
        tokenizer, valid_tokens=2048, limit=10**6, max_bytes=1 << 20, processes=processes, timeout_s=PATIENCE_S
    )
    try:
        assert reader.read("hello")[0] == tokenizer.encode("hello"), "a harmless text is tokenized as ever"
        slow = ("a" * 18 + "b") * 10_000
        assert len(slow) < QUICK_BYTES, "a quick tokenizer would read it in this process"
        begun = time.monotonic()
        with pytest.raises(BadRequest, match=r"tokenizing the text (took longer|did not end)"):
            reader.read(slow, begun + 1.0)
    finally:
        processes.close()


@pytest.mark.parametrize(
    "pattern",
    [
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{M}]*[\p{Ll}\p{M}]+(?i:'s|'t|'re)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s+",
        r"[!-/\[\]~][A-Za-z]+|[^\r\n\p{L}\p{P}]?[\p{L}\p{M}]+| ?\p{P}+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        " {2,}",
    ],
)
def test_published_patterns_are_quick(pattern: str) -> None:
    assert is_linear(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+b",
        "(a|a)*b",
        "(?:a|aa)+$",
        "a*a*b",
        "a*a*a*",
        "(?:a+b?)*c",
        "((a{1,999})){2}x",
        "(.*)*",
        "(a",
        "(c|a*a*b)",
    ],
)
def test_patterns_that_may_backtrack_are_not_quick(pattern: str) -> None:
    assert not is_linear(pattern)


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
def test_the_factor_of_a_normal_form_is_the_longest_of_any_character(form: Any) -> None:
    characters = map(chr, (*range(0xD800), *range(0xE000, 0x30000)))
    assert max(len(unicodedata.normalize(form, character)) for character in characters) == expansion._FACTORS[form]
