"""Which requests count as having the same beginning."""

from typing import Any

from tandemrt.runtime.servers.ray.beginning import MAX_BEGINNING, beginning


def chat(*contents: str, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    return {"messages": messages, **more}


def test_all_turns_of_a_conversation_have_one_beginning() -> None:
    assert beginning(chat("Hi")) == beginning(chat("Hi", "Hello", "More"))
    assert beginning(chat("Hi")) != beginning(chat("Ho"))


def test_a_long_system_prompt_is_the_beginning_whatever_is_asked() -> None:
    system = {"role": "system", "content": "x" * MAX_BEGINNING}
    first, second = ({"messages": [system, {"role": "user", "content": text}]} for text in ("a", "b"))
    assert beginning(first) == beginning(second)
    assert beginning({"system": system["content"], **chat("a")}) == beginning(
        {"system": system["content"], **chat("b")}
    )


def test_prompts_differ_by_their_beginning_and_their_model() -> None:
    assert beginning({"prompt": "x" * MAX_BEGINNING + "a"}) == beginning({"prompt": "x" * MAX_BEGINNING + "b"})
    assert beginning({"prompt": "a"}) != beginning({"prompt": "b"})
    assert beginning({"prompt": "a"}) != beginning({"prompt": "a", "model": "other"})
    assert beginning({"prompt": [1, 2]}) == beginning({"prompt": [1, 2], "seed": 3})
    assert beginning({"input": "a", "instructions": "b"}) != beginning({"input": "a"})


def test_a_body_without_a_prompt_has_no_beginning() -> None:
    assert beginning({}) == beginning({"prompt": ""}) == beginning({"messages": []}) == ""
    assert beginning({"messages": [7, None]}) != ""
