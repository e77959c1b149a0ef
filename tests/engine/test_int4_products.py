"""Weights in 4 bits over a paged cache: products are an operator of the project and mean what the weights mean."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tandemrt import LLM, SamplingParams
from tandemrt.engines.errors import BadCheckpoint, BadRecipe
from tandemrt.engines.recipe import Recipe
from tandemrt.export.build import BuildReport, build
from tandemrt.export.model.opening import open_models
from tandemrt.export.quantize.blocks import Blocks, Form
from tandemrt.plugins.kernels.int4_product import launch
from tandemrt.plugins.launch import Context
from tandemrt.plugins.reference.int4 import int4_product
from tests.engine import narrow
from tests.engine.decoding import Decoder, expected_logits, make_checkpoint, open_steps
from tests.engine.test_quantized_checkpoints import FLOAT8, INT4, TOKENS
from tests.makers import tiny_checkpoint, write_recipe

PAGED = 'name = "onnxruntime-cuda"\ncompute_capabilities = ["9.0"]'


@given(st.integers(0, 2**32 - 1), st.sampled_from([32, 64, 128]), st.integers(1, 5), st.booleans())
def test_a_product_is_that_of_what_the_blocks_stand_for(seed: int, block: int, blocks: int, zeros: bool) -> None:
    """Whole chunks and others, whose padding changes nothing."""
    rng, width, inner = np.random.default_rng(seed), 3, block * blocks
    middles = rng.integers(0, 16, (width, blocks), dtype=np.uint8) if zeros else None
    integers = rng.integers(0, 16, (width, blocks, block), dtype=np.uint8)
    scales = rng.uniform(0.1, 1, (width, blocks)).astype(np.float32)
    held = Blocks(Form(4, block, zeros, tiles="float32"), inner, integers, scales, middles)
    stored, shapes = held.stored(), held.form.shapes(width, inner)
    assert {kind: (str(array.dtype), array.shape) for kind, array in stored.items()} == shapes
    x = rng.normal(size=(2, inner)).astype(np.float32)
    found = int4_product(x, stored[f"tiles{block}"], stored["scales"], stored.get("zeros"), block=block)
    np.testing.assert_allclose(found, x @ held.restored.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", INT4)
def test_the_graph_and_its_steps_give_the_logits_that_the_checkpoint_means(tmp_path: Path, case: str) -> None:
    expected = expected_logits(INT4[case].write(tmp_path), TOKENS)
    narrow.packed(tmp_path, "float32")
    folder = tmp_path / "packed"
    steps = Decoder(folder, "paged", 1, open_engine=partial(open_steps, folder=folder))
    for found in (Decoder(folder, "paged", batch=1)([TOKENS], [0])[0], steps([TOKENS], [0])[0]):
        assert (found - expected).norm() < 1e-5 * expected.norm()


def test_products_with_zero_points_stand_beside_products_without(tmp_path: Path) -> None:
    """A checkpoint in AWQ has some, and a head that is rounded when the bundle is built has none."""
    make_checkpoint("qwen2", tmp_path, sizes=narrow.SIZES | {"vocab_size": 64})
    narrow.rewrite(tmp_path, INT4["awq"].config, INT4["awq"].store)
    names = narrow.packed(tmp_path, "float32", bits=4).tensors
    assert 0 < len([n for n in names if ".int4.zeros" in n]) < len([n for n in names if ".int4.tiles" in n])
    folder = tmp_path / "packed"
    whole, steps = (
        Decoder(folder, "paged", 1),
        Decoder(folder, "paged", 1, open_engine=partial(open_steps, folder=folder)),
    )
    torch.testing.assert_close(whole([TOKENS], [0])[0], steps([TOKENS], [0])[0])


def test_widths_that_no_product_on_a_gpu_has_are_refused_by_name(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "t", vocab=323, layers=1, head_dim=32)
    recipe = write_recipe(tmp_path / "r.toml", target=target, dtype="int4", backend=PAGED)
    with pytest.raises(BadCheckpoint, match=r"lm_head: .* of 32 and outputs of 8; it has 32 and 323; .*another dtype"):
        build(Recipe.load(recipe), tmp_path / "bundle")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BuildReport:
    """A target that comes in 4 bits, head and all, and a draft as well; float16, which a CPU can run."""
    folder, case = tmp_path_factory.mktemp("int4"), INT4["gptq_v2, zero points"]
    sources = [tiny_checkpoint(folder / name, layers=n, seed=1, head_dim=32) for name, n in (("t", 2), ("d", 1))]
    for source in sources:
        narrow.rewrite(source, case.config | {"lm_head": True}, case.store, head=True)
    recipe = write_recipe(folder / "r.toml", target=sources[0], draft=sources[1], dtype="float16", backend=PAGED)
    return build(Recipe.load(recipe), folder / "bundle")


LAYER = ["int4_product", "window_attention", "int4_product", "int4_product", "swiglu", "int4_product"]


def test_every_product_is_one_operator_and_the_head_too(report: BuildReport) -> None:
    for name, layers in (("target", 2), ("draft", 1)):
        decoder = report.manifest.engines[name].decoder
        assert decoder is not None
        assert [step.name for step in decoder.operators] == [*layers * LAYER, "int4_product"]
    assert "kernels/int4.sm_90.cubin" in report.manifest.kernels
    assert not [file for file in report.manifest.kernels if "float8" in file]


def test_a_checkpoint_keeps_its_values_where_the_dtype_holds_its_scales(report: BuildReport) -> None:
    packed = "weights of 4 bits (gptq) were packed anew, their values are the same"
    assert report.notes == (f"target: 15 {packed}", f"draft: 8 {packed}")


def test_rounds_speculate_invisibly(report: BuildReport) -> None:
    texts, accepted = [], 0
    for window in (0, 4):
        with LLM(report.folder, device="cpu", threads=1, window=window) as llm:
            outputs = llm.generate(["json", "long " * 9], SamplingParams(temperature=0.8, seed=3, max_tokens=16))
            texts.append([output.token_ids for output in outputs])
            accepted += sum(output.speculation.num_accepted_draft_tokens for output in outputs)
    assert texts[0] == texts[1]
    assert accepted > 0


def test_a_build_rounds_other_weights_computes_in_bfloat16_and_says_what_that_changed(tmp_path: Path) -> None:
    target, draft = (tiny_checkpoint(tmp_path / name, layers=1, head_dim=32) for name in "td")
    narrow.rewrite(target, FLOAT8["fp8, block"].config, FLOAT8["fp8, block"].store)
    narrow.rewrite(draft, INT4["gptq_v2, zero points"].config, INT4["gptq_v2, zero points"].store)
    drafting = f'kind = "model"\ncheckpoint = "{draft}"\ndtype = "bfloat16"'
    recipe = write_recipe(tmp_path / "r.toml", target=target, dtype="int4", drafting=drafting, backend=PAGED)
    report = build(Recipe.load(recipe), tmp_path / "out")
    rounded, packed = report.notes
    found = re.fullmatch(r"target: int4 changed the weights by ([\d.]+)% \(root mean square\)", rounded)
    assert found is not None
    assert 5 < float(found[1]) < 15
    changed = r"their scales changed by 0\.[0-3]\d% \(bfloat16; root mean square\)"
    assert re.fullmatch(rf"draft: 7 weights of 4 bits \(gptq\) were packed anew, {changed}", packed)
    for name in ("target", "draft"):
        engine = report.manifest.engines[name]
        assert engine.dtype == "bfloat16"
        assert engine.decoder is not None
        assert {step.name for step in engine.decoder.operators} == set(LAYER)
    assert not [file for file in report.manifest.kernels if "float8" in file]


def test_4_bits_in_float32_are_refused_on_a_gpu(tmp_path: Path) -> None:
    target, case = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32), INT4["gptq_v2, zero points"]
    narrow.rewrite(target, case.config, case.store)
    recipe = Recipe.load(write_recipe(tmp_path / "r.toml", target=target, backend=PAGED))
    with pytest.raises(BadRecipe, match=r"in 4 bits needs target\.dtype 'bfloat16' or 'float16' on .* got 'float32'"):
        open_models(recipe)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(2, 128)}, r"x: bfloat16 or float16 is needed, got torch\.float32"),
        ({"x": torch.ones(2, 130).half()}, r"inputs in multiples of 32, .* are needed, got 130, 16 and 32"),
        ({"product": torch.ones(2, 12).half()}, r"outputs of 8 .* are needed, got 128, 12 and 32"),
        ({"scales": torch.ones(16, 8).half()}, r"scales: \(16, 4\) is needed, got \(16, 8\)"),
        ({"weight": torch.ones(16, 128, dtype=torch.uint8)}, r"weight: \(16, 64\) is needed, got \(16, 128\)"),
    ],
)
def test_kernels_refuse_what_does_not_fit_together(changes: dict[str, torch.Tensor], message: str) -> None:
    given = {"x": torch.ones(2, 128).half(), "scales": torch.ones(16, 4).half(), "product": torch.ones(2, 16).half()}
    given["weight"] = torch.ones(16, 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        launch(given | changes, {"block": 32}, Context(torch.device("cpu")))


def test_a_bundle_of_whole_weights_has_no_kernels_of_4_bits(tmp_path: Path) -> None:
    target = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32)
    recipe = write_recipe(tmp_path / "r.toml", target=target, backend=PAGED)
    kernels = build(Recipe.load(recipe), tmp_path / "out").manifest.kernels
    assert not [file for file in kernels if "int4" in file]
