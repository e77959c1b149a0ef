"""OpenVINO GenAI, with a GGUF file."""

import os
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai

from tools.bench.cpu.protocol import serve


class OpenVINO:
    """Paged attention without a prefix cache. ``MODEL:f32`` computes in float32, ``MODEL`` in OpenVINO's default."""

    def __init__(self, model: str, threads: int) -> None:
        path, _, precision = model.partition(":")
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching = False
        scheduler.cache_size = 1
        how: dict[str, Any] = {"scheduler_config": scheduler, "INFERENCE_NUM_THREADS": threads}
        if precision:
            how |= {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision}
        self._how, self._path = how, os.fspath(path)
        self._plain = genai.LLMPipeline(self._path, "CPU", **how)
        self._lookup: Any = None

    def generate(self, prompts: list[list[int]], tokens: int, *, schema: str, speculate: bool) -> list[list[int]]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = tokens, not schema, False
        pipeline = self._plain
        if schema:
            config.structured_output_config = genai.StructuredOutputConfig(json_schema=schema)
        if speculate:
            if self._lookup is None:
                self._lookup = genai.LLMPipeline(self._path, "CPU", prompt_lookup=True, **self._how)
            config.num_assistant_tokens, config.max_ngram_size = 5, 3
            pipeline = self._lookup
        ids = np.array(prompts, dtype=np.int64)
        inputs = genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        return [list(map(int, each)) for each in pipeline.generate(inputs, config).tokens]


if __name__ == "__main__":
    serve(OpenVINO)
