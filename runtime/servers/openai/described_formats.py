"""Formats of tool calls that a prompt describes, because its template leaves calls out or writes them otherwise."""

from dataclasses import replace

from tandemrt.runtime.servers.openai.tool_call_format import ToolCallFormat

_HARMONY = ToolCallFormat("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>", "", groups=False)
_AFTER_REASONING = "<|end|><|start|>assistant"

_FORMATS = (
    (  # Granite 3
        "<|tool_call|> followed by a JSON list",
        ToolCallFormat('<|tool_call|>[{"name": "', '", "arguments": ', "}]", between='}, {"name": "', groups=False),
    ),
    (  # LFM2
        "<|tool_list_start|>",
        ToolCallFormat(
            "<|tool_call_start|>[",
            "(",
            ")]<|tool_call_end|>",
            between="), ",
            groups=False,
            style="python_arguments",
        ),
    ),
    (  # gpt-oss: the stop token follows a call; the recipient comes after the channel or before it
        "Calls to these tools must go to the commentary channel",
        replace(
            _HARMONY,
            variants=(
                replace(_HARMONY, first=_AFTER_REASONING + _HARMONY.first),
                replace(
                    _HARMONY,
                    first=_AFTER_REASONING + " to=functions.",
                    opening="<|channel|>commentary json<|message|>",
                ),
            ),
        ),
    ),
)


def described_format(prompt: str) -> ToolCallFormat | None:
    """Return the format that a prompt with tools describes, if it is a known one."""
    return next((call_format for words, call_format in _FORMATS if words in prompt), None)
