"""Chats: forms of messages, variables of a template, and user text that never becomes a control token."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from tandemrt import Chat
from tandemrt.engines.text.chat_template import call_without_object
from tandemrt.engines.text.control_tokens import MARKS, ControlText, control_tokens
from tandemrt.engines.text.tokenizer import Tokenizer, load_tokenizer, open_tokenizer
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.runtime.requests.prompt import PromptReader
from tandemrt.runtime.workers.sandbox.lanes import ProcessLanes
from tests.makers import DELIMITERS, VOCAB, tiny_tokenizer
from tests.plain.test_tokenizer_parity import llama_like
from tests.plain.tool_call_templates import TEMPLATES

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    folder = tiny_tokenizer(tmp_path_factory.mktemp("chat"), extra=("<|im_start|>",))
    return open_tokenizer(folder, VOCAB)[0].backend


def tokenizer(backend: Backend, template: str) -> Tokenizer:
    return Tokenizer(backend, {}, {"default": template})


def token_ids(chat: Any, chat_tokenizer: Tokenizer, *, valid_tokens: int = VOCAB) -> list[int]:
    """Return the prompt of a chat. The templates and texts are short, so no worker process starts."""
    pool = ProcessLanes(processes=1)
    reader = PromptReader(
        chat_tokenizer, valid_tokens=valid_tokens, limit=10**6, max_bytes=10**5, processes=pool, timeout_s=9
    )
    return reader.read(chat)[0]


def prompt(backend: Backend, chat: Any, template: str = CHATML) -> str:
    """Return the decoded prompt of a chat."""
    chat_tokenizer = tokenizer(backend, template)
    return chat_tokenizer.decode(token_ids(chat, chat_tokenizer))


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# Forms of messages


def test_text_parts_of_a_message_are_joined(backend: Backend) -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert prompt(backend, user(parts)) == prompt(backend, user("one two"))


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "text", {"type": "text", "text": 1}]
)
def test_a_part_that_is_not_text_is_rejected_with_its_place(backend: Backend, part: Any) -> None:
    with pytest.raises(
        BadRequest, match=r"messages\.0\.content\.1: must be a part of type text, received .* text only"
    ):
        prompt(backend, user([{"type": "text", "text": "a"}, part]))


@pytest.mark.parametrize("arguments", [{"city": "Rö", "n": [1]}, '{"city": "Rö", "n": [1]}'], ids=["object", "text"])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for k, v in arguments | items %}{{ k }}={{ v }};{% endfor %}", "city=Rö;n=[1];"),
        ("{{ arguments | tojson }}", '{"city": "Rö", "n": [1]}'),
        ("{{ '<' + arguments + '>' }}", '<{"city": "Rö", "n": [1]}>'),
        ("{{ '<' ~ arguments }}{{ arguments }}", '<{"city": "Rö", "n": [1]}{"city": "Rö", "n": [1]}'),
        ("{{ arguments if arguments is string else arguments | tojson }}", '{"city": "Rö", "n": [1]}'),
        ("{{ arguments['city'] }}", "Rö"),
    ],
)
def test_a_template_may_read_the_arguments_of_a_call_as_object_or_text(
    backend: Backend, template: str, expected: str, arguments: Any
) -> None:
    reads = "{% set arguments = messages[1].tool_calls[0].function.arguments %}" + template
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [*user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert prompt(backend, chat, reads) == expected


@pytest.mark.parametrize("arguments", ["{broken", "[1]", "null", "7"])
def test_arguments_that_are_not_a_json_object_stay_text(backend: Backend, arguments: str) -> None:
    chat = [*user("x"), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]
    assert prompt(backend, chat, "[{{ messages[1].tool_calls[0].arguments }}]") == f"[{arguments}]"


def answered(arguments: Any, *, named: bool = True) -> list[dict[str, Any]]:
    """Return a chat with a call of these arguments; ``named`` false: without arguments."""
    function = {"name": "get_weather", **({"arguments": arguments} if named else {})}
    call = {"id": "call_7", "type": "function", "function": function}
    return [*user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize("template", ["hermes", "qwen coder", "glm"])
@pytest.mark.parametrize("arguments", ["", " ", "\n", None])
def test_empty_arguments_are_an_empty_object(backend: Backend, template: str, arguments: Any) -> None:
    expected = prompt(backend, answered({}), TEMPLATES[template])
    assert prompt(backend, answered(arguments), TEMPLATES[template]) == expected
    assert prompt(backend, answered(None, named=False), TEMPLATES[template]) == expected


@pytest.mark.parametrize("arguments", ['{"path": "a', '"Beijing"', '["x"]', "null", ["x"], 7])
def test_arguments_that_are_no_object_are_text_or_rejected_with_their_call(backend: Backend, arguments: Any) -> None:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    reads = "{{ messages[1].tool_calls[0].function.arguments }}"
    assert prompt(backend, answered(arguments), reads) == text
    message = r"^prompt: the arguments of a call .* in the call 'call_7' of 'get_weather' .*send {}"
    with pytest.raises(BadRequest, match=message):
        prompt(backend, answered(arguments), TEMPLATES["qwen coder"])


# Variables of a template


def test_variables_reach_the_template(backend: Backend) -> None:
    template = CHATML + "{% if enable_thinking is defined and enable_thinking is false %}</think>{% endif %}"
    for variables, end in (({}, "<think>"), ({"enable_thinking": False}, "<think></think>")):
        assert prompt(backend, Chat(user("x"), chat_template_kwargs=variables), template).endswith(end)
    documents = [{"title": "t", "text": "moon"}]
    reads = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}{% endfor %}"
    assert prompt(backend, Chat(user("x"), chat_template_kwargs={"documents": documents}), reads) == "t: moon"


def test_tools_reach_the_template(backend: Backend) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert prompt(backend, Chat(user("x"), tools=[tool]), "{{ tools | tojson }}") == json.dumps([tool])


def test_the_error_for_an_unread_variable_lists_the_variables_that_the_template_reads(backend: Backend) -> None:
    template = CHATML + "{{ reasoning_effort }}{% set own = enable_thinking %}{{ own }}{{ bos_token }}"
    with pytest.raises(
        BadRequest,
        match=r"reads bos_token, enable_thinking, reasoning_effort, received 'enable_thinkin' \(did you mean 'ena",
    ):
        prompt(backend, Chat(user("x"), chat_template_kwargs={"enable_thinkin": True}), template)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: messages must not be a variable"),
        ({"chat_template_kwargs": {"__x": 1}}, "chat_template_kwargs: names must be identifiers"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: must be a valid dictionary"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "must not come with add_generation_prompt"),
        ({"continue_final_mesage": True}, "did you mean 'continue_final_message'"),
        ({"tools": [1]}, r"tools.0: must be a valid dictionary"),
    ],
)
def test_an_invalid_chat_option_is_rejected_with_its_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Chat(user("x"), **options)


def test_a_prompt_may_end_after_the_last_message(backend: Backend) -> None:
    ends = prompt(backend, Chat(user("x"), add_generation_prompt=False))
    assert ends == "<|im_start|>user\nx<|im_end|>\n"


@pytest.mark.parametrize(
    ("content", "template"), [("so it is ", CHATML), ("so  it is", CHATML.replace("t }", "t | trim }"))]
)
def test_an_answer_may_continue_the_last_message(backend: Backend, content: str, template: str) -> None:
    chat = [*user("x"), {"role": "assistant", "content": content}]
    expected = f"<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{content}"
    assert prompt(backend, Chat(chat, continue_final_message=True), template) == expected
    parts = [*user("x"), {"role": "assistant", "content": [{"type": "text", "text": content}]}]
    assert prompt(backend, Chat(parts, continue_final_message=True), template) == expected


def test_a_message_that_cannot_be_continued_is_rejected(backend: Backend) -> None:
    calls = [{"role": "assistant", "tool_calls": []}]
    with pytest.raises(BadRequest, match="continue_final_message: the last message must have a text to continue"):
        prompt(backend, Chat(calls, continue_final_message=True))
    with pytest.raises(BadRequest, match="continue_final_message: the chat template leaves out the last message"):
        prompt(backend, Chat(user("x"), continue_final_message=True), "only this")


# Control tokens in texts of users


texts = st.lists(st.sampled_from([*DELIMITERS, "<|im_start|>", "the", "<|im_", "end|>", " ", "\n", "é", MARKS[0]])).map(
    "".join
)


@pytest.fixture(scope="module")
def named(backend: Backend) -> Tokenizer:
    return tokenizer(backend, CHATML.replace("m.role", "m.role + m.name"))


@settings(max_examples=150, deadline=None)
@given(content=texts, name=texts)
def test_no_text_of_a_user_becomes_a_control_token(backend: Backend, named: Tokenizer, content: str, name: str) -> None:
    """The prompt has the text as written, and only the template's control tokens."""
    chat_tokenizer = named
    control = {index for index, token in backend.get_added_tokens_decoder().items()}
    chat = [{"role": "user", "name": name, "content": content}]
    ids = token_ids(chat, chat_tokenizer)
    texts_of_control = [chat_tokenizer.decode([index]) for index in ids if index in control]
    assert texts_of_control == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>"]
    assert chat_tokenizer.decode(ids) == f"<|im_start|>user{name}\n{content}<|im_end|>\n<|im_start|>assistant\n<think>"


def test_control_tokens_of_a_vocabulary_that_is_a_list_become_text_too() -> None:
    """A Unigram model lists its tokens with scores; a control token may be one of them."""
    letters = [("<unk>", 0.0), ("<s>", 0.0), *((letter, -1.0) for letter in "abs<>")]
    backend = Backend(models.Unigram(letters, 0, False))
    backend.add_special_tokens(["<s>"])
    control = ControlText(backend, control_tokens(backend, ()))
    mark = control.mark_for("a<s>")
    assert mark is not None
    ids = control.encode("<s>" + control.mark("a<s>b", mark), mark)
    assert [backend.id_to_token(index) for index in ids] == ["<s>", "a", "<", "s", ">", "b"]


def test_a_chat_without_control_tokens_is_encoded_directly(backend: Backend) -> None:
    chat_tokenizer = tokenizer(backend, CHATML)
    ids = token_ids(user("the <b>text</b>"), chat_tokenizer)
    assert ids == chat_tokenizer.encode(
        chat_tokenizer.apply_chat_template(user("the <b>text</b>")), add_special_tokens=False
    )


def test_texts_become_control_tokens_if_allowed(backend: Backend) -> None:
    chat_tokenizer = tokenizer(backend, CHATML)
    ids = token_ids(Chat(user("<|im_end|>"), allow_control_tokens=True), chat_tokenizer)
    assert ids.count(backend.token_to_id("<|im_end|>")) == 2


def test_tools_and_variables_do_not_become_control_tokens(backend: Backend) -> None:
    chat_tokenizer = tokenizer(backend, "{{ tools | tojson }}{{ documents[0] }}<|im_end|>")
    chat = Chat(user("x"), tools=[{"<think>": "<|im_end|>"}], chat_template_kwargs={"documents": ["<|im_end|>"]})
    ids = token_ids(chat, chat_tokenizer)
    assert ids.count(backend.token_to_id("<|im_end|>")) == 1
    assert chat_tokenizer.decode(ids) == '[{"<think>": "<|im_end|>"}]<|im_end|><|im_end|>'


def tagged(backend: Backend) -> Backend:
    """Return a tokenizer with tags that are not special (Qwen3, DeepSeek) and line breaks as tokens (Gemma)."""
    copy = Backend.from_str(backend.to_str())
    copy.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<tool>", "</tool>", "\n\n", "<table>", "content")]
    )
    return copy


TAGGED = (
    "{% for m in messages %}{{ m.role }}: {% if '</tool>' in m.content %}{{ m.content.split('</tool>')[1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}<tool>"
)


def test_control_tokens_are_special_tokens_and_tags_of_the_template(backend: Backend) -> None:
    """Gemma's line breaks and HTML tags are text."""
    contents = {token.content for token in control_tokens(tagged(backend), [TAGGED]).values()}
    assert contents == {*DELIMITERS, "<|im_start|>", "<tool>", "</tool>"}


def test_a_template_finds_its_tags_in_an_earlier_answer(backend: Backend) -> None:
    chat_tokenizer = tokenizer(tagged(backend), TAGGED)
    chat = [*user("a</tool>b"), {"role": "assistant", "content": "<tool>x</tool>\n\n<table><|im_end|>"}]
    ids = token_ids(chat, chat_tokenizer)
    assert chat_tokenizer.decode(ids) == "user: a</tool>b<|im_end|>assistant: \n\n<table><|im_end|><|im_end|><tool>"
    assert [chat_tokenizer.decode([i]) for i in ids if i >= 262] == [
        "<|im_end|>",
        "\n\n",
        "<table>",
        "<|im_end|>",
        "<tool>",
    ]


def test_escaped_control_tokens_get_no_spaces_around_them(tmp_path: Path) -> None:
    chat_tokenizer = Tokenizer(
        open_tokenizer(llama_like(tmp_path), 4096)[0].backend, {}, {"default": "<s>{{ messages[0].content }}</s>"}
    )
    ids = token_ids(user("the</s>the <s>"), chat_tokenizer, valid_tokens=4096)
    assert (ids[0], ids[-1], set(ids[1:-1]) & {0, 1, 2}) == (1, 2, set())
    assert chat_tokenizer.decode(ids, skip_special_tokens=True) == "the</s>the <s>"


def test_a_lone_surrogate_is_rejected_anywhere(backend: Backend) -> None:
    for chat in (user("\ud800"), Chat(user("x"), tools=[{"\ud800": 1}])):
        with pytest.raises(BadRequest, match="prompt: must be text that UTF-8 can encode"):
            prompt(backend, chat)


# Sources of a template


def test_a_template_may_come_from_a_file(tmp_path: Path) -> None:
    folder, file = tiny_tokenizer(tmp_path / "t"), tmp_path / "mine.jinja"
    file.write_text("mine: {{ messages[0].content }}")
    chat_tokenizer = load_tokenizer(folder, chat_template=str(file))
    assert chat_tokenizer.apply_chat_template(user("x")) == "mine: x"
    with pytest.raises(BadRequest, match=r"chat_template: must be a file with a template, in UTF-8, received .*; give"):
        load_tokenizer(folder, chat_template=str(tmp_path))
    file.write_bytes(b"\xff")
    with pytest.raises(BadRequest, match="chat_template: must be a file with a template, in UTF-8"):
        load_tokenizer(folder, chat_template=str(file))


def test_a_call_without_an_object_is_found_in_any_message() -> None:
    bad: dict[str, Any] = {"function": {"name": "f", "arguments": "no object"}}
    good: dict[str, Any] = {"function": {"name": "f", "arguments": "{}"}}
    for calls in ([[bad], [good]], [[good, bad], []], [[], [good], [bad]]):
        messages = [{"role": "assistant", "content": "", "tool_calls": each} for each in calls]
        assert call_without_object(messages) == bad
    assert call_without_object([{"role": "assistant", "tool_calls": [good]}, {"role": "user"}]) is None
