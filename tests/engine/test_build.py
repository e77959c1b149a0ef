"""Building a bundle, end to end: its files and manifest, that it runs, and the files left after a failure."""

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from tandemrt import LLM, SamplingParams
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.build_listener import BuildListener
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BackendUnavailable, BadBundle, BadCheckpoint, BadRecipe, InternalError
from tandemrt.export.bundle.build import BuildReport, build
from tandemrt.export.bundle.graphs import graphs
from tandemrt.export.bundle.opening import open_models
from tandemrt.export.bundle.provenance import source_state
from tandemrt.export.compile.backends import compile_graph
from tandemrt.export.compile.graph_contract import differences, require_contract
from tandemrt.export.compile.onnxruntime import graph_file as compiler
from tandemrt.export.graph.builder import save_model
from tandemrt.plugins.kernels.nvrtc import compile_program
from tandemrt.runtime.device.backends.tensorrt.plan import require_profiles
from tests.engine.decoding import expected_logits, make_checkpoint
from tests.engine.draft_kinds import EAGLE3, MTP, SIZES
from tests.listeners import Recorded
from tests.makers import VOCAB, tiny_checkpoint, tiny_tokenizer, write_recipe
from tests.mtp import add_layers

ENGINES = ["target", "draft", "adjust", "verify", "verify_probs", "propose", "propose_probs"]


@pytest.fixture(scope="module", autouse=True)
def kernels_of_bundles() -> None:
    """They are compiled here."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target and a draft checkpoint."""
    folder = tmp_path_factory.mktemp("models")
    tiny_checkpoint(folder / "target")
    tiny_checkpoint(folder / "draft", layers=1, hidden=16, seed=1)
    return folder


@pytest.fixture(scope="module")
def report(models: Path) -> BuildReport:
    file = write_recipe(models / "tiny.toml", target=models / "target", draft=models / "draft")
    return build(Recipe.load(file), models / "built/tiny")


@pytest.fixture
def copy(models: Path, tmp_path: Path) -> Path:
    """Checkpoints of one's own, to damage."""
    for name in ("target", "draft"):
        shutil.copytree(models / name, tmp_path / name)
    return tmp_path


def recipe(folder: Path, **options: int | str) -> Recipe:
    name = "tiny.toml"
    return Recipe.load(write_recipe(folder / name, target=folder / "target", draft=folder / "draft", **options))


def test_a_built_bundle_opens_and_every_digest_holds(report: BuildReport) -> None:
    bundle = Bundle.open(report.folder, verify=True)
    assert bundle.manifest == report.manifest
    assert list(bundle.manifest.engines) == ENGINES


def test_the_manifest_repeats_the_recipe_and_the_tokenizer(report: BuildReport, models: Path) -> None:
    manifest = report.manifest
    assert manifest.limits.model_dump() == {
        "batch": 4,
        "length": 96,
        "capacity": 96 + 4 + 1,
        "num_draft_tokens": 4,
        "prefill_chunk": 16,
        "cache_blocks": None,
    }
    tokenizer = AutoTokenizer.from_pretrained(models / "target")
    assert (manifest.vocab, manifest.valid_tokens) == (VOCAB, len(tokenizer))
    assert manifest.stop_ids == (tokenizer.convert_tokens_to_ids("<|im_end|>"),)
    assert manifest.reasoning is not None
    for delimiter in (manifest.reasoning.think_start, *manifest.reasoning.think_ends, manifest.reasoning.forced_end):
        assert list(delimiter.ids) == tokenizer.encode(delimiter.text, add_special_tokens=False)
    assert manifest.specs["draft"]["layers"] == 1


def test_the_tokenizer_of_the_bundle_is_the_checkpoints_with_its_chat_template(
    report: BuildReport, models: Path
) -> None:
    ours = AutoTokenizer.from_pretrained(Bundle.open(report.folder).tokenizer_dir)
    theirs = AutoTokenizer.from_pretrained(models / "target")
    message = [{"role": "user", "content": "the band and the hand"}]
    assert ours.apply_chat_template(message) == theirs.apply_chat_template(message)
    assert ours.get_vocab() == theirs.get_vocab()


def test_every_engine_opens_with_the_bindings_of_its_contract(report: BuildReport) -> None:
    bundle = Bundle.open(report.folder)
    for name in ENGINES:
        session = onnxruntime.InferenceSession(bundle.path(name), providers=["CPUExecutionProvider"])
        contract = bundle.contract(name)
        assert {b.name for b in session.get_inputs()} == {b.name for b in contract.inputs}
        assert {b.name: tuple(b.shape) for b in session.get_outputs()} == {b.name: b.shape for b in contract.outputs}


def test_the_target_of_the_bundle_computes_what_the_checkpoint_computes(report: BuildReport, models: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    bundle = Bundle.open(report.folder)
    tokens = np.arange(5, 15, dtype=np.int64)[None]
    sizes = {"batch": 1, "query": 10, "rows": 10}
    feeds = {b.name: np.zeros(b.resolve(sizes), b.dtype) for b in bundle.contract("target").inputs}
    feeds |= {"token_ids": tokens, "score_rows": np.arange(10)[None]}
    session = onnxruntime.InferenceSession(bundle.path("target"), providers=["CPUExecutionProvider"])
    (logits,) = session.run(["logits"], feeds)
    model = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_weights_are_those_of_the_checkpoint_in_files_of_their_own(report: BuildReport, models: Path) -> None:
    for role in ("target", "draft"):
        ours, theirs = report.folder / role / "model.safetensors", models / role / "model.safetensors"
        assert ours.read_bytes() == theirs.read_bytes()
        assert not ours.samefile(theirs)


def test_provenance_holds_the_digests_of_recipe_and_checkpoints(report: BuildReport, models: Path) -> None:
    def sha256(file: Path) -> str:
        return hashlib.sha256(file.read_bytes()).hexdigest()

    provenance = report.manifest.provenance
    assert provenance.recipe == sha256(models / "tiny.toml")
    names = ("config.json", "model.safetensors")
    lines = "".join(f"{sha256(models / 'target' / name)}  {name}\n" for name in names)
    assert provenance.checkpoints["target"] == hashlib.sha256(lines.encode()).hexdigest()
    assert provenance.packages["onnxruntime"] == onnxruntime.__version__
    assert provenance.created.endswith("+00:00")


def test_nothing_of_the_machine_that_built_it_is_in_a_bundle(report: BuildReport, models: Path) -> None:
    for name in ("bundle.json", *(engine.file for engine in report.manifest.engines.values())):
        assert str(models).encode() not in (report.folder / name).read_bytes()


def test_building_twice_gives_the_same_files(report: BuildReport, models: Path) -> None:
    again = build(Recipe.load(models / "tiny.toml"), models / "built/again")
    assert again.manifest.files == report.manifest.files


def test_progress_hears_every_step_and_the_report_has_their_times(copy: Path) -> None:
    heard = Recorded()
    report = build(recipe(copy), copy / "out", listener=heard)
    assert [step.title for step in report.steps] == heard.titles
    assert all(any(engine.file in title for title in heard.titles) for engine in report.manifest.engines.values())


def test_a_bundle_without_a_draft_holds_no_drafting_engines(copy: Path) -> None:
    file = write_recipe(copy / "plain.toml", target=copy / "target")
    manifest = build(Recipe.load(file), copy / "plain").manifest
    assert list(manifest.engines) == ["target", "adjust", "verify", "verify_probs"]
    assert (manifest.draft.kind, manifest.limits.num_draft_tokens, manifest.limits.capacity) == ("none", 4, 101)


def test_an_ngram_draft_keeps_its_bounds(copy: Path) -> None:
    file = write_recipe(copy / "ngram.toml", target=copy / "target")
    file.write_text(file.read_text().replace('kind = "none"', 'kind = "ngram"\nnum_draft_tokens = 3\nngram_max = 5'))
    manifest = build(Recipe.load(file), copy / "ngram").manifest
    assert (manifest.draft.ngram_min, manifest.draft.ngram_max, manifest.limits.num_draft_tokens) == (2, 5, 3)


def test_a_cuda_bundle_with_linear_caches_is_whole_graphs_and_builds_without_a_gpu(copy: Path) -> None:
    backend = 'name = "onnxruntime-cuda"\ncache = "linear"\ncompute_capabilities = ["9.0"]'
    manifest = build(recipe(copy, dtype="bfloat16", backend=backend), copy / "out").manifest
    assert {(engine.backend, engine.built_for) for engine in manifest.engines.values()} == {
        ("onnxruntime-cuda", "cuda")
    }
    assert {engine.decoder for engine in manifest.engines.values()} == {None}
    assert manifest.engines["verify"].contract["logits"].dtype == "bfloat16"
    assert manifest.limits.cache_blocks is None
    assert manifest.kernels == kernels_of("adjust", "verify", sm=["90"]), "attention and swiglu stand between subgraphs"


@pytest.fixture(scope="module")
def paged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with paged caches, in float32."""
    folder = tmp_path_factory.mktemp("paged")
    tiny_checkpoint(folder / "target", head_dim=32)
    tiny_checkpoint(folder / "draft", head_dim=32, layers=1, seed=1)
    backend = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]'
    return build(recipe(folder, backend=backend, cache_tokens=300), folder / "out").folder


def test_a_cuda_bundle_holds_its_decoders_in_subgraphs_and_its_kernels(paged: Path) -> None:
    bundle = Bundle.open(paged, verify=True)
    for name, layers in (("target", 2), ("draft", 1)):
        engine = bundle.engine(name)
        assert engine.decoder is not None
        assert engine.file is None
        subgraphs = [f"{name}/subgraph.{i:02}.onnx" for i in range(2 * layers + 1)]
        assert engine.files == (f"{name}/constants.onnx", *subgraphs)
        operators = engine.decoder.operators
        assert [step.name for step in operators] == ["window_attention", "swiglu"] * layers
        for attributes in [step.attributes for step in operators if step.name == "window_attention"]:
            assert (attributes["heads"], attributes["kv_heads"], attributes["sliding_window"]) == (4, 2, 0)
            assert (attributes["scale"], attributes["epsilon"]) == (pytest.approx(32**-0.5), pytest.approx(1e-6))
        assert "block_table" in {binding.name for binding in bundle.contract(name).inputs}
    assert bundle.limits.cache_blocks == 5  # of 64 tokens
    kernels = ("adjust", "attention", "residual_norm", "swiglu", "verify")  # no experts, nothing in float8
    assert bundle.manifest.kernels == kernels_of(*kernels, sm=["90"])
    for kernel in kernels:
        assert (bundle.kernels_dir / f"{kernel}.sm_90.cubin").read_bytes()[:4] == b"\x7fELF"
    entries = re.findall(r"\.entry (\w+)", (bundle.kernels_dir / "attention.ptx").read_text())
    names = ("append", "attend", "prepare", "attend_runs")
    assert set(entries) == {f"{name}_fp32_32" for name in names}, "the models' dtype and head size, and no other"


def kernels_of(*names: str, sm: list[str]) -> dict[str, str]:
    """What a manifest says of kernels for architectures "90", …, the lowest first."""
    cubins = {f"kernels/{name}.sm_{a}.cubin": f"sm_{a}" for name in names for a in sm}
    return cubins | {f"kernels/{name}.ptx": f"compute_{sm[0]}" for name in names}


def test_the_steps_of_a_cuda_bundle_compute_the_same_on_a_cpu(paged: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from tandemrt.runtime.device.backends.opening import open_engines

    bundle = Bundle.open(paged)
    engine = open_engines(bundle, torch.device("cpu"), 1)["target"]
    tokens = torch.arange(5, 15)[None]
    sizes = {"batch": 1, "rows": 10, "tokens": 10, "blocks": 3, "prompt_tokens": 0, "prompts": 0, "prompts+1": 1}
    inputs = {
        b.name: torch.zeros(b.resolve(sizes), dtype=getattr(torch, b.dtype)) for b in bundle.contract("target").inputs
    }
    inputs |= {"token_ids": tokens[0], "score_rows": torch.arange(10)[None]}
    inputs |= {"block_table": torch.tensor([[2, 1]], dtype=torch.int32)}
    logits = torch.full((1, 10, bundle.vocab), float("nan"))
    engine.bind(inputs | {"logits": logits}).run()
    model = AutoModelForCausalLM.from_pretrained(paged.parent / "target", dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(tokens).logits
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_a_head_size_without_a_kernel_is_refused(copy: Path) -> None:
    message = (
        r"backend\.cache 'paged' needs a head size of 32, 64, 128, 256, .*; got 16 in target\.checkpoint; choose cache"
    )
    with pytest.raises(BadRecipe, match=message):
        build(recipe(copy, backend='name = "onnxruntime-cuda"'), copy / "out")


def test_kernels_without_a_compiler_are_refused_with_what_to_install(
    paged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_program.cache_clear()
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    wanted = recipe(paged.parent, backend='name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]')
    with pytest.raises(BackendUnavailable, match=r"NVRTC is not installed .*pip install 'tandemrt\[kernels\]'"):
        build(wanted, paged.parent / "other")
    assert not (paged.parent / "other").exists()


def test_a_tensorrt_rtx_bundle_holds_engines_and_their_graphs(tmp_path: Path) -> None:
    pytest.importorskip("tensorrt_rtx_bindings")
    tiny_checkpoint(tmp_path / "target", head_dim=32)
    tiny_checkpoint(tmp_path / "draft", head_dim=32, layers=1, seed=1)
    backend = 'name = "tensorrt-rtx"\ncompute_capabilities = ["7.5", "8.6", "12.0", "12.1"]'
    report = build(recipe(tmp_path, dtype="float16", backend=backend), tmp_path / "out")
    bundle = Bundle.open(report.folder, verify=True)
    for name in ("target", "draft"):
        engine = bundle.engine(name)
        assert (engine.file, engine.built_for) == (f"{name}/model.engine", "sm_75+sm_86+sm_120+sm_121")
        assert {f"{name}/model.onnx", f"{name}/model.safetensors"} <= set(bundle.manifest.files)
    for name in ("verify", "propose"):
        assert bundle.engine(name).backend == "onnxruntime-cuda", "for GPUs older than the kernels"
    assert bundle.manifest.kernels == kernels_of("adjust", "verify", sm=["86", "120"])
    entries = re.findall(r"\.entry (\w+)", (bundle.kernels_dir / "verify.ptx").read_text())
    assert set(entries) == {"row_stats_fp16", "choose_fp16", "draft_probs_fp16"}


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_a_tensorrt_rtx_bundle_holds_the_engines_of_a_draft_head(tmp_path: Path, kind: str) -> None:
    """``fuse`` is an engine too, so a bundle needs nothing of onnxruntime to run."""
    pytest.importorskip("tensorrt_rtx_bindings")
    tiny_checkpoint(tmp_path / "target", **SIZES)
    if kind == "mtp":
        add_layers(tmp_path / "target", [MTP, replace(MTP, at=1)])
    head = EAGLE3.save(tmp_path / "head") if kind == "eagle3" else tmp_path / "target"
    drafting = f'kind = "{kind}"\ncheckpoint = "{head}"\nnum_draft_tokens = 3'
    backend = 'name = "tensorrt-rtx"\ncompute_capabilities = ["8.6"]'
    file = write_recipe(
        tmp_path / "r.toml", target=tmp_path / "target", dtype="float16", backend=backend, drafting=drafting
    )
    bundle = Bundle.open(build(Recipe.load(file), tmp_path / "out").folder, verify=True)
    decoders = {"target", "draft", "fuse", *(["draft_2"] if kind == "mtp" else [])}
    assert {n for n, engine in bundle.manifest.engines.items() if engine.backend == "tensorrt-rtx"} == decoders
    for name in decoders:
        profiles = json.loads(bundle.path(name).with_suffix(".inspect.json").read_text())["profiles"]
        shapes = [
            {n: tuple(zip(*ranges, strict=True)) for n, ranges in each["inputs"].items()} for each in profiles.values()
        ]
        require_profiles(name, bundle.contract(name), bundle.limits, shapes)


@pytest.mark.parametrize("vocab", [VOCAB - 32, VOCAB + 64])
def test_a_draft_with_other_padding_and_a_shorter_length_drafts_as_far_as_it_goes(copy: Path, vocab: int) -> None:
    """D6: Qwen2.5 0.5B, 151,936 logits wide, drafts for 7B with 152,064; their tokens are the same."""
    tiny_checkpoint(copy / "draft", vocab=vocab, layers=1, max_length=40)
    with LLM(build(recipe(copy), copy / "out").folder, threads=1, lookup=False) as llm:
        for prompt, drafts in (([5, 6, 7], True), ([5, 6, 7] * 15, False)):
            params = SamplingParams(seed=3, max_tokens=12, ignore_eos=True)
            drafted, plain = (
                llm.generate(prompt, params.model_copy(update={"num_draft_tokens": w})) for w in (None, 0)
            )
            assert drafted.token_ids == plain.token_ids
            assert (drafted.speculation.num_draft_tokens > 0) == drafts
            assert (drafted.speculation.num_accepted_draft_tokens > 0) == drafts


def test_a_draft_without_all_tokens_of_the_target_is_refused(copy: Path) -> None:
    tiny_tokenizer(copy / "target", extra=tuple(f"<{number}>" for number in range(20)))
    tiny_checkpoint(copy / "draft", vocab=VOCAB - 40, layers=1)
    with pytest.raises(
        BadRecipe, match=r"its vocabulary must hold every token of the target's tokenizer, 287; its logits have 280"
    ):
        build(recipe(copy), copy / "out")


@pytest.mark.parametrize(
    ("vocab", "backend", "message"),
    [
        (
            VOCAB,
            'name = "onnxruntime-cpu"',
            f"draft.vocab must be below {VOCAB}, the size of the vocabulary; got {VOCAB}",
        ),
        (9, 'name = "onnxruntime-cuda"\ncache = "linear"', "draft.vocab needs backend.name 'onnxruntime-cpu'; got"),
    ],
)
def test_a_part_of_the_vocabulary_that_a_draft_cannot_have_is_refused(
    copy: Path, vocab: int, backend: str, message: str
) -> None:
    drafting = f'kind = "model"\ncheckpoint = "{copy / "draft"}"\nvocab = {vocab}'
    file = write_recipe(copy / "r.toml", target=copy / "target", backend=backend, drafting=drafting)
    with pytest.raises(BadRecipe, match=message):
        build(Recipe.load(file), copy / "out")


def test_a_tokenizer_that_the_runtime_would_refuse_is_refused_and_leaves_no_files(copy: Path) -> None:
    file = copy / "target" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["dropout"] = 0.1
    file.write_text(json.dumps(tokenizer))
    before = sorted(copy.rglob("*"))
    with pytest.raises(BadCheckpoint, match=r"tokenizer.json: model.dropout must be null, got 0.1"):
        build(recipe(copy), copy / "out")
    assert sorted({*copy.rglob("*")} - {copy / "tiny.toml"}) == before


def test_a_tokenizer_with_more_ids_than_logits_is_refused(copy: Path) -> None:
    tiny_tokenizer(copy / "target", extra=tuple(f"<extra_{i}>" for i in range(VOCAB)))
    with pytest.raises(BadCheckpoint, match=rf"must not have more ids than the logits are wide \({VOCAB}\)"):
        build(recipe(copy), copy / "out")


def test_a_length_beyond_the_training_of_a_model_is_refused(copy: Path) -> None:
    with pytest.raises(BadRecipe, match=r"the length that the target's config.json gives, 256; got 257; lower"):
        build(recipe(copy, length=257), copy / "out")


@pytest.mark.parametrize(("written", "dtype"), [("", "float32"), ('\ndtype = "float16"', "float16")])
def test_a_draft_computes_in_a_dtype_of_its_own_and_else_in_the_targets(copy: Path, written: str, dtype: str) -> None:
    drafting = f'kind = "model"\ncheckpoint = "{copy / "draft"}"{written}'
    wanted = Recipe.load(write_recipe(copy / "own.toml", target=copy / "target", drafting=drafting))
    models = open_models(wanted)
    assert [model.dtype for model in models] == ["float32", dtype]
    dtypes = {graph.name: graph.dtype for graph in graphs(wanted, models)}
    assert {dtypes[name] for name in ("target", "verify", "adjust")} == {"float32"}
    assert {dtypes[name] for name in ("draft", "propose", "propose_probs")} == {dtype}


def test_a_forced_end_without_a_delimiter_is_refused(copy: Path) -> None:
    wanted = recipe(copy)
    assert wanted.reasoning is not None
    file = copy / "tiny.toml"
    file.write_text(file.read_text().replace("enough.</think>", "enough."))
    with pytest.raises(BadRecipe, match=r"reasoning\.forced_end must contain an end delimiter"):
        build(Recipe.load(file), copy / "out")


def drop_a_tensor(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_build_that_fails_midway_leaves_no_files_and_the_old_bundle_as_it_was(copy: Path) -> None:
    old = build(recipe(copy), copy / "out/tiny")
    before = (copy / "out/tiny/bundle.json").read_bytes()
    drop_a_tensor(copy / "draft")
    heard = Recorded()
    with pytest.raises(BadCheckpoint, match=r"model\.norm\.weight"):
        build(recipe(copy), copy / "out/tiny", listener=heard)
    assert any("draft/model.onnx" in title for title in heard.titles), "the target was already built"
    assert os.listdir(copy / "out") == ["tiny"]  # noqa: PTH208
    assert (copy / "out/tiny/bundle.json").read_bytes() == before
    assert Bundle.open(copy / "out/tiny", verify=True).manifest == old.manifest


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("target/model.safetensors", None, "nothing was built: a file cannot be read or written: .*: No such file"),
        ("target/model.safetensors", "draft/model.safetensors", "target/model.safetensors must not change while it is"),
        ("target/tokenizer.json", None, "must hold a usable tokenizer"),
        ("target/config.json", None, "nothing was built: a file cannot be read or written: .*: No such file"),
    ],
)
def test_a_checkpoint_that_changes_during_its_build_is_refused_and_leaves_nothing(
    copy: Path, file: str, content: str | None, message: str
) -> None:
    class Changes(BuildListener):
        def begin(self, title: str) -> None:
            if title.startswith("Place the weights"):
                (copy / file).unlink()
                if content is not None:
                    shutil.copyfile(copy / content, copy / file)

    with pytest.raises((BadCheckpoint, BadBundle), match=message):
        build(recipe(copy), copy / "out/tiny", listener=Changes())
    assert not (copy / "out").exists()


def test_a_checkpoint_that_is_written_over_changes_no_bundle_and_ends_nothing_that_runs(copy: Path) -> None:
    folder = build(recipe(copy), copy / "out").folder
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM(folder, threads=1) as llm:
        before = llm.generate("the", params).token_ids
        for name in ("target", "draft"):
            weights = copy / name / "model.safetensors"
            weights.write_bytes(bytes(weights.stat().st_size))
            assert llm.generate("the", params).token_ids == before
            weights.write_bytes(b"")
        assert llm.generate("the", params).token_ids == before
    assert Bundle.open(folder, verify=True).name == "tiny"


def test_a_full_disk_is_refused_and_no_files_are_left(copy: Path) -> None:
    asked, before = recipe(copy), sorted(copy.rglob("*"))
    _, most = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        for room in (0, 1_000, 20_000, 60_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, most))  # a file beyond it fails like one on a full disk
            with pytest.raises(BadBundle, match=r"^nothing was built: .* written: /\S+: File too large"):
                build(asked, copy / "out")
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            assert sorted(copy.rglob("*")) == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_rebuild_takes_the_place_of_the_old_bundle(copy: Path) -> None:
    build(recipe(copy), copy / "out")
    build(recipe(copy, batch=2), copy / "out")
    assert Bundle.open(copy / "out", verify=True).limits.batch == 2


def test_a_graph_that_departs_from_its_contract_never_becomes_a_bundle(report: BuildReport) -> None:
    bundle = Bundle.open(report.folder)
    assert differences(bundle.path("verify"), bundle.contract("verify")) == []
    with pytest.raises(InternalError, match=r"input draft_probs float32.* is missing"):
        require_contract(bundle.path("verify"), bundle.contract("verify_probs"))


def test_a_graph_that_onnxruntime_refuses_never_becomes_a_bundle(report: BuildReport, tmp_path: Path) -> None:
    shutil.copy(Bundle.open(report.folder).path("target"), tmp_path / "model.onnx")  # without its weights
    with pytest.raises(InternalError, match=r"onnxruntime .* rejects model\.onnx"):
        compiler.require_session(tmp_path / "model.onnx")


def test_a_full_disk_is_named_where_a_graph_is_optimized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime's own error is "Protobuf serialization failed"."""
    file = tmp_path / "model.onnx"
    file.write_bytes(bytes(64))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=63))
    with pytest.raises(BackendUnavailable, match=r"model\.onnx: No space left on device: free some space"):
        compiler.require_session(file)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=64))
    with pytest.raises(InternalError, match=r"rejects model\.onnx"):
        compiler.require_session(file)


def test_graphs_for_a_cpu_are_saved_as_the_optimizer_leaves_them(report: BuildReport) -> None:
    bundle = Bundle.open(report.folder)
    graph = ir.load(bundle.path("target"))
    kinds = [node.op_type for node in graph.graph]
    assert bundle.engine("target").optimized
    assert "swiglu" in kinds
    assert "Cos" not in kinds  # of rotary tables, which are constants now
    used = {node.op_type for node in graph.graph if node.domain == "tandemrt"}
    assert used <= {function.name for function in graph.functions.values()}  # for machines without a compiler


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_built_gpt_oss_opens_and_writes_the_tokens_of_transformers(tmp_path: Path, dtype: str) -> None:
    """onnxruntime's optimizer gives values of its experts' branches the names of values around them."""
    model = make_checkpoint("gpt_oss", tiny_tokenizer(tmp_path), sizes={"vocab_size": VOCAB, "swiglu_limit": 7.0})
    build(Recipe.load(write_recipe(tmp_path / "r.toml", target=tmp_path, dtype=dtype)), tmp_path / "out")
    prompt = [*range(40, 48)]
    with LLM(tmp_path / "out", threads=1) as llm:
        output = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    valid = Bundle.open(tmp_path / "out").manifest.valid_tokens
    logits = expected_logits(model, prompt + output.token_ids)[len(prompt) - 1 : -1, :valid]
    written = logits.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
    assert (logits.amax(1) - written).max() <= (1e-3 if dtype == "float32" else 0.1) * logits.std()


def test_constants_that_optimization_would_add_stay_out_of_a_graph(
    report: BuildReport, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(compiler, "_MAX_CONSTANTS", -(1 << 30))
    folder = Path(shutil.copytree(report.folder / "target", tmp_path / "target"))
    before = (folder / "model.onnx").read_bytes()
    assert not compiler.require_session(folder / "model.onnx")
    assert (folder / "model.onnx").read_bytes() == before
    assert not [*folder.glob("*.optimized")]


def test_a_compiled_graph_is_held_to_its_contract_and_must_open(copy: Path) -> None:
    wanted = recipe(copy)
    target, *others = graphs(wanted, open_models(wanted))
    (copy / "out/target").mkdir(parents=True)
    save_model(target.make(), copy / "out" / target.file)
    with pytest.raises(InternalError, match=r"model\.onnx must have the bindings of its contract: input .* is not in"):
        compile_graph(replace(target, contract=others[0].contract, file=target.file), wanted, copy / "out")
    with pytest.raises(InternalError, match=r"onnxruntime .* rejects model\.onnx"):
        compile_graph(target, wanted, copy / "out")  # its weights are not there
    shutil.copy(copy / "target/model.safetensors", copy / "out/target")
    assert compile_graph(target, wanted, copy / "out").engine.file == target.file


@pytest.mark.parametrize(
    "backend", ['name = "onnxruntime-cpu"', 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]']
)
def test_engines_of_several_mtp_layers_share_no_file(tmp_path: Path, backend: str) -> None:
    """Over a paged cache each is cut into subgraphs, which are files of one folder."""
    tiny_checkpoint(tmp_path / "target", **SIZES)
    add_layers(tmp_path / "target", [MTP, replace(MTP, at=1)])
    drafting = f'kind = "mtp"\ncheckpoint = "{tmp_path / "target"}"\nnum_draft_tokens = 3'
    file = write_recipe(tmp_path / "r.toml", target=tmp_path / "target", drafting=drafting, backend=backend)
    engines = build(Recipe.load(file), tmp_path / "out").manifest.engines
    files = [file for name in ("target", "draft", "draft_2", "fuse") for file in engines[name].files]
    assert len(files) == len(set(files))
    assert engines["draft_2"].files


def test_a_draft_whose_tokens_have_other_texts_is_refused(copy: Path) -> None:
    tokenizer = (copy / "draft/tokenizer.json").read_text()
    (copy / "draft/tokenizer.json").write_text(tokenizer.replace('"</think>"', '"</thought>"'))
    with pytest.raises(BadRecipe, match="id 265 is '</thought>', and '</think>' in the target; choose a draft"):
        build(recipe(copy), copy / "out")


def test_the_commit_is_that_of_the_checkout_that_tracks_the_source(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "ours.py").write_text("")
    assert source_state(tmp_path / "ours.py") == (None, None)
    git("init")
    git("add", "ours.py")
    git("commit", "-m", "first")
    assert source_state(tmp_path / "ours.py") == (git("rev-parse", "HEAD"), False)
    (tmp_path / "installed.py").write_text("")
    assert source_state(tmp_path / "ours.py") == (git("rev-parse", "HEAD"), True)
    assert source_state(tmp_path / "installed.py") == (None, None), "another project's checkout says nothing"


def test_sharded_checkpoints_keep_all_their_files(copy: Path) -> None:
    weights = load_file(copy / "target/model.safetensors")
    names = sorted(weights)
    shards = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: weights[name] for name in part}, copy / "target" / file, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: file for file, part in shards.items() for name in part}}
    (copy / "target/model.safetensors.index.json").write_text(json.dumps(index))
    (copy / "target/model.safetensors").unlink()
    manifest = build(recipe(copy), copy / "out").manifest
    assert {f"target/{file}" for file in shards} <= set(manifest.files)
