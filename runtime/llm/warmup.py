"""Warm up an LLM before its first request."""

from tandemrt.engines.parameters.sampling import SamplingParams, StructuredOutputs
from tandemrt.engines.validation.errors import InternalError
from tandemrt.runtime.llm.llm import LLM
from tandemrt.runtime.requests.request import RequestOutput


def warm_up(llm: LLM) -> None:
    """Run a long prompt and a full batch through drafting and both verification rules, and compile a grammar.

    Servers publish what ``llm.metrics`` counts afterwards. Raises InternalError if a round fails. CUDA graphs were
    captured when the bundle opened.
    """
    limits = llm.bundle.limits
    prompt = [0] * min(limits.prefill_chunk + 1, limits.length // 2)
    plain = SamplingParams(
        seed=0, max_tokens=min(limits.num_draft_tokens + 2, limits.length - len(prompt)), ignore_eos=True
    )
    rejection = plain.model_copy(update={"rule": "rejection"})
    prompts = [prompt, *[prompt[:1]] * limits.batch]
    _check(llm.generate(prompts, [plain] * limits.batch + [rejection]))
    # Not checked: a tokenizer without tokens for JSON is an error only for requests that ask for JSON.
    structured = plain.model_copy(update={"structured_outputs": StructuredOutputs(json_object=True)})
    llm.generate([prompt], [structured])
    llm.metrics.begin_traffic()


def _check(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        if output.finish_reason == "error":
            raise InternalError(f"the bundle opens but cannot generate: {output.error}")
