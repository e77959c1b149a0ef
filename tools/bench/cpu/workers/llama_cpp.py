"""llama.cpp through llama-cpp-python. It runs one text at a time; several use the C functions below it."""

from typing import Any

import llama_cpp
import numpy as np
from llama_cpp import Llama, LlamaGrammar
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from tools.bench.cpu.protocol import serve


class LlamaCpp:
    def __init__(self, model: str, threads: int) -> None:
        self._how: dict[str, Any] = {"n_threads": threads, "n_threads_batch": threads, "n_ctx": 1024, "verbose": False}
        self._model = model
        self._plain = Llama(model, **self._how)
        self._lookup: Llama | None = None
        self._streams: Streams | None = None

    def generate(self, prompts: list[list[int]], tokens: int, *, schema: str, speculate: bool) -> list[list[int]]:
        if len(prompts) > 1:
            if self._streams is None:
                self._streams = Streams(self._plain, len(prompts), self._how["n_ctx"], self._how["n_threads"])
            return self._streams.generate(prompts, tokens)
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


class Streams:
    """A context for ``count`` texts at once: each call of llama_decode computes a token of all of them."""

    def __init__(self, llama: Llama, count: int, context: int, threads: int) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_seq_max, params.n_ctx, params.n_batch = count, count * context, context
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(llama.model, params)
        self._batch = llama_cpp.llama_batch_init(context, 0, 1)
        self._vocab = llama.n_vocab()

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        outputs: list[list[int]] = [[] for _ in prompts]
        inputs, begin = prompts, 0
        for _ in range(tokens):
            last = self._decode(inputs, begin)
            begin += len(inputs[0])
            inputs = []
            for output, row in zip(outputs, last, strict=True):
                logits = llama_cpp.llama_get_logits_ith(self._context, row)
                output.append(int(np.argmax(np.ctypeslib.as_array(logits, (self._vocab,)))))
                inputs.append(output[-1:])
        return outputs

    def _decode(self, inputs: list[list[int]], begin: int) -> list[int]:
        """Compute tokens of all texts, which begin at the same position; return the place of each text's last one."""
        batch, last = self._batch, []
        batch.n_tokens = 0
        for sequence, ids in enumerate(inputs):
            for position, token in enumerate(ids, begin):
                at = batch.n_tokens
                batch.token[at], batch.pos[at], batch.n_seq_id[at], batch.seq_id[at][0] = token, position, 1, sequence
                batch.logits[at] = position == begin + len(ids) - 1
                batch.n_tokens += 1
            last.append(batch.n_tokens - 1)
        if failed := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {failed}")
        return last


if __name__ == "__main__":
    serve(LlamaCpp)
