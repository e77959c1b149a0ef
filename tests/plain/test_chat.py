"""Chats: what a template is told, whatever form messages come in, and that no text of a user is a control token."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tandemrt import Chat
from tandemrt.engines.control_tokens import MARKS, control_tokens
from tandemrt.engines.errors import BadRequest
from tandemrt.engines.tokenizer import Tokenizer, open_tokenizer
from tandemrt.runtime.processes.pool import ProcessPool
from tandemrt.runtime.requests.prompt import PromptReader
from tests.makers import MARKERS, VOCAB, tiny_tokenizer
from tests.plain.test_tokenizer_parity import llama_like

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


def token_ids(chat: Any, made: Tokenizer, *, valid_tokens: int = VOCAB) -> list[int]:
    """The prompt of a chat. No process starts: these templates are quick, these texts short."""
    pool = ProcessPool(processes=1)
    reader = PromptReader(made, valid_tokens=valid_tokens, limit=10**6, most_bytes=10**5, processes=pool, timeout_s=9)
    return reader.read(chat)


def prompt(backend: Backend, chat: Any, template: str = CHATML) -> str:
    """What the prompt of a chat decodes to."""
    made = tokenizer(backend, template)
    return made.decode(token_ids(chat, made))


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# Forms of messages.


def test_parts_of_text_are_joined_before_a_template_could_print_a_python_list(backend: Backend) -> None:
    """D3."""
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert prompt(backend, user(parts)) == prompt(backend, user("one two"))


@pytest.mark.parametrize(
    "part", [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "text", {"type": "text", "text": 1}]
)
def test_a_part_that_is_no_text_is_refused_by_its_place(backend: Backend, part: Any) -> None:
    with pytest.raises(BadRequest, match=r"messages\.0\.content\.1: must be a part of type text, .* reads text"):
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
def test_a_template_gets_the_arguments_of_a_call_as_it_wants_them(
    backend: Backend, template: str, expected: str, arguments: Any
) -> None:
    reads = "{% set arguments = messages[1].tool_calls[0].function.arguments %}" + template
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    chat = [*user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert prompt(backend, chat, reads) == expected


@pytest.mark.parametrize("arguments", ["{broken", "[1]", "", "7"])
def test_arguments_that_are_no_json_object_stay_what_the_model_wrote(backend: Backend, arguments: str) -> None:
    chat = [*user("x"), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": arguments}]}]
    assert prompt(backend, chat, "[{{ messages[1].tool_calls[0].arguments }}]") == f"[{arguments}]"


# What a template is told.


def test_variables_reach_the_template(backend: Backend) -> None:
    """D4."""
    template = CHATML + "{% if enable_thinking is defined and enable_thinking is false %}</think>{% endif %}"
    for variables, end in (({}, "<think>"), ({"enable_thinking": False}, "<think></think>")):
        assert prompt(backend, Chat(user("x"), chat_template_kwargs=variables), template).endswith(end)
    documents = [{"title": "t", "text": "moon"}]
    reads = "{% for d in documents or [] %}{{ d.title }}: {{ d.text }}{% endfor %}"
    assert prompt(backend, Chat(user("x"), chat_template_kwargs={"documents": documents}), reads) == "t: moon"


def test_tools_reach_the_template(backend: Backend) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert prompt(backend, Chat(user("x"), tools=[tool]), "{{ tools | tojson }}") == json.dumps([tool])


def test_a_variable_that_the_template_does_not_read_is_refused_with_those_it_reads(backend: Backend) -> None:
    template = CHATML + "{{ reasoning_effort }}{% set own = enable_thinking %}{{ own }}{{ bos_token }}"
    with pytest.raises(
        BadRequest,
        match=r"reads bos_token, enable_thinking, reasoning_effort, received 'enable_thinkin' \(did you mean 'ena",
    ):
        prompt(backend, Chat(user("x"), chat_template_kwargs={"enable_thinkin": True}), template)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: messages is no variable for a template"),
        ({"chat_template_kwargs": {"__x": 1}}, "chat_template_kwargs: a variable of a template must have a name"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs: must be a valid dictionary"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "must not come with add_generation_prompt"),
        ({"continue_final_mesage": True}, "did you mean 'continue_final_message'"),
        ({"tools": [1]}, r"tools.0: must be a valid dictionary"),
    ],
)
def test_what_cannot_be_said_of_a_chat_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        Chat(user("x"), **options)


def test_a_prompt_may_end_behind_the_last_message(backend: Backend) -> None:
    ends = prompt(backend, Chat(user("x"), add_generation_prompt=False))
    assert ends == "<|im_start|>user\nx<|im_end|>\n"


@pytest.mark.parametrize(
    ("content", "template"), [("so it is ", CHATML), ("so  it is", CHATML.replace("t }", "t | trim }"))]
)
def test_an_answer_goes_on_with_the_last_message(backend: Backend, content: str, template: str) -> None:
    chat = [*user("x"), {"role": "assistant", "content": content}]
    expected = f"<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n{content}"
    assert prompt(backend, Chat(chat, continue_final_message=True), template) == expected
    parts = [*user("x"), {"role": "assistant", "content": [{"type": "text", "text": content}]}]
    assert prompt(backend, Chat(parts, continue_final_message=True), template) == expected


def test_what_cannot_be_continued_is_refused(backend: Backend) -> None:
    calls = [{"role": "assistant", "tool_calls": []}]
    with pytest.raises(BadRequest, match="continue_final_message: the last message must have a text to go on with"):
        prompt(backend, Chat(calls, continue_final_message=True))
    with pytest.raises(BadRequest, match="continue_final_message: the chat template leaves out the last message"):
        prompt(backend, Chat(user("x"), continue_final_message=True), "only this")


# Texts of users.


texts = st.lists(st.sampled_from([*MARKERS, "<|im_start|>", "the", "<|im_", "end|>", " ", "\n", "é", MARKS[0]])).map(
    "".join
)


@pytest.fixture(scope="module")
def named(backend: Backend) -> Tokenizer:
    return tokenizer(backend, CHATML.replace("m.role", "m.role + m.name"))


@settings(max_examples=150, deadline=None)
@given(content=texts, name=texts)
def test_no_text_of_a_user_becomes_a_control_token(backend: Backend, named: Tokenizer, content: str, name: str) -> None:
    """Whatever it spells: the prompt reads as written, and its control tokens are those that the template writes."""
    made = named
    control = {index for index, token in backend.get_added_tokens_decoder().items()}
    chat = [{"role": "user", "name": name, "content": content}]
    found = token_ids(chat, made)
    spelled = [made.decode([index]) for index in found if index in control]
    assert spelled == ["<|im_start|>", "<|im_end|>", "<|im_start|>", "<think>"]
    assert made.decode(found) == f"<|im_start|>user{name}\n{content}<|im_end|>\n<|im_start|>assistant\n<think>"


def test_a_chat_without_control_tokens_is_encoded_as_it_always_was(backend: Backend) -> None:
    made = tokenizer(backend, CHATML)
    found = token_ids(user("the <b>text</b>"), made)
    assert found == made.encode(made.apply_chat_template(user("the <b>text</b>")), add_special_tokens=False)


def test_texts_become_control_tokens_where_that_is_allowed(backend: Backend) -> None:
    made = tokenizer(backend, CHATML)
    found = token_ids(Chat(user("<|im_end|>"), allow_control_tokens=True), made)
    assert found.count(backend.token_to_id("<|im_end|>")) == 2


def test_tools_and_variables_are_texts_of_users_too(backend: Backend) -> None:
    made = tokenizer(backend, "{{ tools | tojson }}{{ documents[0] }}<|im_end|>")
    chat = Chat(user("x"), tools=[{"<think>": "<|im_end|>"}], chat_template_kwargs={"documents": ["<|im_end|>"]})
    found = token_ids(chat, made)
    assert found.count(backend.token_to_id("<|im_end|>")) == 1
    assert made.decode(found) == '[{"<think>": "<|im_end|>"}]<|im_end|><|im_end|>'


def tagged(backend: Backend) -> Backend:
    """With tags that are not called special, as Qwen3 and DeepSeek have them, and line breaks, as Gemma has them."""
    made = Backend.from_str(backend.to_str())
    made.add_tokens(
        [AddedToken(text, normalized=False) for text in ("<tool>", "</tool>", "\n\n", "<table>", "content")]
    )
    return made


TAGGED = (
    "{% for m in messages %}{{ m.role }}: {% if '</tool>' in m.content %}{{ m.content.split('</tool>')[1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}<tool>"
)


def test_control_tokens_are_special_ones_and_the_tags_that_a_template_writes(backend: Backend) -> None:
    """D9: Gemma's line breaks and HTML tags are text."""
    found = {token.content for token in control_tokens(tagged(backend), [TAGGED]).values()}
    assert found == {*MARKERS, "<|im_start|>", "<tool>", "</tool>"}


def test_a_template_finds_its_tags_in_an_answer_that_is_sent_back(backend: Backend) -> None:
    made = tokenizer(tagged(backend), TAGGED)
    chat = [*user("a</tool>b"), {"role": "assistant", "content": "<tool>x</tool>\n\n<table><|im_end|>"}]
    found = token_ids(chat, made)
    assert made.decode(found) == "user: a</tool>b<|im_end|>assistant: \n\n<table><|im_end|><|im_end|><tool>"
    assert [made.decode([i]) for i in found if i >= 262] == ["<|im_end|>", "\n\n", "<table>", "<|im_end|>", "<tool>"]


def test_a_tokenizer_that_writes_spaces_its_own_way_adds_none_around_such_a_text(tmp_path: Path) -> None:
    made = Tokenizer(
        open_tokenizer(llama_like(tmp_path), 4096)[0].backend, {}, {"default": "<s>{{ messages[0].content }}</s>"}
    )
    found = token_ids(user("the</s>the <s>"), made, valid_tokens=4096)
    assert (found[0], found[-1], set(found[1:-1]) & {0, 1, 2}) == (1, 2, set())
    assert made.decode(found, skip_special_tokens=True) == "the</s>the <s>"


def test_half_a_surrogate_pair_is_refused_wherever_it_stands(backend: Backend) -> None:
    for chat in (user("\ud800"), Chat(user("x"), tools=[{"\ud800": 1}])):
        with pytest.raises(BadRequest, match="prompt: must be text that UTF-8 can spell"):
            prompt(backend, chat)


# The template itself.


def test_a_template_may_come_from_a_file(tmp_path: Path) -> None:
    folder, file = tiny_tokenizer(tmp_path / "t"), tmp_path / "mine.jinja"
    file.write_text("mine: {{ messages[0].content }}")
    made, _ = open_tokenizer(folder, VOCAB, chat_template=str(file))
    assert made.apply_chat_template(user("x")) == "mine: x"
    with pytest.raises(BadRequest, match=r"chat_template: must be a file with a template, in UTF-8, received .*; name"):
        open_tokenizer(folder, VOCAB, chat_template=str(tmp_path))
