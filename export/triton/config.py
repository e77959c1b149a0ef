"""A served model's ``config.pbtxt``, written and read through Triton's own protobuf."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tandemrt.engines import serving
from tandemrt.engines.errors import BackendUnavailable, BadRepository, clipped, quoted

FILE_NAME = "config.pbtxt"


def model_config(
    name: str, *, parameters: Mapping[str, str], instances: int = 1, gpus: Sequence[int] | None = None
) -> Any:
    """Return the ``ModelConfig`` message of a model.

    ``gpus`` puts ``instances`` instances on each of these GPUs; None: on the CPU. Batching is the runtime's own, so
    Triton is told of none: ``max_batch_size`` 0, a decoupled transaction policy, one request per call.
    """
    pb = _messages()
    config = pb.ModelConfig(name=name, backend="python", max_batch_size=0)
    config.model_transaction_policy.decoupled = True
    for tensor in serving.inputs():
        config.input.add(name=tensor.name, data_type=_type(pb, tensor), dims=tensor.dims, optional=tensor.optional)
    for tensor in serving.OUTPUTS:
        config.output.add(name=tensor.name, data_type=_type(pb, tensor), dims=tensor.dims)
    group = config.instance_group.add(count=instances)
    group.kind = pb.ModelInstanceGroup.KIND_CPU if gpus is None else pb.ModelInstanceGroup.KIND_GPU
    group.gpus.extend(gpus or ())
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def write_config(config: Any, path: Path) -> None:
    """Write ``config`` as text. Raises BadRepository should it not read back as itself."""
    from google.protobuf import text_format

    path.write_text(text_format.MessageToString(config))
    if read_config(path) != config:
        raise BadRepository(f"{path}: must read back as what was written; report this with the file")


def read_config(path: Path) -> Any:
    """Return the ``ModelConfig`` message in a file. Raises BadRepository if it is missing or not of that form."""
    from google.protobuf import text_format

    try:
        return text_format.Parse(path.read_text(), _messages().ModelConfig())
    except OSError as error:
        raise BadRepository(f"{path}: must be a readable file; {error.strerror}") from error
    except (text_format.ParseError, UnicodeDecodeError) as error:
        raise BadRepository(f"{path}: must be a model configuration of Triton; {error}") from error


def differences(config: Any, expected: Any) -> list[str]:
    """Say, one line each, where ``config`` departs from what this version of TandemRT serves."""
    lines = [
        f"{field} must be {getattr(expected, field)!r}; it is {quoted(getattr(config, field))}"
        for field in ("name", "backend", "max_batch_size")
        if getattr(config, field) != getattr(expected, field)
    ]
    if not config.model_transaction_policy.decoupled:
        lines.append("model_transaction_policy must be decoupled; it is not")
    for kind in ("input", "output"):
        mine = {tensor.name: tensor for tensor in getattr(expected, kind)}
        found = {tensor.name: tensor for tensor in getattr(config, kind)}
        lines += [f"{kind} {name} must be there; it is missing" for name in mine if name not in found]
        lines += [
            f"{kind} {name} must not be there; this version does not know it" for name in found if name not in mine
        ]
        lines += [
            f"{kind} {name} must be as this version writes it ({_line(mine[name])}); it is "
            f"{clipped(_line(found[name]))}"
            for name in mine
            if name in found and mine[name] != found[name]
        ]
    return lines


def _messages() -> Any:
    try:
        from tritonclient.grpc import model_config_pb2
    except ImportError as error:
        raise BackendUnavailable(
            f"tritonclient: writing a model repository needs it ({error}); pip install 'tandemrt[triton]'"
        ) from error
    return model_config_pb2


def _type(pb: Any, tensor: serving.TensorSpec) -> Any:
    return pb.DataType.Value(serving.config_type(tensor))


def _line(message: Any) -> str:
    return " ".join(str(message).split())
