"""The beginning of a prompt: requests that share it go to the same replica, which then has it in its prefix cache."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

MAX_BEGINNING = 1024  # characters: about four blocks of the KV cache


def beginning(fields: Mapping[str, Any]) -> str:
    """Return a digest of the beginning of the prompt in the ``fields`` of a request's body; "" without a prompt.

    A chat counts up to its first message of a user, so that all turns of a conversation have the same beginning.
    Longer beginnings are cut: requests with the same long system prompt go to one replica, whatever they ask.
    """
    for name in ("messages", "input", "prompt"):
        prompt = fields.get(name)
        if prompt:
            if isinstance(prompt, list):
                roles = [message.get("role") if isinstance(message, dict) else None for message in prompt]
                prompt = prompt[: roles.index("user") + 1 if "user" in roles else None]
            system = fields.get("system") or fields.get("instructions")  # of /v1/messages and /v1/responses
            text = json.dumps([fields.get("model"), system, prompt])[:MAX_BEGINNING]
            return hashlib.sha256(text.encode()).hexdigest()
    return ""
