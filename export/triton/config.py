"""Write and read the ``config.pbtxt`` of a served model with Triton's protobuf."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandemrt.engines.parameters import server_tensors
from tandemrt.engines.validation.errors import BackendUnavailable, BadRepository, clipped, quoted
from tandemrt.engines.validation.extras import pip_install

FILE_NAME = "config.pbtxt"


def model_config(
    name: str, *, parameters: Mapping[str, str], instances: int = 1, gpus: Sequence[int] | None = None
) -> Any:
    """Return the ``ModelConfig`` message of a model.

    ``gpus``: run ``instances`` instances on each of these GPUs; None: on the CPU. The runtime batches requests itself,
    so the config disables Triton's batching: ``max_batch_size`` 0, a decoupled transaction policy, one request per
    call.
    """
    pb = _messages()
    config = pb.ModelConfig(name=name, backend="python", max_batch_size=0)
    config.model_transaction_policy.decoupled = True
    for tensor in server_tensors.inputs():
        config.input.add(name=tensor.name, data_type=_type(pb, tensor), dims=tensor.dims, optional=tensor.optional)
    for tensor in server_tensors.OUTPUTS:
        config.output.add(name=tensor.name, data_type=_type(pb, tensor), dims=tensor.dims)
    group = config.instance_group.add(count=instances)
    group.kind = pb.ModelInstanceGroup.KIND_CPU if gpus is None else pb.ModelInstanceGroup.KIND_GPU
    group.gpus.extend(gpus or ())
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def write_config(config: Any, path: Path) -> None:
    """Write ``config`` as text. Raises BadRepository if reading the file gives another config."""
    from google.protobuf import text_format

    path.write_text(text_format.MessageToString(config))
    if read_config(path) != config:
        raise BadRepository(f"{path}: must read back as what was written; report this with the file")


def read_config(path: Path) -> Any:
    """Return the ``ModelConfig`` message in a file. Raises BadRepository if the file is missing or invalid."""
    from google.protobuf import text_format

    try:
        return text_format.Parse(path.read_text(), _messages().ModelConfig())
    except OSError as error:
        raise BadRepository(f"{path}: must be a readable file; {error.strerror}") from error
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise BadRepository(f"{path}: must be a model configuration of Triton; {error}") from error


def differences(config: Any, expected: Any) -> list[str]:
    """Return the differences, one line each, between ``config`` and ``expected``, the config of this version."""
    lines = [
        f"{field} must be {getattr(expected, field)!r}; it is {quoted(getattr(config, field))}"
        for field in ("name", "backend", "max_batch_size")
        if getattr(config, field) != getattr(expected, field)
    ]
    if not config.model_transaction_policy.decoupled:
        lines.append("model_transaction_policy must be decoupled; it is not")
    for kind in ("input", "output"):
        wanted = {tensor.name: tensor for tensor in getattr(expected, kind)}
        actual = {tensor.name: tensor for tensor in getattr(config, kind)}
        lines += [f"{kind} {name} must be there; it is missing" for name in wanted if name not in actual]
        lines += [
            f"{kind} {name} must not be there; this version does not have it" for name in actual if name not in wanted
        ]
        lines += [
            f"{kind} {name} must be as this version writes it ({_line(wanted[name])}); it is "
            f"{clipped(_line(actual[name]))}"
            for name in wanted
            if name in actual and wanted[name] != actual[name]
        ]
    return lines


def _messages() -> Any:
    try:
        from tritonclient.grpc import model_config_pb2
    except (ImportError, RuntimeError) as error:  # RuntimeError: tritonclient without its extra grpc
        raise BackendUnavailable(
            f"tritonclient: writing a model repository needs it ({error}); {pip_install('triton')}"
        ) from error
    return model_config_pb2


def _type(pb: Any, tensor: server_tensors.TensorSpec) -> Any:
    return pb.DataType.Value(server_tensors.config_type(tensor))


def _line(message: Any) -> str:
    return " ".join(str(message).split())
