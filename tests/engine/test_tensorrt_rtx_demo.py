"""The demo target and draft compile for RTX GPUs: attention, rotary embedding and cache update are native layers."""

import pytest

from tandemrt.export.builder import save_model
from tandemrt.export.checkpoint import Checkpoint
from tandemrt.export.compile.tensorrt import Range, build_engine
from tandemrt.export.decoder import build_decoder
from tandemrt.export.spec import ModelSpec
from tools.demo.models import DRAFT, TARGET

ROUND = {"batch": Range(1, 8, 8), "query": Range(1, 5, 5), "rows": Range(1, 5, 5)}
CAPACITY = 517


@pytest.mark.parametrize("demo", [TARGET, DRAFT], ids=lambda folder: folder.name)
def test_the_demo_models_become_native_layers(demo, tmp_path):
    checkpoint = Checkpoint.open(demo)
    for file in checkpoint.files:
        (tmp_path / file.name).symlink_to(file)
    spec = ModelSpec.from_hf(checkpoint.config)
    model = build_decoder(spec, checkpoint, dtype="float16", capacity=CAPACITY, attention="mask")
    save_model(model, tmp_path / "model.onnx")
    report = build_engine(
        tmp_path / "model.onnx",
        tmp_path / "model.engine",
        profiles=[ROUND],
        compute_capabilities=["8.6", "8.9", "12.0"],
    )
    assert report.layers["ATTENTION_INPUT"] == report.layers["ATTENTION_OUTPUT"] == spec.layers
    assert report.layers["ROTARY_EMBEDDING"] == report.layers["KV_CACHE_UPDATE"] == 2 * spec.layers
    expected = spec.contract(capacity=CAPACITY, dtype="float16")
    assert set(report.contract.aliases) == set(expected.aliases)
    assert expected.differences(report.contract) == []
