"""Widely deployed architectures that are not exported, each with the reason (docs/models.md)."""

_LATENT = "its keys and values are stored as one latent vector per token"
_RECURRENT = (
    "some of its layers are recurrent or convolutions, with a state that a rejected draft would have to roll back"
)

UNSUPPORTED = {
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,  # Kimi-K2 too
    "Kimi_K25ForConditionalGeneration": _LATENT,
    "DeepseekV32ForCausalLM": f"{_LATENT}, and an index chooses which of them a token sees",
    "GlmMoeDsaForCausalLM": f"{_LATENT}, and an index chooses which of them a token sees",
    "NemotronHForCausalLM": _RECURRENT,
    "GraniteMoeHybridForCausalLM": _RECURRENT,
    "KimiLinearForCausalLM": _RECURRENT,
    "Lfm2ForCausalLM": _RECURRENT,
    "DeciLMForCausalLM": "its layers have different structures, some without attention",
}
