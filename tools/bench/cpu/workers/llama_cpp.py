"""llama.cpp through llama-cpp-python, which runs one text at a time."""

from typing import Any

from llama_cpp import Llama, LlamaGrammar
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from tools.bench.cpu.protocol import Unable, serve


class LlamaCpp:
    def __init__(self, model: str, threads: int) -> None:
        self._how: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": 1024, "verbose": False}
        self._model = model
        self._plain = Llama(model, **self._how)
        self._lookup: Llama | None = None

    def generate(self, prompts: list[list[int]], tokens: int, *, schema: str, speculate: bool) -> list[list[int]]:
        if len(prompts) > 1:
            raise Unable("llama-cpp-python runs one text at a time")
        llama, how = self._plain, dict[str, Any]()
        if schema:
            how["grammar"] = LlamaGrammar.from_json_schema(schema, verbose=False)
        if speculate:
            if self._lookup is None:
                drafts = LlamaPromptLookupDecoding(max_ngram_size=3, num_pred_tokens=5)
                self._lookup = Llama(self._model, draft_model=drafts, **self._how)
            llama = self._lookup
        generated: list[int] = []
        llama.reset()
        for token in llama.generate(prompts[0], temp=0.0, repeat_penalty=1.0, reset=True, **how):
            generated.append(token)
            if len(generated) == tokens or (schema and token == llama.token_eos()):
                break
        return [generated]


if __name__ == "__main__":
    serve(LlamaCpp)
