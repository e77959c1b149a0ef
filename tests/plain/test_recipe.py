"""Recipes: loading, defaults, and errors with the key, the rule, the value and the remedy."""

import hashlib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandemrt.engines.contract.gpus import COMPUTE_CAPABILITIES
from tandemrt.engines.recipe.models import HeadDraft, ModelDraft, NgramDraft
from tandemrt.engines.recipe.recipe import INCLUDED, Recipe, locate
from tandemrt.engines.validation.errors import BadRecipe

DRAWN = 'sampling = "greedy"\ngreedy_below = 1\ntemperature_scale = 0.25'
MINIMAL = 'name = "r"\n[target]\ncheckpoint = "models/target"\n'


def load(folder: Path, text: str) -> Recipe:
    file = folder / "r.toml"
    file.write_text(text)
    return Recipe.load(file)


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(BadRecipe) as caught:
        load(folder, text)
    return str(caught.value)


def test_paths_are_relative_to_the_recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert load(tmp_path, MINIMAL).target.checkpoint == tmp_path / "models/target"
    assert load(tmp_path, MINIMAL.replace("models", "/models")).target.checkpoint == Path("/models/target")


def test_defaults_are_a_float32_model_on_the_cpu_without_a_drafter(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL)
    assert (recipe.target.dtype, recipe.backend.name, recipe.draft.kind) == ("float32", "onnxruntime-cpu", "none")
    assert recipe.draft.num_draft_tokens == 4
    assert recipe.reasoning is None


def test_a_draft_has_the_targets_dtype_unless_the_recipe_sets_one(tmp_path: Path) -> None:
    text = MINIMAL + 'dtype = "float16"\n[draft]\nkind = "model"\ncheckpoint = "d"\n'
    assert load(tmp_path, text).draft_dtype == "float16"
    assert load(tmp_path, text + 'dtype = "float32"').draft_dtype == "float32"
    assert load(tmp_path, MINIMAL).draft_dtype is None


def test_capacity_has_slack_for_the_padded_end_of_the_last_draft_window(tmp_path: Path) -> None:
    draft = '[draft]\nkind = "ngram"\nnum_draft_tokens = 5\n'
    assert load(tmp_path, MINIMAL + draft + "[limits]\nlength = 100\n").capacity == 100 + 5 + 1


def test_prefill_chunk_defaults_to_the_backends(tmp_path: Path) -> None:
    assert load(tmp_path, MINIMAL).prefill_chunk() == 256
    assert load(tmp_path, MINIMAL).prefill_chunk(large=True) == 256
    assert load(tmp_path, MINIMAL + "[limits]\nlength = 100").prefill_chunk() == 100
    assert load(tmp_path, MINIMAL + "[limits]\nprefill_chunk = 7").prefill_chunk(large=True) == 7
    assert load(tmp_path, CUDA).prefill_chunk() == 2048
    assert load(tmp_path, CUDA).prefill_chunk(large=True) == 8192


CUDA = MINIMAL + '[backend]\nname = "onnxruntime-cuda"\n'


def test_cuda_defaults_to_paged_caches_and_kernels_for_every_compute_capability(
    tmp_path: Path,
) -> None:
    recipe = load(tmp_path, CUDA)
    assert (recipe.cache, recipe.kernel_capabilities) == ("paged", COMPUTE_CAPABILITIES)
    other = load(tmp_path, CUDA + 'cache = "linear"\ncompute_capabilities = ["9.0"]')
    assert (other.cache, other.kernel_capabilities, other.cache_blocks) == ("linear", ("9.0",), None)
    assert (load(tmp_path, MINIMAL).cache, load(tmp_path, MINIMAL).kernel_capabilities) == ("linear", ())


def test_a_paged_cache_holds_every_slot_or_cache_tokens(tmp_path: Path) -> None:
    limits = "[limits]\nbatch = 3\nlength = 128\n"  # a row of 129 tokens: three blocks of 64
    assert load(tmp_path, CUDA + limits).cache_blocks == 9
    assert load(tmp_path, CUDA + limits + "cache_tokens = 200").cache_blocks == 4


def test_the_digest_is_the_files(tmp_path: Path) -> None:
    recipe = load(tmp_path, MINIMAL)
    assert recipe.digest == hashlib.sha256((tmp_path / "r.toml").read_bytes()).hexdigest()


def test_a_recipe_is_immutable(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="frozen"):
        load(tmp_path, MINIMAL).name = "other"


def test_included_recipes_load_and_are_found_by_name() -> None:
    demos: dict[str, type] = {
        "demo": ModelDraft,
        "demo-cuda": ModelDraft,
        "demo-rtx": ModelDraft,
        "demo-tensorrt": ModelDraft,
    }
    demos |= {"demo-ngram": NgramDraft, "demo-eagle3": HeadDraft, "demo-pard": ModelDraft, "demo-dflash": HeadDraft}
    demos |= {"demo-hybrid": ModelDraft, "demo-tensorrt": ModelDraft}
    pairs = dict.fromkeys(("qwen3-8b", "llama-3.1-8b", "qwen3.6-35b-a3b", "qwen3.8-27b"), HeadDraft)
    on_a_cpu = dict.fromkeys(("qwen3-0.6b", "llama-3.2-1b", "smollm3-3b", "gemma-3-1b"), NgramDraft)
    on_a_gpu = dict.fromkeys(("gpt-oss-20b", "gemma-4-26b-a4b"), NgramDraft)
    of_gguf_files = {"qwen2.5-coder-1.5b": ModelDraft}
    expected = demos | pairs | on_a_cpu | on_a_gpu | of_gguf_files
    assert {file.stem for file in INCLUDED.glob("*.toml")} == expected.keys()
    for name, kind in expected.items():
        recipe = Recipe.load(locate(name))
        assert recipe.name == name
        assert isinstance(recipe.draft, kind)
        if name in demos:
            target = "hybrid" if name == "demo-hybrid" else "target"
            assert recipe.target.checkpoint.parts[-4:] == ("tools", "demo", "checkpoints", target)
            recipe.require_checkpoints()


@pytest.mark.parametrize("name", ["qwen3-8b", "llama-3.1-8b"])
def test_a_missing_checkpoint_is_rejected_with_its_key_and_file(name: str) -> None:
    recipe = Recipe.load(locate(name))
    with pytest.raises(BadRecipe) as caught:
        recipe.require_checkpoints()
    said = str(caught.value)
    assert f"recipe {locate(name)} names a checkpoint that does not exist. Put the checkpoint there, or copy" in said
    for section, model in (("target", recipe.target), ("draft", recipe.draft)):
        assert f"{section}.checkpoint: must be an existing folder; got '{model.checkpoint}'" in said  # type: ignore[union-attr]


def test_a_path_takes_precedence_over_an_included_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("demo").write_text(MINIMAL)
    assert Recipe.load(locate("demo")).name == "r"


def test_the_error_for_an_unknown_recipe_name_suggests_the_nearest_one() -> None:
    with pytest.raises(BadRecipe, match=r"got 'demo-rtxx' \(did you mean 'demo-rtx'\?\).*Included: demo, "):
        locate("demo-rtxx")


@pytest.mark.parametrize(
    ("text", "key", "near"),
    [
        ('nam = "r"', "nam", "name"),
        (MINIMAL + 'dtyp = "float16"', "dtyp", "dtype"),
        (
            MINIMAL + '[draft]\nkind = "model"\ncheckpoint = "d"\nnum_draft_token = 4',
            "num_draft_token",
            "num_draft_tokens",
        ),
        (MINIMAL + '[draft]\nkind = "ngram"\nngram_maximum = 4', "ngram_maximum", "ngram_max"),
        (MINIMAL + '[draft]\nkind = "none"\nkinds = 1', "kinds", "kind"),
        (MINIMAL + '[reasoning]\nthink_start = "a"\nthink_ends = ["b"]\nforced = "b"', "forced", "forced_end"),
        (MINIMAL + "[limits]\nprefill-chunk = 4", "prefill-chunk", "prefill_chunk"),
        (MINIMAL + '[backend]\nname = "tensorrt-rtx"\ncompute_capability = ["8.6"]', "compute_capability", None),
    ],
)
def test_the_error_for_an_unknown_key_suggests_the_nearest_one(tmp_path: Path, text: str, key: str, near: str) -> None:
    message = refusal(tmp_path, text)
    assert f"unknown key '{key}' (did you mean '{near or 'compute_capabilities'}'?); known keys: " in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "target: is required and missing"),
        ('name = "r"\n[target]\n', "target.checkpoint: is required and missing"),
        ('name = "r"\ntarget = "models/target"', "target: must be a table; got 'models/target'"),
        (MINIMAL.replace('"r"', '"../r"'), "name: must match ^[A-Za-z0-9]"),
        (MINIMAL.replace('"models/target"', "3"), "target.checkpoint: must be a path; got 3"),
        (
            MINIMAL + 'dtype = "int2"',
            "target.dtype: must be 'float32', 'float16', 'bfloat16', 'int8' or 'int4'; got 'int2'",
        ),
        (MINIMAL + "[draft]\nnum_draft_tokens = 4", "draft.kind: is required and missing"),
        (
            MINIMAL + '[draft]\nkind = "medusa"',
            "must be one of 'model', 'pard', 'eagle3', 'peagle', 'mtp', 'assistant', 'dflash', 'dflash2', "
            "'dspark', 'ngram', 'none'; got",
        ),
        (MINIMAL + '[draft]\nkind = "model"', "draft.checkpoint: is required and missing"),
        (
            MINIMAL + '[draft]\nkind = "ngram"\nnum_draft_tokens = 0',
            "draft.num_draft_tokens: must be at least 1; got 0",
        ),
        (
            MINIMAL + '[draft]\nkind = "ngram"\nnum_draft_tokens = 17',
            "draft.num_draft_tokens: must be at most 16; got 17",
        ),
        (
            MINIMAL + '[draft]\nkind = "ngram"\nnum_draft_tokens = 4.0',
            "draft.num_draft_tokens: must be a valid integer; got 4.0",
        ),
        (MINIMAL + "[limits]\nbatch = 0", "limits.batch: must be at least 1; got 0"),
        (MINIMAL + "[limits]\nbatch = true", "limits.batch: must be a valid integer; got True"),
        (MINIMAL + '[limits]\nlength = "512"', "limits.length: must be a valid integer; got '512'"),
        (MINIMAL + "[limits]\nlength = 2026-01-01", "limits.length: must be a valid integer"),
        (MINIMAL + '[backend]\nname = "vulkan"', "backend.name: must be one of 'onnxruntime-cpu', 'onnxruntime-cuda'"),
        (
            MINIMAL + '[backend]\nname = "tensorrt-rtx"',
            "backend.compute_capabilities: is required and missing",
        ),
        (
            MINIMAL + '[reasoning]\nthink_start = ""\nthink_ends = ["b"]\nforced_end = "b"',
            "reasoning.think_start: must not be empty; got ''",
        ),
        (
            MINIMAL + '[reasoning]\nthink_start = "a"\nthink_ends = []\nforced_end = "b"',
            "reasoning.think_ends: must not be empty",
        ),
        (
            MINIMAL + '[reasoning]\nthink_start = "a"\nthink_ends = "b"\nforced_end = "b"',
            "reasoning.think_ends: must be a list; got 'b'",
        ),
    ],
)
def test_a_missing_or_invalid_value_is_rejected_with_its_key(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, text)


@pytest.mark.parametrize(
    "kind", ["model", "eagle3", "peagle", "mtp", "assistant", "pard", "dflash", "dflash2", "dspark"]
)
def test_every_kind_of_draft_model_has_sampling_options(tmp_path: Path, kind: str) -> None:
    text = MINIMAL + f'[draft]\nkind = "{kind}"\ncheckpoint = "d"\n'
    plain, asked = (load(tmp_path, text + keys).draft.model_dump() for keys in ("", DRAWN))
    assert [plain[key] for key in ("sampling", "greedy_below", "temperature_scale")] == [None, 0.0, 1.0]
    assert [asked[key] for key in ("sampling", "greedy_below", "temperature_scale")] == ["greedy", 1.0, 0.25]


@pytest.mark.parametrize("value", ["0", "0.001", "11", "nan", "true", '"0.5"'])
def test_a_temperature_scale_out_of_bounds_is_rejected(tmp_path: Path, value: str) -> None:
    text = MINIMAL + f'[draft]\nkind = "model"\ncheckpoint = "d"\ntemperature_scale = {value}'
    assert "draft.temperature_scale: must be " in refusal(tmp_path, text)


@pytest.mark.parametrize("capability", ["9.0", "8.7", "86", "sm_86"])
def test_a_compute_capability_that_tensorrt_rtx_does_not_support_is_rejected(tmp_path: Path, capability: str) -> None:
    backend = f'dtype = "float16"\n[backend]\nname = "tensorrt-rtx"\ncompute_capabilities = ["8.6", "{capability}"]'
    message = refusal(tmp_path, MINIMAL + backend)
    assert "compute_capabilities.1: must be '7.5', '8.0', '8.6', '8.9', '12.0' or '12.1'; got " in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[limits]\nlength = 32\nprefill_chunk = 33", "prefill_chunk must not exceed length; got 33 > 32. Lower"),
        (
            '[limits]\nbatch = 2\nlength = 32\nprefill_chunk = 65\n[backend]\nname = "onnxruntime-cuda"',
            "prefill_chunk must not exceed batch * length; got 65 > 64. Lower",
        ),
        (
            '[draft]\nkind = "ngram"\nnum_draft_tokens = 8\n[limits]\nlength = 8\nprefill_chunk = 8',
            "draft.num_draft_tokens must be below limits.length; got 8 >= 8. Lower",
        ),
        ('[draft]\nkind = "ngram"\nngram_min = 5', "ngram_min must not exceed ngram_max; got 5 > 4. Lower"),
        ('[draft]\nkind = "model"\ncheckpoint = "d"\nngram_min = 2', "draft 'model': unknown key 'ngram_min'"),
        ('[draft]\nkind = "none"\ncheckpoint = "d"', "draft 'none': unknown key 'checkpoint'"),
        ('[draft]\nkind = "ngram"\ntemperature_scale = 0.5', "draft 'ngram': unknown key 'temperature_scale'"),
        ('[draft]\nkind = "none"\nnum_draft_tokens = 17', "draft.num_draft_tokens: must be at most 16; got 17"),
        (
            '[backend]\nname = "onnxruntime-cpu"\ncompute_capabilities = ["8.6"]',
            "backend 'onnxruntime-cpu': unknown key 'compute_capabilities'",
        ),
        (
            'dtype = "float16"\n[backend]\nname = "tensorrt-rtx"\ncompute_capabilities = ["8.6", "8.6"]',
            "must name each capability once; got 8.6, 8.6",
        ),
        (
            "[limits]\ncache_tokens = 4096",
            "limits.cache_tokens needs backend.name 'onnxruntime-cuda' with cache = 'paged'; got 4096 for a linear",
        ),
        (
            '[limits]\nlength = 100\ncache_tokens = 100\n[backend]\nname = "onnxruntime-cuda"',
            "limits.cache_tokens must hold one request: length + num_draft_tokens + 1 = 105; got 100. Raise it",
        ),
        (
            '[backend]\nname = "onnxruntime-cuda"\ncompute_capabilities = ["9.0", "9.0"]',
            "must name each capability once; got 9.0, 9.0",
        ),
        (
            '[backend]\nname = "onnxruntime-cuda"\ncompute_capabilities = ["7.5"]',
            "compute_capabilities.0: must be '8.0', '8.6', '8.9', '9.0', '10.0' or '12.0'; got '7.5'",
        ),
        (
            '[backend]\nname = "onnxruntime-cuda"\ncache = "ring"',
            "backend.cache: must be 'linear' or 'paged'; got 'ring'",
        ),
        ('[backend]\nname = "onnxruntime-cpu"\ncache = "paged"', "backend 'onnxruntime-cpu': unknown key 'cache'"),
        (
            'dtype = "int8"\n[backend]\nname = "onnxruntime-cuda"\ncache = "linear"',
            "dtype must be float32, float16 or bfloat16 unless backend.name is 'onnxruntime-cpu'",
        ),
        (
            'dtype = "int4"\n[backend]\nname = "onnxruntime-cuda"\ncache = "linear"',
            "'onnxruntime-cuda' with cache = 'paged'; got 'int4' for 'onnxruntime-cuda' with a linear",
        ),
        (
            'dtype = "int4"\n[backend]\nname = "tensorrt"',
            "'onnxruntime-cuda' with cache = 'paged'; got 'int4' for 'tensorrt' with a linear",
        ),
        ('dtype = "bfloat16"', "dtype must be float32, float16, int8 or int4 when backend.name is 'onnxruntime-cpu'"),
        (
            '[draft]\nkind = "model"\ncheckpoint = "d"\ndtype = "bfloat16"',
            "dtype must be float32, float16, int8 or int4 when backend.name is 'onnxruntime-cpu'",
        ),
        (
            '[backend]\nname = "tensorrt-rtx"\ncompute_capabilities = ["8.6"]',
            "dtype must be float16 or bfloat16 when backend.name is 'tensorrt-rtx'",
        ),
        ('[backend]\nname = "tensorrt"', "dtype must be float16 or bfloat16 when backend.name is 'tensorrt'"),
        ('dtype = "int8"\ndequantize = true', "target.dequantize needs target.dtype float32, float16 or bfloat16"),
        (
            '[draft]\nkind = "model"\ncheckpoint = "d"\ndtype = "int4"\ndequantize = true',
            "draft.dequantize needs draft.dtype float32, float16 or bfloat16",
        ),
        (
            'dtype = "bfloat16"\n[backend]\nname = "tensorrt-rtx"\ncompute_capabilities = ["7.5", "8.6"]',
            "dtype must be float16 for compute capability 7.5, which has no bfloat16; got 'bfloat16'. Choose",
        ),
    ],
)
def test_contradictions_are_rejected(tmp_path: Path, text: str, message: str) -> None:
    assert message in refusal(tmp_path, MINIMAL + text)


@pytest.mark.parametrize(("count", "more"), [(20, ""), (21, ", and 1 more")])
def test_twenty_unknown_keys_are_named(tmp_path: Path, count: int, more: str) -> None:
    message = refusal(tmp_path, MINIMAL + "".join(f"unknown_{at:02} = 1\n" for at in range(count)))
    assert f"unknown key 'unknown_19'{more}; known keys: " in message


@pytest.mark.parametrize("kind", ["model", "eagle3", "peagle", "mtp", "pard", "ngram"])
def test_tensorrt_builds_drafts_over_a_linear_cache(tmp_path: Path, kind: str) -> None:
    draft = f'[draft]\nkind = "{kind}"\n' + ("" if kind == "ngram" else 'checkpoint = "d"\n')
    text = MINIMAL + 'dtype = "float32"\n' + draft + '[backend]\nname = "tensorrt"\nlayers = "basic"'
    assert load(tmp_path, text).draft.kind == kind


def test_tensorrt_has_no_operators_for_block_drafts(tmp_path: Path) -> None:
    text = MINIMAL + 'dtype = "float16"\n[draft]\nkind = "dflash"\ncheckpoint = "d"\n[backend]\nname = "tensorrt"'
    assert "draft.kind must be one of model, eagle3, peagle, mtp, pard, ngram, none" in refusal(tmp_path, text)


def test_tensorrt_has_no_drafts_that_read_the_targets_cache(tmp_path: Path) -> None:
    text = MINIMAL + 'dtype = "float16"\n[draft]\nkind = "assistant"\ncheckpoint = "d"\n[backend]\nname = "tensorrt"'
    assert "when backend.name is 'tensorrt'; got 'assistant'" in refusal(tmp_path, text)


def test_the_interpreter_that_builds_may_be_named_at_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(MINIMAL + 'dtype = "float16"')
    recipe = Recipe.load(tmp_path / "r.toml", tensorrt_python="/usr/bin/python3.10")
    assert (recipe.backend.name, recipe.backend.python) == ("tensorrt", "/usr/bin/python3.10")
    (tmp_path / "r.toml").write_text(MINIMAL + '[backend]\nname = "onnxruntime-cpu"')
    with pytest.raises(BadRecipe, match=r"(?s)with --tensorrt-python p must be corrected.*unknown key 'python'"):
        Recipe.load(tmp_path / "r.toml", tensorrt_python="p")


def test_tensorrt_options_default_to_the_librarys(tmp_path: Path) -> None:
    backend = load(tmp_path, MINIMAL + 'dtype = "float16"\n[backend]\nname = "tensorrt"').backend
    assert backend.model_dump() == {
        "name": "tensorrt",
        "layers": "native",
        "python": None,
        "headers": None,
        "version_compatible": False,
        "hardware_compatibility": "none",
        "workspace_mib": None,
        "optimization_level": 3,
    }


def test_backend_replaces_the_section_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(MINIMAL + '[backend]\nname = "onnxruntime-cuda"\ncache = "linear"')
    plain = Recipe.load(tmp_path / "r.toml")
    same = Recipe.load(tmp_path / "r.toml", backend="onnxruntime-cuda")
    other = Recipe.load(tmp_path / "r.toml", backend="tensorrt-rtx", dtype="bfloat16")
    assert same.backend == plain.backend, "a section of that name keeps its options"
    assert other.backend.model_dump() == {
        "name": "tensorrt-rtx",
        "compute_capabilities": ("8.0", "8.6", "8.9", "12.0", "12.1"),
    }
    assert len({plain.digest, same.digest, other.digest}) == 3


def test_dtype_replaces_the_dtype_of_target_and_draft(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text(
        MINIMAL + 'dtype = "float32"\n[draft]\nkind = "model"\ncheckpoint = "d"\ndtype = "float32"'
    )
    recipe = Recipe.load(tmp_path / "r.toml", backend="tensorrt", dtype="float16")
    assert (recipe.target.dtype, recipe.draft_dtype) == ("float16", "float16")


@pytest.mark.parametrize("draft", ['kind = "ngram"\nngram_min = 2', 'kind = "eagle3"\ncheckpoint = "d"'])
def test_dtypes_replace_none_of_a_draft_that_has_none(tmp_path: Path, draft: str) -> None:
    text = MINIMAL + f"[backend]\nname = 'onnxruntime-cuda'\n[draft]\nnum_draft_tokens = 4\n{draft}"
    plain = load(tmp_path, text)
    replaced = Recipe.load(tmp_path / "r.toml", dtype="bfloat16", kv_dtype="float8_e4m3")
    assert (replaced.target.dtype, replaced.target.kv_dtype, replaced.draft) == ("bfloat16", "float8_e4m3", plain.draft)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("tensorrt-rtx", "with --backend tensorrt-rtx must be corrected:\ndtype must be float16 or bfloat16 when"),
        ("vulkan", "with --backend vulkan must be corrected:\nbackend.name: must be one of 'onnxruntime-cpu'"),
    ],
)
def test_a_backend_that_contradicts_the_recipe_is_rejected(tmp_path: Path, backend: str, message: str) -> None:
    (tmp_path / "r.toml").write_text(MINIMAL)
    with pytest.raises(BadRecipe) as caught:
        Recipe.load(tmp_path / "r.toml", backend=backend)
    assert message in str(caught.value)


def test_all_violations_are_reported_together(tmp_path: Path) -> None:
    message = refusal(tmp_path, MINIMAL + 'dtype = "int2"\n[limits]\nbatch = 0\nlength = 1')
    assert all(key in message for key in ("target.dtype", "limits.batch", "limits.length"))


@pytest.mark.parametrize("content", [b"name = ", b"name = '\xff'", b"a = 1\na = 2"])
def test_a_file_that_is_not_toml_is_rejected(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "r.toml").write_bytes(content)
    with pytest.raises(BadRecipe, match="must be TOML in UTF-8"):
        Recipe.load(tmp_path / "r.toml")


def test_a_missing_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(BadRecipe, match="cannot be read: No such file"):
        Recipe.load(tmp_path / "none.toml")


values = st.sampled_from(
    ["1", "-3", "1.5", "nan", "true", '"model"', '"float32"', "[]", '["8.6"]', "{a = 1}", "1979-05-27"]
)
keys = st.sampled_from(
    ["name", "checkpoint", "dtype", "kind", "num_draft_tokens", "batch", "length", "think_ends", "think_start", "zz"]
)
sections = st.sampled_from(["target", "draft", "reasoning", "limits", "backend", "zz"])
tables = st.dictionaries(sections, st.dictionaries(keys, values, max_size=4), max_size=5)


@given(top=st.dictionaries(keys, values, max_size=2), tables=tables)
def test_any_file_loads_or_raises_bad_recipe(
    tmp_path_factory: pytest.TempPathFactory, top: dict[str, str], tables: dict[str, dict[str, str]]
) -> None:
    def lines(table: dict[str, str]) -> str:
        return "".join(f"{key} = {value}\n" for key, value in table.items())

    text = lines(top) + "".join(f"[{section}]\n{lines(table)}" for section, table in tables.items())
    file = tmp_path_factory.getbasetemp() / "any.toml"
    file.write_text(text)
    with suppress(BadRecipe):
        assert Recipe.load(file).name in top["name"]


@pytest.mark.parametrize(("dtype", "kv_dtype", "valid"), [("int8", "bfloat16", True), ("int8", "float16", False)])
def test_a_cache_may_have_the_compute_dtype_of_quantized_weights(
    tmp_path: Path, dtype: str, kv_dtype: str, valid: bool
) -> None:
    text = MINIMAL + f"dtype = {dtype!r}\nkv_dtype = {kv_dtype!r}\n[backend]\nname = 'onnxruntime-cuda'\n"
    recipe = load(tmp_path, MINIMAL + "[backend]\nname = 'onnxruntime-cuda'\n")
    assert recipe.computed_in(dtype) == "bfloat16"
    if valid:
        assert load(tmp_path, text).target.kv_dtype == kv_dtype
        return
    with pytest.raises(BadRecipe, match=r"target\.kv_dtype must be .* or the compute dtype 'bfloat16'; got 'float16'"):
        load(tmp_path, text)


@pytest.mark.parametrize(("dtype", "draft_dtype"), [("int8", "bfloat16"), ("float16", "float16")])
def test_a_draft_head_has_the_compute_dtype_of_its_target(tmp_path: Path, dtype: str, draft_dtype: str) -> None:
    backend = "[backend]\nname = 'onnxruntime-cuda'\n"
    text = MINIMAL + f"dtype = {dtype!r}\n{backend}[draft]\nkind = 'eagle3'\ncheckpoint = 'd'\nnum_draft_tokens = 4"
    assert load(tmp_path, text).draft_dtype == draft_dtype
