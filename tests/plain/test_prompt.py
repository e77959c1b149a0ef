"""What may be given as a prompt, and what is refused."""

from typing import Any

import pytest
from tokenizers import processors

from tandemrt.engines.errors import BadRequest
from tandemrt.engines.tokenizer import Tokenizer, open_tokenizer
from tandemrt.runtime.requests.prompt import is_batch, token_ids
from tools.demo.models import CHECKPOINTS


def opened(template: str | None = None) -> Tokenizer:
    """The demo's tokenizer, with another chat template if one is given and with none if it is empty."""
    found, _ = open_tokenizer(CHECKPOINTS / "target", 2048)
    if template is None:
        return found
    return Tokenizer(found.backend, found.special_tokens, {"default": template} if template else {})


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return opened()


@pytest.mark.parametrize("prompt", [5, None, 1.5, b"bytes", [True], ["a", 1], {"role": "user"}, iter([1])])
def test_what_is_no_prompt_is_refused_as_a_request(tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(BadRequest, match="must be a text, a list of token ids or a list of chat messages, received"):
        token_ids(prompt, tokenizer, valid_tokens=2000, limit=100)


def test_messages_for_a_tokenizer_without_a_chat_template_are_refused_with_the_way_out() -> None:
    plain = opened(template="")
    with pytest.raises(BadRequest, match=r"must have a chat template .*, and has none; send a text instead"):
        token_ids([{"role": "user", "content": "hello"}], plain, valid_tokens=2000, limit=100)


def test_a_text_gets_the_token_that_begins_a_text_once_and_a_chat_only_what_its_template_writes() -> None:
    tokenizer = opened("<|im_start|>{{ messages[0].content }}")
    [first] = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)]
    )
    plain = tokenizer.encode("hello", add_special_tokens=False)
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        assert token_ids(prompt, tokenizer, valid_tokens=2048, limit=100) == [first, *plain]


def test_a_prompt_may_be_as_long_as_its_limit_and_no_longer(tokenizer: Tokenizer) -> None:
    assert token_ids([1] * 7, tokenizer, valid_tokens=2000, limit=7) == [1] * 7
    with pytest.raises(BadRequest, match="at most 7 tokens leave room for an output, received 8"):
        token_ids([1] * 8, tokenizer, valid_tokens=2000, limit=7)


@pytest.mark.parametrize("prompt", [5, None, "text", [1, 2], [{"role": "user", "content": "x"}], [], iter([1])])
def test_one_prompt_is_no_batch(prompt: Any) -> None:
    assert not is_batch(prompt)


@pytest.mark.parametrize("prompts", [["text"], [[1, 2]], ("a", "b")])
def test_a_list_of_prompts_is_a_batch(prompts: Any) -> None:
    assert is_batch(prompts)


def test_a_prompt_that_is_too_long_is_refused_in_the_bundles_terms(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match=r"at most 100 tokens leave room for an output, received \d{4}"):
        token_ids("hello world " * 600, tokenizer, valid_tokens=2000, limit=100)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ (messages|attr('__class__')).__bases__ }}",
        "{{ '{0.__class__}'.format(messages).x.y }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ messages.append({}) }}",
    ],
)
def test_a_template_that_tries_to_leave_its_sandbox_is_refused(template: str) -> None:
    with pytest.raises(BadRequest, match="the chat template refused the messages"):
        token_ids([{"role": "user", "content": "x"}], opened(template), valid_tokens=10**6, limit=10**6)


def test_a_tokenizer_that_begins_texts_with_a_token_begins_each_prompt_with_one() -> None:
    """A raw text gets it from the tokenizer, messages from the template, and neither gets two."""
    begin = opened().special_tokens["eos_token"]
    tokenizer = opened(begin + "{% for m in messages %}{{ m.content }}{% endfor %}")
    special = [(begin, tokenizer.token_to_id(begin))]
    tokenizer.backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        assert token_ids(prompt, tokenizer, valid_tokens=2048, limit=100) == [special[0][1], *plain]
