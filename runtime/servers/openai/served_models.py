"""The models that a server has open, and the requests that name them."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandemrt.engines.validation.errors import quoted
from tandemrt.runtime.grammars.schema.spelling import spelling_warnings
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.servers.openai.errors import UnknownModel
from tandemrt.runtime.servers.openai.protocols import Endpoint
from tandemrt.runtime.servers.openai.request_body import CompletionRequest
from tandemrt.runtime.servers.openai.template_variables import without_unread


@dataclass(frozen=True)
class Models:
    """The served models: open bundles by name. ``created`` in seconds since 1970."""

    llms: Mapping[str, LLM]
    created: int

    def find(self, name: str | None) -> tuple[str, LLM]:
        """Return name and model; None stands for the only model. Raises UnknownModel."""
        if name is None and len(self.llms) == 1:
            return next(iter(self.llms.items()))
        if name is None or name not in self.llms:
            raise UnknownModel(f"model: must be one of {', '.join(self.llms)}, received {quoted(name)}")
        return name, self.llms[name]

    def requested(self, fields: Mapping[str, Any]) -> tuple[str, LLM]:
        """Return name and model that the body of a request names. Raises UnknownModel."""
        model = fields.get("model")
        return self.find(model if isinstance(model, str) else None)

    def parse(self, fields: Mapping[str, Any], endpoint: Endpoint, network: str) -> tuple[CompletionRequest, str, LLM]:
        """Return the request in the ``fields`` of a body, and name and model that it asks for.

        ``network``: the sender's, which shares are counted by; "" for work of this process. Raises BadRequest or
        UnknownModel.
        """
        name, llm = self.requested(fields)
        parsed = endpoint.parse(fields, llm.tokenizer.chat_templates)
        prompt, warnings = without_unread(parsed.prompt, llm.tokenizer, parsed.field_names)
        warnings += spelling_warnings(parsed.params.structured_outputs)
        client = parsed.client._replace(name=network)
        return replace(parsed, prompt=prompt, warnings=warnings, client=client), name, llm

    def card(self, name: str) -> dict[str, Any]:
        """Return the entry of /v1/models; ``root`` and ``parent`` are vLLM's, and ``vllm bench serve`` reads them."""
        card = {"id": name, "object": "model", "created": self.created, "owned_by": "tandemrt"}
        return card | {"root": name, "parent": None, "max_model_len": self.llms[name].bundle.limits.length}
