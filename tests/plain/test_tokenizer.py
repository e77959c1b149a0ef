"""Opening a tokenizer: damaged or random ones are rejected with the reason."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from tandemrt.engines.text.chat_template import randomness_in_template
from tandemrt.engines.text.tokenizer import Tokenizer, open_tokenizer, require_deterministic
from tandemrt.engines.validation.errors import BadBundle
from tests.makers import VOCAB, tiny_tokenizer


def opened(folder: Path) -> Tokenizer:
    return open_tokenizer(folder, VOCAB)[0]


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_model(folder: Path, **changes: Any) -> None:
    file = folder / "tokenizer.json"
    edit(file, model=json.loads(file.read_text())["model"] | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_tokenizer(tmp_path)


def test_a_tokenizer_with_dropout_is_rejected(folder: Path) -> None:
    edit_model(folder, dropout=0.5)
    drawn = Backend.from_file(str(folder / "tokenizer.json"))
    assert len({tuple(drawn.encode("the and the and the").ids) for _ in range(50)}) > 1, "nothing to refuse"
    with pytest.raises(
        BadBundle, match=r"tokenizer.json: model.dropout must be null, got 0.5: it splits the same text"
    ):
        opened(folder)


@pytest.mark.parametrize("dropout", [None, 0.0])
def test_a_dropout_of_zero_is_accepted(folder: Path, dropout: float | None) -> None:
    edit_model(folder, dropout=dropout)
    assert opened(folder).encode("the") == opened(folder).encode("the")


def test_a_unigram_model_that_samples_is_rejected() -> None:
    model = models.Unigram([("a", 0.0), ("b", -1.0)], 0, False)
    model.alpha = 0.1  # not every version of tokenizer.json has it

    with pytest.raises(BadBundle, match=r"model.alpha must be null, got 0.1"):
        require_deterministic(Tokenizer(Backend(model)))


@pytest.mark.parametrize(
    ("template", "chance"),
    [
        ("{{ ['a', 'b'] | random }}", "the filter random"),
        ("{{ messages | map('random') }}", "the filter random"),
        ("{{ lipsum(n=1) }}", "lipsum"),
        ("{% for m in messages %}{{ m.content }} | random lipsum{% endfor %}", None),
        ("{% if 'random' in messages %}{{ strftime_now('%Y') }}{% endif %}", None),
        ("{% generation %}{{ random | trim }}{% endgeneration %}", None),
        ("{{ no jinja", None),
    ],
)
def test_randomness_in_a_chat_template_is_detected(template: str, chance: str | None) -> None:
    assert randomness_in_template(template) == chance


def test_a_chat_template_with_randomness_is_rejected(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ [1, 2] | random }}")
    with pytest.raises(BadBundle, match=r"chat template must give the same prompt .* got one with the filter random"):
        opened(folder)


def test_a_prompt_is_neither_truncated_nor_padded(folder: Path) -> None:
    tokenizer = Backend.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(folder / "tokenizer.json"))
    opened_tokenizer = opened(folder)
    assert (opened_tokenizer.backend.truncation, opened_tokenizer.backend.padding) == (None, None)
    assert len(opened_tokenizer.encode("xyzxyz")) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"model_max_length": "x"},
        {"tokenizer_class": 7},
        {"tokenizer_class": "NoSuchTokenizer"},
        {"eos_token": 5},
        {"eos_token": {"content": []}},
        {"padding_side": "up"},
        {"self": 1},
        {"chat_template": 5},
        {"chat_template": [{"name": "default"}]},
        {"auto_map": {"AutoTokenizer": ["code.Tokenizer", None]}, "tokenizer_class": "Tokenizer"},
    ],
    ids=str,
)
def test_any_tokenizer_works_or_is_rejected_with_a_clear_error(folder: Path, changes: dict[str, Any]) -> None:
    edit(folder / "tokenizer_config.json", **changes)
    try:
        tokenizer = opened(folder)
    except BadBundle:
        return
    assert tokenizer.decode(tokenizer.encode("the text")) == "the text"


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"model": 3}', "[" * 100_000])
def test_a_damaged_tokenizer_is_rejected(folder: Path, damage: str) -> None:
    (folder / "tokenizer.json").write_text(damage)
    with pytest.raises(BadBundle, match="must hold a usable tokenizer"):
        opened(folder)


def test_a_token_outside_of_the_byte_alphabet_is_rejected_with_its_text(folder: Path) -> None:
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    edit_model(folder, vocab=vocabulary | {"a b": 300})
    with pytest.raises(BadBundle, match=r"ByteLevel, tokens must be in its alphabet, got 'a b'"):
        opened(folder)
