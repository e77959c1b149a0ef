"""How a bundle is deployed in a server: the ``parameters`` of a served model's configuration, all of them text."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from tandemrt.engines.errors import BadRepository, BadRequest
from tandemrt.engines.options import RuntimeOptions, ServedOptions, window_from_text, window_to_text
from tandemrt.engines.validation import refuse

SERVERS_OWN = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_AUTO_COMPLETE_CONFIG")
"""Parameters that Triton's Python backend reads itself."""


class Deployment(RuntimeOptions):
    """What the server's model opens, and how: RuntimeOptions but ``device``, which the server's instances say.

    Attributes:
        bundle: folder of the bundle, relative to the model's version folder, or absolute.
        tandemrt_version: what wrote the repository.
    """

    model_config = ConfigDict(strict=False)  # every value is a text

    bundle: Annotated[str, Field(min_length=1)]
    tandemrt_version: str

    @model_validator(mode="before")
    @classmethod
    def _placed_by_the_server(cls, data: Any) -> Any:
        if "device" in data:
            raise refuse("device: instance_group says where a served model runs; use export triton --device")
        return data

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> "Deployment":
        """Read a configuration's parameters. Raises BadRepository for an unknown name or a value out of range."""
        values: dict[str, Any] = {key: value for key, value in parameters.items() if key not in SERVERS_OWN}
        try:
            if "window" in values:
                values["window"] = window_from_text(values["window"])
            return cls(**values)
        except BadRequest as error:
            raise BadRepository(f"parameters of the model's configuration: {error}") from error

    def parameters(self) -> dict[str, str]:
        """Return what is set as a configuration's parameters."""
        own = {"bundle": self.bundle, "tandemrt_version": self.tandemrt_version}
        return own | {name: _text(name, value) for name, value in self.llm_arguments().items()}

    def llm_arguments(self) -> ServedOptions:
        """Return the arguments of ``LLM`` that are set."""
        return self.served()


def _text(name: str, value: Any) -> str:
    if name == "window":
        return window_to_text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
