"""Demo target, demo draft and one layer of an 8B model compile for every RTX GPU that TensorRT-RTX knows."""

import json
from pathlib import Path
from typing import get_args

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tandemrt.engines.recipe.tensorrt import ComputeCapability, TensorRtRtx, rtx_capabilities
from tandemrt.export.compile.tensorrt.engine import EngineReport, build_engine
from tandemrt.export.compile.tensorrt.profiles import Range
from tandemrt.export.graph.builder import save_model
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tools.demo.models import DRAFT, TARGET

ONE = Range(1, 1, 1)
PROFILES = {
    "prefill": {"batch": Range(1, 1, 8), "query": Range(1, 64, 64), "rows": ONE},
    "window": {"batch": Range(1, 8, 8), "query": Range(1, 5, 5), "rows": Range(1, 5, 5)},
    "single": {"batch": Range(1, 8, 8), "query": ONE, "rows": ONE},
}
CAPACITY = 517


@pytest.fixture(scope="module")
def layer_of_8b(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One layer with the sizes of an 8B Llama; the vocabulary is small, for what it would add is one more matmul."""
    folder = tmp_path_factory.mktemp("8b")
    sizes = {"hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, vocab_size=320, **sizes)).to(torch.bfloat16)
    model.to_empty(device="cpu").save_pretrained(folder)
    return folder


def compile_for_all(checkpoint_folder: Path, folder: Path, dtype: str) -> tuple[EngineReport, ModelSpec]:
    checkpoint = Checkpoint.open(checkpoint_folder)
    for file in checkpoint.files:
        (folder / file.name).symlink_to(file)
    spec = ModelSpec.from_hf(checkpoint.config)
    model = build_decoder(spec, checkpoint, dtype=dtype, capacity=CAPACITY, lowering="mask")
    save_model(model, folder / "model.onnx")
    options = TensorRtRtx(name="tensorrt-rtx", compute_capabilities=rtx_capabilities({dtype}))
    return build_engine(folder / "model.onnx", folder / "model.engine", options, profiles=PROFILES), spec


def require_native_layers_and_the_contract(report: EngineReport, spec: ModelSpec, dtype: str) -> None:
    assert report.layers["ATTENTION_INPUT"] == report.layers["ATTENTION_OUTPUT"] == spec.layers
    assert report.layers["ROTARY_EMBEDDING"] == report.layers["KV_CACHE_UPDATE"] == 2 * spec.layers
    expected = spec.contract(capacity=CAPACITY, dtype=dtype)
    assert set(report.contract.aliases) == set(expected.aliases)
    assert expected.differences(report.contract) == []
    assert set(json.loads(report.inspection.read_text())["profiles"]) == set(PROFILES)


@pytest.mark.parametrize("demo", [TARGET, DRAFT], ids=lambda folder: folder.name)
def test_the_demo_models_become_native_layers(demo: Path, tmp_path: Path) -> None:
    report, spec = compile_for_all(demo, tmp_path, "float16")
    require_native_layers_and_the_contract(report, spec, "float16")
    assert report.built_for == "+".join(f"sm_{c.replace('.', '')}" for c in get_args(ComputeCapability))


def test_a_layer_of_an_8b_model_becomes_native_layers_and_three_profiles_share_its_weights(
    layer_of_8b: Path, tmp_path: Path
) -> None:
    report, spec = compile_for_all(layer_of_8b, tmp_path, "bfloat16")
    require_native_layers_and_the_contract(report, spec, "bfloat16")
    weights = sum(file.stat().st_size for file in layer_of_8b.glob("*.safetensors"))
    assert weights > 400e6
    assert report.nbytes < 1.1 * weights
