"""Write a GGUF file as a checkpoint folder: config.json, the tokenizer and the tensors that do not stay in the file."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tandemrt.engines.options.build_listener import Progress
from tandemrt.engines.validation.errors import BackendUnavailable, BadCheckpoint, clipped, quoted
from tandemrt.engines.validation.extras import pip_install
from tandemrt.export.graph.low_bit_format import numpy_dtype
from tandemrt.export.quantize.gguf.families import FREQUENCIES, GGUF_FAMILIES, GgufFamily, gguf_family
from tandemrt.export.quantize.gguf.latent import joined_keys_and_values
from tandemrt.export.quantize.gguf.special_tokens import special_tokens
from tandemrt.export.quantize.gguf.split import parts_of
from tandemrt.export.quantize.gguf.tokenizer import write_tokenizer
from tandemrt.export.quantize.writer import Entry, write_safetensors
from tandemrt.export.read.checkpoint import GGUF_INDEX, StoredTensor, gguf_index_entry
from tandemrt.export.read.quantization.gguf import GGUF_TYPES, gguf_section
from tandemrt.export.read.tokenizer import missing_chat_template

# Types that the package gguf dequantizes.
_TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_M"),
    *("IQ1_S", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ3_S", "IQ3_XXS", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4"),
)
_STACKED = 3  # dimensions of a tensor of all experts
_UNCHANGED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # types that a checkpoint holds as they are


@dataclass(frozen=True)
class KeptTypes:
    """The ``names`` of types whose weights stay packed in layers, and the types of ``experts`` that do.

    ``alike``: those of experts only if all experts of a file have one type. ``embedding``, ``head``: these, too; a
    tied head is the embedding. ``outputs``: only matrices whose number of outputs is a multiple of it. ``floats``: the
    dtype of the values of other quantized weights.
    """

    names: frozenset[str]
    experts: frozenset[str]
    alike: bool = False
    embedding: bool = True
    head: bool = True
    outputs: int = 1
    floats: str = "float32"


ALL_KEPT = KeptTypes(GGUF_TYPES, GGUF_TYPES)


def write_gguf_checkpoint(
    file: Path,
    folder: Path,
    kept: KeptTypes,
    progress: Progress | None = None,
    *,
    needs_chat_template: bool = False,
) -> None:
    """Write ``file`` as a checkpoint into ``folder``, which is created unless it exists.

    Matrices of types that are ``kept`` stay in the file: the checkpoint has an index of their places. Only matrices
    whose rows have another order are copied. Weights in other quantized types become the float32 values that the type
    defines. Raises BadCheckpoint for files that are damaged or of another family,
    BackendUnavailable without the package gguf or transformers, and BadRequest before it writes weights, if it
    ``needs_chat_template`` and the file has none.
    """
    folder.mkdir(exist_ok=True)
    model = read_gguf(file, kept)
    if needs_chat_template and "tokenizer.chat_template" not in model.metadata:
        raise missing_chat_template(str(file))
    write_tensors(model, folder, progress)
    write_tokenizer(parts_of(file)[0], model.metadata, folder)


@dataclass(frozen=True)
class GgufModel:
    """A GGUF file as a checkpoint: its metadata, config.json, tensors to write, and those that stay in the file."""

    metadata: dict[str, Any]
    config: dict[str, Any]
    entries: list[Entry]
    in_file: dict[str, StoredTensor]


def write_tensors(model: GgufModel, folder: Path, progress: Progress | None = None) -> None:
    """Write config.json, the tensors to write and the index of the others into ``folder``."""
    write_safetensors(folder / "model.safetensors", model.entries, progress=progress)
    index = {name: gguf_index_entry(tensor) for name, tensor in model.in_file.items()}
    (folder / GGUF_INDEX).write_text(json.dumps(index), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(model.config, indent=2), encoding="utf-8")


def read_gguf(file: Path, kept: KeptTypes = ALL_KEPT) -> GgufModel:
    """Read a GGUF file or the parts of one. Raises as ``write_gguf_checkpoint`` does."""
    metadata, tensors, files = _read_parts(file)
    name = str(metadata.get("general.architecture"))
    if name == "clip":
        raise BadCheckpoint(
            f"{file}: it is the vision part of a model, images are not supported; name the model's file"
        )
    family = gguf_family(metadata)
    if family is None:
        raise BadCheckpoint(
            f"{file}: general.architecture should be one of {', '.join(GGUF_FAMILIES)}, it is {quoted(name)}; take the "
            "original checkpoint"
        )
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    try:
        config = family.config(metadata, name, tied="output.weight" not in tensors, vocab=len(tokens))
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{file}: {error}") from error
    config |= special_tokens(metadata)
    if (factors := tensors.pop(FREQUENCIES, None)) is not None:
        config |= _with_factors(config, np.asarray(factors.data, np.float32))
    for tensor in tensors.values():
        if tensor.tensor_type.name not in _TYPES:
            raise BadCheckpoint(
                f"{file}: tensor {quoted(tensor.name)} should be of one of the types {', '.join(_TYPES)}, it is "
                f"{tensor.tensor_type.name}; take a file with another quantization"
            )
    if kept.alike and len({tensor.tensor_type for tensor in tensors.values() if len(tensor.shape) == _STACKED}) > 1:
        kept = replace(kept, experts=frozenset())
    entries = list(joined_keys_and_values(tensors))
    in_file: dict[str, StoredTensor] = {}
    modules: dict[str, list[str]] = {}
    for tensor in tensors.values():
        if not _is_kept(tensor, kept):
            entries.append(_entry(file, tensor, family, config, kept.floats))
            continue
        name = _checkpoint_name(file, tensor, family)
        modules.setdefault(tensor.tensor_type.name, []).append(name.removesuffix(".weight"))
        order = _order(tensor.name, tensor.data.shape, family, config)
        if order is None:
            path, begin = files[tensor.name].resolve(), int(tensor.data_offset)
            in_file[name] = StoredTensor(name, "uint8", tensor.data.shape, path, begin, tensor.data.nbytes)
        else:
            entries.append(Entry(name, "uint8", tensor.data.shape, partial(_ordered_rows, tensor, order)))
    if modules:
        config["quantization_config"] = gguf_section(modules)
    return GgufModel(metadata, config, entries, in_file)


def _read_parts(file: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Path]]:
    """Return the metadata of a model, its tensors and their files by name.

    The first part of a split model holds the metadata.
    """
    try:
        from tandemrt.export.quantize.gguf.reader import BoundedReader
    except ModuleNotFoundError as error:
        raise BackendUnavailable(f"a GGUF file needs the package gguf: {pip_install('gguf')}") from error
    metadata: dict[str, Any] = {}
    tensors: dict[str, Any] = {}
    files: dict[str, Path] = {}
    for part in parts_of(file):
        try:
            reader = BoundedReader(part)
            metadata = {name: field.contents() for name, field in reader.fields.items()} | metadata
        except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
            raise BadCheckpoint(f"{part}: should be a GGUF file: {clipped(error)}; download it again") from error
        except OSError as error:
            raise BadCheckpoint(f"{part}: should be a file that can be read: {error.strerror}") from error
        tensors |= {tensor.name: tensor for tensor in reader.tensors}
        files |= {tensor.name: part for tensor in reader.tensors}
    if len(tensors) != metadata.get("split.tensors.count", len(tensors)):
        raise BadCheckpoint(
            f"{file}: its parts should hold {metadata['split.tensors.count']} tensors, they hold {len(tensors)}; "
            "download them again"
        )
    return metadata, tensors, files


def _with_factors(config: dict[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """Return the rotary embedding whose frequencies are divided by ``factors``, as Llama 3.1's rule gives them."""
    each = [float(factor) for factor in factors]
    length = config["max_position_embeddings"]
    scaling = {"rope_type": "longrope", "short_factor": each, "long_factor": each, "attention_factor": 1.0}
    return {"rope_scaling": scaling | {"original_max_position_embeddings": length}}


def _entry(file: Path, tensor: Any, family: GgufFamily, config: dict[str, Any], floats: str) -> Entry:
    """Return the tensor of the checkpoint for one tensor of the file that is not kept."""
    name, kind = _checkpoint_name(file, tensor, family), tensor.tensor_type.name
    shape = tuple(int(size) for size in reversed(tensor.shape))
    order = _order(tensor.name, shape, family, config)
    if len(shape) == 1 and name.endswith("_gate.weight"):  # a matmul with one output
        shape = (1, *shape)
    offset = 1.0 if family.norm_offset and name.endswith("norm.weight") else 0.0
    return Entry(name, _UNCHANGED.get(kind, floats), shape, partial(_values, tensor, order, offset, floats))


def _checkpoint_name(file: Path, tensor: Any, family: GgufFamily) -> str:
    """Return the name of a tensor in the checkpoint. Raises BadCheckpoint if it has none."""
    name = family.name_of(tensor.name)
    if name is None:
        raise BadCheckpoint(
            f"{file}: tensor {quoted(tensor.name)} has no place in {family.architecture}; take the original checkpoint"
        )
    return name


def _is_kept(tensor: Any, kept: KeptTypes) -> bool:
    """Whether a tensor stays packed: of a matmul or of all experts in a layer, or of the embedding or the head.

    Latent attention reads floats of keys and values.
    """
    if tensor.name.endswith(".attn_kv_b.weight"):
        return False
    outside = {"token_embd.weight": kept.embedding, "output.weight": kept.head}
    names = {2: kept.names, _STACKED: kept.experts}.get(len(tensor.shape), frozenset())
    fits = int(tensor.shape[1]) % kept.outputs == 0 if names else False
    return fits and tensor.tensor_type.name in names and outside.get(tensor.name, True)


def _ordered_rows(tensor: Any, order: np.ndarray) -> Iterator[bytes]:
    yield tensor.data[order].tobytes()


def _order(name: str, shape: tuple[int, ...], family: GgufFamily, config: dict[str, Any]) -> np.ndarray | None:
    """Return the order of the rows that pairs value i with value i + half of a head; None: as they are stored."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config.get("num_key_value_heads")}
    count = heads.get(name.rpartition(".")[0].rpartition(".")[2])
    if not family.permuted or count is None:
        return None
    return np.arange(shape[0]).reshape(count, -1, 2).swapaxes(1, 2).reshape(-1)


def _values(tensor: Any, order: np.ndarray | None, offset: float, floats: str) -> Iterator[bytes]:
    """Yield the values of a tensor, one expert at a time, with rows in ``order``, minus ``offset``.

    Those of a quantized type are rounded to ``floats``.
    """
    from gguf import dequantize

    for data in tensor.data if len(tensor.shape) == _STACKED else [tensor.data]:
        stored = data if tensor.tensor_type.name in _UNCHANGED else dequantize(data, tensor.tensor_type)
        if order is not None:
            stored = stored[order]
        if offset:
            stored = stored - np.float32(offset)
        if tensor.tensor_type.name not in _UNCHANGED:
            stored = stored.astype(numpy_dtype(floats), copy=False)
        yield np.ascontiguousarray(stored).tobytes()
