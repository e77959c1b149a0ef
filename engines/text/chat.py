"""Options of a chat in addition to its messages, with the names of vLLM and transformers.

``Chat`` of the Python API, the request fields of the OpenAI server and the inputs of a served model derive from it.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, ValidationError, model_validator

from tandemrt.engines.validation.errors import BadRequest, quoted
from tandemrt.engines.validation.records import Section, explain, reject

OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template")


def _variables(value: Any) -> Any:
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
                raise reject(f"names must be identifiers without a leading underscore; got {quoted(name)}. Rename it")
            if name in OWN:
                raise reject(f"{name} must not be a variable of the template; leave it out, or pass it as an option")
    return value


class ChatOptions(Section):
    """How messages are rendered to a prompt.

    Attributes:
        tools: the functions that the model may call, in OpenAI's format; a template may ignore them.
        chat_template_kwargs: variables of the chat template (enable_thinking, reasoning_effort, documents, ...); one
            that the template does not read is rejected (the OpenAI server ignores it).
        add_generation_prompt: whether the prompt ends with the start of an answer; None: yes, unless
            continue_final_message.
        continue_final_message: the prompt ends inside the last message, and the answer continues its text.
        allow_control_tokens: whether text such as ``<|im_end|>`` in a message becomes that token; else it is text.
    """

    tools: tuple[dict[str, Any], ...] = Field(default=(), strict=False)
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(_variables)] = Field(default_factory=dict)
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool = False
    allow_control_tokens: StrictBool = False

    def __init__(self, **data: Any) -> None:
        try:
            super().__init__(**data)
        except ValidationError as error:
            raise BadRequest(explain(error)) from error

    @property
    def generation_prompt(self) -> bool:
        """``add_generation_prompt`` with its default resolved."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @model_validator(mode="after")
    def _one_end(self) -> "ChatOptions":
        if self.continue_final_message and self.add_generation_prompt:
            raise reject(
                "continue_final_message must not come with add_generation_prompt true: a prompt ends inside the last "
                "message, or with the start of another; leave one out"
            )
        return self
