"""Checkpoints in float8 on a CUDA device: logits, texts with speculation on and off, and GPUs that are refused."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tandemrt import LLM, SamplingParams
from tandemrt.engines.errors import BackendUnavailable
from tandemrt.engines.recipe import Recipe
from tandemrt.export.build import build
from tandemrt.plugins.faces import launcher
from tandemrt.plugins.kernels.compile import compile_kernels
from tandemrt.plugins.launch import Context
from tests.engine import narrow
from tests.engine.decoding import Decoder, expected_logits, open_steps
from tests.engine.test_quantized_checkpoints import FLOAT8
from tests.engine.test_scaled_products import SCALES
from tests.gpu.here import compute_capabilities
from tests.gpu.rounds import paged
from tests.makers import tiny_checkpoint, write_recipe

CAPACITY = 170


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    compile_kernels(compute_capabilities(), folder, names=["attention", "swiglu", "float8"], head_dims=[64])
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", SCALES)
def test_logits_are_those_that_the_checkpoint_means(tmp_path: Path, kernels: Path, case: str, dtype: str) -> None:
    """Chunks of many rows, windows of few."""
    open_engine = partial(open_steps, folder=tmp_path, device=torch.device("cuda", 0), kernels=kernels)
    model = FLOAT8[case].write(tmp_path)
    texts = [torch.randint(0, 61, (120,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(2)]
    expected = [expected_logits(model, text) for text in texts]
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        decode = Decoder(tmp_path, "paged", 2, dtype, CAPACITY, device="cuda", open_engine=open_engine)
        start = 0
        for query in (50, 3, 1, 6, 20):
            found = decode([text[start : start + query] for text in texts], [start, start])
            wanted = torch.stack([logits[start : start + query] for logits in expected])
            assert (found - wanted).norm() < (0.02 if dtype == "float32" else 0.06) * wanted.norm()
            start += query


def test_texts_are_the_same_with_speculation_and_without(tmp_path: Path) -> None:
    """Up to ties, of which texts of this length have none."""
    case = FLOAT8[SCALES[0]]
    sources = [tiny_checkpoint(tmp_path / name, layers=n, seed=1, head_dim=32) for name, n in (("t", 2), ("d", 1))]
    for source in sources:
        narrow.rewrite(source, {**case.config, "ignore": []}, case.store, head=True)
    recipe = tmp_path / "r.toml"
    write_recipe(recipe, target=sources[0], draft=sources[1], backend=paged(), dtype="bfloat16")
    build(Recipe.load(recipe), tmp_path / "bundle")
    prompts = [f"{word} the world" for word in ("hello", "and", "x", "why")]
    texts = []
    for window in (0, 4):
        with LLM(tmp_path / "bundle", device="cuda", window=window) as llm:
            outputs = llm.generate(prompts, SamplingParams(temperature=0.8, seed=3, max_tokens=24))
            assert not [output.error for output in outputs if output.finish_reason == "error"]
            texts.append([output.token_ids for output in outputs])
    assert texts[0] == texts[1]


def test_a_gpu_without_float8_is_refused(kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(torch.device("cuda", 0), kernels)
    launcher("scaled_product", context)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 6))
    with pytest.raises(BackendUnavailable, match=r"scaled_product needs compute capability 8\.9 or later, .* has 8\.6"):
        launcher("scaled_product", context)
