"""Keys and values in float8: what checkpoints say of them, what models compute with them, and rounds that speculate."""

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache, PreTrainedModel

from tandemrt import LLM
from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadCheckpoint, BadRecipe
from tandemrt.export.bundle.build import build
from tandemrt.export.bundle.capacity import fitting
from tandemrt.export.bundle.opening import open_models
from tandemrt.runtime.check.reference import open_reference_unquantized_cache
from tandemrt.runtime.check.run import check_engines
from tests.engine import quantized
from tests.engine.decoding import Decoder, edit_config, make_checkpoint, open_steps
from tests.engine.test_invisible import REQUESTS, output_of, outputs
from tests.engine.test_paged_rounds import PAGED
from tests.engine.test_quantized_checkpoints import FLOAT8, MODELOPT, TOKENS
from tests.makers import tiny_checkpoint, write_recipe

CACHE = "float8_e4m3fn"
SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
SCALES = {0: (0.03, 0.05), 1: (0.01, 0.0078125)}  # of keys and values, by layer


class RoundedCache(DynamicCache):
    """A cache of transformers that gives keys and values back as float8 holds them."""

    def __init__(self, scales: dict[int, tuple[float, float]]) -> None:
        super().__init__()
        self._by_layer = scales

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *rest: Any, **how: Any) -> Any:
        scaled = zip((keys, values), self._by_layer[layer], strict=True)
        rounded = ((x / by).clamp(-448, 448).to(torch.float8_e4m3fn).float() * by for x, by in scaled)
        return super().update(*rounded, layer, *rest, **how)


def expected(model: PreTrainedModel, scales: dict[int, tuple[float, float]]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([TOKENS]), past_key_values=RoundedCache(scales), use_cache=True).logits[0].float()


def store_scales(folder: Path, names: tuple[str, str], config: dict[str, Any], shape: tuple[int, ...] = (1,)) -> None:
    """Put SCALES into the checkpoint in ``folder``, whose quantization_config becomes ``config``."""
    tensors = load_file(folder / "model.safetensors")
    for layer, pair in SCALES.items():
        for name, scale in zip(names, pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.full(shape, scale)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(folder, quantization_config=config)


def keys_and_values_alone(folder: Path) -> PreTrainedModel:
    model = make_checkpoint("qwen2", folder, sizes=quantized.SIZES)
    scheme = SCHEME | {"observer": "minmax"}
    said = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    store_scales(folder, ("k_scale", "v_scale"), said)
    return model


def compressed_tensors(folder: Path) -> PreTrainedModel:
    case = FLOAT8["compressed-tensors, channel, inputs by token"]
    model = case.write(folder)
    store_scales(folder, ("k_scale", "v_scale"), case.config | {"kv_cache_scheme": SCHEME})
    return model


def modelopt(folder: Path) -> PreTrainedModel:
    model = FLOAT8["modelopt"].write(folder)
    said = MODELOPT | {"kv_cache_quant_algo": "FP8"}
    store_scales(folder, ("k_proj.k_scale", "v_proj.v_scale"), said, shape=())
    return model


# A last bit of what is rounded can fall to the other side of a step of float8, a sixteenth of the value. With rounded
# inputs of matmuls more values do, and the processor decides which (modelopt: 0.017 with AVX-512, below 0.01 without).
@pytest.mark.parametrize(
    ("write", "near"), [(keys_and_values_alone, 0.005), (modelopt, 0.04), (compressed_tensors, 0.04)]
)
def test_scales_of_the_checkpoint_give_the_logits_of_a_rounded_cache(
    tmp_path: Path, write: Callable[[Path], PreTrainedModel], near: float
) -> None:
    model = write(tmp_path)
    wanted, whole = expected(model, SCALES), expected(model, dict.fromkeys(SCALES, (1e-3, 1e-3)))
    assert (wanted - whole).norm() > 0.1 * wanted.norm()  # the scales decide
    steps = Decoder(tmp_path, "paged", 1, kv_dtype=CACHE, open_engine=partial(open_steps, folder=tmp_path))
    logits = [Decoder(tmp_path, "paged", 1, kv_dtype=CACHE)([TOKENS], [0])[0], steps([TOKENS], [0])[0]]
    parts = [steps([TOKENS[at : at + 5]], [at])[0] for at in range(0, 30, 5)]  # over what it wrote itself
    for each in (*logits, torch.cat(parts)):
        assert (each - wanted).norm() < near * wanted.norm()


def test_a_checkpoint_without_scales_has_scales_of_1(tmp_path: Path) -> None:
    model = make_checkpoint("qwen3", tmp_path, sizes={"head_dim": 32})
    wanted = expected(model, {0: (1.0, 1.0), 1: (1.0, 1.0)})
    logits = Decoder(tmp_path, "paged", 1, kv_dtype=CACHE)([TOKENS], [0])[0]
    assert (logits - wanted).norm() < 0.01 * wanted.norm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_scale": None}, "'model.layers.0.self_attn.k_scale' should accompany '.*v_scale', it is missing"),
        ({"v_scale": torch.zeros(1)}, "v_scale' should hold scales, finite and above 0"),
        ({"k_scale": torch.ones(4)}, r"k_scale' should be one number in .*, it is float32\[4\]"),
        ({"k_scale": torch.tensor(float("nan"))}, "k_scale' should hold scales, finite and above 0"),
    ],
)
def test_scales_that_make_no_sense_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    compressed_tensors(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, value in change.items():
        tensors.pop(full := f"model.layers.0.self_attn.{name}")
        tensors |= {} if value is None else {full: value}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadCheckpoint, match=message):
        Decoder(tmp_path, "paged", 1, kv_dtype=CACHE)


def scaled_checkpoint(folder: Path) -> Path:
    """A tiny model in float8 whose checkpoint says that its cache is, too."""
    target, case = tiny_checkpoint(folder, seed=1, head_dim=32), FLOAT8["compressed-tensors, channel, inputs by token"]
    quantized.rewrite(target, case.config, case.store)
    store_scales(target, ("k_scale", "v_scale"), case.config | {"kv_cache_scheme": SCHEME})
    return target


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Target and draft with unquantized weights over caches in float8, as the command line asks for them."""
    folder = tmp_path_factory.mktemp("cache")
    target, draft = (tiny_checkpoint(folder / name, layers=n, seed=1, head_dim=32) for name, n in (("t", 2), ("d", 1)))
    recipe = write_recipe(folder / "r.toml", target=target, draft=draft, window=8, backend=PAGED)
    report = build(Recipe.load(recipe, kv_dtype="float8_e4m3"), folder / "bundle")
    said = "keys and values are held in float8_e4m3fn, with scales of 1: the checkpoint has none"
    assert (f"target: {said}", f"draft: {said}") == report.notes[:2]
    return Bundle.open(report.folder)


@pytest.fixture(scope="module")
def plain(bundle: Bundle) -> list[Any]:
    return [output_of(output) for output in outputs(bundle.folder, device="cpu", num_draft_tokens=0)]


@pytest.mark.parametrize(
    "options", [{"num_draft_tokens": 1}, {"num_draft_tokens": 3, "overlap": True}, {"cache_tokens": 192}]
)
def test_rounds_speculate_invisibly(bundle: Bundle, plain: list[Any], options: dict[str, Any]) -> None:
    """With windows of any length, with overlap, and where requests are preempted and prefilled again."""
    drafted = outputs(bundle.folder, device="cpu", **options)
    assert [output_of(output) for output in drafted] == plain
    assert sum(output.speculation.num_accepted_draft_tokens for output in drafted) > 0


def test_a_text_does_not_depend_on_other_requests(bundle: Bundle, plain: list[Any]) -> None:
    drafted = outputs(bundle.folder, requests=REQUESTS[::-1], device="cpu", num_draft_tokens=3)
    assert [output_of(output) for output in drafted[::-1]] == plain


def test_a_bundle_reports_the_dtype_and_size_of_its_caches(bundle: Bundle) -> None:
    for name in ("target", "draft"):
        decoder, contract = bundle.engine(name).decoder, bundle.contract(name)
        assert {b.dtype for b in (*contract.inputs, *contract.outputs) if "_key." in b.name} == {CACHE}
        assert decoder is not None
        assert "float8_window_attention" in {step.name for step in decoder.operators}
    assert "kernels/attention_float8.sm_90.cubin" in bundle.manifest.kernels
    assert "kernels/attention.sm_90.cubin" not in bundle.manifest.kernels
    assert fitting(bundle.manifest, 10**9).token == 3 * 2 * 2 * 32  # layers, keys and values, heads, a byte each


def test_a_cache_is_in_float8_if_its_checkpoint_names_it_and_the_backend_supports_it(tmp_path: Path) -> None:
    target = scaled_checkpoint(tmp_path / "t")

    def notes(backend: str, kv_dtype: str | None = None, dtype: str = "float32") -> tuple[str, list[str]]:
        recipe = write_recipe(tmp_path / "r.toml", target=target, backend=backend)
        [model] = open_models(Recipe.load(recipe, kv_dtype=kv_dtype, dtype=dtype))
        return model.kv_dtype, model.cache_notes()

    honoured = (CACHE, ["keys and values are held in float8_e4m3fn, with the checkpoint's scales"])
    whole = ("float32", ["keys and values are held in float32; the checkpoint's scales are not used"])
    assert notes(PAGED) == notes(PAGED, "float8_e4m3") == honoured
    assert notes('name = "onnxruntime-cpu"') == notes(PAGED, "float32") == whole
    assert Decoder(target, "grouped", 1, kv_dtype=None)([[1, 2, 3]], [0]).isfinite().all()


def test_a_target_with_a_float8_cache_is_batch_invariant(tmp_path: Path) -> None:
    recipe = Recipe.load(
        write_recipe(tmp_path / "r.toml", target=scaled_checkpoint(tmp_path / "t"), backend=PAGED), dtype="bfloat16"
    )
    assert build(recipe, tmp_path / "bundle").manifest.engines["target"].batch_invariant


@pytest.mark.parametrize(
    ("of_target", "of_draft", "scales", "dtypes"),
    [
        ("", "", True, ("float32", CACHE)),
        ("float32", "", True, ("float32", CACHE)),
        ("float8_e4m3", "", False, (CACHE, CACHE)),
        ("float8_e4m3", "float32", True, (CACHE, "float32")),
    ],
)
def test_a_draft_models_cache_is_in_float8_if_the_targets_recipe_or_its_own_checkpoint_names_it(
    tmp_path: Path, of_target: str, of_draft: str, scales: bool, dtypes: tuple[str, str]
) -> None:
    """``scales``: whether the draft's checkpoint has them."""
    target = tiny_checkpoint(tmp_path / "t", seed=1, head_dim=32)
    draft = scaled_checkpoint(tmp_path / "d") if scales else tiny_checkpoint(tmp_path / "d", seed=1, head_dim=32)
    recipe = write_recipe(tmp_path / "r.toml", target=target, draft=draft, backend=PAGED)
    for section, said in (("target", of_target), ("draft", of_draft)):
        asked = f'kv_dtype = "{said}"' if said else ""
        recipe.write_text(recipe.read_text().replace(f"[{section}]", f"[{section}]\n{asked}"))
    assert tuple(model.kv_dtype for model in open_models(Recipe.load(recipe))) == dtypes


@pytest.mark.parametrize(
    ("backend", "kv_dtype", "message"),
    [
        (
            'name = "onnxruntime-cpu"',
            "float8_e4m3",
            "target.kv_dtype 'float8_e4m3' needs backend.name 'onnxruntime-cud",
        ),
        (
            PAGED,
            "bfloat16",
            "target.kv_dtype must be float8_e4m3 or the compute dtype 'float32'; got 'bfl",
        ),
        (PAGED, "fp8", "with --kv-dtype fp8 must be corrected"),
        (PAGED.replace("9.0", "8.6"), "float8_e4m3", r"needs compute capability 8\.9 or later; got 8\.6 in backend"),
    ],
)
def test_cache_dtypes_without_an_implementation_are_refused(
    tmp_path: Path, backend: str, kv_dtype: str, message: str
) -> None:
    target = tiny_checkpoint(tmp_path / "t", layers=1, head_dim=32)
    recipe = write_recipe(tmp_path / "r.toml", target=target, backend=backend)
    with pytest.raises(BadRecipe, match=message):
        open_models(Recipe.load(recipe, kv_dtype=kv_dtype))


def test_a_check_reports_the_cost_of_rounding_keys_and_values_alone(bundle: Bundle) -> None:
    """In bfloat16 a GPU does; here another engine rounds not even keys and values."""
    other = open_reference_unquantized_cache(
        bundle, "target", 1, dict.fromkeys(("batch", "query", "rows", "tokens"), 512)
    )
    with LLM(bundle.folder, device="cpu", threads=1) as llm:
        engines = llm.loop.target.engines
        logits, cache = islice(check_engines(bundle, engines, threads=1), 2)
        _, of_other = islice(check_engines(bundle, {**engines, "target": other}, threads=1), 2)
    assert (logits.check, logits.verdict) == ("logits of target", "pass")
    assert (cache.check, cache.verdict) == ("keys and values of target in float8", "measured")
    assert 0.002 < cache.numbers["root_mean_square_relative"] < 0.1
    assert of_other.numbers == cache.numbers
