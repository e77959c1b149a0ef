"""The server's side of the contract: every tensor a request may carry into Triton and every one that comes back.

Sampling inputs are derived from ``SamplingParams``, what may be said of messages from ``ChatOptions``: a field added
there becomes an input of the same name here, in ``config.pbtxt`` and in what the server's model reads, with no second
list. What is written down here is only what neither is: prompts, flags, and the names that other servers' clients use
for the same thing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.chat import ChatOptions
from tandemrt.engines.errors import InternalError
from tandemrt.engines.params import SamplingParams
from tandemrt.engines.validation import Section


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the served model. ``datatype`` is Triton's name (``BYTES`` is text); ``dims`` are [1] or [-1]."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    description: str
    optional: bool = True
    is_json: bool = False  # a text that holds JSON

    @property
    def is_list(self) -> bool:
        return self.dims == (-1,)


def _scalar(name: str, datatype: str, description: str, *, is_json: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, (1,), description, is_json=is_json)


def _list(name: str, datatype: str, description: str, *, is_json: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, (-1,), description, is_json=is_json)


OUTPUTS = (
    _scalar("text_output", "BYTES", "the answer; in a stream, what became certain since the last response"),
    _scalar("reasoning_output", "BYTES", "the reasoning, likewise"),
    _list("token_ids", "INT32", "tokens of reasoning, markers and answer; in a stream, the new ones"),
    _scalar("num_input_tokens", "UINT32", "tokens of the prompt, in every response"),
    _scalar("num_output_tokens", "UINT32", "tokens in token_ids; the responses of a stream add up"),
    _scalar("index", "UINT32", "which of n outputs the response is a part of, where there are several"),
    _scalar("finish_reason", "BYTES", "stop, length, constraint or timeout; on the last response, of each output"),
    _scalar("stop_reason", "BYTES", "the stop string or stop token that ended the text, if one did"),
    _scalar("constraint_error", "BYTES", "how the finished text failed the check of validate_output, if it did"),
    _scalar("seed", "UINT64", "the seed that was used; on the last response"),
    _scalar("speculation", "BYTES", "how drafting went, in the shape load tools read; on the last one", is_json=True),
    _scalar("logprobs", "BYTES", "of all tokens, if asked for: token, logprob, top; on the last one", is_json=True),
    _scalar("prompt_logprobs", "BYTES", "the same of the prompt's tokens but the first", is_json=True),
)

PROMPTS = (
    _scalar("text_input", "BYTES", "the prompt as text"),
    _list("messages", "BYTES", "chat messages, for the tokenizer's template: a list of objects, or each", is_json=True),
    _list("input_ids", "INT64", "the prompt as token ids"),
)

FLAGS = (
    _scalar("stream", "BOOL", "a response for each piece of text as it becomes certain; default false: one response"),
    _scalar("exclude_input_in_output", "BOOL", "default true; false puts text_input in front of the answer"),
    *(
        _scalar(f"return_{spec.name}", "BOOL", f"default true; false leaves {spec.name} out")
        for spec in OUTPUTS
        if spec.name != "text_output"
    ),
)

CLIENT = "tandemrt-client"
"""The request parameter that names whose request it is; over gRPC also metadata, where the server forwards it."""

ALIASES = {"stop_words": "stop"}
"""Other servers' names of sampling parameters."""

GUIDES = {"json": "json_object", "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
"""TensorRT-LLM's ``guided_decoding_guide_type`` and the kind of ``structured_outputs`` it names."""

GUIDED = (
    _scalar("guided_decoding_guide_type", "BYTES", f"one of {', '.join(GUIDES)}; another way to structured_outputs"),
    _scalar("guided_decoding_guide", "BYTES", "the schema, expression or grammar; none for json"),
)

BUNDLED = _scalar("sampling_parameters", "BYTES", "any sampling parameters as one object", is_json=True)

OFF: Mapping[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "best_of": (1,),
    "num_return_sequences": (1,),
    "use_beam_search": (False,),
    "early_stopping": (False,),
    "length_penalty": (1,),
    "top_logprobs": (0,),
    "return_log_probs": (False,),
    "return_cumulative_logprob": (False,),
    "return_context_logits": (False,),
    "return_generation_logits": (False,),
    "return_kv_cache_reuse_stats": (False,),
    "return_perf_metrics": (False,),
    "detokenize": (True,),
    "spaces_between_special_tokens": (True, False),  # no tokenizer that spells bytes puts any there
}
"""What other servers' clients send without meaning it: accepted at the value that asks for nothing, else refused."""


def config_type(tensor: TensorSpec) -> str:
    """Return the name of a tensor's datatype in a model's configuration."""
    return "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"


def sampling_inputs() -> tuple[TensorSpec, ...]:
    """Return one input for every field of ``SamplingParams``. Raises InternalError for a field that fits no tensor."""
    return _inputs_of("SamplingParams", SamplingParams)


def chat_inputs() -> tuple[TensorSpec, ...]:
    """Return one input for every field of ``ChatOptions``, which come with messages."""
    return _inputs_of("Chat", ChatOptions)


def inputs() -> tuple[TensorSpec, ...]:
    """Return every input of the served model, all optional. Names are unique."""
    sampling = sampling_inputs()
    known = {spec.name: spec for spec in sampling}
    aliases = (
        TensorSpec(alias, known[name].datatype, known[name].dims, f"another name of {name}")
        for alias, name in ALIASES.items()
    )
    return (*PROMPTS, *chat_inputs(), *sampling, *aliases, *GUIDED, BUNDLED, *FLAGS)


def _inputs_of(place: str, section: type[Section]) -> tuple[TensorSpec, ...]:
    schema = section.model_json_schema()
    return tuple(_derive(place, name, rule, schema.get("$defs", {})) for name, rule in schema["properties"].items())


def _derive(place: str, name: str, rule: Mapping[str, Any], definitions: Mapping[str, Any]) -> TensorSpec:
    kinds = [kind for kind in rule.get("anyOf", [rule]) if kind.get("type") != "null"]
    kind = kinds[0] if len(kinds) == 1 else {}
    place = f"{place}.{name}"
    description = f"{place}; default {_spell(rule.get('default'))}"
    if kind.get("type") == "array" and kind["items"].get("type") == "object":
        return TensorSpec(name, "BYTES", (-1,), f"{description}; a list of objects, or each", is_json=True)
    if kind.get("type") == "array":
        return TensorSpec(name, _datatype(place, kind["items"]), (-1,), description)
    if kind.get("type") == "object" or ("$ref" in kind and kind["$ref"].rsplit("/", 1)[-1] in definitions):
        return TensorSpec(name, "BYTES", (1,), f"{description}; an object", is_json=True)
    return TensorSpec(name, _datatype(place, kind), (1,), description)


def _datatype(place: str, kind: Mapping[str, Any]) -> str:
    datatype = {"number": "FP32", "boolean": "BOOL", "string": "BYTES"}.get(kind.get("type", ""))
    if kind.get("type") == "integer":  # wide: of a number that does not fit, the server would keep the low bits
        datatype = "UINT64" if kind.get("exclusiveMaximum") == 2**64 else "INT64"
    if datatype is None:
        raise InternalError(f"{place}: fits no tensor of a server; engines/serving.py must learn {kind}")
    return datatype


def _spell(default: Any) -> str:
    if default is None or default == []:
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)
