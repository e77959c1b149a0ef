"""Every model family gives the logits of transformers, in every supported lowering, beyond its sliding window."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    Gemma3Config,
    PreTrainedConfig,
    PreTrainedModel,
)

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.support import unsupported
from tandemrt.export.quantize.checkpoint import write_quantized
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.layer import QKNorm
from tandemrt.export.read.spec import ModelSpec
from tandemrt.export.read.tensors import with_graph_names
from tests.engine.decoding import VOCAB, Decoder, edit_config, expected_logits, make_checkpoint, randomize
from tests.families.cases import FAMILIES, LENGTH, WINDOW
from tests.makers import VOCAB as WIDE
from tests.makers import tiny_tokenizer, write_recipe

CAPACITY = LENGTH + 8
LING = {  # names of GLM-4.5 -> those of Ling 2.0
    r"^model\.embed_tokens\.": "model.word_embeddings.",
    r"\.self_attn\.o_proj\.": ".attention.dense.",
    r"\.self_attn\.q_norm\.": ".attention.query_layernorm.",
    r"\.self_attn\.k_norm\.": ".attention.key_layernorm.",
    r"\.self_attn\.": ".attention.",
    r"\.gate\.e_score_correction_bias$": ".gate.expert_bias",
}
QK = {"q": ".query_layernorm.", "k": ".key_layernorm."}
STARTS = (40, 33)  # tokens of the two prompts, which no row scores


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, VOCAB, (2, LENGTH), generator=generator).tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A checkpoint folder, and the logits of transformers for two texts."""
    folder = tmp_path_factory.mktemp("checkpoint")
    model = make_checkpoint(request.param, folder)
    return folder, torch.stack([expected_logits(model, text) for text in texts()])


def assert_close(logits: torch.Tensor, expected: torch.Tensor, atol: float = 1e-4) -> None:
    torch.testing.assert_close(logits, expected, atol=atol, rtol=0)


def near(spec: ModelSpec) -> float:
    """Random recurrent layers amplify rounding: transformers in bfloat16 errs by up to 0.3 of their largest logit."""
    return 1e-4 if spec.recurrent is None else 3e-4


@pytest.mark.parametrize("attention", ["mask", "basic", "paged", "length"])
def test_logits_equal_those_of_transformers(checkpoint: tuple[Path, torch.Tensor], attention: Lowering) -> None:
    folder, expected = checkpoint
    spec = ModelSpec.from_hf(Checkpoint.open(folder).config)
    capacity = WINDOW if attention == "length" and spec.sliding_window else CAPACITY
    if unsupported(spec, attention, capacity):
        with pytest.raises(BadCheckpoint, match=r"paged cache|onnxruntime-cpu"):
            Decoder(folder, attention, batch=2, capacity=capacity)
        return
    decode = Decoder(folder, attention, batch=2, capacity=capacity)
    for start, end in ((0, 17), (17, 22), (22, 23), (23, LENGTH)):
        if end <= capacity:
            assert_close(decode([text[start:end] for text in texts()], [start] * 2), expected[:, start:end], near(spec))


def test_draft_windows_on_a_cpu_equal_transformers_and_single_tokens_exactly(
    checkpoint: tuple[Path, torch.Tensor],
) -> None:
    folder, expected = checkpoint
    decode = Decoder(folder, "grouped", batch=2, capacity=CAPACITY)
    for row, (text, end) in enumerate(zip(texts(), STARTS, strict=True)):
        prefill(decode, row, text[:end], cut=row)
    cached = {name: cache.clone() for name, cache in decode.caches.items()}
    logits = continued(decode, window=5)
    for row, start in enumerate(STARTS):
        spec = ModelSpec.from_hf(Checkpoint.open(folder).config)
        assert_close(logits[row], expected[row, start : start + 30], near(spec))
    decode.caches = cached
    assert torch.equal(logits, continued(decode, window=1))


def test_a_quantized_checkpoint_is_read_by_the_names_that_the_build_wrote(
    checkpoint: tuple[Path, torch.Tensor],
) -> None:
    source = Checkpoint.open(checkpoint[0])
    spec = ModelSpec.from_hf(source.config)
    written = with_graph_names(source, spec)
    assert with_graph_names(written, spec).tensors.keys() == written.tensors.keys()


def continued(decode: Decoder, *, window: int) -> torch.Tensor:
    """[2, 30, vocab]: the logits of the 30 tokens after both prompts, ``window`` tokens per call."""
    parts = []
    for done in range(0, 30, window):
        begins = [start + done for start in STARTS]
        parts.append(decode([text[at : at + window] for text, at in zip(texts(), begins, strict=True)], begins))
    return torch.cat(parts, dim=1)


def prefill(decode: Decoder, row: int, text: list[int], *, cut: int) -> None:
    """Process a prompt as the runtime does, without scores, in two calls. The first call has 1 or 2 tokens."""
    for start, end in ((0, cut + 1), (cut + 1, len(text))):
        decode.prefill(row, text[start:end], start)


def test_experts_in_float16_are_rejected(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tiny_tokenizer(tmp_path), sizes={"vocab_size": WIDE, "eos_token_id": 5})
    for dtype in ("float32", "int8", "int4"):
        open_models(Recipe.load(write_recipe(tmp_path / "r.toml", target=tmp_path, dtype=dtype)))
    with pytest.raises(BadRecipe, match=r"target\.dtype should be float32, int8 or int4 .* experts; got 'float16'"):
        open_models(Recipe.load(write_recipe(tmp_path / "r.toml", target=tmp_path, dtype="float16")))


@pytest.mark.parametrize(
    ("cache", "sizes", "message"),
    [
        ("linear", {}, "mixtral has experts, which run with onnxruntime-cuda over a paged cache, or on a CPU"),
        ("paged", {"intermediate_size": 36}, "has 2 of 4 experts of 36 values for 48; .*in multiples of 8 values"),
        ("paged", {"hidden_size": 56, "head_dim": 32}, "multiples of 16: choose onnxruntime-cpu"),
        ("paged", {}, "needs a head size of .*got 16 in target.checkpoint; choose backend 'onnxruntime-cpu'"),
    ],
)
def test_experts_that_a_gpu_does_not_support_are_rejected(
    tmp_path: Path, cache: str, sizes: dict[str, int], message: str
) -> None:
    make_checkpoint("mixtral", tiny_tokenizer(tmp_path), sizes={"vocab_size": WIDE, "eos_token_id": 5, **sizes})
    backend = f'name = "onnxruntime-cuda"\ncache = "{cache}"'
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=tmp_path, dtype="bfloat16", backend=backend))
    with pytest.raises((BadCheckpoint, BadRecipe), match=message):
        open_models(recipe)


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("bfloat16", r"the width of its experts, 40, does not give 2 ranks multiples of 128 each"),
        ("int4", r"target\.dtype must be float32, .* with experts over 2 ranks; got 'int4'"),
    ],
)
def test_quantized_experts_that_ranks_cannot_share_are_rejected(tmp_path: Path, dtype: str, message: str) -> None:
    make_checkpoint("mixtral", tiny_tokenizer(tmp_path), sizes={"vocab_size": WIDE, "eos_token_id": 5, "head_dim": 32})
    if dtype == "bfloat16":
        edit_config(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    backend = 'name = "onnxruntime-cuda"\ntensor_parallel = 2'
    recipe = write_recipe(tmp_path / "r.toml", target=tmp_path, dtype=dtype, backend=backend)
    with pytest.raises(BadRecipe, match=message):
        open_models(Recipe.load(recipe))


def test_ling_is_glm_4_5_under_other_names(tmp_path: Path) -> None:
    """Its code is in its checkpoints alone; there its logits were compared by hand."""
    model = make_checkpoint("glm4_moe", tmp_path / "glm", sizes={"attention_bias": False})
    glm = Checkpoint.open(tmp_path / "glm")
    tensors, config = load_file(tmp_path / "glm" / "model.safetensors"), model.config.to_dict()
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn"
        joined = torch.cat([tensors.pop(f"{name}.{part}_proj.weight") for part in "qkv"])
        tensors[f"{name}.query_key_value.weight"] = joined
    for stored, named in LING.items():
        tensors = {re.sub(stored, named, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    names = {"n_routed_experts": "num_experts", "n_shared_experts": "num_shared_experts"}
    own = {names.get(name, name): value for name, value in config.items() if name != "attention_bias"}
    own |= {"architectures": ["BailingMoeV2ForCausalLM"], "model_type": "bailing_moe_v2", "partial_rotary_factor": 0.5}
    own |= {"score_function": "sigmoid", "use_rmsnorm": True, "norm_head": False, "rope_parameters": None}
    (tmp_path / "config.json").write_text(json.dumps(own | {"rope_theta": config["rope_parameters"]["rope_theta"]}))
    ling = Checkpoint.open(tmp_path)
    spec, same = ModelSpec.from_hf(ling.config), ModelSpec.from_hf(glm.config)
    assert spec == replace(same, family=spec.family, qk_norm=QKNorm("query_layernorm", "key_layernorm"))
    renamed, expected = with_graph_names(ling, spec), with_graph_names(glm, same)
    names = {name: re.sub(r"\.([qk])_norm\.", lambda at: QK[at[1]], name) for name in expected.tensors}
    assert set(renamed.tensors) == set(names.values())
    for name, tensor in expected.tensors.items():
        read = (tensor.shape, (tensor.dtype,))
        assert np.array_equal(renamed.read(names[name], *read), expected.read(name, *read))


def test_an_expert_without_tokens_is_not_run(tmp_path: Path) -> None:
    """Its weights may even be NaN."""
    model = make_checkpoint("mixtral", tmp_path)
    chosen: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda _gate, _given, routed: chosen.append(routed[2].unique()))
    expected = expected_logits(model, [7])
    with torch.no_grad():
        for layer, used in zip(model.model.layers, chosen, strict=True):
            assert len(used) == 2
            layer.mlp.experts.down_proj[[expert for expert in range(4) if expert not in used]] = float("nan")
    model.save_pretrained(tmp_path)
    assert_close(Decoder(tmp_path, "grouped", batch=1)([[7]], [0])[0], expected)


def test_a_padding_row_takes_no_expert_from_another_row(tmp_path: Path) -> None:
    make_checkpoint("mixtral", tmp_path)
    decode = Decoder(tmp_path, "grouped", batch=2)
    alone = decode([[7], [7]], [0, 0])[0]
    for cache in decode.caches.values():
        cache[1] = float("nan")
    assert torch.equal(decode([[7], [7]], [0, 9])[0], alone)


@pytest.mark.parametrize(
    ("case", "bits", "error"),
    [
        *(("phi3", 8, 0.05), ("mixtral", 8, 0.05), ("mixtral", 4, 0.4), ("gpt_oss", 8, 0.05), ("gemma4", 8, 0.05)),
        *(("gpt_neox", 8, 0.05), ("gpt2", 8, 0.05)),
    ],
)
def test_every_matmul_is_quantized_under_any_family_name(tmp_path: Path, case: str, bits: int, error: float) -> None:
    model = make_checkpoint(case, tmp_path)
    checkpoint, quantized = Checkpoint.open(tmp_path), tmp_path / "quantized"
    quantized.mkdir()
    shutil.copy(tmp_path / "config.json", quantized)
    written = write_quantized(checkpoint, ModelSpec.from_hf(checkpoint.config), quantized, bits).checkpoint
    ends = ("proj.weight", "lm_head.weight", "gate.weight", "projection.weight")
    whole = {name for name in written.tensors if name.endswith(ends) and not name.endswith("mlp.gate.weight")}
    assert not whole
    text = texts()[0]
    logits, expected = (
        Decoder(quantized, "grouped", batch=1, capacity=CAPACITY)([text], [0])[0],
        expected_logits(model, text),
    )
    assert (logits - expected).abs().mean() < error * expected.abs().mean()


def test_keys_and_values_that_no_layer_reads_may_be_stored(tmp_path: Path) -> None:
    """Gemma 4's files have them for layers that share those of an earlier one."""
    model = make_checkpoint("gemma4", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [name for name in tensors if re.search(r"layers\.1\.self_attn\.[kv]_", name)]
    for name in names:
        tensors[name.replace("layers.1.", "layers.3.")] = torch.full_like(tensors[name], float("nan"))
    assert len(names) == 3
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = texts()[0]
    assert_close(Decoder(tmp_path, "grouped", batch=1, capacity=CAPACITY)([text], [0])[0], expected_logits(model, text))


def test_gpt2_is_read_under_the_names_of_its_first_checkpoints(tmp_path: Path) -> None:
    model, longest = make_checkpoint("gpt2", tmp_path), 128
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 9, 9)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = texts()[0]
    assert ModelSpec.from_hf(Checkpoint.open(tmp_path).config).max_length == longest
    decode = Decoder(tmp_path, "grouped", batch=1, capacity=longest + 8)
    assert_close(decode([text], [0])[0], expected_logits(model, text))
    text = [each % VOCAB for each in range(longest)]
    decode([text], [0])
    # A draft window may go beyond the last learned position. That changes nothing of the tokens up to it.
    assert_close(decode([[*text[-2:], 5, 6, 7]], [longest - 2])[0, :2], expected_logits(model, text)[-2:])
    tensors["h.0.attn.c_attn.weight"] = torch.zeros(128, 385)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"c_attn.weight' should have 384 columns"):
        Decoder(tmp_path, "grouped", batch=1)


def test_masks_and_frequencies_that_old_checkpoints_store_are_left_out(tmp_path: Path) -> None:
    make_checkpoint("gpt_neox", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "gpt_neox.layers.0.attention"
    tensors |= {f"{name}.bias": torch.ones(1, 1, 9, 9, dtype=torch.bool), f"{name}.masked_bias": torch.tensor(-1e9)}
    tensors[f"{name}.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    Decoder(tmp_path, "grouped", batch=1)


VISION: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
SQUARE = VISION | {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 48}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [3, 3, 2]}
DIMS: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": None, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}
OF_64 = DIMS | {"hidden_size": 64, "sliding_window": None}
MISTRAL4: dict[str, Any] = FAMILIES["deepseek_v3"]().to_dict() | {
    "model_type": "mistral4",
    "kv_lora_rank": 32,
    "head_dim": 88,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 500.0,
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    },
}
WITH_IMAGES: dict[str, Callable[[], PreTrainedConfig]] = {
    "gemma4": lambda: AutoConfig.for_model(
        "gemma4",
        text_config=FAMILIES["gemma4"]().to_dict() | {"pad_token_id": 0},
        vision_config=VISION | {"head_dim": 16, "num_key_value_heads": 2, "global_head_dim": 16, "patch_size": 14},
        audio_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        **dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), VOCAB),
    ),
    "llama4": lambda: AutoConfig.for_model(
        "llama4",
        text_config=FAMILIES["llama4"]().to_dict(),
        vision_config=SQUARE | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
        image_token_index=VOCAB,
        tie_word_embeddings=False,
    ),
    "gemma3": lambda: Gemma3Config(text_config=FAMILIES["gemma3"](), vision_config=SQUARE, mm_tokens_per_image=4),
    **{
        name: lambda name=name: AutoConfig.for_model(
            "mistral3", text_config=FAMILIES[name](), vision_config=SQUARE | {"head_dim": 16}, tie_word_embeddings=False
        )
        for name in ("mistral3", "ministral3")
    },
    "qwen2_vl": lambda: AutoConfig.for_model(
        "qwen2_vl",
        text_config=DIMS | {"hidden_size": 64, "rope_parameters": MROPE},
        vision_config={"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64},
    ),
    "qwen2_5_vl": lambda: AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=DIMS | {"hidden_size": 64, "rope_parameters": MROPE},
        vision_config=QWEN_VISION | {"out_hidden_size": 64},
    ),
    "qwen3_vl": lambda: AutoConfig.for_model(
        "qwen3_vl",
        text_config=DIMS | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": lambda: AutoConfig.for_model(
        "qwen3_vl_moe",
        text_config=DIMS | EXPERTS | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        vision_config=QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "glm4v": lambda: AutoConfig.for_model(
        "glm4v",
        text_config=DIMS
        | {"hidden_size": 64, "rope_parameters": MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32},
    ),
    "qwen3_5": lambda: AutoConfig.for_model(
        "qwen3_5",
        text_config=FAMILIES["qwen3_5"]().to_dict(),
        vision_config=QWEN_VISION | {"num_position_embeddings": 16},
        tie_word_embeddings=False,
    ),
    "mistral4": lambda: AutoConfig.for_model(
        "mistral3",
        text_config=AutoConfig.for_model(**MISTRAL4),
        vision_config=SQUARE | {"head_dim": 16},
        tie_word_embeddings=False,
    ),
    "kimi_k25": lambda: AutoConfig.for_model(
        "kimi_k25", text_config=FAMILIES["deepseek_v3"]().to_dict(), vision_config=VISION
    ),
    "glm4v_moe": lambda: AutoConfig.for_model(
        "glm4v_moe",
        text_config=DIMS
        | {"hidden_size": 64, "moe_intermediate_size": 24, "num_experts_per_tok": 3, "n_routed_experts": 6}
        | {"rope_parameters": MROPE | {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}},
        vision_config={"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 64, "intermediate_size": 32},
    ),
    "exaone4_5": lambda: AutoConfig.for_model(
        "exaone4_5", text_config=FAMILIES["exaone4"]().to_dict(), vision_config=QWEN_VISION | {"out_hidden_size": 64}
    ),
    "lfm2_vl": lambda: AutoConfig.for_model(
        "lfm2_vl",
        text_config=FAMILIES["lfm2"]().to_dict(),
        vision_config=SQUARE | {"model_type": "siglip2_vision_model"},
    ),
    "lfm3_vl": lambda: AutoConfig.for_model(
        "lfm3_vl",
        text_config=FAMILIES["lfm3"]().to_dict(),
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"num_key_value_heads": 1},
    ),
    "lighton_ocr": lambda: AutoConfig.for_model(
        "lighton_ocr",
        text_config=OF_64 | {"model_type": "qwen3"},
        vision_config=SQUARE | {"model_type": "pixtral", "head_dim": 16},
    ),
    **{
        name: lambda name=name, text=text, vision=vision: AutoConfig.for_model(
            name, text_config=OF_64 | {"model_type": text}, vision_config=SQUARE | vision
        )
        for name, text, vision in (
            ("llava", "llama", {"model_type": "clip_vision_model"}),
            ("llava_next", "mistral", {"model_type": "clip_vision_model"}),
            ("llava_onevision", "qwen2", {"model_type": "siglip_vision_model"}),
            ("idefics3", "llama", {}),
            ("smolvlm", "llama", {}),
            ("got_ocr2", "qwen2", {"image_size": 64, "output_channels": 16, "global_attn_indexes": [0], "mlp_dim": 32}),
        )
    },
    "internvl": lambda: AutoConfig.for_model(
        "internvl",
        text_config=AutoConfig.for_model("qwen3", **DIMS),
        vision_config=SQUARE | {"image_size": [28, 28], "patch_size": [14, 14]},
    ),
}


LAYERS = "language_model.model.layers."


def with_images(case: str) -> PreTrainedModel:
    """Make a tiny random vision-language model."""
    model = AutoModelForImageTextToText.from_config(WITH_IMAGES[case](), attn_implementation="eager").eval()
    randomize(model)
    return model


@pytest.mark.parametrize("case", WITH_IMAGES)
def test_the_text_part_of_a_vision_language_model_is_exported(tmp_path: Path, case: str) -> None:
    model = with_images(case)
    model.save_pretrained(tmp_path)
    if case == "kimi_k25":  # transformers saves the layers of both parts under the name of one
        file = tmp_path / "model.safetensors"
        tensors = {
            name.replace("language_model.model.blocks.", LAYERS): tensor for name, tensor in load_file(file).items()
        }
        save_file(tensors, file, metadata={"format": "pt"})
    text = texts()[0]
    logits = Decoder(tmp_path, "grouped", batch=1, capacity=CAPACITY)([text], [0])[0]
    assert_close(logits, expected_logits(model, text))
    checkpoint = Checkpoint.open(tmp_path)
    names = with_graph_names(checkpoint, ModelSpec.from_hf(checkpoint.config)).tensors
    assert not [name for name in names if "vis" in name or "projector" in name]


def test_the_text_part_of_internvl_is_exported_in_its_own_form(tmp_path: Path) -> None:
    """As its own code saves it; "dynamic" changes no text of the original length."""
    make_checkpoint("qwen2", tmp_path)
    edit_config(tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0})
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    tensors |= {"mlp1.1.weight": torch.ones(2, 2), "vision_model.encoder.layers.0.norm1.weight": torch.ones(2)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text_part = json.loads((tmp_path / "config.json").read_text())
    form: dict[str, Any] = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat"}
    form |= {"hidden_size": 5, "tie_word_embeddings": True, "llm_config": text_part, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(form))
    text = [token % VOCAB for token in range(60)]
    logits = Decoder(tmp_path, "grouped", batch=1, capacity=64)([text], [0])[0]
    assert_close(logits, expected_logits(model, text))


def test_experts_of_a_vision_language_model_may_be_stored_transposed(tmp_path: Path) -> None:
    """As published; transformers 5 saves them as its own parameters."""
    model = with_images("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    text = texts()[0]
    logits = Decoder(tmp_path, "grouped", batch=1, capacity=CAPACITY)([text], [0])[0]
    assert_close(logits, expected_logits(model, text))


@pytest.mark.parametrize(("case", "text"), [("voxtral", "llama"), ("qwen2_audio", "qwen2")])
def test_the_text_part_of_an_audio_model_has_the_tensors_of_a_text_model(tmp_path: Path, case: str, text: str) -> None:
    tower = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
    config = AutoConfig.for_model(case, text_config=OF_64 | {"model_type": text}, audio_config=VISION | tower)
    model = AutoModelForMultimodalLM.from_config(config)
    model.save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = ModelSpec.from_hf(checkpoint.config)
    same = AutoModelForCausalLM.from_config(AutoConfig.for_model(**model.config.text_config.to_dict()))
    assert any("audio_tower" in name for name in checkpoint.tensors)
    assert set(with_graph_names(checkpoint, spec).tensors) == set(same.state_dict())
    assert spec == ModelSpec.from_hf(same.config.to_dict() | {"architectures": [type(same).__name__]})


def test_tensor_names_of_a_text_part_are_independent_of_the_transformers_version(tmp_path: Path) -> None:
    with_images("mistral3").save_pretrained(tmp_path)
    older = Checkpoint.open(tmp_path)
    newer = dict(older.tensors)
    for name in older.tensors:
        kind, _, rest = name.partition(".model.")
        if kind == "language_model":
            newer[f"model.language_model.{rest}"] = newer.pop(name)
        elif name.startswith("language_model.lm_head."):
            newer[name.removeprefix("language_model.")] = newer.pop(name)
        else:
            newer[f"model.{name}"] = newer.pop(name)
    spec = ModelSpec.from_hf(older.config)
    renamed = Checkpoint(older.folder, older.config, newer, older.files)
    assert set(with_graph_names(renamed, spec).tensors) == set(with_graph_names(older, spec).tensors)
    assert not any("vision" in name or "projector" in name for name in with_graph_names(older, spec).tensors)


def test_mtp_layers_of_a_text_part_are_left_out(tmp_path: Path) -> None:
    make_checkpoint("step3p5", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    config = checkpoint.config | {"text_config": checkpoint.config["text_config"] | {"num_nextn_predict_layers": 1}}
    layers = {name.replace("layers.2", "layers.3"): tensor for name, tensor in checkpoint.tensors.items()}
    more = Checkpoint(checkpoint.folder, config, {**checkpoint.tensors, **layers}, checkpoint.files)
    assert len(more.tensors) > len(checkpoint.tensors)
    names = with_graph_names(more, ModelSpec.from_hf(config)).tensors
    assert names.keys() == with_graph_names(checkpoint, ModelSpec.from_hf(checkpoint.config)).tensors.keys()


def test_a_fused_weight_is_read_in_parts_in_place(tmp_path: Path) -> None:
    make_checkpoint("phi3", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    parts = with_graph_names(checkpoint, ModelSpec.from_hf(checkpoint.config)).tensors
    content = (tmp_path / "model.safetensors").read_bytes()
    with safe_open(tmp_path / "model.safetensors", framework="np") as stored:
        for module, whole, kinds in (("self_attn", "qkv", ("q", "k", "v")), ("mlp", "gate_up", ("gate", "up"))):
            tensors = [parts[f"model.layers.1.{module}.{kind}_proj.weight"] for kind in kinds]
            joined = b"".join(content[part.offset : part.offset + part.nbytes] for part in tensors)
            assert joined == stored.get_tensor(f"model.layers.1.{module}.{whole}_proj.weight").tobytes()


def test_a_tensor_without_every_expert_is_rejected(tmp_path: Path) -> None:
    make_checkpoint("gpt_oss", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = ModelSpec.from_hf(checkpoint.config | {"num_local_experts": 8})
    with pytest.raises(
        BadCheckpoint, match=r"experts\.down_proj.*' should hold 8 experts by config\.json, .*\[6, 40, 48\]"
    ):
        with_graph_names(checkpoint, spec)


def test_a_fused_weight_of_another_size_is_rejected(tmp_path: Path) -> None:
    make_checkpoint("phi3", tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = ModelSpec.from_hf(checkpoint.config | {"num_key_value_heads": 4})
    with pytest.raises(
        BadCheckpoint, match=r"qkv_proj\.weight' should have 192 rows by config\.json, its shape is \[128"
    ):
        with_graph_names(checkpoint, spec)


@pytest.mark.parametrize("shape", [(), (7, 2)])
def test_zero_points_of_a_fused_weight_that_fit_no_rows_are_rejected(tmp_path: Path, shape: tuple[int, ...]) -> None:
    make_checkpoint("phi3", tmp_path)
    name = "model.layers.0.self_attn.qkv_proj.weight_zero_point"
    stored = {name: torch.zeros(shape, dtype=torch.int32)}
    save_file(load_file(tmp_path / "model.safetensors") | stored, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    with pytest.raises(
        BadCheckpoint, match=r"should have 128 rows by config\.json, or fewer that pack them, its shape"
    ):
        with_graph_names(checkpoint, ModelSpec.from_hf(checkpoint.config))
