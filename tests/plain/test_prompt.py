"""What may be given as a prompt, and what is refused."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from typing import Any, cast

import pytest
from tokenizers import processors

from tandemrt.engines.text.tokenizer import Tokenizer, open_tokenizer
from tandemrt.engines.validation.errors import BadRequest, Closed, ContextLengthExceeded, QueueFull
from tandemrt.runtime.requests import prompt as prompts
from tandemrt.runtime.requests.prompt import Chat, Prompt, PromptReader, is_batch, prompt_processes
from tandemrt.runtime.workers.clients import UNNAMED, Client
from tandemrt.runtime.workers.fair import FairExecutor
from tandemrt.runtime.workers.sandbox.lanes import ProcessLanes
from tests.waiting import PATIENCE_S
from tools.demo.models import CHECKPOINTS


def opened(template: str | None = None) -> Tokenizer:
    """The demo's tokenizer, with another chat template if one is given and with none if it is empty."""
    demo_tokenizer, _ = open_tokenizer(CHECKPOINTS / "target", 2048)
    if template is None:
        return demo_tokenizer
    return Tokenizer(demo_tokenizer.backend, demo_tokenizer.special_tokens, {"default": template} if template else {})


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessLanes]:
    """One worker process, which the first call starts."""
    pool = ProcessLanes(processes=1)
    yield pool
    pool.close()


@pytest.fixture
def token_ids(processes: ProcessLanes) -> Callable[..., list[int]]:
    """Read one prompt."""

    def read(
        prompt: Prompt,
        tokenizer: Tokenizer,
        deadline: float | None = None,
        client: Client = UNNAMED,
        **options: Any,
    ) -> list[int]:
        defaults = {"valid_tokens": 2048, "limit": 100, "max_bytes": 8192, "timeout_s": PATIENCE_S}
        reader = PromptReader(tokenizer, **defaults | {"processes": processes} | options)
        return reader.read(prompt, deadline, client)[0]

    return read


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return opened()


@pytest.mark.parametrize("prompt", [5, None, 1.5, b"bytes", [True], ["a", 1], {"role": "user"}, iter([1])])
def test_other_values_than_prompts_are_refused_as_a_request(token_ids, tokenizer: Tokenizer, prompt: Any) -> None:
    with pytest.raises(BadRequest, match="must be a text, a list of token ids or a list of chat messages, received"):
        token_ids(prompt, tokenizer)


@pytest.mark.parametrize("text", ["\ud83d", "a\ude00b"])
def test_a_lone_surrogate_is_refused_with_its_place(token_ids, tokenizer: Tokenizer, text: str) -> None:
    place = f"received {text.strip('ab')!r} at character {text.find(text.strip('ab'))}"
    with pytest.raises(BadRequest, match=re.escape(f"prompt: must be text that UTF-8 can encode, {place}")):
        token_ids(text, tokenizer)


def test_messages_for_a_tokenizer_without_a_chat_template_are_refused_with_the_way_out(token_ids) -> None:
    plain = opened(template="")
    with pytest.raises(BadRequest, match=r"must have a chat template .*, and has none; send a text instead"):
        token_ids([{"role": "user", "content": "hello"}], plain)


def test_a_text_gets_the_token_that_begins_a_text_once_and_a_chat_only_what_its_template_writes(token_ids) -> None:
    tokenizer = opened("<|im_start|>{{ messages[0].content }}")
    [first] = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)]
    )
    plain = tokenizer.encode("hello", add_special_tokens=False)
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        assert token_ids(prompt, tokenizer) == [first, *plain]


def test_a_prompt_may_be_as_long_as_its_limit_and_no_longer(token_ids, tokenizer: Tokenizer) -> None:
    assert token_ids([1] * 7, tokenizer, limit=7) == [1] * 7
    with pytest.raises(BadRequest, match="at most 7 tokens leave room for an output, and 8 were received"):
        token_ids([1] * 8, tokenizer, limit=7)


def test_the_first_and_the_last_token_id_may_be_in_a_prompt(token_ids, tokenizer: Tokenizer) -> None:
    assert token_ids([0, 2047], tokenizer) == [0, 2047]
    for outside in (-1, 2048):
        with pytest.raises(BadRequest, match=rf"token ids must be in 0\.\.2047, received {outside}"):
            token_ids([0, outside], tokenizer)


def test_a_text_may_be_as_many_tokens_as_its_limit_and_no_more(token_ids, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("some words that are a prompt")
    assert token_ids("some words that are a prompt", tokenizer, limit=len(ids)) == ids
    with pytest.raises(BadRequest, match=f"at most {len(ids) - 1} tokens leave room for an output"):
        token_ids("some words that are a prompt", tokenizer, limit=len(ids) - 1)


@pytest.mark.parametrize("prompt", [5, None, "text", [1, 2], [{"role": "user", "content": "x"}], [], iter([1])])
def test_one_prompt_is_no_batch(prompt: Any) -> None:
    assert not is_batch(prompt)


@pytest.mark.parametrize("prompts", [["text"], [[1, 2]], ("a", "b")])
def test_a_list_of_prompts_is_a_batch(prompts: Any) -> None:
    assert is_batch(prompts)


def test_a_prompt_that_is_too_long_is_refused_in_the_bundles_terms(token_ids, tokenizer: Tokenizer) -> None:
    message = r"at most 100 tokens leave room for an output, and \d{4} were received"
    with pytest.raises(ContextLengthExceeded, match=message) as caught:
        token_ids("hello world " * 600, tokenizer)
    assert caught.value.length == 101
    assert caught.value.prompt_tokens == len(tokenizer.encode("hello world " * 600))
    with pytest.raises(ContextLengthExceeded) as caught:
        token_ids("hello world " * 600, tokenizer, max_bytes=50)
    assert caught.value.length == 101
    assert caught.value.prompt_tokens >= 101, "a text that is not tokenized is too long all the same"


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
def test_a_template_that_tries_to_leave_its_sandbox_is_refused(token_ids, template: str) -> None:
    with pytest.raises(BadRequest, match="the chat template refused the messages"):
        token_ids([{"role": "user", "content": "x"}], opened(template), limit=10**6)


def test_a_tokenizer_that_begins_texts_with_a_token_begins_each_prompt_with_one(token_ids) -> None:
    """A raw text gets it from the tokenizer, messages from the template, and neither gets two."""
    begin = opened().special_tokens["eos_token"]
    tokenizer = opened(begin + "{% for m in messages %}{{ m.content }}{% endfor %}")
    special = [(begin, tokenizer.token_to_id(begin))]
    tokenizer.backend.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=special)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        assert token_ids(prompt, tokenizer) == [special[0][1], *plain]


CACHED = "__import__('tandemrt.engines.text.tokenizer', fromlist=['reopened']).reopened.cache_info().currsize"
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
ASKED = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else '' }}{% endmacro %}{{ f(40) }}",
        "{{ 10**(10**8) }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(token_ids, template: str) -> None:
    with pytest.raises(BadRequest, match=r"prompt: the chat template took longer than 0\.3 s; simplify it"):
        token_ids(ASKED, opened(template), timeout_s=0.3)


@pytest.mark.parametrize("template", ["{{ 'a' * 10**10 }}", "{{ 'a'.ljust(10**10) }}", "{{ 'a'|center(10**10) }}"])
def test_a_template_that_takes_too_much_memory_is_refused(token_ids, template: str) -> None:
    with pytest.raises(BadRequest, match="the chat template took more memory than a worker process may use"):
        token_ids(ASKED, opened(template))


def test_a_template_has_no_longer_than_the_request(token_ids) -> None:
    with pytest.raises(BadRequest, match=r"the chat template (took longer than 0\.\d+ s|did not (begin|end) before)"):
        token_ids(ASKED, opened("{{ 10**(10**8) }}"), time.monotonic() + 0.3)


def test_the_wait_for_a_process_is_limited_without_a_deadline(token_ids, processes: ProcessLanes) -> None:
    tokenizer = opened("{{ 10**(10**8) }}")
    slow = processes.submit(Client("a"), "another prompt", PATIENCE_S, time.sleep, 3.0)
    with pytest.raises(QueueFull, match="the chat template had to wait too long for other requests; try later"):
        token_ids(ASKED, tokenizer, timeout_s=0.3)
    assert slow.result(PATIENCE_S) is None


def test_slow_templates_of_two_clients_delay_a_third_one_for_a_moment_only(token_ids, tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(prompts, "QUICK_BYTES", 10)
    slow, readers = opened("{{ 10**(10**8) }}"), FairExecutor(3, "test")
    with closing(prompt_processes(tokenizer)) as processes:

        def read(client: Client, prompt: Prompt, tokenizer: Tokenizer) -> "Future[list[int]]":
            return readers.submit(client, lambda: token_ids(prompt, tokenizer, client=client, processes=processes))

        waiting = [read(Client(name), ASKED, slow) for name in "aaabbb"]
        text = "hello world " * 9
        for name in "cd":
            assert read(Client(name), text, tokenizer).result(PATIENCE_S) == tokenizer.encode(text)
        assert not any(task.done() for task in waiting)
    readers.shutdown(wait=True)
    assert {type(task.exception()) for task in waiting} == {Closed}


def test_a_tokenizer_is_opened_before_the_time_of_a_quick_task_begins(tokenizer: Tokenizer) -> None:
    with closing(prompt_processes(tokenizer, processes=1)) as processes:
        cached = processes.submit(UNNAMED, "work", PATIENCE_S, eval, CACHED).result(PATIENCE_S)
    assert cached == 1


def test_long_prompts_get_the_same_tokens_as_short_ones(token_ids, tokenizer, monkeypatch) -> None:
    text = "hello world " * 9
    quick = [token_ids(text, tokenizer), token_ids(ASKED, opened("{{ messages[0].content.upper() }}"))]
    monkeypatch.setattr(prompts, "QUICK_BYTES", 10)
    slow = [token_ids(text, tokenizer), token_ids(ASKED, opened("{{ '%s'|format(messages[0].content.upper()) }}"))]
    assert slow == quick


def test_a_long_text_of_a_user_becomes_no_control_token_either(token_ids, tokenizer, monkeypatch) -> None:
    chat = [{"role": "user", "content": "hello <|im_end|> </think>" * 3}]
    quick = token_ids(chat, tokenizer)
    assert quick.count(tokenizer.token_to_id("<|im_end|>")) == 1
    monkeypatch.setattr(prompts, "QUICK_BYTES", 10)
    assert token_ids(chat, tokenizer) == quick


def test_the_error_of_a_slow_template_is_reported(token_ids) -> None:
    with pytest.raises(BadRequest, match=r"the chat template refused the messages: no 5{10}; received \[\{'role"):
        token_ids(ASKED, opened("{{ raise_exception('no ' ~ '5' * 10) }}"))


@pytest.mark.parametrize(
    ("prompt", "rule"),
    [
        ("x" * 8193, r"at most 8192 bytes of text may become tokens \(max_prompt_bytes\), and at least 8193"),
        ("é" * 5000, "at least 10000 that begin 'ééé"),
        ([1] * 10**6, "at most 100 tokens leave room for an output, and 1000000 were received"),
        ([{"role": "user", "content": "x" * 33_000}], r"messages and tools hold more than 32768 characters \(4 times"),
        ([{"role": "user", "content": "x"}] * 2000, "hold more than 32768 characters"),
        (
            Chat(ASKED, tools=[{"type": "function", "x": ["y" * 40] * 1000}]),
            "messages and tools hold more than 32768",
        ),
        ([{"role": "user", "content": CYCLE}], "messages and tools hold more than 32768 characters"),
        ([*ASKED, 5], "every message must be an object, received"),
    ],
    ids=["text", "bytes", "ids", "message", "messages", "tools", "cycle", "mixed"],
)
def test_a_prompt_that_is_too_large_is_refused_before_it_is_read(prompt: Any, rule: str) -> None:
    reader = PromptReader(
        cast("Tokenizer", None),
        valid_tokens=9,
        limit=100,
        max_bytes=8192,
        processes=cast("ProcessLanes", None),
        timeout_s=1.0,
    )
    with pytest.raises(BadRequest, match=rule):
        reader.read(prompt)
