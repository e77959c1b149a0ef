"""Held-out prompts of the demo in Triton's form."""

import json
from typing import Any

from tools.demo.corpus import Example, held_out

EXAMPLES = held_out(16)


def record_inputs(example: Example, **more: Any) -> dict[str, Any]:
    """The inputs that request an example's record."""
    return {
        "messages": json.dumps(example.prompt_messages()),
        "structured_outputs": json.dumps({"json": example.schema}),
        **more,
    }


def endless(**more: Any) -> dict[str, Any]:
    """The inputs of a request that runs to the maximum length."""
    return {"text_input": "Please send", "ignore_eos": True, "seed": 1, **more}
