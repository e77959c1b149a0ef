"""Widely deployed architectures that are not exported, each with the reason (docs/models.md)."""

from collections.abc import Mapping

_LATENT = "its keys and values are stored as one latent vector per token"
_KIMI = "its text part is DeepSeek-V3, but the tensors of the vision model around it are not read"
_GEMMA = "it has several residual streams, and activations that keep the largest values alone"
_SPARSE = "an index chooses which blocks of keys a token sees"
_PARALLEL = "its norms subtract the mean, and attention and MLP read the same input"

# By reason: architectures of further published models.
OTHERS: Mapping[str, tuple[str, ...]] = {
    "its positions are learned or added to scores (ALiBi), not rotary": (
        *("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "BloomForCausalLM", "MPTForCausalLM", "MptForCausalLM"),
        *("OPTForCausalLM", "JAISLMHeadModel"),
    ),
    "its queries, keys and values are one tensor under a name that is not read": (
        *("BaiChuanForCausalLM", "BaichuanForCausalLM", "ChatGLMModel", "ChatGLMForConditionalGeneration"),
        *("QWenLMHeadModel", "InternLM2ForCausalLM", "InternLM2VEForCausalLM", "BailingMoeForCausalLM"),
        *("BailingMoeV2ForCausalLM", "TeleChatForCausalLM", "TeleChat2ForCausalLM", "ExaoneForCausalLM"),
    ),
    "its norms subtract the mean or have no weights, next to other parts that are not read": (
        *("StableLMEpochForCausalLM", "OrionForCausalLM", "DbrxForCausalLM", "PersimmonForCausalLM", "OlmoForCausalLM"),
    ),
    "attention and MLP read the same input": (
        *("CohereForCausalLM", "GPTJForCausalLM", "GPTNeoXForCausalLM", "FalconForCausalLM", "RWForCausalLM"),
        "PhiForCausalLM",
    ),
    "it has recurrent layers of another kind, or no attention at all": (
        *("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM", "JambaForCausalLM", "Zamba2ForCausalLM"),
        *("Plamo2ForCausalLM", "MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    ),
    "its attention has output gates of another form": ("AfmoeForCausalLM", "LagunaForCausalLM"),
    "its activation has learned parameters": ("ApertusForCausalLM",),
    "its experts run next to an MLP of their own": ("ArcticForCausalLM", "Grok1ModelForCausalLM"),
    f"{_LATENT}, with parts that are not read": (
        *("MiniCPM3ForCausalLM", "MistralLarge3ForCausalLM", "PanguUltraMoEForCausalLM"),
    ),
    "it is described by code in the checkpoint, which is not run": (
        *("AquilaModel", "AquilaForCausalLM", "DeepseekForCausalLM", "Fairseq2LlamaForCausalLM", "GritLM"),
        *("HCXVisionForCausalLM", "InternLMForCausalLM", "LLaMAForCausalLM"),
        *("MiniCPMForCausalLM", "OuroForCausalLM", "PanguEmbeddedForCausalLM", "PanguProMoEV2ForCausalLM"),
        *("Plamo3ForCausalLM", "SolarForCausalLM", "Step3TextForCausalLM", "TeleFLMForCausalLM", "XverseForCausalLM"),
    ),
    "it is a drafter that reads its target's keys and values": (
        *("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
    ),
    "its keys are chosen by an index, next to other parts that are not read": (
        *("AXK2ForCausalLM", "Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration", "HYV4ForCausalLM"),
        *("Glm5NextForConditionalGeneration", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        *("MiniMaxM3VLForCausalLM", "MiniMaxM3VLForConditionalGeneration"),
    ),
    "its router or the norms around its experts are of a kind that is not read": (
        *(
            "NemotronHPuzzleForCausalLM",
            "AXK1ForCausalLM",
            "BeamForCausalLM",
            "Kolibri1ForCausalLM",
            "JetMoeForCausalLM",
            "ZayaForCausalLM",
        ),
    ),
    "it has recurrent layers or convolutions of another kind": (
        *("BailingHybridForCausalLM", "InklingForCausalLM", "InklingForConditionalGeneration", "Inkling2ForCausalLM"),
        *("Inkling2ForConditionalGeneration", "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "xLSTMForCausalLM"),
        *("ZambaForCausalLM", "BltForCausalLM", "HrmTextForCausalLM", "Lfm3VlForConditionalGeneration"),
    ),
    "its norms have no weights, or lie at places that are not read": (
        *("NanoChatForCausalLM", "BitNetForCausalLM", "DiffLlamaForCausalLM", "DogeForCausalLM"),
    ),
    "its text part has parts that are not read": (
        *("AriaTextForCausalLM", "AriaForConditionalGeneration", "AyaVisionForConditionalGeneration"),
        *("Cohere2VisionForConditionalGeneration", "CohereCompassForCausalLM", "CohereCompassForConditionalGeneration"),
        *("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration", "MllamaForCausalLM"),
        *("MllamaForConditionalGeneration", "MuseGlimmerForConditionalGeneration", "MuseSparkForConditionalGeneration"),
        *("MistralLarge4ForConditionalGeneration", "Step3VLForConditionalGeneration", "Phi4MultimodalForCausalLM"),
        *("Ernie4_5_VLMoeForConditionalGeneration", "PaddleOCRVLForConditionalGeneration", "Phi4MMForCausalLM"),
        *("HunYuanVLForConditionalGeneration", "HyperCLOVAXVisionV2ForConditionalGeneration"),
    ),
    "the tensors around its text part have names that are not read": (
        *(
            "FastVlmForConditionalGeneration",
            "GlmOcrForConditionalGeneration",
            "Granite4VisionForConditionalGeneration",
        ),
        *(
            "GraniteDoclingForConditionalGeneration",
            "Idefics2ForConditionalGeneration",
            "Molmo2ForConditionalGeneration",
        ),
        *("MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration", "MiniCPMV", "MiniCPMO"),
        *("NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "Ovis2ForConditionalGeneration", "Ovis2_5"),
        *("PaliGemmaForConditionalGeneration", "PerceptionLMForConditionalGeneration"),
        *("QianfanOCRForConditionalGeneration", "Qwen2_5OmniModel", "Qwen2_5OmniThinkerForConditionalGeneration"),
        *("Qwen3OmniMoeForConditionalGeneration", "Qwen3OmniMoeThinkerForConditionalGeneration"),
        *("DeepseekVLV2ForCausalLM", "DeepseekOCRForCausalLM", "DeepseekOcr2ForConditionalGeneration"),
        *(
            "LlavaNextVideoForConditionalGeneration",
            "VideoLlama3ForConditionalGeneration",
            "JanusForConditionalGeneration",
        ),
        *("DeepseekVLForConditionalGeneration", "DeepseekVLHybridForConditionalGeneration", "Phi3VForCausalLM"),
    ),
    "it writes texts by diffusion, not token by token": ("DiffusionGemmaForBlockDiffusion",),
}
UNSUPPORTED = {name: reason for reason, names in OTHERS.items() for name in names} | {
    "KimiVLForConditionalGeneration": _KIMI,
    "DeepseekV32ForCausalLM": f"{_LATENT}, and an index chooses which of them a token sees",
    "GlmMoeDsaForCausalLM": f"{_LATENT}, and an index chooses which of them a token sees",
    "Gemma3nForConditionalGeneration": _GEMMA,
    "Gemma3nForCausalLM": _GEMMA,
    "MiniMaxM3SparseForConditionalGeneration": _SPARSE,
    "DeepseekV4ForCausalLM": _SPARSE,
    "LongcatFlashForCausalLM": f"{_LATENT}, twice in a layer, and some of its experts return their input",
    "Cohere2ForCausalLM": _PARALLEL,
    "Cohere2MoeForCausalLM": _PARALLEL,
    "DeciLMForCausalLM": "its layers have different structures, some without attention",
}
