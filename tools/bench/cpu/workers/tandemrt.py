"""TandemRT, with a bundle for n-gram drafts."""

import json

from tandemrt import LLM, SamplingParams, StructuredOutputs
from tools.bench.cpu.protocol import serve


class TandemRT:
    def __init__(self, model: str, threads: int) -> None:
        self._llm = LLM(model, threads=threads, grammar_timeout_s=600.0)

    def generate(self, prompts: list[list[int]], tokens: int, *, schema: str, speculate: bool) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=not schema,
            num_draft_tokens=None if speculate else 0,
            structured_outputs=StructuredOutputs(json=json.loads(schema)) if schema else None,
        )
        outputs = self._llm.generate(prompts, params)
        for output in outputs:
            if output.error:
                raise RuntimeError(output.error)
        return [output.token_ids for output in outputs]


if __name__ == "__main__":
    serve(TandemRT)
