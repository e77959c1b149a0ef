"""Reading a quantization_config: the scheme of each module, and errors that name the field."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.model.scaled_matmul import unsupported
from tandemrt.export.quantize.gguf.packed import gguf_shape
from tandemrt.export.read.checkpoint import StoredTensor
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.gguf import GGUF_TYPES, gguf_section, read_gguf_section
from tandemrt.export.read.quantization.kv_cache import cache_scales
from tandemrt.export.read.quantization.scheme import FULL_DIM, Quantization, Scheme

CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
LAYER = "model.layers.0."
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 64, "symmetric": True}
MX = FLOAT8 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
QUARK = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "observer_cls": "PerTensorMinMaxObserver"}
BY_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def compressed(*groups: dict[str, Any], **fields: Any) -> dict[str, Any]:
    named = {f"group_{i}": {"targets": ["Linear"], **group} for i, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named, "ignore": ["lm_head"], **fields}


def quark(weight: object, inputs: object = None, *, output_tensors: object = None, **fields: object) -> dict[str, Any]:
    specs = {"weight": weight, "input_tensors": inputs, "output_tensors": output_tensors}
    return {"quant_method": "quark", "global_quant_config": specs, "exclude": ["lm_head"], **fields}


def torchao(kind: str, **data: object) -> dict[str, Any]:
    """Return a config as transformers writes it."""
    default = {"_type": kind, "_version": 2, "_data": {"set_inductor_config": True, **data}}
    return {"quant_method": "torchao", "quant_type": {"default": default}, "modules_to_not_convert": None}


def read(said: object, folder: Path = Path("nowhere")) -> Quantization:
    config = read_quantization({"quantization_config": said}, folder)
    assert config is not None
    return config


@pytest.mark.parametrize("fields", [("quantization",), ("quantization", "quantization_config")])
def test_a_checkpoint_of_mlx_is_rejected_as_what_it_is(tmp_path, fields) -> None:
    config = {name: {"group_size": 64, "bits": 4, "mode": "affine"} for name in fields}
    with pytest.raises(
        BadCheckpoint, match=r"config.json: quantization: .*integers in the layout of MLX.*choose a check"
    ):
        read_quantization(config, tmp_path)


def test_a_checkpoint_without_the_field_is_not_quantized(tmp_path):
    assert read_quantization({}, tmp_path) is None


def test_the_first_matching_group_gives_the_scheme_of_a_module():
    attention = {"targets": [r"re:.*self_attn\.(q|o)_proj$", f"{LAYER}self_attn.v_proj"], "weights": FLOAT8}
    config = read(compressed(attention, {"weights": INT4}, ignore=["lm_head", "re:.*down_proj"]))
    schemes = {name: config.scheme(f"{LAYER}{name}") for name in ("self_attn.q_proj", "self_attn.v_proj")}
    assert set(schemes.values()) == {Scheme("float8_e4m3fn", "compressed-tensors", (1, FULL_DIM))}
    assert config.scheme(f"{LAYER}self_attn.k_proj") == Scheme("int4", "compressed-tensors", (1, 64))
    for whole in (f"{LAYER}mlp.down_proj", "lm_head", "model.embed_tokens"):
        assert config.scheme(whole) is None


def test_ignored_modules_match_complete_name_parts():
    said = {"quant_method": "fp8", "modules_to_not_convert": ["layers.0.mlp.gate", "up_proj", "lm_head"]}
    config = read(said)
    assert config.scheme("model.layers.0.mlp.gate_proj") == Scheme(
        "float8_e4m3fn", "fp8", (128, 128), inputs="token", input_group=128
    )
    assert config.scheme("model.layers.0.mlp.up_proj") is None
    assert config.scheme("model.layers.10.mlp.gate_proj") is not None


def test_scales_that_are_powers_of_2_are_stored_ones_and_a_note_says_what_inputs_get():
    config = read({"quant_method": "fp8", "fmt": "float8_e4m3fn", "scale_fmt": "ue8m0"})
    assert config.scheme(f"{LAYER}mlp.up_proj") == read({"quant_method": "fp8"}).scheme(f"{LAYER}mlp.up_proj")
    assert config.notes()[-1] == "scales of inputs are not rounded to powers of 2, as scale_fmt ue8m0 would"


def test_inputs_of_fbgemm_are_rounded_per_token_and_a_note_names_the_limit() -> None:
    config = read({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]})
    assert config.scheme(f"{LAYER}mlp.up_proj") == Scheme("float8_e4m3fn", "modelopt", (1, FULL_DIM), inputs="token")
    assert config.scheme("lm_head") is None
    assert config.notes()[-1] == "inputs above 1200 are not clipped, as activation_scale_ub would"


def test_the_first_expression_of_gptqs_dynamic_gives_the_scheme_of_a_module() -> None:
    dynamic = {
        r"-:.*\.mlp\.gate$": {},
        r"+:model\.layers\.0\.mlp\.": {"bits": 8, "group_size": 32},
        r"-:.*layers\.0\.": {},
        "lm_head": {"bits": 8, "sym": False},
    }
    config = read({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "dynamic": dynamic})
    layer = "model.layers.1."
    assert config.scheme(f"{layer}mlp.up_proj") == Scheme("int4", "gptq", (1, 128))
    assert config.scheme(f"{layer}mlp.gate") is None
    assert config.scheme("model.layers.0.mlp.gate") is None
    assert config.scheme("model.layers.0.mlp.up_proj") == Scheme("int8", "gptq", (1, 32))
    assert config.scheme("model.layers.0.self_attn.q_proj") is None
    assert config.scheme("lm_head") == Scheme("int8", "gptq", (1, 128), symmetric=False)
    assert config.scheme("model.embed_tokens") is None


def test_mxfp4_quantizes_only_experts_that_are_not_ignored():
    said = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.1", "lm_head"],
    }
    config = read(said)
    assert config.is_packed
    assert config.scheme(f"{LAYER}mlp.experts.3.down_proj") == Scheme("mxfp4", "mxfp4", (1, 32))
    assert config.scheme("model.layers.11.mlp.experts.3.down_proj") is not None
    for whole in (f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.gate", "model.layers.1.mlp.experts.3.down_proj", "lm_head"):
        assert config.scheme(whole) is None


def test_modelopt_may_name_an_algorithm_for_each_module():
    layers = {
        f"{LAYER}self_attn.q_proj": {"quant_algo": "FP8"},
        f"{LAYER}mlp": {"quant_algo": "NVFP4", "group_size": 16},
        "lm_head": {"quant_algo": "W8A16"},
    }
    said = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    config = read(said | {"exclude_modules": ["*.up_proj"]})
    names = ("self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "self_attn.k_proj")
    kinds = [getattr(config.scheme(f"{LAYER}{name}"), "weight", None) for name in names]
    assert kinds == ["float8_e4m3fn", "nvfp4", None, None]
    assert config.scheme("model.layers.0.mlpx.gate_proj") is None
    assert config.scheme("lm_head") == Scheme("int8", "integers", (1, FULL_DIM))
    assert (
        config.notes()[-1] == "inputs of matmuls stay unquantized; the checkpoint's config rounds them to 4-bit floats"
    )


def test_auto_round_leaves_modules_unquantized_or_stores_them_with_more_bits():
    own = {f"{LAYER}mlp.gate_proj": {"bits": 16, "data_type": "float"}, f"{LAYER}mlp.up_proj": {"bits": 8}}
    config = read({"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": False, "extra_config": own})
    assert config.scheme(f"{LAYER}mlp.gate_proj") is config.scheme("lm_head") is None
    assert config.scheme(f"{LAYER}mlp.up_proj") == Scheme("int8", "gptq", (1, 64), symmetric=False)
    assert config.scheme(f"{LAYER}mlp.down_proj") == Scheme("int4", "gptq", (1, 64), symmetric=False)


def test_modelopt_config_may_be_a_separate_file(tmp_path):
    said = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "FP8", "exclude_modules": ["*.0.*", "lm_*"]},
    }
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(said))
    config = read_quantization({}, tmp_path)
    assert config is not None
    assert config.scheme("lm_head") is config.scheme(f"{LAYER}mlp.up_proj") is None
    assert config.scheme("model.layers.1.mlp.up_proj") == Scheme(
        "float8_e4m3fn", "modelopt", (FULL_DIM, FULL_DIM), inputs="static"
    )


@pytest.mark.parametrize(
    ("said", "asks"),
    [
        (compressed({"weights": FLOAT8}), False),
        (compressed({"weights": FLOAT8}, kv_cache_scheme=CACHE), True),
        (compressed(kv_cache_scheme=CACHE), True),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, True),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, True),
    ],
)
def test_the_config_selects_a_float8_kv_cache(said, asks):
    assert read(said).float8_cache == asks


@pytest.mark.parametrize(
    ("field", "accepted", "rejected"),
    [
        ("type", "float", "int"),
        ("num_bits", 8, 4),
        ("strategy", "tensor", "channel"),
        ("symmetric", True, False),
        ("dynamic", False, True),
        ("group_size", None, 64),
        ("block_structure", None, [128, 128]),
    ],
)
def test_every_field_of_a_cache_scheme_has_one_accepted_value(field, accepted, rejected):
    assert read(compressed(kv_cache_scheme=CACHE | {field: accepted})).float8_cache
    with pytest.raises(BadCheckpoint, match=f"kv_cache_scheme: {field} is "):
        read(compressed(kv_cache_scheme=CACHE | {field: rejected}))


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"quant_method": "unheard"}, "quant_method should be one of compressed-tensors, .*it is 'unheard'"),
        ({"quant_method": "hqq"}, "quant_method is 'hqq': .* W_q and meta tensors; choose a checkpoint in a format of"),
        ({"bits": 4, "group_size": 64}, "quant_method is missing, as in checkpoints of MLX: the exporter does not"),
        (compressed({"weights": INT4}, format="mxfp6-pack-quantized"), "floats of 6 bits; quantize with preset MXFP4"),
        (compressed({"weights": INT4}, sparsity_config={"format": "a"}), "does not implement sparse weights; quantize"),
        (compressed({"weights": INT4}, transform_config={"a": {}}), "rotations of inputs .*; quantize without transf"),
        (compressed({"weights": MX | {"group_size": 64}}, format="mxfp8-quantized"), "group_size is 64"),
        ({"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type is 'mx_fp': .*AutoRound's MXFP4 and MXFP8;"),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"},
            "keys and values in NVFP4;",
        ),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "experts in 4-bit floats next to FP8 .*; choose a checkpoint"),
        ({"quant_method": "mxfp8", "activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"quant_method": "mxfp8", "weight_block_size": [128, 128]}, r"weight_block_size is \[128, 128\]"),
        (
            quark({"dtype": "int8"}),
            "global_quant_config: weight: dtype is 'int8'.*; quantize the model to FP8 or MXFP4",
        ),
        (quark([{}, {}]), "weight is rounded 2 times, such as to INT4 and FP8.*; quantize the model to FP8 or MXFP4"),
        (quark(QUARK, QUARK | {"is_dynamic": True}), "would let the requests of a batch change one another"),
        (quark(QUARK, None, algo_config=[{"name": "rotation"}]), "algo_config has 'rotation', which may change the"),
        (quark(QUARK, None, export={"weight_format": "fake_quantized"}), "export: weight_format is 'fake_quantized'"),
        (quark(QUARK, None, export={"kv_cache_group": ["*k_proj"]}), r"'\*k_proj' is not in both; export the model"),
        (quark(QUARK, None, output_tensors=QUARK), "output_tensors is .*, which the exporter implements for the kv_c"),
        ({"quant_method": "bitsandbytes"}, "one of load_in_4bit and load_in_8bit should be true, they are False and F"),
        ("fp8", "quant_method should be one of .*it is 'fp8'"),
        (
            compressed({"weights": FLOAT8}, mystery=1),
            r"quantization_config: .*does not support the field\(s\) 'mystery'",
        ),
        (compressed({"weights": FLOAT8}, kv_cache_scheme=BY_TOKEN), "kv_cache_scheme: strategy is 'token', which the"),
        (compressed({"weights": FLOAT8}, kv_cache_scheme=CACHE | {"num_bits": 4}), "kv_cache_scheme: num_bits is 4"),
        (
            compressed({"weights": FLOAT8}, kv_cache_scheme=CACHE | {"dynamic": True}),
            "kv_cache_scheme: dynamic is True",
        ),
        (compressed({"weights": FLOAT8}, kv_cache_scheme="fp8"), "kv_cache_scheme should be an object, it is 'fp8'"),
        (compressed({"weights": FLOAT8 | {"num_bits": 6}}), "float or int of 4 or 8 bits, they are 'float' of 6"),
        (compressed({"weights": FLOAT8 | {"num_bits": 4}}), "strategy should be one of tensor_group, group, it is"),
        (compressed({"weights": INT4 | {"group_size": 16}}), "group_size is 16"),
        (compressed({"weights": INT4 | {"strategy": "tensor"}}), "strategy should be one of channel, it is 'tensor'"),
        (compressed({"weights": INT4, "input_activations": BY_TOKEN | {"num_bits": 2}}), "num_bits is 2"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "quantized_layers should map modules to objects",
        ),
        ({"quant_method": "modelopt", "quant_algo": "FP6"}, "quant_algo is 'FP6'"),
        (
            torchao("Int4WeightOnlyConfig"),
            "quant_type should have one of Float8WeightOnly.* zero points in",
        ),
        (torchao("Float8WeightOnlyConfig", granularity={"_type": "PerTensor"}), "granularity should be PerRow"),
        (torchao("Int8WeightOnlyConfig", group_size=32), "group_size is 32"),
        (torchao("Int8WeightOnlyConfig", sparsity=2), "'sparsity'"),
        (torchao("Int8WeightOnlyConfig") | {"include_input_output_embeddings": True}, "embeddings is True"),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "it is 'int8_weight_only'"),
        ({"quant_method": "auto-round", "packing_format": "auto_round:gguf"}, "packing_format is 'auto_round:gguf'"),
        ({"quant_method": "auto-round", "extra_config": ["lm_head"]}, "extra_config should map modules to objects"),
        (
            compressed({"weights": FLOAT8, "input_activations": BY_TOKEN | {"strategy": "tensor"}}),
            "would let the requests of a batch change one another; quantize with dynamic scales per token",
        ),
        (compressed({"weights": FLOAT8, "output_activations": BY_TOKEN}), "output_activations is"),
        (compressed({"weights": FLOAT8, "targets": ["re:("]}), r"'re:\(|'\(' should be a regular expression"),
        (compressed({"weights": None}), "weights should be an object"),
        (compressed({"weights": FLOAT8}, ignore="lm_head"), "ignore should be a list of strings, it is 'lm_head'"),
        (compressed(), "config_groups should name at least one group"),
        (compressed(config_groups=["group_0"]), r"config_groups should name at least one group, it is \['group_0'\]"),
        ({"quant_method": "fp8", "scale_fmt": "e5m2"}, "scale_fmt is 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "two integers or null"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme should be dynamic where"),
        ({"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"}, "quant_algo is 'W4A16_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo is"),
        ({"quant_method": "gptq", "bits": 3}, "bits is 3"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"a": {"bits": 2}}}, "dynamic, a: .*bits is 2"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": ["a"]}, "dynamic should map expressions to objects"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 16}, "group_size is 16"),
        ({"quant_method": "awq", "bits": 8}, "bits is 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "version is 'gemv_fast'"),
        ({"quant_method": "awq", "bits": 4, "modules_to_fuse": {}}, "modules_to_fuse is {}"),
    ],
)
def test_unknown_fields_and_values_are_rejected_by_name(said, message):
    with pytest.raises(BadCheckpoint, match=message):
        read(said)


STORED = "backbone.layers.1.mixer.gate"  # which the graph calls model.layers.0.mlp.router
LISTS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["mixer.gate"], "modules_to_fuse": None},
    "auto-round": {"quant_method": "auto-round", "bits": 4, "extra_config": {STORED: {"bits": 16}}},
    "compressed-tensors": compressed({"weights": FLOAT8}, ignore=[STORED]),
    "fp8": {"quant_method": "fp8", "modules_to_not_convert": [STORED]},
    "gptq": {"quant_method": "gptq", "bits": 4, "dynamic": {r"-:backbone\.layers\.1\.mixer\.gate": {}}},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["backbone.layers.1.*gate"]},
    "quark": quark(QUARK, None, exclude=["*mixer.gate"]),
}


@pytest.mark.parametrize("method", LISTS)
def test_lists_name_modules_as_the_checkpoint_does(method: str) -> None:
    config, module = read(LISTS[method]), "model.layers.0.mlp.router"
    assert config.scheme(module, STORED) is None
    assert config.scheme(module) is not None
    assert config.scheme("model.embed_tokens", "model.language_model.embed_tokens") is None


def test_groups_name_modules_as_the_checkpoint_does() -> None:
    config = read(compressed({"weights": FLOAT8, "targets": [STORED]}))
    assert config.scheme("model.layers.0.mlp.router", STORED) is not None
    assert config.scheme("model.layers.0.mlp.router") is None


def test_mxfp8_has_a_power_of_2_per_32_inputs() -> None:
    config = read(compressed({"weights": MX, "input_activations": MX | {"dynamic": True}}, format="mxfp8-quantized"))
    assert config.scheme(f"{LAYER}mlp.up_proj") == Scheme(
        "mxfp8", "compressed-tensors", (1, 32), unrounded="8-bit floats"
    )
    assert (config.without_matmuls, config.is_packed, config.has_float8) == ("MXFP8", False, False)


@pytest.mark.parametrize("stored", ["int-quantized", "naive-quantized"])
def test_integers_of_a_byte_each_may_have_one_scale(stored: str) -> None:
    one = compressed({"weights": {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True}})
    whole = Scheme("int8", "integers", (FULL_DIM, FULL_DIM), True)
    assert read(one | {"format": stored}).scheme(f"{LAYER}mlp.up_proj") == whole
    with pytest.raises(BadCheckpoint, match="strategy should be one of channel, it is 'tensor'"):
        read(one | {"format": "pack-quantized"})


def test_the_first_pattern_of_quark_gives_the_scheme_of_a_module_and_marks_keys_and_values() -> None:
    cache = {"weight": QUARK, "input_tensors": QUARK, "output_tensors": QUARK, "bias": None}
    mxfp4 = {"dtype": "fp4", "qscheme": "per_group", "ch_axis": -1, "group_size": 32, "scale_format": "e8m0"}
    own = {"*k_proj": cache, "*v_proj": cache, "re:model.layers.0": {"weight": mxfp4, "input_tensors": None}}
    groups = {"kv_cache_group": ["*k_proj", "*v_proj"], "weight_format": "real_quantized"}
    config = read(quark(QUARK, None, layer_quant_config=own, export=groups, exclude=["lm_head", "*.mlp.gate"]))
    static = Scheme("float8_e4m3fn", "modelopt", (FULL_DIM, FULL_DIM), inputs="static")
    assert config.float8_cache
    assert config.scheme(f"{LAYER}self_attn.k_proj") == static
    assert config.scheme(f"{LAYER}mlp.up_proj") == Scheme("mxfp4", "modelopt", (1, 32))
    assert config.scheme("model.layers.1.mlp.up_proj") == Scheme("float8_e4m3fn", "modelopt", (FULL_DIM, FULL_DIM))
    assert config.scheme("lm_head") is config.scheme(f"{LAYER}mlp.gate") is None


def test_a_bitsandbytes_config_needs_no_method_and_may_have_a_threshold() -> None:
    assert read({"load_in_8bit": True, "llm_int8_threshold": 6.0}).method == "bitsandbytes"


def test_a_cache_without_scales_stores_keys_and_values_as_they_are() -> None:
    assert cache_scales({}, "model.layers.0.self_attn") == (1.0, 1.0)


def test_each_type_of_a_gguf_file_has_the_groups_of_its_format() -> None:
    module = "model.layers.0.mlp.up_proj"
    groups = {kind: read_gguf_section(gguf_section({kind: [module]}), "config.json") for kind in GGUF_TYPES}
    sizes = {kind: quantization.scheme(module).group_shape for kind, quantization in groups.items()}
    assert sizes == {kind: (1, 16 if kind == "Q6_K" else 32) for kind in GGUF_TYPES}


@pytest.mark.parametrize("kind", sorted(GGUF_TYPES))
def test_a_weight_of_a_gguf_file_is_rows_of_whole_blocks(kind: str) -> None:
    scheme = read_gguf_section(gguf_section({kind: ["m"]}), "config.json").scheme("m")
    size = gguf_bytes(kind)

    def shape(dtype: str, *dims: int) -> tuple[int, int]:
        return gguf_shape("m", {"m.weight": StoredTensor("m.weight", dtype, dims, Path("f.gguf"), 0, 0)}, scheme)

    assert shape("uint8", 3, 2 * size)[0] == 3
    assert shape("uint8", 3, 2 * size)[1] == 2 * shape("uint8", 3, size)[1] > 0
    for dtype, dims in (
        *(("uint8", (3, 2 * size + more)) for more in (1, -1, size // 2)),
        *(("int8", (3, size)), ("uint8", (size,)), ("uint8", (1, 3, size))),
    ):
        rule = f"f.gguf: m.weight should be rows of {kind}, {size} bytes each, it is {dtype}{list(dims)}"
        with pytest.raises(BadCheckpoint, match=re.escape(rule)):
            shape(dtype, *dims)


def gguf_bytes(kind: str) -> int:
    """The bytes of a block, as the gguf package has them."""
    return int(gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1])


def float8(inputs: str, *, groups: tuple[int, int] = (1, FULL_DIM)) -> Scheme:
    return Scheme("float8_e4m3fn", "compressed-tensors", groups, inputs=inputs)  # type: ignore[arg-type]


BLOCKS = (128, 128)
INT8 = Scheme("int8", "integers", (1, FULL_DIM))
INT4_GROUPS = Scheme("int4", "awq", (1, 64), symmetric=False)


@pytest.mark.parametrize(
    ("schemes", "reason"),
    [
        ([float8("token")], None),
        ([float8("static")], None),
        ([float8("token"), float8("token", groups=BLOCKS)], None),
        ([float8("token"), float8("static")], "static scales of inputs together with scales per token"),
        ([float8("static", groups=BLOCKS)], "block scales of weights with static scales of inputs"),
        ([float8("unquantized")], "float8 weights with unquantized inputs"),
        ([float8("token"), float8("unquantized")], "float8 weights with unquantized inputs"),
        ([float8("token"), INT4_GROUPS], None),
        ([float8("token", groups=BLOCKS), INT4_GROUPS], "block scales of float8 weights together with weights of 4"),
        ([float8("static"), INT8], None),
        ([INT8], None),
        ([replace(INT8, symmetric=False)], "8-bit integers with zero points"),
        ([float8("token"), replace(INT8, symmetric=False)], "8-bit integers with zero points"),
        ([Scheme("mxfp8", "fp8", (1, 32))], "weights in MXFP8"),
        ([float8("token"), Scheme("table4", "bitsandbytes", (1, 64))], "weights in 4-bit floats of bitsandbytes"),
    ],
)
def test_operators_on_a_gpu_support_exactly_these_combinations(schemes: list[Scheme], reason: str | None) -> None:
    answer = unsupported(Quantization("any", tuple((lambda *_: True, scheme) for scheme in schemes)))
    assert answer is None if reason is None else str(answer).startswith(reason)
