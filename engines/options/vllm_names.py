"""Options of ``vllm serve`` that have another name here, or that something else replaces."""

from tandemrt.engines.validation.errors import BadRequest

ALIASES = {
    "enable-prefix-caching": "prefix-caching",
    "enforce-eager": "no-cuda-graphs",
    "no-enable-prefix-caching": "no-prefix-caching",
    "uvicorn-log-level": "log-level",
}
ADVICE = {
    "enable-auto-tool-choice": "leave it out: tool calls are read in the format of the chat template",
    "gpu-memory-utilization": "write --cache-tokens, how many tokens the cache of keys and values holds",
    "kv-cache-dtype": "set target.kv_dtype in a recipe, or write tandemrt export build --kv-dtype",
    "max-num-batched-tokens": "write --prefill-chunk, the prompt tokens per round",
    "max-num-seqs": "set limits.batch in a recipe, the requests that run at once",
    "quantization": "write --dtype int8 or int4; a quantized checkpoint needs no option",
    "reasoning-parser": "leave it out: reasoning is read with the delimiters of the bundle",
    "served-model-name": "write NAME=MODEL in place of MODEL",
    "speculative-config": "write --draft and --num-draft-tokens",
    "tensor-parallel-size": "set backend.tensor_parallel in a recipe (docs/scaling.md)",
    "tool-call-parser": "leave it out: tool calls are read in the format of the chat template",
    "trust-remote-code": "leave it out: code of a checkpoint never runs here",
}


def own_name(name: str) -> str:
    """Return the name of an option here, without dashes at its start. Raises BadRequest with what to write instead."""
    if advice := ADVICE.get(name):
        raise BadRequest(f"--{name}: is an option of vLLM; {advice}")
    return ALIASES.get(name, name)
