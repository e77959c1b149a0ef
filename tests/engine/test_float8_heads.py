"""Draft heads in float8: what ``export quantize`` writes of one drafts as the definition does with the same weights, up
to the rounding of inputs, and changes no text.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tandemrt import LLM
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.recipe.models import HeadDraft
from tandemrt.engines.validation.errors import BadCheckpoint, BadRequest
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.opened_head import DraftHead
from tandemrt.export.bundle.publish import publish
from tandemrt.export.model.markov import build_markov
from tandemrt.export.quantize.stored_weights import read_matrix
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.dspark import DSparkSpec
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.spec import ModelSpec
from tests.eagle3 import Definition, Head
from tests.engine.decoding import edit_config
from tests.engine.draft_kinds import DFLASH, DSPARK, EAGLE3, PEAGLE, SIZES
from tests.engine.test_drafts import answers, recipe_of
from tests.engine.test_eagle3_graphs import PLAIN, TARGET, VOCAB, Exported
from tests.engine.test_float8_cache import SCHEME
from tests.engine.test_invisible import output_of
from tests.heads import Weights
from tests.makers import tiny_checkpoint

WIDE = replace(PLAIN, draft_vocab=48, norm_before_fc=True)  # matmuls in float8 have 16 outputs, or a multiple of it


def publish_float8(head: Head, folder: Path) -> Path:
    """The checkpoint of ``head`` in float8."""
    return publish(head.save(folder / "unquantized"), folder / "quantized", "fp8").folder


def restored(folder: Path) -> Weights:
    """Its weights as numbers."""
    checkpoint = Checkpoint.open(folder)
    how = read_quantization(checkpoint.config, folder)
    assert how is not None
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        module, _, kind = name.rpartition(".")
        scheme = how.scheme(module) if f"{name}_scale" in checkpoint.tensors else None
        if kind == "weight" and len(tensor.shape) == 2:
            tensors[name] = torch.from_numpy(np.array(read_matrix(module, checkpoint.tensors, scheme)))
        elif kind != "weight_scale":
            tensors[name] = torch.from_numpy(checkpoint.read(name, tensor.shape, (tensor.dtype,)).copy())
    return tensors


def test_layers_and_the_heads_own_matmuls_are_in_float8_and_what_fuses_is_not(tmp_path: Path) -> None:
    folder = publish_float8(WIDE, tmp_path)
    stored = {name: tensor.dtype for name, tensor in Checkpoint.open(folder).tensors.items()}
    whole = {name for name, dtype in stored.items() if name.endswith(".weight") and dtype == "float32"}
    assert {name for name, dtype in stored.items() if dtype == "float8_e4m3fn"} == {
        "lm_head.weight",
        *(f"layers.0.self_attn.{kind}_proj.weight" for kind in "qkvo"),
        *(f"layers.0.mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")),
    }
    assert "fc.weight" in whole
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"] == ["fc"]


def test_only_the_layers_of_dspark_are_in_float8(tmp_path: Path) -> None:
    folder = publish_float8(replace(DSPARK, draft_vocab=16), tmp_path)  # type: ignore[arg-type]
    checkpoint = Checkpoint.open(folder)
    kept = {name for name in checkpoint.tensors if name.startswith(("markov_head.", "confidence_head."))}
    assert {checkpoint.tensors[name].dtype for name in kept} == {"float32"}
    ignored = json.loads((folder / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored == ["confidence_head.proj", "fc", "markov_head.joint_proj", "markov_head.markov_w2"]
    target = ModelSpec.from_hf({**TARGET, "vocab_size": DSPARK.vocab})
    build_markov(DSparkSpec.from_hf(checkpoint.config, target), checkpoint, dtype="float32")


def test_four_bits_are_refused_for_a_head(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="scheme must be fp8 for a draft that reads its target's states; got int4"):
        publish(WIDE.save(tmp_path / "unquantized"), tmp_path / "quantized", "int4")


def test_rounds_of_drafted_tokens_are_near_those_of_the_definition(tmp_path: Path) -> None:
    """Inputs are rounded to float8 in the graph and not in the definition: 3 bits of each number."""
    folder = publish_float8(WIDE, tmp_path)
    weights = restored(folder)
    exported, defined = Exported.of(folder), Definition(WIDE, weights)
    draw = torch.Generator().manual_seed(5)
    text, features = torch.randint(VOCAB, (12,), generator=draw), torch.randn(12, 3 * 32, generator=draw)
    ids, states = weights["d2t"] + torch.arange(WIDE.draft_vocab), defined.fuse(features)
    logits, state = exported(text[1:], exported.fuse(features)[:-1], 0, 10)
    expected, fed_back = (each[-1:] for each in defined(text[1:], states[:-1]))
    for step in range(4):
        error = (logits - expected).norm() / expected.norm()
        assert 0 < error < 0.15, f"step {step}: {error:.3f}"
        token = ids[expected.argmax(-1)]
        logits, state = exported(token, state, 11 + step, 0)
        expected, fed_back = defined(token, fed_back)


@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash"])
def test_a_float8_head_changes_no_text(tmp_path: Path, kind: str) -> None:
    """In steps, as on a GPU: every matmul of the head's layers is one in float8."""
    target = tiny_checkpoint(tmp_path / "target", **SIZES)
    head: Any = replace({"eagle3": EAGLE3, "peagle": PEAGLE, "dflash": DFLASH}[kind], draft_vocab=16)
    bundle = build(
        recipe_of(kind, tmp_path, target, publish_float8(head, tmp_path), "paged"), tmp_path / "bundle"
    ).folder
    decoder = Bundle.open(bundle).engine("draft").decoder
    assert decoder is not None
    matmuls = [step.name for step in decoder.operators if step.name in ("scaled_matmul", "float8_matmul")]
    assert len(matmuls) == 4 * head.layers + 1
    known = (restored(tmp_path / "quantized")["d2t"] + torch.arange(16)).tolist()
    bytes_known = [token for token in known if token < 256]
    among = {"logit_bias": dict.fromkeys(bytes_known, 30.0), "ignore_eos": True}
    requests = [
        ("among " * (3 + i), {"temperature": 0.7 * i, "seed": i, "max_tokens": 40, **among}) for i in (0, 3, 4, 5)
    ]
    with LLM(bundle, device="cpu", threads=1) as llm:
        outputs, plain = answers(llm, requests), answers(llm, requests, num_draft_tokens=0)
    assert [output_of(output) for output in outputs] == [output_of(output) for output in plain]
    assert sum(output.speculation.num_accepted_draft_tokens for output in outputs) > 3


@pytest.mark.parametrize("head", [WIDE, replace(PLAIN, draft_vocab=48, flat=True)], ids=["layers.0", "midlayer"])
@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale")], ids=str)
def test_scales_of_keys_and_values_are_not_used_and_a_build_reports_it(
    tmp_path: Path, head: Head, names: tuple[str, str]
) -> None:
    folder = publish_float8(head, tmp_path)
    tensors = load_file(folder / "model.safetensors")
    scales = {f"{'midlayer' if head.flat else 'layers.0'}.self_attn.{name}": torch.ones(1) for name in names}
    save_file(tensors | scales, folder / "model.safetensors")
    said = json.loads((folder / "config.json").read_text())["quantization_config"] | {"kv_cache_scheme": SCHEME}
    edit_config(folder, quantization_config=said)
    Exported.of(folder)
    section = HeadDraft(kind="eagle3", checkpoint=folder, num_draft_tokens=3)
    read = DraftHead.open(section, Checkpoint.open(folder), ModelSpec.from_hf(TARGET), dtype="float32", length=32)
    assert read.cache_notes() == ["keys and values are held in float32; the checkpoint's scales are not used"]


def test_a_head_that_uses_the_targets_lm_head_stores_none(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "target", **SIZES)
    whole = replace(DFLASH, draft_vocab=DFLASH.vocab)
    folder = publish_float8(whole, tmp_path)  # type: ignore[arg-type]
    build(recipe_of("dflash", tmp_path, target, folder), tmp_path / "bundle")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["fc"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match="must leave out 'lm_head', which this head takes from its target"):
        build(recipe_of("dflash", tmp_path, target, folder), tmp_path / "again")


def test_scales_of_blocks_are_refused(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "target", **SIZES)
    folder = publish_float8(replace(EAGLE3, draft_vocab=16), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["strategy"] = "block"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(BadCheckpoint, match=r"in float8 with a scale per channel or tensor, it has scales of blocks"):
        build(recipe_of("eagle3", tmp_path, target, folder), tmp_path / "bundle")
