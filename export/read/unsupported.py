"""Widely deployed architectures that are not exported, each with the reason (docs/models.md)."""

_LATENT = "its keys and values are stored as one latent vector per token"
_KIMI = "its text part is DeepSeek-V3, but the tensors of the vision model around it are not read"
_GEMMA = "it has several residual streams, and activations that keep the largest values alone"
_SPARSE = "an index chooses which blocks of keys a token sees"
_PARALLEL = "its norms subtract the mean, and attention and MLP read the same input"
_LFM3 = "its attention has a gate per head, and sliding windows next to short convolutions"

UNSUPPORTED = {
    "Kimi_K25ForConditionalGeneration": _KIMI,
    "KimiK25ForConditionalGeneration": _KIMI,
    "KimiVLForConditionalGeneration": _KIMI,
    "DeepseekV32ForCausalLM": f"{_LATENT}, and an index chooses which of them a token sees",
    "GlmMoeDsaForCausalLM": f"{_LATENT}, and an index chooses which of them a token sees",
    "Lfm3ForCausalLM": _LFM3,
    "Gemma3nForConditionalGeneration": _GEMMA,
    "Gemma3nForCausalLM": _GEMMA,
    "Step3p7ForConditionalGeneration": "its activations are clamped layer by layer, and its attention has output gates",
    "MiniMaxM3SparseForConditionalGeneration": _SPARSE,
    "DeepseekV4ForCausalLM": _SPARSE,
    "LongcatFlashForCausalLM": f"{_LATENT}, twice in a layer, and some of its experts return their input",
    "Cohere2ForCausalLM": _PARALLEL,
    "Cohere2MoeForCausalLM": _PARALLEL,
    "DeciLMForCausalLM": "its layers have different structures, some without attention",
}
