"""TandemRT compiles a draft and a target model into engines and decodes with both under exact constraints."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandemrt.engines.parameters.sampling import SamplingParams as SamplingParams
    from tandemrt.engines.parameters.sampling import StructuredOutputs as StructuredOutputs
    from tandemrt.engines.validation.errors import TandemError as TandemError
    from tandemrt.runtime.llm.llm import LLM as LLM
    from tandemrt.runtime.requests.prompt import Chat as Chat
    from tandemrt.runtime.requests.request import RequestOutput as RequestOutput
    from tandemrt.runtime.requests.request import StreamOutput as StreamOutput

__version__ = "0.1.0"

# Imported on first use, so that the exporter does not import the runtime and the command line starts quickly.
_MODULES = {
    "Chat": "tandemrt.runtime.requests.prompt",
    "LLM": "tandemrt.runtime.llm.llm",
    "RequestOutput": "tandemrt.runtime.requests.request",
    "SamplingParams": "tandemrt.engines.parameters.sampling",
    "StreamOutput": "tandemrt.runtime.requests.request",
    "StructuredOutputs": "tandemrt.engines.parameters.sampling",
    "TandemError": "tandemrt.engines.validation.errors",
}
__all__ = [*_MODULES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'tandemrt' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_MODULES[name]), name)
