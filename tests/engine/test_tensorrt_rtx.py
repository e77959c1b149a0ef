"""TensorRT-RTX compiles the mask lowering ahead of time, on a machine without a GPU, into native layers."""

import json
import sys

import numpy as np
import pytest

from tandemrt.engines.contract.binding import Binding
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.recipe.tensorrt import TensorRtRtx
from tandemrt.engines.validation.errors import BackendUnavailable, BadRecipe
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.bundle.vision import open_tower
from tandemrt.export.compile.backends import compile_graph
from tandemrt.export.compile.tensorrt.engine import build_engine
from tandemrt.export.compile.tensorrt.profiles import Range
from tandemrt.export.graph.builder import GraphBuilder, save_model
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.spec import ModelSpec
from tandemrt.runtime.requests.images import Image
from tandemrt.runtime.requests.vision import tower_inputs
from tests.engine.decoding import make_checkpoint
from tests.makers import tiny_vision, write_recipe

WINDOW = {"batch": Range(1, 2, 4), "query": Range(1, 5, 8), "rows": Range(1, 5, 8)}
PREFILL = {"batch": Range(1, 1, 4), "query": Range(1, 16, 16), "rows": Range(1, 1, 1)}
LAYERS, CAPACITY = 2, 64


def rtx(*capabilities):
    return TensorRtRtx(name="tensorrt-rtx", compute_capabilities=capabilities or ("8.6",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint("qwen3", folder)
    return folder


@pytest.fixture(scope="module", params=["float16", "bfloat16"])
def built(request, folder):
    graph, expected = export(folder, request.param)
    steps = []
    report = build_engine(
        graph,
        folder / "target.engine",
        rtx("8.0", "8.6", "8.9", "12.0"),
        profiles={"window": WINDOW, "prefill": PREFILL},
        progress=lambda *step: steps.append(step),
    )
    return report, expected, steps


def export(folder, dtype):
    checkpoint = Checkpoint.open(folder)
    spec = ModelSpec.from_hf(checkpoint.config)
    graph = folder / f"{dtype}.onnx"
    save_model(build_decoder(spec, checkpoint, dtype=dtype, capacity=CAPACITY, lowering="mask"), graph)
    return graph, spec.contract(capacity=CAPACITY, dtype=dtype)


def test_attention_rotary_embedding_and_cache_update_are_native_layers(built):
    layers = built[0].layers
    assert layers["ATTENTION_INPUT"] == layers["ATTENTION_OUTPUT"] == LAYERS
    assert layers["ROTARY_EMBEDDING"] == layers["KV_CACHE_UPDATE"] == 2 * LAYERS
    assert "SCATTER" not in layers
    assert "SOFTMAX" not in layers


def test_the_engine_keeps_the_contract_and_updates_its_caches_in_place(built):
    report, expected, _ = built
    assert expected.differences(report.contract) == []
    assert set(report.contract.aliases) == set(expected.aliases)


def test_the_report_describes_the_built_engine(built):
    report, _, _ = built
    assert report.nbytes == report.path.stat().st_size > 0
    assert report.built_for == "sm_80+sm_86+sm_89+sm_120"
    assert report.compiler.startswith("tensorrt-rtx 1.")
    assert report.seconds > 0


def test_progress_counts_every_phase_up_to_its_end(built):
    last = {phase: (done, total) for phase, done, total in built[2]}
    assert "Building engine" in last
    assert all(done == total for done, total in last.values())


def test_the_inspection_file_is_next_to_the_engine_and_needs_no_gpu(built):
    report, expected, _ = built
    said = json.loads(report.inspection.read_text())
    assert report.inspection == report.path.with_name("target.inspect.json")
    assert said["native"] == {"attention": 2, "cache update": 4, "rotary embedding": 4, "plugin": 0}
    assert said["network_layers"] == report.layers
    assert set(said["profiles"]) == {"window", "prefill"}
    assert said["profiles"]["prefill"]["inputs"]["token_ids"] == [[1, 1, 4], [1, 16, 16]]
    assert set(said["profiles"]["window"]["inputs"]) == {binding.name for binding in expected.inputs}
    assert said["engine_bytes"] == report.nbytes
    assert (said["engine_layers"] is None) == bool(said["engine_not_opened"])


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])  # the second one attends within windows
def test_a_vision_tower_becomes_an_engine_for_images_of_all_sizes(tmp_path, kind):
    backend = 'name = "tensorrt-rtx"\ncompute_capabilities = ["8.6"]'
    sizes = {"length": 400, "prefill_chunk": 64, "dtype": "float16", "backend": backend}
    target = tiny_vision(tmp_path / "target", kind)
    recipe = Recipe.load(write_recipe(tmp_path / "recipe.toml", target=target, **sizes))
    tower, _ = open_tower(recipe, open_models(recipe)[0])
    engine = compile_graph(tower.placed(tmp_path / "vision").graph(400), recipe, tmp_path).engine
    report = json.loads((tmp_path / "vision/model.inspect.json").read_text())
    assert (engine.backend, engine.file) == ("tensorrt-rtx", "vision/model.engine")
    assert report["native"] == {"attention": 3, "cache update": 0, "rotary embedding": 6, "plugin": 0}
    (profile,) = report["profiles"].values()
    side = tower.spec.entry.patch_size
    for rows, columns in ((2, 2), (2, 48), (8, 12), (48, 2)):  # of at most 96 patches
        image = Image.of_pixels(np.zeros((rows * side, columns * side, 3), np.uint8), tower.spec.entry)
        for name, array in tower_inputs(image).items():
            dims = zip(profile["inputs"][name], array.shape, strict=True)
            assert all(least <= size <= most for (least, _, most), size in dims), (name, array.shape)


@pytest.mark.parametrize(
    ("profiles", "message"),
    [
        ({}, "profiles must hold at least one"),
        ({"window": {"batch": Range(1, 1, 1)}}, "token_ids has the dimension 'query', which has no range"),
        ({"window": WINDOW | {"query": Range(5, 4, 8)}}, r"got query \(5, 4, 8\)"),
        ({"window": WINDOW | {"query": Range(0, 4, 8)}}, r"must be 1 <= least <= best <= most; got query \(0, 4, 8\)"),
    ],
)
def test_profiles_that_cannot_be_built_are_refused(folder, tmp_path, profiles, message):
    graph, _ = export(folder, "float16")
    with pytest.raises(BadRecipe, match=message):
        build_engine(graph, tmp_path / "target.engine", rtx(), profiles=profiles)
    assert list(tmp_path.iterdir()) == []


def test_a_capability_that_the_installed_release_lacks_is_refused_by_name(folder, tmp_path):
    graph, _ = export(folder, "float16")
    newer = TensorRtRtx.model_construct(name="tensorrt-rtx", compute_capabilities=("8.6", "9.0"))
    with pytest.raises(BadRecipe, match=r"does not support '9\.0'.*supported: 7\.5, 8\.0, 8\.6, 8\.9, 12\.0, 12\.1"):
        build_engine(graph, tmp_path / "target.engine", newer, profiles={"window": WINDOW})


def test_a_graph_without_a_fused_kernel_fails_with_the_cause_and_leaves_no_file(folder, tmp_path):
    graph, _ = export(folder, "float32")
    with pytest.raises(BackendUnavailable, match=r"Attention operation was not supported.*float16 and bfloat16"):
        build_engine(graph, tmp_path / "target.engine", rtx(), profiles={"window": WINDOW})
    assert list(tmp_path.iterdir()) == []


def test_weights_missing_next_to_the_graph_are_named(folder, tmp_path):
    graph, _ = export(folder, "float16")
    alone = tmp_path / "alone.onnx"
    alone.write_bytes(graph.read_bytes())
    with pytest.raises(BackendUnavailable, match=r"cannot read .*alone\.onnx: .*model\.embed_tokens\.weight"):
        build_engine(alone, tmp_path / "e", rtx(), profiles={"window": WINDOW})


def test_a_node_that_the_compiler_does_not_support_is_named(tmp_path):
    b = GraphBuilder("g")
    x = b.input(Binding("x", "float32", ("batch", 3)))
    with b.scope("layers.0"):
        unknown = b.op("Twist", x, domain="elsewhere")
    unknown.dtype = x.dtype
    unknown.shape = x.shape
    b.output(Binding("y", "float32", ("batch", 3)), unknown)
    save_model(b.model(), tmp_path / "g.onnx")
    with pytest.raises(BackendUnavailable, match=r"node layers\.0/Twist \(Twist\): .*Plugin not found"):
        build_engine(tmp_path / "g.onnx", tmp_path / "e", rtx(), profiles={"window": WINDOW})


def test_without_the_compiler_the_error_names_the_package_to_install(folder, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'tandemrt\[tensorrt-rtx\]'"):
        build_engine(folder / "any.onnx", tmp_path / "e", rtx(), profiles={"window": WINDOW})
