"""Architectures that people deploy and that are not exported, with what stands in the way (docs/models.md)."""

_ROUTER = "its router is a sigmoid with a correction, and a shared expert runs beside the chosen ones"
_LATENT = "its keys and values are kept as one latent vector per token"
_RECURRENT = (
    "some of its layers are recurrent or convolutions, with a state that a refused draft would have to roll back"
)

REASONS = {
    "Glm4MoeForCausalLM": _ROUTER,
    "MiniMaxM2ForCausalLM": "its router is a sigmoid with a correction",
    "Qwen2MoeForCausalLM": "a shared expert runs beside the chosen ones",
    "Ernie4_5_MoeForCausalLM": "a shared expert runs beside the chosen ones",
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,  # Kimi-K2 too
    "Kimi_K25ForConditionalGeneration": _LATENT,
    "DeepseekV32ForCausalLM": f"{_LATENT}, and an index chooses which of them a token sees",
    "GlmMoeDsaForCausalLM": f"{_LATENT}, and an index chooses which of them a token sees",
    "Qwen3NextForCausalLM": _RECURRENT,
    "Qwen3_5ForCausalLM": _RECURRENT,
    "Qwen3_5ForConditionalGeneration": _RECURRENT,
    "Qwen3_5MoeForCausalLM": _RECURRENT,
    "Qwen3_5MoeForConditionalGeneration": _RECURRENT,
    "NemotronHForCausalLM": _RECURRENT,
    "GraniteMoeHybridForCausalLM": _RECURRENT,
    "KimiLinearForCausalLM": _RECURRENT,
    "Lfm2ForCausalLM": _RECURRENT,
    "DeciLMForCausalLM": "each of its layers is a block of its own, some without attention",
}
