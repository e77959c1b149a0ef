"""How a bundle is deployed in a server: the ``parameters`` of a served model's configuration, all of them text."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import ConfigDict, Field, ValidationError

from tandemrt.engines.errors import BadRepository
from tandemrt.engines.validation import Section, explain

SERVERS_OWN = ("EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_AUTO_COMPLETE_CONFIG")
"""Parameters that Triton's Python backend reads itself."""


class Deployment(Section):
    """What the server's model opens, and how. All but the first two are arguments of ``LLM``, None for its default.

    Attributes:
        bundle: folder of the bundle, relative to the model's version folder, or absolute.
        tandemrt_version: what wrote the repository.
    """

    model_config = ConfigDict(strict=False)  # every value is a text

    bundle: Annotated[str, Field(min_length=1)]
    tandemrt_version: str
    window: Annotated[int, Field(ge=0)] | None = None
    threads: Annotated[int, Field(ge=1)] | None = None
    overlap: bool | None = None
    queue_limit: Annotated[int, Field(ge=1)] | None = None
    cache_tokens: Annotated[int, Field(ge=1)] | None = None
    cuda_graphs: bool | None = None
    grammar_timeout_s: Annotated[float, Field(gt=0)] | None = None

    @classmethod
    def read(cls, parameters: Mapping[str, str]) -> "Deployment":
        """Read a configuration's parameters. Raises BadRepository for an unknown name or a value out of range."""
        try:
            return cls.model_validate({key: value for key, value in parameters.items() if key not in SERVERS_OWN})
        except ValidationError as error:
            raise BadRepository(f"parameters of the model's configuration: {explain(error)}") from error

    def parameters(self) -> dict[str, str]:
        """Return what is set as a configuration's parameters."""
        return {
            name: str(value).lower() if isinstance(value, bool) else str(value)
            for name, value in self.model_dump(exclude_none=True).items()
        }

    def llm_arguments(self) -> dict[str, Any]:
        """Return the arguments of ``LLM`` that are set."""
        return self.model_dump(exclude_none=True, exclude={"bundle", "tandemrt_version"})
