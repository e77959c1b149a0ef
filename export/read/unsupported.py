"""Widely deployed architectures that are not exported, each with the reason (docs/models.md)."""

from collections.abc import Mapping

_LATENT = "its keys and values are stored as one latent vector per token"
_KIMI = "its text part is DeepSeek-V3, but the tensors of the vision model around it are not read"
_GEMMA = "it has several residual streams, and activations that keep the largest values alone"
_SPARSE = "an index chooses which blocks of keys a token sees"

# By reason: architectures of further published models.
OTHERS: Mapping[str, tuple[str, ...]] = {
    "its positions are learned or added to scores (ALiBi)": (
        *("BloomForCausalLM", "MPTForCausalLM", "MptForCausalLM"),
        *("JAISLMHeadModel", "GPTNeoForCausalLM", "OpenAIGPTLMHeadModel", "XGLMForCausalLM"),
    ),
    "it has further weights for images in every MLP; InternLM 2 is read": ("InternLM2VEForCausalLM",),
    "its published weights are pickles": ("Fairseq2LlamaForCausalLM",),
    "its queries, keys and values are one tensor with bounds (clip_qkv), and its norms subtract the mean": (
        "DbrxForCausalLM",
    ),
    "its queries, keys and values are one tensor in an order of its own": ("CodeGenForCausalLM",),
    "it has no attention: all of its layers are recurrent (Mamba)": (
        *("MambaForCausalLM", "Mamba2ForCausalLM", "FalconMambaForCausalLM"),
    ),
    "its recurrent layers are Mamba-1, which is not read": ("JambaForCausalLM",),
    "its layers with attention share weights, next to Mamba layers": ("Zamba2ForCausalLM", "ZambaForCausalLM"),
    "its recurrent layers are lightning attention, which is not read; MiniMax M2 is read": (
        *("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    ),
    "it has recurrent layers of another kind": ("Plamo2ForCausalLM",),
    "its experts run next to an MLP of their own": ("ArcticForCausalLM", "Grok1ModelForCausalLM"),
    f"{_LATENT}, with parts that are not read": ("MistralLarge3ForCausalLM",),
    "its positions are added to scores (ALiBi)": ("Step1ForCausalLM",),
    "its chunks of attention see the chunk before theirs, too": ("Rnj1ForCausalLM",),
    "its layers run several times for each token, or mix streams of earlier layers": (
        *("DoryForCausalLM", "IQuestLoopCoderForCausalLM", "AliceAIForCausalLM"),
    ),
    "its queries and keys are normed in different ways, next to layers of different head sizes": (
        "DomynEdgeForCausalLM",
    ),
    "its queries, keys and values are one tensor, in parts for a number of ranks": ("MiMoV2ForCausalLM",),
    "a router chooses the values of its attention": ("K2HorizonForCausalLM",),
    "its two latent attentions in a layer read embeddings of several tokens": ("LongcatFlashNgramForCausalLM",),
    "it is described by code in the checkpoint, which is not run": (
        *("Phi3SmallForCausalLM", "HCXVisionForCausalLM", "PanguProMoEV2ForCausalLM", "Plamo3ForCausalLM"),
        "Step3TextForCausalLM",
    ),
    "its layers run several times for each token": ("OuroForCausalLM",),
    "it is a drafter that reads its target's keys and values": (
        *("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM"),
    ),
    "its keys are chosen by an index, next to other parts that are not read": (
        *("AXK2ForCausalLM", "Dots3NoteForCausalLM", "Dots3NoteForConditionalGeneration", "HYV4ForCausalLM"),
        *("Glm5NextForCausalLM", "Step5ForCausalLM", "MiniMaxM3SparseForCausalLM"),
        *("Glm5NextForConditionalGeneration", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        *("MiniMaxM3VLForCausalLM", "MiniMaxM3VLForConditionalGeneration"),
    ),
    "its router or the norms around its experts are of a kind that is not read": (
        *(
            "NemotronHPuzzleForCausalLM",
            "BeamForCausalLM",
            "Kolibri1ForCausalLM",
            "JetMoeForCausalLM",
            "ZayaForCausalLM",
        ),
    ),
    "it has recurrent layers or convolutions of another kind": (
        *("BailingHybridForCausalLM", "BailingMoeV2_5ForCausalLM", "BailingMoeV3ForCausalLM"),
        *("InklingForCausalLM", "InklingForConditionalGeneration", "Inkling2ForCausalLM"),
        *("Inkling2ForConditionalGeneration", "RecurrentGemmaForCausalLM", "RwkvForCausalLM", "xLSTMForCausalLM"),
        *("BltForCausalLM", "HrmTextForCausalLM"),
    ),
    "its norms have no weights, or lie at places that are not read": (
        *("NanoChatForCausalLM", "BitNetForCausalLM", "DiffLlamaForCausalLM", "DogeForCausalLM"),
    ),
    "some of its layers attend to images (cross-attention)": (
        *("MllamaForCausalLM", "MllamaForConditionalGeneration"),
    ),
    "it has other parts than Command R7B, which is read": (
        *("CohereCompassForCausalLM", "CohereCompassForConditionalGeneration"),
    ),
    "its matmuls are stored next to adapters (LoRA) for images and speech": (
        *("Phi4MMForCausalLM", "Phi4MultimodalForCausalLM"),
    ),
    "its class is that of LLaVA's own code; checkpoints with -hf in their names are read": (
        *("LlavaLlamaForCausalLM", "LlavaMistralForCausalLM", "LlavaQwenForCausalLM"),
    ),
    "it has separate experts for texts and for images": ("Ernie4_5_VLMoeForConditionalGeneration",),
    "its experts are stored under names that are not read": (*("AriaTextForCausalLM", "AriaForConditionalGeneration"),),
    "tokens of its prompts attend to later ones": ("PaliGemmaForConditionalGeneration",),
    "its text part lies under thinker, next to an audio encoder and a talker that are not read": (
        *("Qwen2_5OmniModel", "Qwen2_5OmniThinkerForConditionalGeneration", "Qwen3OmniMoeForConditionalGeneration"),
        "Qwen3OmniMoeThinkerForConditionalGeneration",
    ),
    "its text part lies under llm, next to a resampler of images that is not read": ("MiniCPMV", "MiniCPMO"),
    "its text part has parts that are not read": (
        *("MuseGlimmerForCausalLM", "HCXVisionV2ForCausalLM"),
        *("Gemma4UnifiedForCausalLM", "Gemma4UnifiedForConditionalGeneration"),
        *("MuseGlimmerForConditionalGeneration", "MuseSparkForConditionalGeneration"),
        *("MistralLarge4ForConditionalGeneration", "Step3VLForConditionalGeneration"),
        *("PaddleOCRVLForConditionalGeneration", "HunYuanVLForConditionalGeneration"),
        "HyperCLOVAXVisionV2ForConditionalGeneration",
    ),
    "the tensors around its text part have names that are not read": (
        *("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration"),
        *("FastVlmForConditionalGeneration", "GlmOcrForConditionalGeneration"),
        *("Granite4VisionForConditionalGeneration", "GraniteDoclingForConditionalGeneration"),
        *("Idefics2ForConditionalGeneration", "Molmo2ForConditionalGeneration"),
        *("MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration"),
        *("NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_VL_V2", "Ovis2ForConditionalGeneration", "Ovis2_5"),
        *("PerceptionLMForConditionalGeneration", "QianfanOCRForConditionalGeneration"),
        *("DeepseekVLV2ForCausalLM", "DeepseekOCRForCausalLM", "DeepseekOcr2ForConditionalGeneration"),
        *("LlavaNextVideoForConditionalGeneration", "VideoLlama3ForConditionalGeneration"),
        *("JanusForConditionalGeneration", "DeepseekVLForConditionalGeneration"),
        *("DeepseekVLHybridForConditionalGeneration", "Phi3VForCausalLM"),
    ),
    "it writes texts by diffusion, not token by token": ("DiffusionGemmaForBlockDiffusion",),
    "an encoder reads its prompts": (
        *("T5ForConditionalGeneration", "MT5ForConditionalGeneration", "UMT5ForConditionalGeneration"),
        *("T5GemmaForConditionalGeneration", "T5Gemma2ForConditionalGeneration", "BartForConditionalGeneration"),
        *("MBartForConditionalGeneration", "M2M100ForConditionalGeneration", "PegasusForConditionalGeneration"),
        *("LEDForConditionalGeneration", "WhisperForConditionalGeneration", "Florence2ForConditionalGeneration"),
    ),
}
UNSUPPORTED = {name: reason for reason, names in OTHERS.items() for name in names} | {
    "KimiVLForConditionalGeneration": _KIMI,
    "Gemma3nForConditionalGeneration": _GEMMA,
    "Gemma3nForCausalLM": _GEMMA,
    "MiniMaxM3SparseForConditionalGeneration": _SPARSE,
    "MiniMaxM3ForCausalLM": _SPARSE,
    "KimiK3ForConditionalGeneration": "its activation has bounds, and its layers add the outputs of earlier blocks",
    "DeepseekV4ForCausalLM": _SPARSE,
    "LongcatFlashForCausalLM": f"{_LATENT}, twice in a layer, and some of its experts return their input",
    "DeciLMForCausalLM": "its layers have different structures, some without attention",
}

_WITHOUT_HEAD = ("Classification", "RewardModel", "ForMaskedLM", "ForQuestionAnswering", "ForPreTraining")
_ENCODERS = ("Model", "ModelWithProjection")


def without_head(architecture: str) -> str | None:
    """Return why a class for classes, scores or embeddings is not exported; None for other names."""
    scores = architecture.endswith(_WITHOUT_HEAD)
    if scores or (architecture.endswith(_ENCODERS) and not architecture.endswith("LMHeadModel")):
        return f"it computes {'classes or scores' if scores else 'embeddings'}, not the next token"
    return None
