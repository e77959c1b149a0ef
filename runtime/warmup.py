"""The first rounds, before anybody waits for them."""

from tandemrt.engines.errors import InternalError
from tandemrt.engines.params import SamplingParams, StructuredOutputs
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.requests.outputs import RequestOutput


def warm_up(llm: LLM) -> None:
    """Run a full batch through prefill, drafting and both rules, and compile a grammar. Raises if a round fails.

    The graphs of a CUDA device were captured when the bundle opened.
    """
    limits = llm.bundle.limits
    prompt = [0] * min(limits.prefill_chunk + 1, limits.length // 2)
    plain = SamplingParams(seed=0, max_tokens=min(limits.window + 2, limits.length - len(prompt)), ignore_eos=True)
    rejection = plain.model_copy(update={"rule": "rejection"})
    _check(llm.generate([prompt] * (limits.batch + 1), [plain] * limits.batch + [rejection]))
    # A tokenizer may be unable to spell JSON: then those who ask for it are told, nobody else.
    structured = plain.model_copy(update={"structured_outputs": StructuredOutputs(json_object=True)})
    llm.generate([prompt], [structured])


def _check(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        if output.finish_reason == "error":
            raise InternalError(f"the bundle opens but cannot generate: {output.error}")
