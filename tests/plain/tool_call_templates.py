"""Minimal chat templates that write tool calls in the formats of published models."""

from tandemrt.runtime.servers.openai.tool_call_format import ToolCallFormat
from tandemrt.runtime.servers.openai.tool_call_probe import detect_format

_CHAT = """\
{%- if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\n' + message.content }}
{%- if message.tool_calls %}CALLS{% endif %}
{{- '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def _chat(call: str, separator: str = "", begin: str = "", end: str = "") -> str:
    """Return a template that writes ``call`` for each call, with ``name`` and ``arguments`` of the function."""
    text = "{{- " + repr(begin) + " }}{% for call in message.tool_calls %}"
    text += "{%- set name, arguments = call.function.name, call.function.arguments %}" + call
    text += "{%- if not loop.last %}{{- " + repr(separator) + " }}{% endif %}{% endfor %}{{- " + repr(end) + " }}"
    return _CHAT.replace("CALLS", text)


def _fields(before: str, between: str, after: str) -> str:
    return (
        "{%- for key, value in arguments.items() %}{{- "
        f"{before!r} + key + {between!r} + (value if value is string else value | tojson) + {after!r}"
        " }}{% endfor %}"
    )


def _object(arguments: str = "arguments", end: str = "}") -> str:
    return f"""'{{"name": "' + name + '", "{arguments}": ' + (arguments | tojson) + '{end}'"""


# A value as Gemma 4 writes it: strings in a quote of its own, names without quotes and sorted.
_GEMMA = """\
{%- macro written(value) -%}
{%- if value is string %}{{- '<|"|>' + value + '<|"|>' }}
{%- elif value is mapping -%}
{{- '{' }}{% for key in value | dictsort %}{{- key[0] + ':' + written(key[1]) }}{{- ',' if not loop.last }}{% endfor %}
{{- '}' }}
{%- elif value is iterable -%}
{{- '[' }}{% for each in value %}{{- written(each) }}{{- ',' if not loop.last }}{% endfor %}{{- ']' }}
{%- else %}{{- value | tojson }}{% endif -%}
{%- endmacro -%}
"""


def _pythonic(call: str, value: str) -> str:
    pairs = (
        "{% for key, value in arguments.items() %}{{- key + '=' + " + value + " + (', ' if not loop.last else '') }}"
    )
    return _chat("{{- name + '(' }}" + pairs + "{% endfor %}{{- ')' }}", ", ", f"{call}[", "]")


TEMPLATES = {
    "hermes": _chat(
        "{{- '<tool_call>\\n' + " + _object() + " + '\\n</tool_call>' }}",
        "\n",
        "\n",
    ),
    "llama": _chat("{{- " + _object("parameters") + " }}").replace(
        "{% for call", "{% if message.tool_calls | length > 1 %}{{ raise_exception('one') }}{% endif %}{% for call"
    ),
    "mistral list": _chat(
        "{{- " + _object(end=', "id": "\' + call.id + \'"}') + " }}",
        ", ",
        "[TOOL_CALLS][",
        "]",
    ),
    "mistral": _chat("{{- '[TOOL_CALLS]' + name + '[ARGS]' + (arguments | tojson) }}"),
    "mistral with ids": _chat("{{- '[TOOL_CALLS]' + name + '[CALL_ID]' + call.id + '[ARGS]' + (arguments | tojson) }}"),
    "qwen coder": _chat(
        "{{- '<tool_call>\\n<function=' + name + '>' }}"
        + _fields("\n<parameter=", ">\n", "\n</parameter>")
        + "{{- '\\n</function>\\n</tool_call>' }}",
        "\n",
        "\n",
    ),
    "qwen coder with line breaks": _chat(
        "{{- '<tool_call>\\n<function=' + name + '>\\n' }}"
        + _fields("<parameter=", ">\n", "\n</parameter>\n")
        + "{{- '</function>\\n</tool_call>' }}",
        "\n",
        "\n",
    ),
    "glm": _chat(
        "{{- '\\n<tool_call>' + name }}"
        + _fields("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
        + "{{- '\\n</tool_call>' }}"
    ),
    "minimax": _chat(
        "{{- '<invoke name=\"' + name + '\">' }}"
        + _fields('\n<parameter name="', '">', "</parameter>")
        + "{{- '\\n</invoke>\\n' }}",
        "",
        "<minimax:tool_call>\n",
        "</minimax:tool_call>",
    ),
    "typed": _chat(
        "{{- '<invoke name=\"' + name + '\">\\n' }}{%- for key, value in arguments.items() %}"
        "{{- '<parameter name=\"' + key + '\" string=\"' + ('true' if value is string else 'false') + '\">' }}"
        "{{- (value if value is string else value | tojson) + '</parameter>\\n' }}{% endfor %}{{- '</invoke>\\n' }}",
        "",
        "<function_calls>\n",
        "</function_calls>",
    ),
    "kimi": _chat(
        "{{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}"
        "{{- (arguments | tojson) + '<|tool_call_end|>' }}",
        "",
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
    ),
    "deepseek v3": _chat(
        "{{- '<|tool_call_begin|>function<|tool_sep|>' + name + '\\n```json\\n' + arguments"
        " + '\\n```<|tool_call_end|>' }}",
        "\n",
        "<|tool_calls_begin|>",
        "<|tool_calls_end|>",
    ),
    "deepseek v3.1": _chat(
        "{{- '<|tool_call_begin|>' + name + '<|tool_sep|>' + (arguments | tojson) + '<|tool_call_end|>' }}",
        "",
        "<|tool_calls_begin|>",
        "<|tool_calls_end|>",
    ),
    "cohere": _chat(
        '{{- \'\\n    {"tool_call_id": "\' + loop.index0 | string + \'", "tool_name": "\' + name'
        " + '\", \"parameters\": ' + (arguments | tojson) + '}' }}",
        ",",
        "<|START_ACTION|>[",
        "\n]<|END_ACTION|>",
    ),
    "apriel": _chat(
        "{{- " + _object() + " }}",
        ", ",
        "<tool_calls>[",
        "]</tool_calls>",
    ),
    "seed": _chat(
        "{{- '<seed:tool_call>\\n<function=' + name + '>' }}"
        + _fields("\n<parameter=", ">", "</parameter>").replace("value | tojson", "value | string")
        + "{{- '\\n</function>\\n</seed:tool_call>' }}",
        "\n",
    ),
    "gemma": _GEMMA + _chat("{{- '<|tool_call>call:' + name + written(arguments) + '<tool_call|>' }}"),
    "pythonic": _pythonic("", "value | tojson"),
    "pythonic with tags": _pythonic("<|tool_call_start|>", "value | tojson").replace("']'", "']<|tool_call_end|>'"),
    "granite 3": _CHAT.replace("CALLS", "").replace(
        "(tools | tojson)", "(tools | tojson) + ' Answer with <|tool_call|> followed by a JSON list of tools used.'"
    ),
    "lfm 2": _CHAT.replace("CALLS", "").replace("(tools | tojson)", "'<|tool_list_start|>' + (tools | tojson)"),
    "harmony": _chat(
        "{{- ' to=functions.' + name + '<|channel|>commentary json<|message|>' + (arguments | tojson) + '<|call|>' }}"
    ).replace("(tools | tojson)", "'Calls to these tools must go to the commentary channel' + (tools | tojson)"),
}
UNKNOWN = {
    "plain": _CHAT.replace("CALLS", ""),
    "begins with a word": _chat("{{- 'to=' + name + '<|message|>' + (arguments | tojson) + '<|call|>' }}"),
    "closed by its name": _chat(
        "{{- '<tool_call><invoke name=\"' + name + '\">' }}{%- for key, value in arguments.items() %}"
        "{{- '<' + key + '>' + value | string + '</' + key + '>' }}{% endfor %}{{- '</invoke></tool_call>' }}"
    ),
    "escaped": _chat(
        "{{- '<tool_call><function=' + name + '>' }}"
        + _fields("<parameter=", ">", "</parameter>").replace(
            "(value if value is string", "((value | e) if value is string"
        )
        + "{{- '</function></tool_call>' }}"
    ),
    "typed by every type": _chat(
        "{{- '<call tool=\"' + name + '\">' }}{%- for key, value in arguments.items() %}"
        "{{- '<argument key=\"' + key + '\" type=\"' }}"
        "{{- ('string' if value is string else 'number' if value is number else 'array') + '\">' }}"
        "{{- (value if value is string else value | tojson) + '</argument>' }}{% endfor %}{{- '</call>' }}"
    ),
    "texts on one line": _chat(
        "{{- '<tool_call>\\n<function=' + name + '>' }}"
        + _fields("\n<parameter=", ">\n", "\n</parameter>").replace("value if", "value.split() | join(' ') if")
        + "{{- '\\n</function>\\n</tool_call>' }}"
    ),
    "pythonic, but for no arguments": _pythonic("", "value | tojson").replace(
        "'(' }}", "('(' if arguments else '{') }}"
    ),
    "another form without arguments": _chat(
        "{{- '<tool_call>' + name }}{% if arguments %}{{- ' with ' + (arguments | tojson) }}{% endif %}"
        "{{- '</tool_call>' }}"
    ),
    "ends the turn": _chat("{{- '<|im_end|>\\ncall\\n' + " + _object() + " }}"),
    "refused": "{{ raise_exception('no') }}",
    "not a template": "{% for",
}


def format_of(name: str) -> ToolCallFormat:
    """Return the detected format of a template."""
    call_format = detect_format({"default": TEMPLATES[name]})
    assert call_format is not None
    return call_format


HERMES, LLAMA = format_of("hermes"), format_of("llama")


def begin_of(form: ToolCallFormat, name: str) -> str:
    """Return the text of a first call up to its arguments, in a format without ids."""
    return form.first + name + form.opening
