"""The graphs of a layer that predicts tokens further on against its definition, in every form it is published in."""

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

from tandemrt.engines.errors import BadCheckpoint
from tandemrt.engines.recipe import MtpDraft
from tandemrt.export.model.draft_heads import DraftHead
from tandemrt.export.model.mtp import build_mtp, build_state_norm
from tandemrt.export.quantize.whole import whole
from tandemrt.export.read.checkpoint import Checkpoint, read_header
from tandemrt.export.read.mtp import MtpSpec
from tandemrt.export.read.quantization.scheme import Scheme
from tandemrt.export.read.spec import ModelSpec
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
    """A checkpoint of the layer in ``form``, and what is read of it; ``changes`` of its config, ``target``: of both."""
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
    spec, checkpoint, narrow = MtpSpec.from_checkpoint(source, model, window=window)
    assert not narrow
    return spec, checkpoint, layer


def renamed(folder: Path, checkpoint: Checkpoint, weights: Weights) -> Checkpoint:
    """As a build writes it: the layers' tensors by their new names, beside the target's."""
    stored = {t.offset: name for name, t in checkpoint.tensors.items()}
    found = {stored[t.offset]: weights[n] for n, t in Checkpoint.open(folder).tensors.items() if n in weights}
    save_file(found | SHARED, folder / "model.safetensors")
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
def test_more_tokens_than_layers_are_those_of_the_definition(
    tmp_path: Path, form: str, published: dict[str, Any]
) -> None:
    spec, checkpoint, layer = read(tmp_path, form, **published)
    defined = Definition(layer, layer.weights(), *SHARED.values())
    written = renamed(tmp_path, checkpoint, layer.weights())
    head = build_mtp(spec, written, dtype="float32", capacity=CAPACITY, attention="grouped")
    exported = Exported(tmp_path, spec, build_state_norm(spec, written, dtype="float32"), head)
    text = torch.randint(VOCAB, (24,), generator=torch.Generator().manual_seed(5))
    features = torch.randn(24, 32, generator=torch.Generator().manual_seed(6))
    states, begin = exported.fuse(features), 0
    for accepted in (9, 1, 4):
        end = begin + accepted
        found, state = exported(text[begin + 1 : end + 1], states[begin:end], begin, accepted - 1)
        defined.keep(begin)
        expected, fed_back = (each[-1:] for each in defined(text[begin + 1 : end + 1], features[begin:end]))
        for step in range(STEPS):
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-4)  # the last norm has one large number
            token = expected.argmax(-1)
            if step < STEPS - 1:
                found, state = exported(token, state, end + step, 0)
                expected, fed_back = defined(token, fed_back)
        begin = end


def test_a_checkpoint_that_lacks_one_of_its_layers_is_refused_by_its_name(tmp_path: Path) -> None:
    read(tmp_path, "deepseek", num_nextn_predict_layers=2, window=2)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({k: v for k, v in weights.items() if not k.startswith("model.layers.9.")}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"should hold tensors 'model\.layers\.9\.\*', as num_nextn_predict_layers"):
        MtpSpec.from_checkpoint(Checkpoint.open(tmp_path), ModelSpec.from_hf(TARGET), window=2)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("deepseek", {"num_nextn_predict_layers": None}, "should say how many such layers there are, it is None"),
        ("deepseek", {"num_nextn_predict_layers": 0}, "should say how many such layers there are, it is 0"),
        ("deepseek", {"num_hidden_layers": 7}, "num_hidden_layers should be the target's, 8, it is 7"),
        ("speculators", {"quantization_config": {"quant_method": "fp8"}}, "by itself must come with whole weights"),
        ("speculators", {"num_nextn_predict_layers": 3}, "num_nextn_predict_layers is 3, which the exporter does not"),
        ("speculators", {"speculators_model_type": "eagle3"}, "speculators_model_type is 'eagle3', which the"),
        ("speculators", {"draft_vocab_size": 3}, "the field(s) 'draft_vocab_size'"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path, form: str, changes: Any, message: str) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        read(tmp_path, form, **changes)
    assert message in str(caught.value)


@pytest.mark.parametrize("form", ["deepseek", "mimo"])
def test_each_of_several_layers_drafts_a_token_and_the_last_what_is_further_on(tmp_path: Path, form: str) -> None:
    spec, checkpoint, layer = read(tmp_path, form, num_nextn_predict_layers=3)
    layers = several(layer, 3)
    written = renamed(tmp_path, checkpoint, {name: each for _, own in layers for name, each in own.items()})
    sizes: Any = {"dtype": "float32", "capacity": CAPACITY, "attention": "grouped"}
    norm = build_state_norm(spec, written, dtype="float32")
    exported = [Exported(tmp_path, spec, norm, build_mtp(spec, written, at=at, **sizes)) for at in range(3)]
    text = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(5))
    features = torch.randn(11, 32, generator=torch.Generator().manual_seed(6))
    expected, chosen = drafted(layers, tuple(SHARED.values()), text, features, STEPS)
    tokens, states = text[1:], exported[0].fuse(features)
    for step in range(STEPS):
        if step < 3:
            found, states = exported[step](tokens, states, 0, 10)
        else:
            found, states = exported[2](tokens[-1:], states[-1:], 11 + step - 3, 0)
        torch.testing.assert_close(found[0], expected[step], atol=1e-3, rtol=1e-4)  # as above
        tokens = torch.cat([tokens[1:], torch.tensor([chosen[step]])])


@pytest.mark.parametrize(("published", "window", "depth"), [(3, 4, 3), (3, 2, 2), (5, 8, 4), (3, 1, 1)])
def test_as_many_layers_draft_as_a_window_has_tokens_and_a_build_says_which_do_not(
    tmp_path: Path, published: int, window: int, depth: int
) -> None:
    spec, checkpoint, layer = read(tmp_path, "deepseek", num_nextn_predict_layers=published, window=window)
    assert (spec.published, spec.depth) == (published, depth)
    assert len(checkpoint.tensors) == depth * len(layer.weights())
    notes = DraftHead("draft", checkpoint, checkpoint, spec, "float32", {}).notes()
    note = f"draft: of {published} layers that predict further on, the first {depth} are used"
    assert notes == ([note] if depth < published else [])


def test_a_layer_behind_layers_that_slide_serves_texts_within_their_window(tmp_path: Path) -> None:
    """Whether it slides itself is not known; there it is the same."""
    slides = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 4}
    spec, _, _ = read(tmp_path, "deepseek", target=slides)
    assert (spec.reach, spec.layer.sliding_window) == (20, None)
    assert read(tmp_path, "deepseek")[0].reach is None


def save_in_float8(folder: Path, layer: MtpLayer, said: dict[str, Any], scale_name: str, **scales: float) -> Weights:
    """Save ``layer`` beside its target's table with the products of its block in float8, a scale for each, and with
    ``scales`` beside "self_attn". Returns what these products stand for."""
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
    return DraftHead.open(MtpDraft(kind="mtp", checkpoint=folder, window=3), source, spec, dtype=dtype, length=32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_of_a_layer_that_come_quantized_become_the_numbers_that_they_stand_for(
    tmp_path: Path, dtype: str
) -> None:
    """In float8 with a scale for each block, as DeepSeek publishes it: norms and the first product are whole."""
    layer = MtpLayer(hidden=32, target_layers=8, heads=2, kv_heads=2)
    said = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    restored = save_in_float8(tmp_path, layer, said, "weight_scale_inv")
    narrow = restored.keys()
    head = open_head(tmp_path, dtype)
    assert head.notes() == [f"draft: {len(narrow)} quantized weights became {dtype}"]
    written = head.with_borrowed(tmp_path).checkpoint
    found = load_file(tmp_path / "borrowed.safetensors")
    for name in narrow:
        expected = restored[name].to(getattr(torch, dtype))
        torch.testing.assert_close(found[name.replace(layer.prefix, "layers.0")], expected, atol=0, rtol=0)
    assert isinstance(head.spec, MtpSpec)
    build_mtp(head.spec, written, dtype=dtype, capacity=CAPACITY, attention="grouped")


@pytest.mark.parametrize("form", ["deepseek", "mimo"])
def test_scales_of_keys_and_values_are_no_weights(tmp_path: Path, form: str) -> None:
    """compressed-tensors stores them beside "self_attn", a module like those of products."""
    layer = MtpLayer(hidden=32, target_layers=8, heads=2, kv_heads=2, form=form)
    said = float8_group("tensor") | {"kv_cache_scheme": SCHEME}
    narrow = save_in_float8(tmp_path, layer, said, "weight_scale", k_scale=0.03, v_scale=0.05)
    head = open_head(tmp_path, "float32")
    assert set(head.narrow) == {name.replace(layer.prefix, "layers.0") for name in narrow}
    assert head.notes() == [f"draft: {len(narrow)} quantized weights became float32"]
    assert head.cache_notes() == ["keys and values are held in float32; the checkpoint's scales are not used"]
    written = head.with_borrowed(tmp_path).checkpoint
    assert isinstance(head.spec, MtpSpec)
    build_mtp(head.spec, written, dtype="float32", capacity=CAPACITY, attention="grouped")


def test_a_quantization_that_stands_beside_the_config_is_refused_with_what_to_write(tmp_path: Path) -> None:
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    with pytest.raises(BadCheckpoint, match=r"should stand in config\.json where such a layer drafts"):
        read(tmp_path, "deepseek")


def test_weights_of_4_bits_become_numbers_too(tmp_path: Path) -> None:
    words = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32).repeat(1, 2)
    tensors = {"m.weight_packed": words, "m.weight_scale": torch.tensor([[0.5]])}
    save_file(tensors | {"m.weight_shape": torch.tensor([1, 32])}, tmp_path / "model.safetensors")
    scheme = Scheme("int4", "compressed-tensors", (1, 32))
    entry = whole("n", "m", read_header(tmp_path / "model.safetensors"), scheme, "float32")
    values = np.frombuffer(b"".join(entry.data()), np.float32)
    assert (entry.name, entry.shape) == ("n", (1, 32))
    assert values.tolist() == [(n - 8) / 2 for n in [*range(8), *range(8, 16)] * 2]


def test_a_tensor_of_nobody_is_refused_in_a_checkpoint_of_the_layer_alone(tmp_path: Path) -> None:
    _, checkpoint, layer = read(tmp_path, "speculators")
    copies = {"verifier_lm_head.weight": torch.full((2, 2), float("nan"))}
    save_file(layer.weights() | copies, tmp_path / "model.safetensors")
    target = ModelSpec.from_hf(TARGET | {"intermediate_size": 64})
    assert (
        MtpSpec.from_checkpoint(Checkpoint.open(tmp_path), target, window=3)[1].tensors.keys()
        == checkpoint.tensors.keys()
    )
    save_file(layer.weights() | {"mtp_layers.1.norm.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"tensor 'mtp_layers\.1\.norm\.weight' has no place in such a layer"):
        MtpSpec.from_checkpoint(Checkpoint.open(tmp_path), target, window=3)


def test_a_checkpoint_without_such_a_layer_is_refused(tmp_path: Path) -> None:
    save_file({"model.layers.7.mlp.up_proj.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(TARGET | {"num_nextn_predict_layers": 1}))
    with pytest.raises(
        BadCheckpoint, match=r"should hold tensors 'model\.layers\.8\.\*' or 'model\.mtp_layers\.0\.\*'"
    ):
        MtpSpec.from_checkpoint(Checkpoint.open(tmp_path), ModelSpec.from_hf(TARGET), window=3)
