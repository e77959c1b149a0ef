"""Parse a request's tensors and parameters, or reject the request with the name of the wrong input."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandemrt.engines.parameters import server_tensors
from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.engines.validation.errors import BadRequest, clipped, quoted
from tandemrt.engines.validation.records import nearest
from tandemrt.runtime.requests.prompt import Chat, Prompt
from tandemrt.runtime.servers.json_text import lone_surrogate, parse_json_text
from tandemrt.runtime.servers.request import ServerRequest
from tandemrt.runtime.workers.clients import MAX_USER_LENGTH, UNNAMED, Client

_INPUTS = {spec.name: spec for spec in server_tensors.inputs()}
_CHAT = [spec.name for spec in server_tensors.chat_inputs()]
_SAMPLING = {spec.name for spec in server_tensors.sampling_inputs()}
_PROMPTS = [spec.name for spec in server_tensors.PROMPTS]
_FLAGS = {spec.name for spec in server_tensors.FLAGS}
_GUIDE_TYPE, _GUIDE = (spec.name for spec in server_tensors.GUIDED)


@dataclass(frozen=True, kw_only=True)
class InferRequest(ServerRequest):
    """A request to a Triton model.

    Attributes:
        echo: text before the first text of each output: the prompt, or "".
        outputs: names of the requested output tensors.
    """

    echo: str
    outputs: frozenset[str]


def parse_request(
    tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any] | None = None, *, timeout_us: int = 0
) -> InferRequest:
    """Parse one request: ``tensors`` are its input arrays by name, ``parameters`` its other parameters.

    A value may come as a tensor, as a parameter and inside ``sampling_parameters`` at once, if all agree.
    ``timeout_us`` is Triton's timeout in microseconds, 0 for none; it may also come as the parameter ``timeout``.
    Raises BadRequest.
    """
    fields, client = _RequestValues(), UNNAMED
    for name, tensor in tensors.items():
        fields.add(name, _tensor_value(_INPUTS[name], tensor))
    for name, value in (parameters or {}).items():
        if name == "timeout":
            fields.add("timeout_s", _microseconds(value))
        elif name == server_tensors.CLIENT:
            client = _client(str(value))
        elif name != "id" and not name.startswith("triton_"):  # parameters of the protocol
            fields.add(name, _from_json(name, value) if name in _INPUTS and _INPUTS[name].is_json else value)
    if timeout_us:
        fields.add("timeout_s", _microseconds(timeout_us))
    fields.unpack(server_tensors.BUNDLED.name)
    values = fields.values
    prompts = {name: values.pop(name) for name in _PROMPTS if name in values}
    flags = {name: _flag(name, values.pop(name)) for name in _FLAGS if name in values}
    prompt = _prompt(prompts, {name: values.pop(name) for name in _CHAT if name in values})
    params, stream = _params(values), flags.get("stream", False)
    if params.n > 1 and not stream:
        raise BadRequest(f"n: several outputs need a stream, received {params.n} without; send stream true")
    return InferRequest(
        prompt=prompt,
        params=params,
        stream=stream,
        echo="" if flags.get("exclude_input_in_output", True) else _echo(prompt),
        outputs=frozenset(spec.name for spec in server_tensors.OUTPUTS if flags.get(f"return_{spec.name}", True)),
        client=client,
    )


def _client(user: str) -> Client:
    if len(user) > MAX_USER_LENGTH:
        raise BadRequest(
            f"{server_tensors.CLIENT}: must have at most {MAX_USER_LENGTH} characters, received {quoted(user)}; "
            "shorten it"
        )
    return Client(user=user)


class _RequestValues:
    """Values by name, from all sources. Names that other servers use are replaced by TandemRT's."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        if name in server_tensors.ALIASES:
            name, value = server_tensors.ALIASES[name], None if value == [""] else value
        if value is None and (name in _SAMPLING or name in _CHAT):
            return
        if name in self.values and self.values[name] != value:
            raise BadRequest(
                f"{name}: given twice, received {quoted(self.values[name])} and {quoted(value)}; send it once"
            )
        self.values[name] = value

    def unpack(self, name: str) -> None:
        """Replace the object ``name`` by its entries."""
        bundled = self.values.pop(name, None)
        if bundled is None:
            return
        if not isinstance(bundled, dict):
            raise BadRequest(f"{name}: must be a JSON object, received {quoted(bundled)}")
        for key, value in bundled.items():
            if key in _PROMPTS or key in _CHAT or key in _FLAGS:
                raise BadRequest(f"{name}: holds sampling parameters only, received {quoted(key)}; send it as an input")
            if key == "guided_decoding":  # Triton's OpenAI frontend sends a tool's schema in this form
                self.add("structured_outputs", _without_empty(_from_json(key, value)))
            else:
                self.add(key, value)


def _params(values: dict[str, Any]) -> SamplingParams:
    structured = _structured(values)
    known = {name: values.pop(name) for name in _SAMPLING if name in values}
    for name, value in values.items():
        if name not in server_tensors.OFF:
            raise BadRequest(
                f"{clipped(name)}: is no input of this model{nearest(name, [*_INPUTS])}, received {quoted(value)}; "
                "leave it out"
            )
        if value is not None and value not in server_tensors.OFF[name]:
            raise BadRequest(f"{name}: is not supported, received {quoted(value)}; leave it out")
    if structured is not None:
        known["structured_outputs"] = structured
    return SamplingParams(**known)


def _structured(values: dict[str, Any]) -> StructuredOutputs | None:
    kind, guide = values.pop(_GUIDE_TYPE, None), values.pop(_GUIDE, None)
    wanted = values.pop("structured_outputs", None)
    if kind:
        if kind not in server_tensors.GUIDES:
            raise BadRequest(
                f"{_GUIDE_TYPE}: must be one of {', '.join(server_tensors.GUIDES)}, received {quoted(kind)}"
            )
        if kind == "json" and guide:
            raise BadRequest(
                f"{_GUIDE}: {_GUIDE_TYPE} json takes none, received {quoted(guide)}; json_schema takes a schema"
            )
        if kind != "json" and not guide:
            raise BadRequest(f"{_GUIDE}: must come with {_GUIDE_TYPE} {kind}, received none")
        guided = {server_tensors.GUIDES[kind]: True if kind == "json" else guide}
        if wanted is not None and wanted != guided:
            raise BadRequest(
                f"structured_outputs: given twice, received {quoted(wanted)} and {quoted(guided)}; send it once"
            )
        wanted = guided
    elif guide:
        raise BadRequest(f"{_GUIDE}: must come with {_GUIDE_TYPE}, received {quoted(guide)} alone")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        raise BadRequest(f"structured_outputs: must be a JSON object, received {quoted(wanted)}")
    return StructuredOutputs(**wanted)


def _prompt(prompts: dict[str, Any], chat: dict[str, Any]) -> Prompt:
    if len(prompts) != 1:
        received = " and ".join(prompts) or "none"
        raise BadRequest(f"prompt: exactly one of {', '.join(_PROMPTS)} must be given, received {received}")
    [(name, prompt)] = prompts.items()
    kind = _INPUTS[name]
    if kind.is_json and not (isinstance(prompt, list) and prompt and all(isinstance(each, dict) for each in prompt)):
        raise BadRequest(f"{name}: must be a JSON list of objects with role and content, received {quoted(prompt)}")
    if kind.is_json:
        return Chat(prompt, **chat)
    if chat:
        raise BadRequest(f"{next(iter(chat))}: must come with messages, received {name}; leave it out")
    return prompt  # type: ignore[no-any-return]


def _echo(prompt: Prompt) -> str:
    if not isinstance(prompt, str):
        raise BadRequest("exclude_input_in_output: only text_input can be returned before the answer, received false")
    return prompt


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name}: must be true or false, received {quoted(value)}")
    return value


def _tensor_value(spec: server_tensors.TensorSpec, tensor: np.ndarray) -> Any:
    items = [_item(spec, item) for item in tensor.reshape(-1)]
    if spec.is_list and spec.is_json:  # one text with a list, or one text per item
        values = [_from_json(spec.name, item) for item in items]
        return values[0] if len(values) == 1 and isinstance(values[0], list) else values
    if spec.is_list:
        return items
    if len(items) != 1:
        raise BadRequest(f"{spec.name}: must hold one value, received {len(items)}")
    return _from_json(spec.name, items[0]) if spec.is_json else items[0]


def _item(spec: server_tensors.TensorSpec, item: Any) -> Any:
    if spec.datatype == "BYTES":
        try:
            return item.decode() if isinstance(item, bytes) else str(item)
        except UnicodeDecodeError as error:
            raise BadRequest(f"{spec.name}: must be UTF-8, received {quoted(item)}: {error.reason}") from None
    if spec.datatype == "FP32":
        return float(str(item))  # the shortest decimal: 0.7, not 0.699999988
    return item.item()


def _microseconds(value: Any) -> float:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise BadRequest(f"timeout: must be a positive number of microseconds, received {quoted(value)}")
    return value / 1e6


def _from_json(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = parse_json_text(value) if value else None
    except ValueError as error:
        raise BadRequest(f"{name}: must be JSON, received {quoted(value)}: {clipped(error)}") from error
    except RecursionError:
        raise BadRequest(f"{name}: must be JSON of a sensible depth, received {len(value)} characters") from None
    if lone_surrogate(value):
        raise BadRequest(
            f"{name}: must be text that UTF-8 can encode, received {quoted(value)}; join or drop lone surrogates"
        )
    return parsed


def _without_empty(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None and item is not False} or None
