"""A chat with a model: its messages and the parameters of its answers."""

from dataclasses import dataclass, field
from typing import Any

from tandemrt.engines.parameters.sampling import SamplingParams
from tandemrt.runtime.cli.answer import StreamedAnswer
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import RequestOutput


@dataclass
class ChatSession:
    """The messages of a chat. ``params`` and a ``system`` prompt, if it is not empty, apply to every answer."""

    llm: LLM
    params: SamplingParams
    messages: list[dict[str, Any]] = field(default_factory=list)
    system: str = ""

    def conversation(self) -> list[dict[str, Any]]:
        """Return all messages, the system prompt included."""
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.messages]

    def ask(self, text: str) -> StreamedAnswer:
        """Start the answer to ``text``; ``keep`` takes its output. Raises BadRequest."""
        return StreamedAnswer(self.llm, [*self.conversation(), {"role": "user", "content": text}], self.params)

    def keep(self, text: str, output: RequestOutput) -> None:
        """Add a question and its answer to the messages."""
        reasoning = {"reasoning_content": output.reasoning} if output.reasoning else {}
        answer = {"role": "assistant", "content": output.text, **reasoning}
        self.messages = [*self.messages, {"role": "user", "content": text}, answer]
