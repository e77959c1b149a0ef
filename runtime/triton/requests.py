"""From a request's tensors and parameters to a prompt, ``SamplingParams`` and flags, or to a refusal by name."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tandemrt.engines import serving
from tandemrt.engines.errors import BadRequest, clipped, quoted
from tandemrt.engines.params import SamplingParams, StructuredOutputs
from tandemrt.engines.validation import nearest
from tandemrt.runtime.requests.prompt import Chat, Prompt

_INPUTS = {spec.name: spec for spec in serving.inputs()}
_CHAT = [spec.name for spec in serving.chat_inputs()]
_SAMPLING = {spec.name for spec in serving.sampling_inputs()}
_PROMPTS = [spec.name for spec in serving.PROMPTS]
_FLAGS = {spec.name for spec in serving.FLAGS}
_GUIDE_TYPE, _GUIDE = (spec.name for spec in serving.GUIDED)


@dataclass(frozen=True)
class Ask:
    """What one request asks for.

    Attributes:
        echo: goes in front of the answer.
        returns: names of the outputs it wants.
        client: whose request it is, "" if nobody said.
    """

    prompt: Prompt
    params: SamplingParams
    stream: bool
    echo: str
    returns: frozenset[str]
    client: str = ""


def read_request(
    tensors: Mapping[str, np.ndarray], parameters: Mapping[str, Any] | None = None, *, timeout_us: int = 0
) -> Ask:
    """Read one request. ``tensors`` hold Triton's arrays, ``parameters`` the request's other parameters.

    The same name may come as a tensor, as a parameter and inside ``sampling_parameters``, if the values agree.
    ``timeout_us`` is Triton's own timeout in microseconds, 0 for none, which may also come as the parameter
    ``timeout``. Raises BadRequest.
    """
    given, client = _Given(), ""
    for name, tensor in tensors.items():
        given.add(name, _value(_INPUTS[name], tensor))
    for name, value in (parameters or {}).items():
        if name == "timeout":
            given.add("timeout_s", _microseconds(value))
        elif name == serving.CLIENT:
            client = str(value)
        elif name != "id" and not name.startswith("triton_"):  # the protocol's own
            given.add(name, _from_json(name, value) if name in _INPUTS and _INPUTS[name].is_json else value)
    if timeout_us:
        given.add("timeout_s", _microseconds(timeout_us))
    given.unpack(serving.BUNDLED.name)
    values = given.values
    prompts = {name: values.pop(name) for name in _PROMPTS if name in values}
    flags = {name: _flag(name, values.pop(name)) for name in _FLAGS if name in values}
    prompt = _prompt(prompts, {name: values.pop(name) for name in _CHAT if name in values})
    params, stream = _params(values), flags.get("stream", False)
    if params.n > 1 and not stream:
        raise BadRequest(f"n: several outputs come as a stream, received {params.n} without; send stream true")
    return Ask(
        prompt=prompt,
        params=params,
        stream=stream,
        echo="" if flags.get("exclude_input_in_output", True) else _echo(prompt),
        returns=frozenset(spec.name for spec in serving.OUTPUTS if flags.get(f"return_{spec.name}", True)),
        client=client,
    )


class _Given:
    """Values by name, however they came; other servers' names are turned into ours."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        if name in serving.ALIASES:
            name, value = serving.ALIASES[name], None if value == [""] else value
        if value is None and (name in _SAMPLING or name in _CHAT):
            return
        if name in self.values and self.values[name] != value:
            raise BadRequest(
                f"{name}: given twice, received {quoted(self.values[name])} and {quoted(value)}; send it once"
            )
        self.values[name] = value

    def unpack(self, name: str) -> None:
        """Spread the object under ``name`` over the names it holds."""
        bundled = self.values.pop(name, None)
        if bundled is None:
            return
        if not isinstance(bundled, dict):
            raise BadRequest(f"{name}: must be a JSON object, received {quoted(bundled)}")
        for key, value in bundled.items():
            if key in _PROMPTS or key in _CHAT or key in _FLAGS:
                raise BadRequest(f"{name}: holds sampling parameters only, received {quoted(key)}; send it as an input")
            if key == "guided_decoding":  # what Triton's OpenAI frontend makes of a tool's schema
                self.add("structured_outputs", _without_nothing(_from_json(key, value)))
            else:
                self.add(key, value)


def _params(values: dict[str, Any]) -> SamplingParams:
    structured = _structured(values)
    known = {name: values.pop(name) for name in _SAMPLING if name in values}
    for name, value in values.items():
        if name not in serving.OFF:
            raise BadRequest(
                f"{clipped(name)}: is no input of this model{nearest(name, [*_INPUTS])}, received {quoted(value)}; "
                "leave it out"
            )
        if value is not None and value not in serving.OFF[name]:
            raise BadRequest(f"{name}: is not supported, received {quoted(value)}; leave it out")
    if structured is not None:
        known["structured_outputs"] = structured
    return SamplingParams(**known)


def _structured(values: dict[str, Any]) -> StructuredOutputs | None:
    kind, guide = values.pop(_GUIDE_TYPE, None), values.pop(_GUIDE, None)
    wanted = values.pop("structured_outputs", None)
    if kind:
        if kind not in serving.GUIDES:
            raise BadRequest(f"{_GUIDE_TYPE}: must be one of {', '.join(serving.GUIDES)}, received {quoted(kind)}")
        if kind == "json" and guide:
            raise BadRequest(
                f"{_GUIDE}: {_GUIDE_TYPE} json takes none, received {quoted(guide)}; json_schema takes a schema"
            )
        if kind != "json" and not guide:
            raise BadRequest(f"{_GUIDE}: must come with {_GUIDE_TYPE} {kind}, received none")
        guided = {serving.GUIDES[kind]: True if kind == "json" else guide}
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
        raise BadRequest("exclude_input_in_output: only text_input can be put in front of the answer, received false")
    return prompt


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{name}: must be true or false, received {quoted(value)}")
    return value


def _value(spec: serving.TensorSpec, tensor: np.ndarray) -> Any:
    items = [_item(spec, item) for item in tensor.reshape(-1)]
    if spec.is_list and spec.is_json:  # one text with a list, or a text for each of its items
        values = [_from_json(spec.name, item) for item in items]
        return values[0] if len(values) == 1 and isinstance(values[0], list) else values
    if spec.is_list:
        return items
    if len(items) != 1:
        raise BadRequest(f"{spec.name}: must hold one value, received {len(items)}")
    return _from_json(spec.name, items[0]) if spec.is_json else items[0]


def _item(spec: serving.TensorSpec, item: Any) -> Any:
    if spec.datatype == "BYTES":
        try:
            return item.decode() if isinstance(item, bytes) else str(item)
        except UnicodeDecodeError as error:
            raise BadRequest(f"{spec.name}: must be UTF-8, received {quoted(item)}: {error.reason}") from None
    if spec.datatype == "FP32":
        return float(str(item))  # the decimal that was meant: 0.7, not 0.699999988
    return item.item()


def _microseconds(value: Any) -> float:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise BadRequest(f"timeout: must be a positive number of microseconds, received {quoted(value)}")
    return value / 1e6


def _from_json(name: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value else None
    except ValueError as error:
        raise BadRequest(f"{name}: must be JSON, received {quoted(value)}: {clipped(error)}") from error
    except RecursionError:
        raise BadRequest(f"{name}: must be JSON of a sensible depth, received {len(value)} characters") from None


def _without_nothing(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: item for key, item in value.items() if item is not None and item is not False} or None
