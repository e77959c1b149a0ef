"""TandemRT: a draft and a target model, compiled into engines and run in tandem under exact constraints."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandemrt.engines.errors import TandemError as TandemError
    from tandemrt.engines.params import SamplingParams as SamplingParams
    from tandemrt.engines.params import StructuredOutputs as StructuredOutputs
    from tandemrt.runtime.llm import LLM as LLM
    from tandemrt.runtime.requests.outputs import RequestOutput as RequestOutput
    from tandemrt.runtime.requests.outputs import StreamOutput as StreamOutput
    from tandemrt.runtime.requests.prompt import Chat as Chat

__version__ = "0.1.0"

# Loaded on first use: the exporter does not pay for the runtime, and the command line starts quickly.
_HOMES = {
    "Chat": "tandemrt.runtime.requests.prompt",
    "LLM": "tandemrt.runtime.llm",
    "RequestOutput": "tandemrt.runtime.requests.outputs",
    "SamplingParams": "tandemrt.engines.params",
    "StreamOutput": "tandemrt.runtime.requests.outputs",
    "StructuredOutputs": "tandemrt.engines.params",
    "TandemError": "tandemrt.engines.errors",
}
__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tandemrt' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
