"""Names of fields in errors: the client's name where the runtime has another one."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

from tandemrt.engines.validation.errors import BadRequest

VARIABLES = ("reasoning_effort", "documents")  # fields of a chat that are variables of its template
FIELD = re.compile(r"^([A-Za-z_][\w.]*)(?=: )", re.MULTILINE)  # at the start of a message, or of a line of it


def chat_field_names(body: Mapping[str, Any]) -> dict[str, str]:
    """Return the fields of a chat's ``body`` by the runtime's names for what they contain."""
    sent = {name for name, value in body.items() if value is not None}
    names = {"prompt": "messages"}
    if "max_completion_tokens" in sent and "max_tokens" not in sent:
        names["max_tokens"] = "max_completion_tokens"
    if "top_logprobs" in sent:
        names["logprobs"] = "top_logprobs"
    variables = [name for name in VARIABLES if name in sent]
    if len(variables) == 1 and "chat_template_kwargs" not in sent:
        names["chat_template_kwargs"] = variables[0]
    if "structured_outputs" in sent:
        return names
    if "response_format" in sent and body["response_format"] != {"type": "text"}:
        names["structured_outputs"] = "response_format"
    elif "tools" in sent:
        names["structured_outputs"] = "tools"
    return names


def with_client_names(error: BadRequest, names: Mapping[str, str]) -> BadRequest:
    """Return ``error`` with its fields renamed by ``names``."""
    text = renamed(str(error), names)
    if text == str(error):
        return error
    error = copy(error)
    error.args = (text,)
    return error


def renamed(message: str, names: Mapping[str, str]) -> str:
    """Return ``message`` with its fields renamed by ``names``. A name also stands for the fields inside it."""
    return FIELD.sub(lambda match: names.get(match[1].partition(".")[0], match[1]), message)


@contextmanager
def client_names(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields of a BadRequest that the block raises."""
    try:
        yield
    except BadRequest as error:
        if renamed(str(error), names) == str(error):
            raise
        raise with_client_names(error, names) from error
