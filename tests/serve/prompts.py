"""Held-out sentences of the demo, as the server takes them."""

import json
from typing import Any

from tools.demo.corpus import Example, held_out

EXAMPLES = held_out(16)


def asking(example: Example, **more: Any) -> dict[str, Any]:
    """The inputs that ask for an example's record."""
    return {
        "messages": json.dumps(example.prompt_messages()),
        "structured_outputs": json.dumps({"json": example.schema}),
        **more,
    }


def endless(**more: Any) -> dict[str, Any]:
    """The inputs of a request that runs to the engine's length."""
    return {"text_input": "Please send", "ignore_eos": True, "seed": 1, **more}
