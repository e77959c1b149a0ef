"""What a build reads from a tokenizer: sizes, stop tokens, and the ids of reasoning delimiters."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from tandemrt.engines.recipe.recipe import Reasoning
from tandemrt.engines.text.tokenizer import open_tokenizer
from tandemrt.engines.text.vocabulary import vocabulary_from_tokenizer
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.read.tokenizer import CheckpointTokenizer
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tests.makers import VOCAB, tiny_tokenizer
from tests.plain.constraints import joined_spans
from tests.plain.test_tokenizer_parity import llama_like

END_OF_TURN, THINK, THINK_END = 263, 264, 265


def reasoning(**changes: Any) -> Reasoning:
    values = {
        "think_start": "<think>",
        "think_ends": ("</think>",),
        "forced_end": "</think>",
        "implicit_ends": (),
        **changes,
    }
    return Reasoning(**values)


@pytest.fixture
def vocabulary(tmp_path: Path) -> CheckpointTokenizer:
    return CheckpointTokenizer.open(tiny_tokenizer(tmp_path))


def other(folder: Path, tokenizer: Tokenizer) -> CheckpointTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return CheckpointTokenizer.open(folder)


def test_the_size_is_the_largest_id_plus_one_despite_gaps(tmp_path: Path) -> None:
    words = {"a": 0, "b": 7}
    assert other(tmp_path, Tokenizer(models.WordLevel(words, unk_token="a"))).size == 8


def start_ids(vocabulary: CheckpointTokenizer, text: str) -> tuple[int, ...]:
    """Return the ids of a start delimiter."""
    return vocabulary.delimiters(reasoning(think_start=text)).think_start.ids


def test_delimiters_have_one_token_or_several(vocabulary: CheckpointTokenizer) -> None:
    delimiters = vocabulary.delimiters(reasoning(think_ends=("</think>", "[done]"), implicit_ends=("<tool_call>",)))
    assert (delimiters.think_start.ids, delimiters.think_ends[0].ids) == ((THINK,), (THINK_END,))
    assert len(delimiters.think_ends[1].ids) == len("[done]")
    assert [delimiter.text for delimiter in delimiters.implicit_ends] == ["<tool_call>"]


def test_delimiters_hold_no_beginning_of_text_token(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer(tmp_path) / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=[("<|endoftext|>", 262)]
    )
    assert tokenizer.encode("<think>").ids == [262, THINK]
    assert start_ids(other(tmp_path, tokenizer), "<think>") == (THINK,)


def test_a_token_from_the_tokenizer_config_encodes_a_delimiter(tmp_path: Path) -> None:
    """D7: the export and the runtime read the same tokenizer."""
    folder = tiny_tokenizer(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"extra_special_tokens": ["<reason>"]}))
    opened = CheckpointTokenizer.open(folder)
    assert start_ids(opened, "<reason>") == (267,)
    assert opened.size == 268
    assert open_tokenizer(folder, VOCAB)[0].encode("<reason>") == [267]


def test_a_tag_token_that_is_not_special_encodes_a_delimiter(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer(tmp_path) / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<reason>", normalized=False)])
    assert start_ids(other(tmp_path, tokenizer), "<reason>") == (267,)


def test_the_last_shared_id_of_two_tokenizers_is_compared(tmp_path: Path) -> None:
    folders = [tiny_tokenizer(tmp_path / name, extra=(f"<{name}>",)) for name in ("one", "two")]
    mine, theirs = (other(folder, Tokenizer.from_file(str(folder / "tokenizer.json"))) for folder in folders)
    with pytest.raises(BadRecipe, match="id 267 is '<two>', and '<one>' in the target"):
        mine.require_same_tokens(theirs)


def test_a_delimiter_changed_by_the_normalizer_is_rejected(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer(tmp_path) / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(
        BadRecipe, match=r"reasoning.think_start: the tokenizer cannot encode '\[Think\]', it gives '\[think\]'"
    ):
        other(tmp_path, tokenizer).delimiters(reasoning(think_start="[Think]"))


def test_a_delimiter_is_encoded_without_the_space_of_a_first_word(tmp_path: Path) -> None:
    """A tokenizer like Llama 2's encodes ``<the>`` as ``▁<`` ``the`` ``>`` at the start of a text."""
    opened = CheckpointTokenizer.open(llama_like(tmp_path))
    delimiter = opened.delimiters(reasoning(think_start="<the>")).think_start
    assert opened.tokenizer.decode(list(delimiter.ids)) == "<the>"
    assert "▁" not in [opened.tokenizer.id_to_token(token) for token in delimiter.ids]


def test_a_vocabulary_encodes_parts_of_a_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer(tmp_path) / "tokenizer.json"))
    plain = tokenizer.encode("ab").ids
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[("<|im_end|>", END_OF_TURN)]
    )
    assert tokenizer.encode("ab").ids == [END_OF_TURN, *plain]
    assert vocabulary_from_tokenizer(tokenizer, VOCAB).encode("ab") == plain


def test_an_empty_or_unknown_delimiter_is_rejected(tmp_path: Path) -> None:
    for index, alphabet in enumerate(("a", "a<>/think")):
        words = {letter: at for at, letter in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="a" if index else None))
        tokenizer.decoder = decoders.ByteLevel()
        with pytest.raises(BadRecipe, match=r"cannot encode '<think\.>', it gives"):
            other(tmp_path, tokenizer).delimiters(reasoning(think_start="<think.>"))


def test_a_text_delimiter_needs_a_token_for_every_byte(tmp_path: Path) -> None:
    """The runtime splits a token where a delimiter ends, so every byte needs a token."""
    letters = {letter: at for at, letter in enumerate("<>/thinkĊ")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    with pytest.raises(BadRecipe, match=r"reasoning\.think_start: .* needs a tokenizer with a token for every byte"):
        other(tmp_path, tokenizer).delimiters(reasoning())


@pytest.mark.parametrize("phrase", ["</think>", "So, in short: </think>\n\n", "</think></think>"])
def test_a_forced_end_may_hold_text_around_its_delimiter(vocabulary: CheckpointTokenizer, phrase: str) -> None:
    assert THINK_END in vocabulary.delimiters(reasoning(forced_end=phrase)).forced_end.ids


@pytest.mark.parametrize("phrase", ["\n\nConsidering the time.\n</think>\n\n", " </think>"])
def test_a_forced_end_may_begin_with_mergeable_text(vocabulary: CheckpointTokenizer, phrase: str) -> None:
    """D2: the forced end is emitted, and never matched."""
    assert vocabulary.delimiters(reasoning(forced_end=phrase)).forced_end.text == phrase


@pytest.mark.parametrize("phrase", ["That is enough.", "</thin", "<think>", "<tool_call>"])
def test_a_forced_end_without_an_end_delimiter_is_rejected(vocabulary: CheckpointTokenizer, phrase: str) -> None:
    with pytest.raises(BadRecipe, match=r"reasoning.forced_end must contain an end delimiter \('</think>'\); got"):
        vocabulary.delimiters(reasoning(forced_end=phrase, implicit_ends=("<tool_call>",)))


def test_a_forced_end_contains_its_delimiter_as_text(vocabulary: CheckpointTokenizer) -> None:
    """D2: the text holds "th" where the tokenizer merges "the"."""
    delimiters = vocabulary.delimiters(reasoning(think_ends=("th",), forced_end="the"))
    assert not set(delimiters.think_ends[0].ids) & set(delimiters.forced_end.ids)


@pytest.mark.parametrize(
    "changes", [{"think_ends": ("<think>",)}, {"implicit_ends": ("</think>",)}, {"think_ends": ("a", "a")}]
)
def test_equal_delimiters_are_rejected(vocabulary: CheckpointTokenizer, changes: dict[str, Any]) -> None:
    with pytest.raises(BadRecipe, match=r"think_start, think_ends and implicit_ends must differ; '.+' appears twice"):
        vocabulary.delimiters(reasoning(**changes))


def test_stop_tokens_come_from_both_configs_and_the_tokenizer(tmp_path: Path, vocabulary: CheckpointTokenizer) -> None:
    assert vocabulary.stop_ids({}) == (END_OF_TURN,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [262, END_OF_TURN]}))
    assert vocabulary.stop_ids({"eos_token_id": 266}) == (262, END_OF_TURN, 266)


def test_a_tokenizer_config_may_store_eos_token_as_an_object(tmp_path: Path, vocabulary: CheckpointTokenizer) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert vocabulary.stop_ids({}) == (262,)


@pytest.mark.parametrize("stop", [267, -1, True, "2", 1.0])
def test_a_stop_token_outside_of_the_tokenizer_is_rejected(vocabulary: CheckpointTokenizer, stop: Any) -> None:
    with pytest.raises(BadCheckpoint, match="eos_token_id must be an id of the tokenizer, below 267; got"):
        vocabulary.stop_ids({"eos_token_id": stop})


def test_a_checkpoint_without_a_stop_token_is_rejected(tmp_path: Path, vocabulary: CheckpointTokenizer) -> None:
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(BadCheckpoint, match="must name an end-of-sequence token, none does; set eos_token_id"):
        vocabulary.stop_ids({})


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 3}'])
def test_a_damaged_tokenizer_is_rejected(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadCheckpoint, match="must be a tokenizer: "):
        CheckpointTokenizer.open(tmp_path)


def test_a_checkpoint_without_a_tokenizer_is_rejected_with_advice(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"tokenizer.json is missing; save it with transformers: AutoTokenizer"):
        CheckpointTokenizer.open(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_a_damaged_config_is_rejected(tmp_path: Path, vocabulary: CheckpointTokenizer, name: str) -> None:
    for content, rule in (("{", "must be JSON"), ("[]", "must hold a JSON object; it holds a list")):
        (tmp_path / name).write_text(content)
        with pytest.raises(BadCheckpoint, match=rf"{name} {rule}"):
            vocabulary.stop_ids({})


@pytest.mark.parametrize("content", ["", "{", "[]", "[" * 5_000])
def test_a_damaged_file_next_to_tokenizer_json_is_named(tmp_path: Path, content: str) -> None:
    (tiny_tokenizer(tmp_path) / "tokenizer_config.json").write_text(content)
    with pytest.raises(BadCheckpoint, match=r"tokenizer_config.json: must (be|hold a) JSON"):
        CheckpointTokenizer.open(tmp_path)


def test_tokenizers_agree_when_every_shared_id_is_the_same_token(
    tmp_path: Path, vocabulary: CheckpointTokenizer
) -> None:
    longer = CheckpointTokenizer.open(tiny_tokenizer(tmp_path / "longer", extra=("<extra>",)))
    vocabulary.require_same_tokens(longer)
    longer.require_same_tokens(vocabulary)
    shuffled = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    data = json.loads(shuffled.to_str())
    first, second = data["added_tokens"][2:4]
    first["id"], second["id"] = second["id"], first["id"]
    data["added_tokens"][2:4] = [second, first]
    with pytest.raises(BadRecipe, match="id 264 is '</think>', and '<think>' in the target"):
        vocabulary.require_same_tokens(other(tmp_path, Tokenizer.from_str(json.dumps(data))))


def test_chat_templates_are_among_the_files_to_copy(tmp_path: Path, vocabulary: CheckpointTokenizer) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tools.jinja").write_text("")
    (tmp_path / "model.safetensors").write_text("")
    names = {file.relative_to(tmp_path).as_posix() for file in vocabulary.files()}
    assert {"tokenizer.json", "chat_template.jinja", "additional_chat_templates/tools.jinja"} <= names
    assert "model.safetensors" not in names


@pytest.mark.parametrize("changes", [{"think_start": "<|im_end|>"}, {"implicit_ends": ("<|im_end|>",)}])
def test_a_delimiter_with_a_stop_token_is_rejected(vocabulary: CheckpointTokenizer, changes: dict[str, Any]) -> None:
    with pytest.raises(BadRecipe, match=r"must not hold a stop token, which ends the text; '<\|im_end\|>' does"):
        vocabulary.delimiters(reasoning(**changes), [END_OF_TURN])


def test_channels_of_gpt_oss_can_be_delimiters(tmp_path: Path) -> None:
    """Control tokens with text between them; the model emits more of both before its last channel."""
    folder = tiny_tokenizer(tmp_path, extra=("<|start|>", "<|end|>", "<|channel|>", "<|message|>"))
    start, end = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
    turn = "<|end|><|start|>assistant"
    tokenizer, read = open_tokenizer(folder, VOCAB)
    delimiters = CheckpointTokenizer.open(folder).delimiters(
        reasoning(think_start=start, think_ends=(end,), forced_end=f"{turn}{end}")
    )
    rule = ThinkingRule(
        delimiters.think_start.ids,
        [each.ids for each in delimiters.think_ends],
        delimiters.forced_end.ids,
        vocabulary=read,
    )
    written = Constraint(VOCAB, [END_OF_TURN], prompt=tokenizer.encode("<|start|>assistant"), thinking=rule)
    commit = written.commit(tokenizer.encode(f"{start}the and{turn}{end}and the"))
    roles = [(kind, tokenizer.decode(ids)) for kind, ids in joined_spans([commit])]
    assert roles == [("delimiter", start), ("reasoning", f"the and{turn}"), ("delimiter", end), ("answer", "and the")]


def test_letters_of_the_byte_level_alphabet_are_themselves_in_a_vocabulary_with_byte_fallback() -> None:
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "\u00e9": 1}, unk_token="a"))
    tokenizer.decoder = decoders.ByteFallback()
    assert vocabulary_from_tokenizer(tokenizer, 2).tokens == (b"a", "\u00e9".encode())
