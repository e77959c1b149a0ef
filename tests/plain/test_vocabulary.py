"""What a bundle takes from the tokenizer: sizes, stop tokens, and markers spelled as a model would write them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from tandemrt.engines.errors import BadCheckpoint, BadRecipe
from tandemrt.engines.recipe import Reasoning
from tandemrt.engines.tokenizer import open_tokenizer
from tandemrt.export.read.tokenizer import CheckpointTokenizer
from tandemrt.runtime.constraints.constraint import Constraint
from tandemrt.runtime.constraints.thinking import ThinkingRule
from tests.makers import VOCAB, tiny_tokenizer
from tests.plain.constraints import pieces
from tests.plain.test_tokenizer_parity import llama_like

END_OF_TURN, THINK, THINK_END = 263, 264, 265


def reasoning(**changes: Any) -> Reasoning:
    values = {"start": "<think>", "ends": ("</think>",), "forced_end": "</think>", "implicit_ends": (), **changes}
    return Reasoning(**values)


@pytest.fixture
def vocabulary(tmp_path: Path) -> CheckpointTokenizer:
    return CheckpointTokenizer.open(tiny_tokenizer(tmp_path))


def other(folder: Path, tokenizer: Tokenizer) -> CheckpointTokenizer:
    tokenizer.save(str(folder / "tokenizer.json"))
    return CheckpointTokenizer.open(folder)


def test_the_size_is_one_past_the_largest_id_even_where_ids_have_gaps(tmp_path: Path) -> None:
    words = {"a": 0, "b": 7}
    assert other(tmp_path, Tokenizer(models.WordLevel(words, unk_token="a"))).size == 8


def spelled(vocabulary: CheckpointTokenizer, text: str) -> tuple[int, ...]:
    """The ids of a start marker."""
    return vocabulary.markers(reasoning(start=text)).start.ids


def test_markers_are_single_tokens_or_several(vocabulary: CheckpointTokenizer) -> None:
    markers = vocabulary.markers(reasoning(ends=("</think>", "[done]"), implicit_ends=("<tool_call>",)))
    assert (markers.start.ids, markers.ends[0].ids) == ((THINK,), (THINK_END,))
    assert len(markers.ends[1].ids) == len("[done]")
    assert [marker.text for marker in markers.implicit_ends] == ["<tool_call>"]


def test_no_beginning_of_text_token_gets_into_a_marker(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer(tmp_path) / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A", special_tokens=[("<|endoftext|>", 262)]
    )
    assert tokenizer.encode("<think>").ids == [262, THINK]
    assert spelled(other(tmp_path, tokenizer), "<think>") == (THINK,)


def test_a_token_that_only_the_configuration_knows_spells_a_marker_at_run_time_and_here(tmp_path: Path) -> None:
    """D7: one tokenizer, at export and at run time."""
    folder = tiny_tokenizer(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"extra_special_tokens": ["<reason>"]}))
    opened = CheckpointTokenizer.open(folder)
    assert spelled(opened, "<reason>") == (267,)
    assert opened.size == 268
    assert open_tokenizer(folder, VOCAB)[0].encode("<reason>") == [267]


def test_a_tag_that_is_a_token_and_not_called_special_spells_a_marker(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer(tmp_path) / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken("<reason>", normalized=False)])
    assert spelled(other(tmp_path, tokenizer), "<reason>") == (267,)


def test_the_last_id_that_two_tokenizers_share_is_compared_as_well(tmp_path: Path) -> None:
    folders = [tiny_tokenizer(tmp_path / name, extra=(f"<{name}>",)) for name in ("one", "two")]
    mine, theirs = (other(folder, Tokenizer.from_file(str(folder / "tokenizer.json"))) for folder in folders)
    with pytest.raises(BadRecipe, match="id 267 is '<two>', and '<one>' in the target"):
        mine.require_same_tokens(theirs)


def test_a_marker_that_the_normalizer_changes_is_refused(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer(tmp_path) / "tokenizer.json"))
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(
        BadRecipe, match=r"reasoning.start: the tokenizer cannot spell '\[Think\]', it gives '\[think\]'"
    ):
        other(tmp_path, tokenizer).markers(reasoning(start="[Think]"))


def test_a_marker_is_spelled_as_within_a_text_where_the_first_word_gets_a_space(tmp_path: Path) -> None:
    """A tokenizer in the way of Llama 2: ``<the>`` is ``▁<`` ``the`` ``>`` at the start of a text."""
    opened = CheckpointTokenizer.open(llama_like(tmp_path))
    marker = opened.markers(reasoning(start="<the>")).start
    assert opened.tokenizer.decode(list(marker.ids)) == "<the>"
    assert "▁" not in [opened.tokenizer.id_to_token(token) for token in marker.ids]


def test_a_marker_that_vanishes_or_has_unknown_tokens_is_refused(tmp_path: Path) -> None:
    for index, alphabet in enumerate(("a", "a<>/think")):
        words = {letter: at for at, letter in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(vocab=words, merges=[], unk_token="a" if index else None))
        tokenizer.decoder = decoders.ByteLevel()
        with pytest.raises(BadRecipe, match=r"cannot spell '<think\.>', it gives"):
            other(tmp_path, tokenizer).markers(reasoning(start="<think.>"))


def test_a_marker_that_is_text_needs_a_token_for_every_byte(tmp_path: Path) -> None:
    """A token is split where a marker ends, wherever that is."""
    letters = {letter: at for at, letter in enumerate("<>/thinkĊ")}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    with pytest.raises(BadRecipe, match=r"reasoning\.start: .* needs a tokenizer with a token for every byte"):
        other(tmp_path, tokenizer).markers(reasoning())


@pytest.mark.parametrize("phrase", ["</think>", "So, in short: </think>\n\n", "</think></think>"])
def test_a_forced_end_may_hold_a_phrase_around_its_marker(vocabulary: CheckpointTokenizer, phrase: str) -> None:
    assert THINK_END in vocabulary.markers(reasoning(forced_end=phrase)).forced_end.ids


@pytest.mark.parametrize("phrase", ["\n\nConsidering the time.\n</think>\n\n", " </think>"])
def test_a_forced_end_may_begin_with_what_a_tokenizer_joins_to_the_text_before(
    vocabulary: CheckpointTokenizer, phrase: str
) -> None:
    """D2: it is emitted, never matched."""
    assert vocabulary.markers(reasoning(forced_end=phrase)).forced_end.text == phrase


@pytest.mark.parametrize("phrase", ["That is enough.", "</thin", "<think>", "<tool_call>"])
def test_a_forced_end_without_an_end_marker_is_refused(vocabulary: CheckpointTokenizer, phrase: str) -> None:
    with pytest.raises(BadRecipe, match=r"reasoning.forced_end must contain an end marker \('</think>'\); got"):
        vocabulary.markers(reasoning(forced_end=phrase, implicit_ends=("<tool_call>",)))


def test_a_forced_end_holds_its_marker_in_its_text_whatever_its_tokens(vocabulary: CheckpointTokenizer) -> None:
    """D2: the text holds "th" where the tokenizer merges "the"."""
    markers = vocabulary.markers(reasoning(ends=("th",), forced_end="the"))
    assert not set(markers.ends[0].ids) & set(markers.forced_end.ids)


@pytest.mark.parametrize("changes", [{"ends": ("<think>",)}, {"implicit_ends": ("</think>",)}, {"ends": ("a", "a")}])
def test_a_marker_with_two_meanings_is_refused(vocabulary: CheckpointTokenizer, changes: dict[str, Any]) -> None:
    with pytest.raises(BadRecipe, match=r"start, ends and implicit_ends must differ; '.+' appears twice"):
        vocabulary.markers(reasoning(**changes))


def test_stop_tokens_are_all_that_the_configs_and_the_tokenizer_name(
    tmp_path: Path, vocabulary: CheckpointTokenizer
) -> None:
    assert vocabulary.stop_ids({}) == (END_OF_TURN,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [262, END_OF_TURN]}))
    assert vocabulary.stop_ids({"eos_token_id": 266}) == (262, END_OF_TURN, 266)


def test_a_tokenizer_config_may_describe_its_token_at_length(tmp_path: Path, vocabulary: CheckpointTokenizer) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<|endoftext|>"}}))
    assert vocabulary.stop_ids({}) == (262,)


@pytest.mark.parametrize("stop", [267, -1, True, "2", 1.0])
def test_a_stop_token_that_the_tokenizer_does_not_have_is_refused(vocabulary: CheckpointTokenizer, stop: Any) -> None:
    with pytest.raises(BadCheckpoint, match="eos_token_id must be an id of the tokenizer, below 267; got"):
        vocabulary.stop_ids({"eos_token_id": stop})


def test_a_checkpoint_without_a_stop_token_is_refused(tmp_path: Path, vocabulary: CheckpointTokenizer) -> None:
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(BadCheckpoint, match="must name an end-of-sequence token, none does; set eos_token_id"):
        vocabulary.stop_ids({})


@pytest.mark.parametrize("content", ["{", "[]", '{"model": 3}'])
def test_a_damaged_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(BadCheckpoint, match="must be a tokenizer: "):
        CheckpointTokenizer.open(tmp_path)


def test_a_checkpoint_without_a_tokenizer_is_refused_with_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"tokenizer.json is missing; save it with transformers: AutoTokenizer"):
        CheckpointTokenizer.open(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_a_damaged_config_is_refused(tmp_path: Path, vocabulary: CheckpointTokenizer, name: str) -> None:
    for content, rule in (("{", "must be JSON"), ("[]", "must hold a JSON object; it holds a list")):
        (tmp_path / name).write_text(content)
        with pytest.raises(BadCheckpoint, match=rf"{name} {rule}"):
            vocabulary.stop_ids({})


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


@pytest.mark.parametrize("changes", [{"start": "<|im_end|>"}, {"implicit_ends": ("<|im_end|>",)}])
def test_a_marker_that_is_a_stop_token_is_refused(vocabulary: CheckpointTokenizer, changes: dict[str, Any]) -> None:
    with pytest.raises(BadRecipe, match=r"must not hold a stop token, which ends the text; '<\|im_end\|>' does"):
        vocabulary.markers(reasoning(**changes), [END_OF_TURN])


def test_the_channels_of_gpt_oss_are_markers(tmp_path: Path) -> None:
    """Control tokens with text between them; the model writes more of both in front of its last channel."""
    folder = tiny_tokenizer(tmp_path, extra=("<|start|>", "<|end|>", "<|channel|>", "<|message|>"))
    start, end = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
    turn = "<|end|><|start|>assistant"
    tokenizer, read = open_tokenizer(folder, VOCAB)
    markers = CheckpointTokenizer.open(folder).markers(reasoning(start=start, ends=(end,), forced_end=f"{turn}{end}"))
    rule = ThinkingRule(markers.start.ids, [each.ids for each in markers.ends], markers.forced_end.ids, vocabulary=read)
    written = Constraint(VOCAB, [END_OF_TURN], prompt=tokenizer.encode("<|start|>assistant"), thinking=rule)
    commit = written.commit(tokenizer.encode(f"{start}the and{turn}{end}and the"))
    roles = [(kind, tokenizer.decode(ids)) for kind, ids in pieces([commit])]
    assert roles == [("marker", start), ("reasoning", f"the and{turn}"), ("marker", end), ("answer", "and the")]
