"""Build Triton's responses: tensors of an output, and errors."""

import json
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from tandemrt.engines.parameters import server_tensors
from tandemrt.engines.validation.errors import BadRequest, QueueFull, TandemError, named
from tandemrt.runtime.requests.request import RequestOutput
from tandemrt.runtime.servers.request_stream import RequestCancelled, RequestTimeout

_DTYPES = {"BYTES": np.object_, "INT32": np.int32, "UINT32": np.uint32, "UINT64": np.uint64}
_SPECS = {spec.name: spec for spec in server_tensors.OUTPUTS}


def send_values(sender: Any, values: Mapping[str, Any], outputs: Collection[str], *, final: bool) -> None:
    """Send those of ``values`` (by tensor name) that are in ``outputs``. ``final`` marks the last response."""
    tensors = [_tensor(name, value) for name, value in values.items() if name in outputs]
    flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0
    sender.send(pb_utils.InferenceResponse(output_tensors=tensors), flags=flags)


def send_error(sender: Any, error: BaseException) -> None:
    """Send ``error`` as the final response, with the code that Triton's clients expect for it."""
    code = pb_utils.TritonError.INTERNAL
    if isinstance(error, BadRequest):
        code = pb_utils.TritonError.INVALID_ARG
    elif isinstance(error, QueueFull | RequestTimeout):
        code = pb_utils.TritonError.UNAVAILABLE
    elif isinstance(error, RequestCancelled):
        code = pb_utils.TritonError.CANCELLED
    message = str(error) if isinstance(error, TandemError) else named(error)
    response = pb_utils.InferenceResponse(error=pb_utils.TritonError(message, code))
    sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def final_values(output: RequestOutput) -> dict[str, Any]:
    """Return the values that only the last response of an output has."""
    values = {
        "finish_reason": output.finish_reason,
        "seed": output.seed,
        "speculation": json.dumps(output.speculation.to_json()),
    }
    if output.stop_reason is not None:
        values["stop_reason"] = str(output.stop_reason)
    if output.logprobs is not None:
        values["logprobs"] = json.dumps([each.to_json() for each in output.logprobs])
    if output.prompt_logprobs is not None:
        values["prompt_logprobs"] = json.dumps([each.to_json() for each in output.prompt_logprobs])
    if output.error is not None:
        values["constraint_error"] = output.error
    return values


def _tensor(name: str, value: Any) -> Any:
    spec = _SPECS[name]
    items = value if spec.is_list else [value.encode() if isinstance(value, str) else value]
    return pb_utils.Tensor(name, np.array(items, _DTYPES[spec.datatype]))
