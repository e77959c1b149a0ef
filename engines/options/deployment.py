"""Deployment of a bundle in Triton: the text ``parameters`` of the served model's configuration."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, model_validator

from tandemrt.engines.options.options import ServedOptions, draft_tokens_to_text
from tandemrt.engines.options.text_options import OptionsFromText
from tandemrt.engines.validation.errors import BadRepository, BadRequest
from tandemrt.engines.validation.records import reject

SERVERS_OWN = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_AUTO_COMPLETE_CONFIG")
"""Parameters that belong to Triton's Python backend."""


class Deployment(OptionsFromText):
    """The bundle that a served model opens, and its RuntimeOptions except ``device``, which instance_group sets.

    Attributes:
        bundle: folder of the bundle, absolute or relative to the model's version folder.
        tandemrt_version: version of tandemrt that wrote the repository.
    """

    bundle: Annotated[str, Field(min_length=1)]
    tandemrt_version: str

    @model_validator(mode="before")
    @classmethod
    def _device_of_the_server(cls, data: Any) -> Any:
        if "device" in data:
            raise reject("device: must not be a parameter: instance_group sets the device; use export triton --device")
        return data

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> "Deployment":
        """Parse a configuration's parameters. Raises BadRepository for an unknown name or a value out of range."""
        values: dict[str, Any] = {key: value for key, value in parameters.items() if key not in SERVERS_OWN}
        try:
            return cls(**values)
        except BadRequest as error:
            raise BadRepository(f"parameters of the model's configuration: {error}") from error

    def parameters(self) -> dict[str, str]:
        """Return the set values as parameters of a configuration."""
        own = {"bundle": self.bundle, "tandemrt_version": self.tandemrt_version}
        return own | {name: _text(name, value) for name, value in self.llm_arguments().items()}

    def llm_arguments(self) -> ServedOptions:
        """Return the set values as arguments of ``LLM``."""
        return self.served()


def _text(name: str, value: Any) -> str:
    if name == "num_draft_tokens":
        return draft_tokens_to_text(value)
    return str(value).lower() if isinstance(value, bool) else str(value)
