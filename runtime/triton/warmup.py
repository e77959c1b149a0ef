"""The first rounds, before anybody waits for them."""

from tandemrt.engines.errors import InternalError
from tandemrt.engines.params import SamplingParams, StructuredOutputs
from tandemrt.runtime.llm import LLM
from tandemrt.runtime.requests.outputs import RequestOutput
from tandemrt.runtime.round.buckets import buckets


def warm_up(llm: LLM) -> None:
    """Run a full batch through prefill, drafting and both rules, and compile a grammar. Raises if a round fails.

    On a CUDA device every batch size runs once more, without filters and with them: rounds are captured as graphs
    when a shape first occurs.
    """
    limits = llm.bundle.limits
    prompt = [0] * min(limits.prefill_chunk + 1, limits.length // 2)
    plain = SamplingParams(seed=0, max_tokens=min(limits.window + 2, limits.length - len(prompt)), ignore_eos=True)
    rejection = plain.model_copy(update={"rule": "rejection"})
    _check(llm.generate([prompt] * (limits.batch + 1), [plain] * limits.batch + [rejection]))
    if llm.loop.clock.device.type == "cuda":
        run_every_batch(llm)
    # A tokenizer may be unable to spell JSON: then those who ask for it are told, nobody else.
    structured = plain.model_copy(update={"structured_outputs": StructuredOutputs(json_object=True)})
    llm.generate([prompt], [structured])


def run_every_batch(llm: LLM) -> None:
    """Run rounds of every batch size, once without and once with filters. Raises if a round fails."""
    limits = llm.bundle.limits
    # A few rounds, so that none leaves before all have joined; prompts of one token join at once.
    most = min(4 * (limits.window + 1), limits.length // 2)
    plain = SamplingParams(seed=0, max_tokens=most, ignore_eos=True)
    for size in buckets(limits.batch):
        for params in (plain, plain.model_copy(update={"top_p": 0.9})):
            _check(llm.generate([[0]] * size, params))


def _check(outputs: list[RequestOutput]) -> None:
    for output in outputs:
        if output.finish_reason == "error":
            raise InternalError(f"the bundle opens but cannot generate: {output.error}")
