"""Every field of a published config changes what is read from it, is rejected, or is known to say nothing."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING, AutoConfig

from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.read.spec import ModelSpec
from tests.plain.test_families import FAMILIES, PUBLISHED, REQUIRED, THEIRS, WITHOUT_CLASS
from tests.plain.test_quantization_config import CACHE, LAYER, QUARK, compressed, quark, read, torchao

_TEXT = {"text_config", "llm_config"}  # where vision-language models have the fields of a text model
_OTHERS = {"vision_config", "audio_config", "quantization_config", "task_specific_params", "auto_map"}

_NEVER, _SOMETIMES = (Path(__file__).parent / "fields_without_effect.txt").read_text().split("\n\n")
NEVER = frozenset(_NEVER.split())  # fields of training, of other programs, of towers, of parts that are not read
# Fields that say nothing in these configs, or in all that have them but these.
SOMETIMES = dict(line.split(": ") for line in _SOMETIMES.replace("\n  ", " ").splitlines())
CONFIGS = {name: json.loads(config) for name, (config, _) in PUBLISHED.items()}


def of_transformers(architecture: str) -> dict[str, Any]:
    """The config of a family of which none is published above."""
    name = FAMILIES[architecture].name
    required = REQUIRED.get(name, {})
    required |= {"num_hidden_layers": 8} if "layer_types" in required else {}
    theirs: Any = AutoConfig.for_model(THEIRS.get(name, name), **required)
    return theirs.to_dict() | {"architectures": [architecture], "model_type": name}


_NAMED = {FAMILIES[each].name for config in CONFIGS.values() for each in config["architectures"] if each in FAMILIES}
_UNNAMED = {family.name: each for each, family in FAMILIES.items() if family.name not in _NAMED}
CONFIGS |= {each: of_transformers(each) for each in _UNNAMED.values() if each not in WITHOUT_CLASS}


def says_nothing(field: str, name: str) -> bool:
    where, among = SOMETIMES.get(field, ""), name in SOMETIMES.get(field, "").removeprefix("not ").split("; ")
    return field in NEVER or among != where.startswith("not ")


def leaves(config: Any, *path: str | int) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Each value of a config and its place; of a list, the last one."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            yield from leaves(value, *path, name)
    elif isinstance(config, list):
        if config:
            yield from leaves(config[-1], *path, len(config) - 1)
    elif config is not None:
        yield path, config


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    return value + {int: 1, float: 0.25, str: "x"}[type(value)]


def without_effect(config: dict[str, Any], reads: Callable[[dict[str, Any]], object]) -> Iterator[tuple[str, ...]]:
    """The names on the way to each value without which ``reads`` returns the same."""
    before = reads(config)
    for path, value in list(leaves(config)):
        *outer, last = path
        inner: Any = reduce(lambda part, at: part[at], outer, config)
        inner[last] = another(value)
        with suppress(BadCheckpoint):
            if reads(config) == before:
                yield tuple(name for name in path if isinstance(name, str))
        inner[last] = value


@pytest.mark.parametrize("name", CONFIGS)
def test_every_other_field_of_a_config_has_an_effect(name: str) -> None:
    def names(paths: Iterable[tuple[str | int, ...]]) -> set[str]:
        named = [[part for part in path if isinstance(part, str)] for path in paths if path[0] not in _OTHERS]
        return {".".join(part for part in path if part not in _TEXT) for path in named}

    config = CONFIGS[name]
    expected = {field for field in names(path for path, _ in leaves(config)) if says_nothing(field, name)}
    assert names(without_effect(config, ModelSpec.from_hf)) == expected


# No published config leaves these out. Without the number of KV heads each head has its own, as in a Llama.
LEFT_OUT = {"num_key_value_heads", "rope_parameters"}
WITH_CLASS = [
    name
    for name, config in CONFIGS.items()
    if config["model_type"] in CONFIG_MAPPING and WITHOUT_CLASS.isdisjoint(config["architectures"])
    if _TEXT.isdisjoint(config)
]


@pytest.mark.parametrize("name", WITH_CLASS)
def test_a_config_without_a_field_has_the_value_of_transformers_or_is_rejected(name: str) -> None:
    def read_or_none(config: dict[str, Any]) -> ModelSpec | None:
        try:
            return ModelSpec.from_hf(config)
        except BadCheckpoint:
            return None

    config = CONFIGS[name]
    theirs = CONFIG_MAPPING[config["model_type"]]().to_dict()
    for field in (config.keys() & theirs.keys()) - LEFT_OUT - {"architectures", "model_type"}:
        without = read_or_none({other: value for other, value in config.items() if other != field})
        if without is not None and not isinstance(theirs[field], list | dict):  # lists are for their number of layers
            assert without == (read_or_none(config | {field: theirs[field]}) or without), field


def each(**fields: Any) -> dict[str, Any]:
    default = {"dynamic": False, "num_bits": 8, "observer": "minmax", "strategy": "channel", "symmetric": True}
    return default | {"type": "float", **fields}


# As programs write them, and the fields that say nothing about the stored weights.
QUANTIZED: dict[str, tuple[dict[str, Any], str]] = {
    "fp8": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
         "scale_fmt": "ue8m0", "modules_to_not_convert": [f"{LAYER}mlp.up_proj"]},
        "",
    ),
    "mxfp8": ({"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]}, ""),
    "gptq": (
        {"quant_method": "gptq", "batch_size": 1, "bits": 4, "cache_block_outputs": True, "damp_percent": 0.01,
         "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "sym": True, "true_sequential": True,
         "use_cuda_fp16": False, "use_exllama": True, "static_groups": False, "checkpoint_format": "gptq",
         "model_name_or_path": "m", "meta": {"quantizer": "gptqmodel:1"}},
        "batch_size cache_block_outputs damp_percent desc_act version true_sequential use_cuda_fp16 use_exllama "
        "static_groups model_name_or_path quantizer",
    ),
    "awq": (
        {"quant_method": "awq", "backend": "autoawq", "bits": 4, "do_fuse": False, "group_size": 128,
         "version": "gemm", "zero_point": True},
        "backend do_fuse",
    ),
    "auto-round": (
        {"quant_method": "auto-round", "autoround_version": "0.5", "bits": 4, "data_type": "int", "group_size": 128,
         "packing_format": "auto_round:auto_gptq", "sym": True, "iters": 200, "nsamples": 128},
        "autoround_version iters nsamples",
    ),
    "compressed-tensors": (
        compressed({"weights": each(), "input_activations": each(dynamic=True, strategy="token")},
                   format="float-quantized", global_compression_ratio=1.5, quantization_status="compressed",
                   version="0.10"),
        "observer global_compression_ratio version",
    ),
    "compressed-tensors in 4 bits, and a cache": (
        compressed({"weights": each(num_bits=4, type="int", strategy="group", group_size=128)},
                   format="pack-quantized", kv_cache_scheme=CACHE, quantization_status="compressed"),
        "observer",
    ),
    "modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8", "producer": {"name": "modelopt", "version": "0.29"},
         "ignore": [f"{LAYER}mlp.up_proj"]},
        "name version",
    ),
    "modelopt in 4 bits": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "kv_cache_quant_algo": "FP8",
         "exclude_modules": [f"{LAYER}mlp.up_proj"]},
        "group_size",  # always 16
    ),
    "mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": [f"{LAYER}mlp.experts.0.up_proj"]}, ""),
    "quark": (
        quark(QUARK | {"ch_axis": 0, "round_method": "half_even", "scale_type": "float", "symmetric": True},
              QUARK | {"round_method": "half_even", "scale_type": "float", "symmetric": True}, quant_mode="eager_mode",
              export={"pack_method": "reorder", "weight_format": "real_quantized"}),
        "ch_axis observer_cls pack_method quant_mode round_method scale_type symmetric",
    ),
    "torchao": (
        torchao("Int8WeightOnlyConfig")
        | {"include_input_output_embeddings": False, "untie_embedding_weights": False},
        "_version set_inductor_config untie_embedding_weights",
    ),
    "bitsandbytes": (
        {"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8",
         "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_threshold": 6.0,
         "llm_int8_has_fp16_weight": False, "load_in_4bit": True, "load_in_8bit": False},
        "bnb_4bit_compute_dtype bnb_4bit_use_double_quant llm_int8_threshold",
    ),
    "bitsandbytes in 8 bits": ({"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True}, ""),
}  # fmt: skip
MODULES = ("self_attn.q_proj", "mlp.up_proj", "mlp.experts.0.up_proj", "mlp.router")


@pytest.mark.parametrize("name", QUANTIZED)
def test_every_other_field_of_a_quantization_has_an_effect(name: str) -> None:
    def described(said: dict[str, Any]) -> object:
        config = read(said)
        schemes = [config.scheme(module) for module in (*(f"{LAYER}{each}" for each in MODULES), "lm_head")]
        return schemes, config.notes(), config.float8_cache

    said, nothing = QUANTIZED[name]
    assert {path[-1] for path in without_effect(said, described)} == set(nothing.split())
