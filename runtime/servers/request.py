"""The fields that a parsed request has over HTTP and in Triton."""

from dataclasses import dataclass

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.runtime.requests.prompt import Prompt
from tandemrt.runtime.workers.clients import UNNAMED, Client


@dataclass(frozen=True, kw_only=True)
class ServerRequest:
    """A request to a served model.

    Attributes:
        stream: whether the client receives text while it is generated.
        client: the sender, for fair shares.
        traced: whether its trace is recorded (LLM.submit).
    """

    prompt: Prompt
    params: SamplingParams
    stream: bool
    client: Client = UNNAMED
    traced: bool = False
