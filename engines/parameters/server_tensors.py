"""The tensors of a model served by Triton: every input of a request and every output of a response.

Sampling inputs derive from ``SamplingParams`` and chat inputs from ``ChatOptions``: a field added there becomes an
input of the same name in ``config.pbtxt`` and in the served model. This file adds the other tensors: prompts, flags and
names that clients of other servers use.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.engines.text.chat import ChatOptions
from tandemrt.engines.validation.errors import InternalError
from tandemrt.engines.validation.records import Section


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the served model. ``datatype`` is Triton's name (``BYTES`` for text); ``dims`` are [1] or [-1]."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    description: str
    optional: bool = True
    is_json: bool = False  # text that holds JSON

    @property
    def is_list(self) -> bool:
        return self.dims == (-1,)


def _scalar(name: str, datatype: str, description: str, *, is_json: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, (1,), description, is_json=is_json)


def _list(name: str, datatype: str, description: str, *, is_json: bool = False) -> TensorSpec:
    return TensorSpec(name, datatype, (-1,), description, is_json=is_json)


OUTPUTS = (
    _scalar("text_output", "BYTES", "text of the answer; in a stream, the text since the last response"),
    _scalar("reasoning_output", "BYTES", "text of the reasoning; in a stream, the text since the last response"),
    _list("token_ids", "INT32", "token ids of reasoning, delimiters and answer; in a stream, the new ones"),
    _scalar("num_input_tokens", "UINT32", "number of prompt tokens, in every response"),
    _scalar(
        "num_output_tokens", "UINT32", "number of tokens in token_ids; the sum over a stream's responses is the total"
    ),
    _scalar("index", "UINT32", "index of the output that the response belongs to, if n is above 1"),
    _scalar("finish_reason", "BYTES", "stop, length, constraint or timeout; on the last response of each output"),
    _scalar("stop_reason", "BYTES", "stop string or stop token that ended the text, if any"),
    _scalar("constraint_error", "BYTES", "error of the check of validate_output on the finished text, if it failed"),
    _scalar("seed", "UINT64", "seed of the request; on the last response"),
    _scalar(
        "speculation", "BYTES", "statistics of drafting, as load tools read them; on the last response", is_json=True
    ),
    _scalar(
        "logprobs", "BYTES", "per output token, if requested: token, logprob, top; on the last response", is_json=True
    ),
    _scalar("prompt_logprobs", "BYTES", "the same per prompt token except the first", is_json=True),
)

PROMPTS = (
    _scalar("text_input", "BYTES", "prompt as text"),
    _list(
        "messages",
        "BYTES",
        "chat messages for the chat template: one list of objects, or one object per element",
        is_json=True,
    ),
    _list("input_ids", "INT64", "prompt as token ids"),
)

FLAGS = (
    _scalar(
        "stream",
        "BOOL",
        "send a response for each new part of the text as soon as it is final; default false: one response",
    ),
    _scalar("exclude_input_in_output", "BOOL", "default true; false adds text_input before the answer"),
    *(
        _scalar(f"return_{spec.name}", "BOOL", f"default true; false leaves {spec.name} out")
        for spec in OUTPUTS
        if spec.name != "text_output"
    ),
)

CLIENT = "tandemrt-client"
"""Name of the request parameter with the client's name. Over gRPC it may be metadata, if the server forwards it."""

ALIASES = {"stop_words": "stop"}
"""Names of sampling parameters in other servers -> names in SamplingParams."""

GUIDES = {"json": "json_object", "json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar"}
"""TensorRT-LLM's ``guided_decoding_guide_type`` -> the kind of ``structured_outputs``."""

GUIDED = (
    _scalar("guided_decoding_guide_type", "BYTES", f"one of {', '.join(GUIDES)}; an alternative to structured_outputs"),
    _scalar("guided_decoding_guide", "BYTES", "schema, regular expression or grammar; none for json"),
)

BUNDLED = _scalar("sampling_parameters", "BYTES", "sampling parameters as one object", is_json=True)

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
    "spaces_between_special_tokens": (True, False),  # byte-level tokenizers add none
}
"""Fields that clients of other servers send by default: accepted with these neutral values, else rejected."""


def config_type(tensor: TensorSpec) -> str:
    """Return a tensor's datatype as a model configuration names it."""
    return "TYPE_STRING" if tensor.datatype == "BYTES" else f"TYPE_{tensor.datatype}"


def sampling_inputs() -> tuple[TensorSpec, ...]:
    """Return one input per field of ``SamplingParams``. Raises InternalError for a field that fits no tensor."""
    return _inputs_of("SamplingParams", SamplingParams)


def chat_inputs() -> tuple[TensorSpec, ...]:
    """Return one input per field of ``ChatOptions``."""
    return _inputs_of("Chat", ChatOptions)


def inputs() -> tuple[TensorSpec, ...]:
    """Return every input of the served model. All are optional; names are unique."""
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
    description = f"{place}; default {_default_text(rule.get('default'))}"
    if kind.get("type") == "array" and kind["items"].get("type") == "object":
        return TensorSpec(
            name, "BYTES", (-1,), f"{description}; one list of objects, or one object per element", is_json=True
        )
    if kind.get("type") == "array":
        return TensorSpec(name, _datatype(place, kind["items"]), (-1,), description)
    if kind.get("type") == "object" or ("$ref" in kind and kind["$ref"].rsplit("/", 1)[-1] in definitions):
        return TensorSpec(name, "BYTES", (1,), f"{description}; an object", is_json=True)
    return TensorSpec(name, _datatype(place, kind), (1,), description)


def _datatype(place: str, kind: Mapping[str, Any]) -> str:
    datatype = {"number": "FP32", "boolean": "BOOL", "string": "BYTES"}.get(kind.get("type", ""))
    if kind.get("type") == "integer":  # always 64 bits: Triton truncates a number that does not fit
        datatype = "UINT64" if kind.get("exclusiveMaximum") == 2**64 else "INT64"
    if datatype is None:
        raise InternalError(f"{place}: fits no tensor of a server; add {kind} to engines/parameters/server_tensors.py")
    return datatype


def _default_text(default: Any) -> str:
    if default is None or default == []:
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)
