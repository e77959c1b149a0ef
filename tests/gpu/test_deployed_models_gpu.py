"""gpt-oss and Gemma 4 on a CUDA device: logits against transformers, and texts with and without speculation."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.export.bundle.build import build
from tandemrt.plugins.kernels.compile import compile_kernels
from tests.engine import quantized
from tests.engine.decoding import VOCAB as NARROW
from tests.engine.decoding import Decoder, expected_logits, make_checkpoint, open_steps
from tests.engine.test_mxfp4 import published, read_by_transformers
from tests.families.cases import FAMILIES
from tests.gpu.here import compute_capabilities
from tests.gpu.quantized_logits import check_logits
from tests.gpu.rounds import by_graphs_and_eagerly, check_invisible, paged, texts
from tests.makers import VOCAB, tiny_checkpoint, tiny_tokenizer, write_recipe

# Head sizes as published; other sizes are not.
GPT_OSS = {"hidden_size": 320, "intermediate_size": 96, "head_dim": 64, "num_attention_heads": 16}
GPT_OSS |= {"num_local_experts": 8, "num_experts_per_tok": 4, "swiglu_limit": 7.0, "max_position_embeddings": 256}
GEMMA4 = {"hidden_size": 128, "head_dim": 256, "num_attention_heads": 8, "max_position_embeddings": 256}
GLOBAL_HEAD_DIM = 512
MODELS = ("gemma4", "gemma4 dense", "gemma4 experts", "gpt_oss")
SHARE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 6e-2}  # of the norm of the logits, that rounding may cost
CHUNKS = (50, 3, 1, 6, 20)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    names = ["attention", "experts", "experts_float4", "residual_norm", "swiglu"]
    compile_kernels(compute_capabilities(), folder, names=names, head_dims=[64, 256, 512])
    return folder


def config_of(case: str, **fields: Any) -> PreTrainedConfig:
    """Return the config of a case with wider heads, of two sizes for Gemma 4, and other ``fields``."""
    values = FAMILIES[case]().to_dict()
    values |= (GPT_OSS if case == "gpt_oss" else GEMMA4) | fields
    if values.get("num_experts"):
        values["num_experts"] = 8  # a multiple of 8, for batch invariance
    if layers := values.get("per_layer_config"):
        values["per_layer_config"] = {layer: of | {"head_dim": GLOBAL_HEAD_DIM} for layer, of in layers.items()}
    return AutoConfig.for_model(values.pop("model_type"), **values)


@pytest.mark.parametrize("dtype", SHARE)
@pytest.mark.parametrize("case", MODELS)
def test_logits_equal_transformers(tmp_path: Path, kernels: Path, case: str, dtype: str) -> None:
    model = make_checkpoint(config_of(case), tmp_path)
    open_engine = partial(open_steps, folder=tmp_path, device=torch.device("cuda", 0), kernels=kernels)
    rows = [torch.randint(0, NARROW, (120,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(2)]
    expected = torch.stack([expected_logits(model, row) for row in rows])
    results, start = [], 0
    with torch.inference_mode(), torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        decode = Decoder(tmp_path, "paged", 2, dtype, 170, device="cuda", open_engine=open_engine)
        for query in CHUNKS:
            results.append(decode([row[start : start + query] for row in rows], [start, start]))
            start += query
    error = (torch.cat(results, dim=1) - expected[:, :start]).norm(dim=-1) / expected[:, :start].norm(dim=-1)
    # In 16 bits some tokens choose other experts, and inputs of single layers amplify rounding, in transformers too.
    amplifies = dtype != "float32" and case != "gemma4 dense"
    worst = float(error.median() if amplifies else error.max())
    print(f"{case}, {dtype}: median {float(error.median()):.1e}, worst {float(error.max()):.1e}")
    assert worst <= SHARE[dtype]


@pytest.mark.parametrize(("dtype", "near"), [("float16", 0.01), ("bfloat16", 0.05)])
def test_logits_of_mxfp4_equal_transformers(tmp_path: Path, kernels: Path, dtype: str, near: float) -> None:
    """Every token selects all experts, so that rounding selects no others."""
    published(tmp_path, sizes=GPT_OSS | {"num_local_experts": 4, "num_experts_per_tok": 4})
    model = read_by_transformers(tmp_path)
    quantized.packed(tmp_path, dtype)
    check_logits(tmp_path / "packed", model, kernels, dtype, near=near)


def bundle_of(folder: Path, case: str) -> Path:
    """Build a batch-invariant bundle with a draft model; experts of gpt-oss are in MXFP4."""
    target, recipe = folder / "target", folder / "r.toml"
    target.mkdir()
    sizes = {"vocab_size": VOCAB, "vocab_size_per_layer_input": VOCAB, "eos_token_id": 5}
    if case == "gpt_oss":
        published(target, sizes=GPT_OSS | {"vocab_size": VOCAB})
    else:
        make_checkpoint(config_of(case, **sizes), target)
    tiny_tokenizer(target)
    draft = tiny_checkpoint(folder / "draft", layers=1, seed=1, head_dim=32)
    backend = paged() + "\nbatch_invariant = true"
    write_recipe(recipe, target=target, draft=draft, backend=backend, dtype="bfloat16", prefill_chunk=64)
    return build(Recipe.load(recipe), folder / "bundle").folder


@pytest.mark.parametrize("case", MODELS)
def test_speculation_batch_mates_and_cuda_graphs_change_no_text(tmp_path: Path, case: str) -> None:
    bundle = bundle_of(tmp_path, case)
    check_invisible(bundle, texts(12, words=lambda i: i % 7))
    by_graphs, eagerly = by_graphs_and_eagerly(bundle)
    assert by_graphs == eagerly
