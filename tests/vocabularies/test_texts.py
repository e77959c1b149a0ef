"""Texts and tokens of real tokenizers: streams equal whole decodes, and both equal transformers."""

from random import Random
from unicodedata import normalize

from tandemrt.runtime.requests.text import TextStream
from tests.vocabularies.conftest import Family

TEXTS = [
    "Hello  world\n\nfoo",
    "The quick brown fox jumps over the lazy dog.",
    "  leading spaces, trailing spaces  ",
    "\ttabs\t\tand\r\nline breaks\n\n\n\n",
    "def f(x: int) -> str:\n    return f'{x:>8}'  # comment\n",
    '{"a": [1, 2.5, -3e10], "b": {"c": null}, "d": "\\u00e9\\n"}',
    "1234567890 3.14159 0x1F 1,000,000",
    "¿Cómo estás? Ça va, naïve café.",
    "你好，世界。今天天气怎么样？",
    "こんにちは世界、お元気ですか。",
    "안녕하세요 세계",
    "Привет, мир! Как дела?",
    "مرحبا بالعالم",
    "שלום עולם",
    "हिन्दी में लिखा हुआ",
    "ภาษาไทยไม่มีช่องว่าง",
    "👩‍👩‍👧‍👦 🏳️‍🌈 😀😃 🇩🇪",
    "e\u0301 o\u0308 combining",
    "∀x∈ℝ: ⌈x⌉ = −⌊−x⌋, α ∧ ¬β",
    "<b>html</b> &amp; <|not_a_token|> <think",
    "don't won't I'll they've it's",
    "\u00a0\u2003\u200bodd spaces\ufeff",
]


def streamed(family: Family, ids: list[int], *, skip_special: bool = True) -> list[str]:
    """Return the text of each token, then the text that was held back."""
    text_stream, deltas = TextStream(family.backend, skip_special=skip_special), []
    for token in ids:
        text_stream.add("answer", [token])
        deltas.append(text_stream.take().text)
    text_stream.finish()
    return [*deltas, text_stream.take().text]


def test_tokens_and_decoded_texts_equal_those_of_transformers(family: Family) -> None:
    theirs = family.theirs
    for text in TEXTS:
        ids = family.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert family.tokenizer.decode(ids) == theirs.decode(ids, clean_up_tokenization_spaces=False), text
        assert family.tokenizer.encode(text) == theirs.encode(text), text


def test_a_stream_equals_one_whole_decode(family: Family) -> None:
    """For texts, for other tokenizations of them, and for random tokens."""
    random = Random(1)
    for text in TEXTS:
        ids = family.encode(text)
        for tokens in (ids, family.retokenize(ids, random)):
            deltas = streamed(family, tokens)
            assert "".join(deltas) == family.tokenizer.decode(ids)
            assert not any(delta.endswith("\ufffd") for delta in deltas), "a delta ends inside a character"
    for at in range(200):
        ids = [random.randrange(family.vocabulary.valid_tokens) for _ in range(12)]
        whole = family.tokenizer.decode(ids, skip_special_tokens=at % 2 == 0)
        assert "".join(streamed(family, ids, skip_special=at % 2 == 0)) == whole


def test_the_bytes_of_tokens_equal_those_of_the_text(family: Family) -> None:
    """Qwen's tokenizer composes characters first."""
    for text in TEXTS:
        written = normalize("NFC", text) if family.name == "qwen3" else text
        assert bytes(family.vocabulary.symbols_of(family.encode(text))) == written.encode(), text


def test_added_text_tokens_have_their_text_and_control_tokens_have_none(family: Family) -> None:
    """Line breaks and runs of spaces are text tokens in Gemma's tokenizer."""
    added = family.backend.get_added_tokens_decoder()
    for index, token in added.items():
        text = token.content.replace("\u2581", " ").encode() if family.name == "gemma3" else token.content.encode()
        assert family.vocabulary.tokens[index] == (b"" if index in family.vocabulary.special else text), token
    assert {index for index, token in added.items() if token.special} <= family.vocabulary.special
    if family.name == "gemma3":
        assert family.vocabulary.tokens[family.backend.token_to_id("\n\n\n")] == b"\n\n\n"


CHAT = [
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And 4 + 4?"},
]


def test_chats_give_the_prompts_of_transformers(family: Family) -> None:
    theirs = family.theirs
    if not family.tokenizer.chat_templates:
        assert theirs.chat_template is None
        return
    expected = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert family.tokenizer.apply_chat_template(CHAT) == expected
    assert family.encode(expected) == theirs.encode(expected, add_special_tokens=False)
