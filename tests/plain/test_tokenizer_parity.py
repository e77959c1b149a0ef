"""A bundle's tokenizer makes the same tokens and prompts as transformers from the same files."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import AutoTokenizer

from tandemrt.engines.text.tokenizer import open_tokenizer
from tests.makers import DELIMITERS, tiny_tokenizer
from tools.demo.models import CHECKPOINTS

WIDE = 4096
TEXTS = ("", "the text", " and  the\n\tthe ", "<think>the</think>", "<|im_end|>", "é 😀 \x00", "x" * 300, "<s>hi</s>")
parts = st.sampled_from([*DELIMITERS, "the", " ", "\n", "and", "é", "<s>", "0123", "▁"]) | st.text(max_size=5)
TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "blocks and loops": """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set messages = messages[1:] %}
{%- endif %}
{%- set ns = namespace(last=-1, self=2) %}
{%- for message in messages %}
    {%- if loop.index0 > 3 %}{% break %}{% endif %}
    {%- if message.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns.last = loop.index0 %}
    {{ bos_token }}[{{ message['role'] }}]
    {% generation %}{{ message.content }}{% endgeneration %}{{ eos_token }}
{%- endfor %}
{{ ns.last }}{{ ns.self }} {{ system is defined }}{{ tools is none }}{{ documents is none }}
""",
    "json": "{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2, sort_keys=True) }}{% endfor %}"
    "{{ dict(a=1) | tojson(separators=(',', ':')) }}{{ dict.fromkeys(['b']) }}",
    "reasoning": "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ 'content' in m }}{% endfor %}",
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": " the <b>text</b> & 'more' é "}],
    "turns": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "the"},
        {"role": "assistant", "content": None, "reasoning": "because", "tool_calls": [{"name": "f", "arguments": {}}]},
        {"role": "tool", "content": "1"},
        {"role": "user", "content": [{"type": "text", "text": "and"}]},
    ],
}


def both(folder: Path) -> tuple[Any, Any]:
    return open_tokenizer(folder, WIDE)[0], AutoTokenizer.from_pretrained(folder)


def require_same_tokens(folder: Path, texts: tuple[str, ...] = TEXTS) -> None:
    ours, theirs = both(folder)
    for text in texts:
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == expected
            assert ours.decode(expected) == theirs.backend_tokenizer.decode(expected, skip_special_tokens=False)


def llama_like(folder: Path) -> Path:
    """Return a byte-fallback tokenizer with a begin token, as in Llama 2 and Mistral."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "t",
        "h",
        "e",
        "th",
        "the",
        "▁the",
    ]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    vocabulary = {word: index for index, word in enumerate(words)}
    model = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | named))
    return folder


@pytest.mark.parametrize("name", ["target", "draft"])
def test_the_demo_tokenizers_match_transformers(name: str) -> None:
    folder = CHECKPOINTS / name
    if not (folder / "tokenizer.json").is_file():
        folder = CHECKPOINTS / "target"
    require_same_tokens(folder)
    ours, theirs = both(folder)
    chat = [{"role": "user", "content": "Send 3 boxes"}]
    expected = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert ours.apply_chat_template(chat) == expected


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bos_token": "<think>", "add_bos_token": True},
        {"bos_token": "<think>", "add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"bos_token": "<s>", "add_bos_token": True},
        {"pad_token": {"__type": "AddedToken", "content": "<pad>", "lstrip": True, "normalized": False}},
        {"additional_special_tokens": ["<s>", "</s>"]},
        {"extra_special_tokens": ["<s>"]},
        {"extra_special_tokens": {"image_token": "<s>", "video_token": "</s>"}},
        {"added_tokens_decoder": {"267": {"content": "<s>", "special": True, "normalized": False}}},
        {"split_special_tokens": True},
        {"clean_up_tokenization_spaces": True},
        {"model_max_length": 3},
    ],
    ids=str,
)
def test_tokens_of_the_configuration_match_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    for folder in (tiny_tokenizer(tmp_path / "bytes"), llama_like(tmp_path / "llama")):
        file = folder / "tokenizer_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))
        require_same_tokens(folder)


def test_named_tokens_in_special_tokens_map_are_read(tmp_path: Path) -> None:
    """transformers 4 wrote the file unless the configuration lists its added tokens."""
    folder = tiny_tokenizer(tmp_path)
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<s>", "lstrip": False}}))
    require_same_tokens(folder)
    ours, theirs = both(folder)
    assert ours.special_tokens == theirs.special_tokens_map


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(st.lists(parts, max_size=12).map("".join), min_size=1, max_size=4))
def test_any_text_has_the_tokens_of_transformers(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    for name, make in (("bytes", tiny_tokenizer), ("llama", llama_like)):
        folder = tmp_path_factory.getbasetemp() / f"parity-{name}"
        if folder not in _OPENED:
            _OPENED[folder] = both(make(folder))
        ours, theirs = _OPENED[folder]
        for text in texts:
            assert ours.encode(text) == theirs.encode(text)


_OPENED: dict[Path, tuple[Any, Any]] = {}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
def test_a_template_renders_the_prompt_of_transformers(tmp_path: Path, template: str, chat: str) -> None:
    folder = llama_like(tmp_path)
    (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    ours, theirs = both(folder)
    expected = theirs.apply_chat_template(CHATS[chat], add_generation_prompt=True, tokenize=False)
    assert ours.apply_chat_template(CHATS[chat]) == expected
    metered = ours.chat_template(CHATS[chat], ())
    assert metered.render_quickly(metered.values(CHATS[chat])) == expected  # the path of most requests


@pytest.mark.parametrize("names", [["default"], ["default", "tool_use"]])
def test_a_template_gets_the_tools(tmp_path: Path, names: list[str]) -> None:
    folder = llama_like(tmp_path)
    file = folder / "tokenizer_config.json"
    tells = [{"name": name, "template": name + " {{ tools | tojson }} {{ tools is none }}"} for name in names]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": tells}))
    ours, theirs = both(folder)
    tool = {"type": "function", "function": {"name": "send", "parameters": {"type": "object", "properties": {}}}}
    for tools in ([tool], []):
        expected = theirs.apply_chat_template(CHATS["one"], tools=tools or None, tokenize=False)
        assert ours.apply_chat_template(CHATS["one"], tools=tools) == expected


@pytest.mark.parametrize("where", ["configuration", "list", "dict", "files"])
def test_a_template_is_found_in_every_supported_place(tmp_path: Path, where: str) -> None:
    folder = llama_like(tmp_path)
    file = folder / "tokenizer_config.json"
    named = {"default": "the default", "tool_use": "the other"}
    listed: Any = {
        "configuration": "the default",
        "list": [{"name": name, "template": text} for name, text in named.items()],
        "dict": named,
        "files": "not this one",
    }[where]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": listed}))
    if where == "files":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text("the other")
        (folder / "chat_template.jinja").write_text("the default")
    ours, theirs = both(folder)
    expected = theirs.apply_chat_template(CHATS["one"], tokenize=False)
    assert ours.apply_chat_template(CHATS["one"]) == expected == "the default"
