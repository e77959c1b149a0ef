"""Weights of GGUF types stay packed: equal values, logits within the rounding of inputs, and no larger files."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors.numpy import save_file

from tandemrt.engines.contract.contract import Binding
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.bundle.gguf import kept_types
from tandemrt.export.graph.builder import GraphBuilder, save_model
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.embedding import embedded
from tandemrt.export.quantize.checkpoint import write_quantized
from tandemrt.export.quantize.gguf.checkpoint import ALL_KEPT, KeptTypes
from tandemrt.export.quantize.stored_weights import read_matrix
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.quantization.config import read_quantization
from tandemrt.export.read.quantization.gguf import GGUF_TYPES
from tandemrt.export.read.spec import ModelSpec
from tests.engine.decoding import VOCAB, Decoder, expected_logits, make_checkpoint
from tests.engine.gguf_files import converted, write_gguf
from tests.engine.test_gguf import CASES

SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
# Every token runs all experts, because rounded inputs would choose others near ties.
SIZES_OF: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 256, "num_experts_per_tok": 6},
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 96, "swiglu_limit": 7.0} | {"num_experts_per_tok": 6},
}
KEYS_OF = {
    "qwen3_moe": {"expert_feed_forward_length": 256, "expert_used_count": 6},
    "gpt_oss": {"expert_feed_forward_length": 96, "expert_used_count": 6},
}
TEXT = [(7 * at) % VOCAB for at in range(30)]
LAYER = "model.layers.1"
# With those of embedding and head, and Q4_1 of the other layer, each model has all types.
MIXED = {
    f"{LAYER}.self_attn.q_proj.weight": "Q4_K",
    f"{LAYER}.self_attn.k_proj.weight": "Q5_K",
    f"{LAYER}.self_attn.v_proj.weight": "Q6_K",
    f"{LAYER}.self_attn.o_proj.weight": "Q5_0",
    f"{LAYER}.mlp.gate_proj.weight": "Q4_0",
    f"{LAYER}.mlp.up_proj.weight": "Q5_1",
    f"{LAYER}.mlp.down_proj.weight": "Q8_0",
}
IQ4 = {f"{LAYER}.mlp.gate_proj.weight": "IQ4_NL", f"{LAYER}.mlp.up_proj.weight": "IQ4_XS"}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
GPU = kept_types(on_cpu=False, paged=True, compute="bfloat16", draft_shares=False)


# Experts of all kinds that files have: those of Q4_K_M, and MXFP4. They are stored as one tensor per layer.
EXPERTS = {f"{LAYER}.mlp.experts.gate_proj.weight": "Q4_K", f"{LAYER}.mlp.experts.up_proj.weight": "Q5_0"}
EXPERTS |= {f"{LAYER}.mlp.experts.down_proj.weight": "Q6_K"}
MXFP4 = {
    f"model.layers.{at}.mlp.experts.{kind}_proj.weight": "MXFP4" for at in (0, 1) for kind in ("gate", "up", "down")
}


def packed_model(
    folder: Path,
    case: str,
    name: str,
    kinds: dict[str, str],
    kept: KeptTypes = ALL_KEPT,
    *,
    kind: str = "Q4_1",
    tiles: str | None = None,
) -> tuple[Checkpoint, torch.nn.Module]:
    """Return the checkpoint as a build packs it, in folder / "packed", and transformers' model of the same values.

    ``tiles``: for a GPU that computes in this dtype.
    """
    (folder / "hf").mkdir()
    model = make_checkpoint(case, folder / "hf", sizes=SIZES | SIZES_OF.get(case, {}))
    stacks = [parameter for parameter in model.parameters() if parameter.dim() == 3]
    for parameter in stacks:  # as large as other weights
        parameter.data /= 8
    if stacks:
        model.save_pretrained(folder / "hf")
    keys: dict[str, Any] = CASES[case][1] if case in CASES else {}
    keys = {"rope_freq_base": 10_000.0} | keys | KEYS_OF.get(case, {})
    values = write_gguf(folder / "hf", folder / "model.gguf", name, kind, kinds=kinds, **keys)
    tensors = {key: np.ascontiguousarray(array) for key, array in values.items()}
    save_file(tensors, folder / "hf" / "model.safetensors", metadata={"format": "pt"})
    model = type(model).from_pretrained(folder / "hf", attn_implementation="eager")
    checkpoint, out = converted(folder / "model.gguf", folder / "unpacked", kept), folder / "packed"
    out.mkdir()
    (out / "config.json").write_text(json.dumps(checkpoint.config))
    spec = ModelSpec.from_hf(checkpoint.config)
    written = write_quantized(checkpoint, spec, out, None, interleaved=tiles is None, tiles=tiles)
    return written.checkpoint, model


@pytest.mark.parametrize(
    ("case", "name", "kinds"),
    [
        ("llama tied", "llama", {EMBEDDING: "Q6_K"} | MIXED),
        ("qwen2", "qwen2", {EMBEDDING: "Q5_0", HEAD: "Q4_K"} | MIXED | IQ4),
        ("qwen3_moe", "qwen3moe", EXPERTS),
        ("gpt_oss", "gpt-oss", MXFP4),
    ],
)
def test_logits_equal_those_of_the_dequantized_values_within_the_rounding_of_inputs(
    tmp_path: Path, case: str, name: str, kinds: dict[str, str]
) -> None:
    checkpoint, model = packed_model(tmp_path, case, name, kinds)
    logits = Decoder(tmp_path / "packed", "grouped", batch=1)([TEXT], [0])[0]
    expected = expected_logits(model, TEXT)
    assert (logits - expected).norm() < 0.02 * expected.norm()

    stored = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    in_file = gguf.GGUFReader(tmp_path / "model.gguf").tensors
    assert stored < 1.2 * sum(tensor.n_bytes for tensor in in_file)


ON_A_GPU = {
    "types K": (
        "qwen2",
        "qwen2",
        MIXED | IQ4 | {HEAD: "Q6_K"},
        {"q4_k_matmul", "q6_k_matmul", "int4_matmul", "int8_matmul"},
    ),
    "MXFP4": ("gpt_oss", "gpt-oss", MXFP4, {"float4_experts"}),
}


@pytest.mark.parametrize("case", ON_A_GPU)
def test_weights_for_a_gpu_have_equal_values(tmp_path: Path, case: str) -> None:
    """Standard operators compute the graph here; GPU tests have the kernels."""
    name, gguf_name, kinds, operators = ON_A_GPU[case]
    kept = replace(GPU, floats="float32")
    _, model = packed_model(tmp_path, name, gguf_name, kinds, kept, kind="Q4_0", tiles="float32")
    decoder = Decoder(tmp_path / "packed", "paged", batch=1)
    expected = expected_logits(model, TEXT)
    assert (decoder([TEXT], [0])[0] - expected).norm() < 1e-5 * expected.norm()
    assert operators <= {node.op_type for node in onnx.load(decoder.path, load_external_data=False).graph.node}


def test_other_types_have_the_dtype_that_a_gpu_computes_in(tmp_path: Path) -> None:
    (tmp_path / "hf").mkdir()
    make_checkpoint("llama tied", tmp_path / "hf", sizes=SIZES)
    kinds = {EMBEDDING: "Q6_K"}
    values = write_gguf(tmp_path / "hf", tmp_path / "m.gguf", "llama", "Q5_1", kinds=kinds, rope_freq_base=10_000.0)
    checkpoint = converted(tmp_path / "m.gguf", tmp_path / "unpacked", GPU)
    for name in (EMBEDDING, f"{LAYER}.mlp.up_proj.weight"):
        rounded = checkpoint.read(name, values[name].shape, ("bfloat16",))
        np.testing.assert_array_equal(rounded, values[name].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("kind", sorted(GGUF_TYPES))
def test_rows_of_the_embedding_and_values_equal_those_of_the_package_gguf(tmp_path: Path, kind: str) -> None:
    checkpoint, _ = packed_model(tmp_path, "llama tied", "llama", {EMBEDDING: kind})
    in_file = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    stored = in_file["token_embd.weight"]
    values = gguf.quants.dequantize(stored.data, stored.tensor_type)
    unpacked = Checkpoint.open(tmp_path / "unpacked")
    quantization = read_quantization(unpacked.config, unpacked.folder)
    assert quantization is not None
    scheme = quantization.scheme("model.embed_tokens")
    np.testing.assert_array_equal(read_matrix("model.embed_tokens", unpacked.tensors, scheme), values)

    b = GraphBuilder("embedding")
    ids = b.input(Binding("ids", "int64", ("batch", "tokens")))
    rows = embedded(b, ids, Weights(checkpoint, b, "float32"), "model.embed_tokens", VOCAB, SIZES["hidden_size"])
    b.output(Binding("rows", "float32", ("batch", "tokens", "hidden")), rows)
    save_model(b.model(), tmp_path / "packed" / "embedding.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "packed" / "embedding.onnx")
    texts = np.array([[0, 7, VOCAB - 1], [9, 8, 7]])
    np.testing.assert_array_equal(session.run(None, {"ids": texts})[0], values[texts])


def test_a_file_that_changed_after_it_was_unpacked_is_rejected(tmp_path: Path) -> None:
    packed_model(tmp_path, "llama tied", "llama", {})
    file = tmp_path / "model.gguf"
    file.write_bytes(file.read_bytes())
    with pytest.raises(BadCheckpoint, match=r"model.gguf: should be the file that was unpacked into"):
        Checkpoint.open(tmp_path / "unpacked")
