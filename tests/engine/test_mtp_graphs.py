"""Graphs of multi-token-prediction layers against their definition, in every published checkpoint format."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandemrt.engines.recipe.models import HeadDraft
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.bundle.draft_kinds import FEATURE_DRAFTS
from tandemrt.export.bundle.opened_head import DraftHead
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.mtp import build_mtp, build_state_norm
from tandemrt.export.quantize.dequantize import dequantized_entry
from tandemrt.export.read.checkpoint import Checkpoint, read_header
from tandemrt.export.read.mtp import MtpSpec
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.spec import ModelSpec
from tests.engine.decoding import fused
from tests.engine.test_eagle3_graphs import CAPACITY, STEPS, TARGET, VOCAB, Exported
from tests.engine.test_float8_cache import SCHEME
from tests.engine.test_quantized_checkpoints import float8_group
from tests.heads import Draw, Weights
from tests.mtp import FORMS, Definition, MtpLayer, drafted, several

SHARED = {"embed_tokens.weight": Draw(9).matrix(VOCAB, 32) * 4, "lm_head.weight": Draw(8).matrix(VOCAB, 32)}


EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def read(
    folder: Path,
    form: str,
    experts: int = 0,
    target: Mapping[str, Any] = MappingProxyType({}),
    window: int = STEPS,
    **changes: Any,
) -> tuple[MtpSpec, Checkpoint, MtpLayer]:
    """Write a checkpoint of the layer in ``form`` and read it; ``changes`` apply to its config, ``target`` to both."""
    layer = MtpLayer(hidden=32, target_layers=8, heads=2, kv_heads=2, form=form, experts=experts)
    weights = layer.weights()
    copies = {f"{layer.prefix}.shared_head.head.weight": torch.zeros(VOCAB, 32)} if form == "deepseek" else {}
    for _, further in several(layer, changes.get("num_nextn_predict_layers") or 1)[1:]:
        copies |= further
    save_file(copies | weights, folder / "model.safetensors")
    others = {"intermediate_size": 64} | (EXPERTS | {"norm_topk_prob": True} if experts else {}) | dict(target)
    config: dict[str, Any] = TARGET | {"num_nextn_predict_layers": 1} | others
    if form == "speculators":
        config = {"speculators_model_type": "mtp", "num_nextn_predict_layers": 1, "transformer_layer_config": config}
        del config["transformer_layer_config"]["num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(config | changes))
    source, model = Checkpoint.open(folder), ModelSpec.from_hf(TARGET | others)
    spec, checkpoint, quantized = MtpSpec.from_checkpoint(source, model, num_draft_tokens=window)
    assert not quantized
    return spec, checkpoint, layer


def renamed(folder: Path, checkpoint: Checkpoint, weights: Weights) -> Checkpoint:
    """Return the checkpoint that a build writes: the layers' tensors under their new names, and the target's."""
    stored = {t.offset: name for name, t in checkpoint.tensors.items()}
    stored_weights = {stored[t.offset]: weights[n] for n, t in Checkpoint.open(folder).tensors.items() if n in weights}
    save_file(stored_weights | SHARED, folder / "model.safetensors")
    return replace(Checkpoint.open(folder), config=checkpoint.config)


@pytest.mark.parametrize(
    ("form", "published"),
    [
        *((form, {}) for form in FORMS),
        ("deepseek", {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),  # not it
        ("deepseek", {"experts": 4}),
    ],
    ids=str,
)
@pytest.mark.parametrize("lowering", ["grouped", "basic"])
def test_the_last_layer_drafts_further_tokens_as_defined(
    tmp_path: Path, form: str, published: dict[str, Any], lowering: Lowering
) -> None:
    if "experts" in published and lowering == "basic":
        lowering = "mask"  # experts have operators that TensorRT lacks
    spec, checkpoint, layer = read(tmp_path, form, **published)
    defined = Definition(layer, layer.weights(), *SHARED.values())
    written = renamed(tmp_path, checkpoint, layer.weights())
    head = fused(build_mtp(spec, written, dtype="float32", capacity=CAPACITY, lowering=lowering), lowering)
    exported = Exported(tmp_path, spec, fused(build_state_norm(spec, written, dtype="float32"), lowering), head)
    text = torch.randint(VOCAB, (24,), generator=torch.Generator().manual_seed(5))
    features = torch.randn(24, 32, generator=torch.Generator().manual_seed(6))
    states, begin = exported.fuse(features), 0
    for accepted in (9, 1, 4):
        end = begin + accepted
        logits, state = exported(text[begin + 1 : end + 1], states[begin:end], begin, accepted - 1)
        defined.keep(begin)
        expected, fed_back = (each[-1:] for each in defined(text[begin + 1 : end + 1], features[begin:end]))
        for step in range(STEPS):
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-4)  # the last norm has one large number
            token = expected.argmax(-1)
            if step < STEPS - 1:
                logits, state = exported(token, state, end + step, 0)
                expected, fed_back = defined(token, fed_back)
        begin = end


def test_a_missing_mtp_layer_is_rejected_by_name(tmp_path: Path) -> None:
    read(tmp_path, "deepseek", num_nextn_predict_layers=2, window=2)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if not k.startswith("model.layers.9.")}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"should hold tensors 'model\.layers\.9\.\*', as num_nextn_predict_layers"):
        MtpSpec.from_checkpoint(Checkpoint.open(tmp_path), ModelSpec.from_hf(TARGET), num_draft_tokens=2)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("deepseek", {"num_nextn_predict_layers": None}, "should be the number of MTP layers, it is None"),
        ("deepseek", {"num_nextn_predict_layers": 0}, "should be the number of MTP layers, it is 0"),
        ("deepseek", {"num_hidden_layers": 7}, "num_hidden_layers should be the target's, 8, it is 7"),
        ("deepseek", {"hidden_size": 64}, "hidden_size should be the target's, 32, it is 64"),
        ("deepseek", {"vocab_size": 63}, f"vocab_size should be the target's, {VOCAB}, it is 63"),
        ("speculators", {"quantization_config": {"quant_method": "fp8"}}, "in its own checkpoint must be unquantized"),
        ("speculators", {"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is 3, which the exporter does not"),
        ("speculators", {"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3', which the"),
        ("speculators", {"draft_vocab_size": 3}, "the field(s) 'draft_vocab_size'"),
    ],
)
def test_checkpoints_that_do_not_fit_are_rejected(tmp_path: Path, form: str, changes: Any, message: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(tmp_path, form, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("form", ["deepseek", "mimo"])
def test_each_layer_drafts_one_token_and_the_last_all_further_ones(tmp_path: Path, form: str) -> None:
    spec, checkpoint, layer = read(tmp_path, form, num_nextn_predict_layers=3)
    layers = several(layer, 3)
    written = renamed(tmp_path, checkpoint, {name: each for _, own in layers for name, each in own.items()})
    sizes: Any = {"dtype": "float32", "capacity": CAPACITY, "lowering": "grouped"}
    norm = build_state_norm(spec, written, dtype="float32")
    heads = [fused(build_mtp(spec, written, at=at, **sizes), "grouped") for at in range(3)]
    exported = [Exported(tmp_path, spec, norm, head) for head in heads]
    text = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(5))
    features = torch.randn(11, 32, generator=torch.Generator().manual_seed(6))
    expected, chosen = drafted(layers, tuple(SHARED.values()), text, features, STEPS)
    tokens, states = text[1:], exported[0].fuse(features)
    for step in range(STEPS):
        if step < 3:
            logits, states = exported[step](tokens, states, 0, 10)
        else:
            logits, states = exported[2](tokens[-1:], states[-1:], 11 + step - 3, 0)
        torch.testing.assert_close(logits[0], expected[step], atol=1e-3, rtol=1e-4)  # as above
        tokens = torch.cat([tokens[1:], torch.tensor([chosen[step]])])


@pytest.mark.parametrize(("published", "window", "depth"), [(3, 4, 3), (3, 2, 2), (5, 8, 4), (3, 1, 1)])
def test_one_layer_drafts_per_window_token_and_the_build_notes_unused_layers(
    tmp_path: Path, published: int, window: int, depth: int
) -> None:
    spec, checkpoint, layer = read(tmp_path, "deepseek", num_nextn_predict_layers=published, window=window)
    assert (spec.published, spec.depth) == (published, depth)
    assert len(checkpoint.tensors) == depth * len(layer.weights())
    notes = DraftHead("draft", FEATURE_DRAFTS["mtp"], checkpoint, checkpoint, spec, "float32", {}).notes()
    note = f"draft: of {published} layers that predict further on, the first {depth} are used"
    assert notes == ([note] if depth < published else [])


def test_a_layer_of_a_sliding_target_is_limited_to_its_window(tmp_path: Path) -> None:
    """The checkpoint does not say whether the MTP layer slides; within the window both kinds are equal."""
    slides = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 4}
    spec, _, _ = read(tmp_path, "deepseek", target=slides)
    assert (spec.max_context, spec.layer.sliding_window) == (20, None)
    assert read(tmp_path, "deepseek")[0].max_context is None


def save_in_float8(folder: Path, layer: MtpLayer, said: dict[str, Any], scale_name: str, **scales: float) -> Weights:
    """Save ``layer`` and its target's embedding, with the layer's matmuls in float8, one scale each, and the cache
    ``scales`` of "self_attn". Return the dequantized weights."""
    weights, restored = layer.weights(), {}
    stored = {f"{layer.prefix}.self_attn.{name}": torch.tensor([scale]) for name, scale in scales.items()} | weights
    for name in weights:
        if not name.endswith("_proj.weight") or name == f"{layer.named(2)}.weight":
            continue
        scale = weights[name].abs().max() / 448
        stored[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        stored[f"{name.removesuffix('weight')}{scale_name}"] = scale.reshape(1, 1)
        restored[name] = stored[name].float() * scale
    table = {"model.embed_tokens.weight": SHARED["embed_tokens.weight"], "lm_head.weight": SHARED["lm_head.weight"]}
    save_file(stored | table, folder / "model.safetensors")
    config = TARGET | {"intermediate_size": 64, "num_nextn_predict_layers": 1, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": said}))
    return restored


def open_head(folder: Path, dtype: str) -> DraftHead:
    source = Checkpoint.open(folder)
    spec = ModelSpec.from_hf({name: each for name, each in source.config.items() if name != "quantization_config"})
    return DraftHead.open(
        HeadDraft(kind="mtp", checkpoint=folder, num_draft_tokens=3), source, spec, dtype=dtype, length=32
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantized_weights_of_a_layer_are_dequantized(tmp_path: Path, dtype: str) -> None:
    """DeepSeek's format: float8 with one scale per group; norms and the first matmul are unquantized."""
    layer = MtpLayer(hidden=32, target_layers=8, heads=2, kv_heads=2)
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    restored = save_in_float8(tmp_path, layer, said, "weight_scale_inv")
    quantized = restored.keys()
    head = open_head(tmp_path, dtype)
    assert head.notes() == [f"draft: {len(quantized)} quantized weights became {dtype}"]
    written = head.with_borrowed(tmp_path).checkpoint
    borrowed = load_file(tmp_path / "borrowed.safetensors")
    for name in quantized:
        expected = restored[name].to(getattr(torch, dtype))
        torch.testing.assert_close(borrowed[name.replace(layer.prefix, "layers.0")], expected, atol=0, rtol=0)
    assert isinstance(head.spec, MtpSpec)
    build_mtp(head.spec, written, dtype=dtype, capacity=CAPACITY, lowering="grouped")


@pytest.mark.parametrize("form", ["deepseek", "mimo"])
def test_cache_scales_are_not_read_as_weights(tmp_path: Path, form: str) -> None:
    """compressed-tensors stores them under "self_attn", whose name looks like that of a matmul."""
    layer = MtpLayer(hidden=32, target_layers=8, heads=2, kv_heads=2, form=form)
    said = float8_group("tensor") | {"kv_cache_scheme": SCHEME}
    quantized = save_in_float8(tmp_path, layer, said, "weight_scale", k_scale=0.03, v_scale=0.05)
    head = open_head(tmp_path, "float32")
    assert set(head.quantized) == {name.replace(layer.prefix, "layers.0") for name in quantized}
    assert head.notes() == [f"draft: {len(quantized)} quantized weights became float32"]
    assert head.cache_notes() == ["keys and values are held in float32; the checkpoint's scales are not used"]
    written = head.with_borrowed(tmp_path).checkpoint
    assert isinstance(head.spec, MtpSpec)
    build_mtp(head.spec, written, dtype="float32", capacity=CAPACITY, lowering="grouped")


def test_a_separate_quantization_file_is_rejected_with_advice(tmp_path: Path) -> None:
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(BadCheckpoint, match=r"config\.json should have the quantization_config where an MTP"):
        read(tmp_path, "deepseek")


def test_4_bit_weights_of_a_layer_are_dequantized(tmp_path: Path) -> None:
    words = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32).repeat(1, 2)
    tensors = {"m.weight_packed": words, "m.weight_scale": torch.tensor([[0.5]])}
    save_file(tensors | {"m.weight_shape": torch.tensor([1, 32])}, tmp_path / "model.safetensors")
    scheme = Scheme("int4", "compressed-tensors", (1, 32))
    entry = dequantized_entry("n", "m", read_header(tmp_path / "model.safetensors"), scheme, "float32")
    values = np.frombuffer(b"".join(entry.data()), np.float32)
    assert (entry.name, entry.shape) == ("n", (1, 32))
    assert values.tolist() == [(n - 8) / 2 for n in [*range(8), *range(8, 16)] * 2]


def test_an_unknown_tensor_is_rejected_in_an_mtp_checkpoint(tmp_path: Path) -> None:
    _, checkpoint, layer = read(tmp_path, "speculators")
    copies = {"verifier_lm_head.weight": torch.full((2, 2), float("nan"))}
    save_file(layer.weights() | copies, tmp_path / "model.safetensors")
    target = ModelSpec.from_hf(TARGET | {"intermediate_size": 64})
    assert (
        MtpSpec.from_checkpoint(Checkpoint.open(tmp_path), target, num_draft_tokens=3)[1].tensors.keys()
        == checkpoint.tensors.keys()
    )
    save_file(layer.weights() | {"mtp_layers.1.norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"tensor 'mtp_layers\.1\.norm\.weight' does not belong to an MTP layer"):
        MtpSpec.from_checkpoint(Checkpoint.open(tmp_path), target, num_draft_tokens=3)


def test_a_checkpoint_without_an_mtp_layer_is_rejected(tmp_path: Path) -> None:
    save_file({"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TARGET | {"num_nextn_predict_layers": 1}))
    with pytest.raises(
        BadCheckpoint, match=r"should hold tensors 'model\.layers\.8\.\*' or 'model\.mtp_layers\.0\.\*'"
    ):
        MtpSpec.from_checkpoint(Checkpoint.open(tmp_path), ModelSpec.from_hf(TARGET), num_draft_tokens=3)
