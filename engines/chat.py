"""What may be said of a chat beside its messages, named as vLLM and transformers name it: one definition for all faces.

``Chat`` of the Python API, the fields of a request of OpenAI's clients and the inputs of a served model derive from it.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, StrictBool, ValidationError, model_validator

from tandemrt.engines.errors import BadRequest, quoted
from tandemrt.engines.validation import Section, explain, refuse

OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize", "chat_template")


def _variables(value: Any) -> Any:
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
                raise refuse(f"a variable of a template must have a name of letters and digits; got {quoted(name)}")
            if name in OWN:
                raise refuse(f"{name} is no variable for a template; leave it out, or give it as an option of its own")
    return value


class ChatOptions(Section):
    """How messages become a prompt.

    Attributes:
        tools: the functions that the model may call, as OpenAI's clients describe them; a template may ignore them.
        chat_template_kwargs: variables of the chat template (enable_thinking, reasoning_effort, documents, ...); one
            that it does not read is refused.
        add_generation_prompt: whether the prompt ends with what begins an answer; None: unless the last message is
            continued.
        continue_final_message: the prompt ends in the last message, and the answer goes on with its text.
        allow_control_tokens: whether a text such as ``<|im_end|>`` in a message becomes that token; else it is text.
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
        """``add_generation_prompt``, decided."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    @model_validator(mode="after")
    def _one_end(self) -> "ChatOptions":
        if self.continue_final_message and self.add_generation_prompt:
            raise refuse(
                "continue_final_message must not come with add_generation_prompt true: the prompt ends in the last "
                "message, or with what begins another; leave one out"
            )
        return self
