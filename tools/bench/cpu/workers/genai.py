"""onnxruntime-genai, with a model from its own builder."""

import json
from typing import Any

import onnxruntime_genai as og

from tools.bench.cpu.protocol import serve


class GenAI:
    def __init__(self, model: str, threads: int) -> None:
        config = og.Config(model)
        options = {"session_options": {"intra_op_num_threads": threads}}
        config.overlay(json.dumps({"model": {"decoder": options}}))
        self._model = og.Model(config)
        self._tokenizer = og.Tokenizer(self._model)

    def generate(self, prompts: list[list[int]], tokens: int, *, schema: str, speculate: bool) -> list[list[int]]:
        length = len(prompts[0])
        params = og.GeneratorParams(self._model)
        room: dict[str, Any] = {"min_length": 0 if schema else length + tokens, "max_length": length + tokens}
        params.set_search_options(do_sample=False, batch_size=len(prompts), **room)
        if schema:
            params.set_guidance("json_schema", schema)
        if speculate:
            params.set_speculative_options(ngram_size=3, max_draft_tokens=5)
        generator = og.Generator(self._model, params)
        generator.append_tokens(prompts if len(prompts) > 1 else prompts[0])
        while not generator.is_done():
            generator.generate_next_token()
        return [[int(token) for token in generator.get_sequence(i)][length:] for i in range(len(prompts))]


if __name__ == "__main__":
    serve(GenAI)
