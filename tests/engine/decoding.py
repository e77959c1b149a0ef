"""What the decoder tests share: tiny random checkpoints made by transformers, and a decoder on the real engine."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import onnx_ir as ir
import torch
from transformers import LlamaConfig, MistralConfig, PreTrainedConfig, PreTrainedModel, Qwen2Config, Qwen3Config

from tandemrt.engines.contract.contract import Contract, table_width
from tandemrt.engines.contract.decoder import Subgraph
from tandemrt.export.graph.builder import save_model
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.decoder import build_decoder
from tandemrt.export.passes.cut import cut
from tandemrt.export.passes.graph_pass import Pipeline
from tandemrt.export.passes.over_ranks import over_ranks
from tandemrt.export.passes.pipelines import PIPELINES
from tandemrt.export.passes.transposed_matmuls import fuse_transposed_matmuls
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.shard import Shard
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.launch import Context, Ranks
from tandemrt.runtime.caches.kv_cache import no_prompts, window_bindings
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.device.backends.onnxruntime.constants import read_constants
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine
from tandemrt.runtime.device.backends.onnxruntime.executor import Executor
from tandemrt.runtime.device.backends.onnxruntime.subgraphs import open_subgraphs
from tests.families.cases import FAMILIES, of_config

CPU = torch.device("cpu")
VOCAB, CAPACITY = 61, 40
DIMS = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
# Original lengths below the tested positions, so that the scaling rules really bend the frequencies.
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 24,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}

# Two have an epsilon that cannot be taken for the usual 1e-5 or 1e-6.
CONFIGS = {
    "llama with llama3 scaling": lambda: LlamaConfig(**DIMS, rope_parameters=LLAMA3),
    "llama tied": lambda: LlamaConfig(**DIMS, tie_word_embeddings=True, rms_norm_eps=0.05),
    "llama biased with linear scaling": lambda: LlamaConfig(
        **DIMS, attention_bias=True, mlp_bias=True, rope_parameters=LINEAR
    ),
    "qwen2": lambda: Qwen2Config(**DIMS),
    "qwen2 tied": lambda: Qwen2Config(**DIMS, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**DIMS, head_dim=16),
    "qwen3 tied with yarn": lambda: Qwen3Config(
        **DIMS, head_dim=16, tie_word_embeddings=True, rope_parameters=YARN, attention_bias=True, rms_norm_eps=0.05
    ),
    "mistral": lambda: MistralConfig(**DIMS, sliding_window=None, head_dim=32),
    "mistral tied": lambda: MistralConfig(**DIMS, sliding_window=CAPACITY, head_dim=None, tie_word_embeddings=True),
}

# Attention that does not reach back to the beginning: in all layers, and in one of two.
SLIDING = {
    "mistral sliding": lambda: MistralConfig(**DIMS, sliding_window=24, head_dim=None),
    "qwen3 sliding in its second layer": lambda: Qwen3Config(
        **DIMS, head_dim=16, use_sliding_window=True, sliding_window=24, max_window_layers=1
    ),
}


def make_checkpoint(
    case: str | PreTrainedConfig,
    folder: Path,
    dtype: torch.dtype = torch.float32,
    sizes: dict[str, Any] | None = None,
    **save: object,
) -> PreTrainedModel:
    """Save a random checkpoint and return the model. ``sizes`` replaces fields of the case's config."""
    config = (CONFIGS | SLIDING | FAMILIES)[case]() if isinstance(case, str) else case
    config.get_text_config().update(sizes or {})
    model = of_config(config, dtype=dtype, attn_implementation="eager").eval()
    randomize(model)
    model.save_pretrained(folder, **save)
    return model


def randomize(model: PreTrainedModel) -> None:
    """Give a model random weights. Norms and biases are random too: at 1 and 0 they hide mistakes."""
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            values = torch.randn(parameter.shape, generator=generator)
            norm = name.endswith("norm.weight")
            matrix = parameter.dim() == 2 and "embed" not in name
            parameter.copy_(
                1 + 0.3 * values if norm else values / parameter.shape[1] ** 0.5 if matrix else 0.5 * values
            )
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.fill_(0.9)


def edit_config(folder: Path, **changes: object) -> None:
    """Change fields of a saved config.json; None removes a field."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def expected_logits(model: PreTrainedModel, tokens: Sequence[int]) -> torch.Tensor:
    """float32[len(tokens), vocab]: what transformers computes for one sequence."""
    with torch.no_grad():
        return model(torch.tensor([list(tokens)])).logits[0].float()


def fused(model: ir.Model, lowering: Lowering, shard: Shard | None = None) -> ir.Model:
    """Run the passes of ``lowering`` on ``model`` in place and return it. ``shard``: the model is that of one rank.

    A paged graph keeps its plain matmuls, because onnxruntime on a CPU has FusedMatMul in float32 alone; ``open_steps``
    fuses them.
    """
    passes = [each for each in PIPELINES[lowering].passes if lowering != "paged" or each is not fuse_transposed_matmuls]
    if shard is not None:
        passes = [*over_ranks(shard.rank, shard.ranks, shard.is_split_by_inputs), *passes]
    Pipeline(tuple(passes))(model)
    return model


def open_steps(
    model: ir.Model,
    contract: Contract,
    folder: Path,
    *,
    device: torch.device = CPU,
    kernels: Path | None = None,
    tokens: int = 256,
    ranks: Ranks | None = None,
) -> Executor:
    """Cut ``model`` into subgraphs in ``folder`` and open its steps for calls of at most ``tokens`` tokens."""
    fuse_transposed_matmuls(model)
    subgraphs, decoder = cut(model)
    for file, subgraph in subgraphs.items():
        save_model(subgraph, folder / file)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    steps = [step for step in decoder.steps if isinstance(step, Subgraph)]
    wanted = [(folder / step.file, decoder.contract_of(step, contract)) for step in steps]
    opened_subgraphs = open_subgraphs(wanted, device, stream, threads=1)
    opened = {step.file: each for step, each in zip(steps, opened_subgraphs, strict=True)}
    on_device = read_constants(folder / decoder.constants.file, device) if decoder.constants else {}
    largest = [{"batch": 1, "rows": tokens, "tokens": tokens}]
    return Executor(decoder, contract, opened, on_device, Context(device, kernels, threads=1, ranks=ranks), largest)


class Decoder:
    """A decoder on onnxruntime with its caches. Cache entries that no call wrote are NaN."""

    def __init__(
        self,
        folder: Path,
        lowering: Lowering,
        batch: int,
        dtype: str = "float32",
        capacity: int = CAPACITY,
        device: str = "cpu",
        open_engine: Callable[[ir.Model, Contract], Engine] | None = None,
        kv_dtype: str | None = None,
        shard: Shard | None = None,
        position_rows: Literal[0, 3] = 0,
    ) -> None:
        checkpoint = Checkpoint.open(folder)
        spec = replace(ModelSpec.from_hf(checkpoint.config), position_rows=position_rows)
        self.path = folder / f"{lowering}-{dtype}.onnx"
        how: dict[str, Any] = {"dtype": dtype, "capacity": capacity, "kv_dtype": kv_dtype}
        how["uncommitted"] = capacity if lowering == "paged" else 8  # windows may be chunks of prompts there
        model = fused(build_decoder(spec, checkpoint, **how, lowering=lowering, shard=shard), lowering, shard)
        spec = spec if shard is None else shard.spec(spec)
        save_model(model, self.path)
        self.paged = lowering == "paged"
        self.contract = spec.contract(**how, cache="paged" if self.paged else "linear")
        self.device = device
        recurrent = any(binding.name == "state_index" for binding in self.contract.inputs)
        if open_engine is None and self.paged and (recurrent or spec.latent):  # whose operators have no ONNX function
            self.engine: Engine = open_steps(model, self.contract, folder)
        elif open_engine is None:
            self.engine = OnnxRuntimeEngine.open(self.path, self.contract, device=device, threads=1)
        else:
            self.engine = open_engine(model, self.contract)
        self.dtype = getattr(torch, dtype)
        # A float16 key of 3e4 would overflow in the matmul with the query, before any mask; values may be anything.
        poison = {"past_key": 3e4 if dtype == "float32" else 200, "past_value": 3e4}
        poison = dict.fromkeys(poison, 400) if kv_dtype else poison
        # Over a linear cache the owner of a state clears it.
        poison |= {"past_state": float("nan") if self.paged else 0, "past_recent": 3e4}
        per_row = table_width(capacity)
        # Rows own blocks in random order. No row owns block 0.
        order = 1 + torch.randperm(batch * per_row, generator=torch.Generator().manual_seed(5), dtype=torch.int32)
        self.table = order.reshape(batch, per_row)
        self.caches = {
            binding.name: torch.full(
                binding.resolve({"batch": batch, "slots": batch, "blocks": 1 + batch * per_row}),
                poison[binding.name.split(".")[0]],
                dtype=getattr(torch, binding.dtype),
                device=device,
            )
            for binding in self.contract.inputs
            if binding.name.startswith("past_")
        }
        if recurrent:
            self.caches["state_index"] = torch.zeros(batch, dtype=torch.int64, device=device)

    def bind(self, tokens: torch.Tensor, index: Sequence[int], rows: torch.Tensor) -> tuple[object, torch.Tensor]:
        """A bound call and the tensor that its logits will be written into."""
        vocab = int(self.contract["logits"].shape[2])
        logits = torch.full((*rows.shape, vocab), float("nan"), dtype=self.dtype, device=self.device)
        named = window_bindings(self.contract, tokens, rows) | {"write_index": torch.tensor(index)}
        if "state_index" in self.caches:
            named["commit_index"] = named["write_index"]
            if self.paged:
                named |= dict.fromkeys(("prompt_slots", "prompt_state_index"), torch.zeros(0, dtype=torch.int64))
        if self.paged:
            named |= {"block_table": self.table} | no_prompts(self.table)
        on_device = {name: tensor.to(self.device) for name, tensor in named.items()}
        return self.engine.bind(on_device | {"logits": logits} | self.caches), logits

    def __call__(
        self, tokens: Sequence[Sequence[int]], index: Sequence[int], rows: Sequence[Sequence[int]] | None = None
    ) -> torch.Tensor:
        """float32[batch, rows, vocab] for ``tokens`` [batch, query]; all query rows unless ``rows`` says which."""
        query = range(len(tokens[0]))
        call, logits = self.bind(
            torch.tensor(tokens), index, torch.tensor([list(query)] * len(tokens) if rows is None else rows)
        )
        call.run()
        if "state_index" in self.caches:
            self.caches["state_index"].copy_(torch.tensor(index))
        return logits.float().cpu()

    def prefill(self, row: int, tokens: Sequence[int], start: int) -> None:
        """Process prompt tokens of one row over a linear cache as the runtime does, without scores."""
        inputs = {
            "token_ids": torch.tensor([list(tokens)]),
            "write_index": torch.tensor([start]),
            "score_rows": torch.zeros(1, 0, dtype=torch.int64),
            "logits": torch.zeros(1, 0, VOCAB),
        }
        if "state_index" in self.caches:
            inputs["commit_index"] = torch.tensor([start + len(tokens) - 1])
        rows = {name: cache[row : row + 1] for name, cache in self.caches.items()}
        self.engine.bind(inputs | rows).run()
        if "state_index" in self.caches:
            self.caches["state_index"][row] = start + len(tokens) - 1

    def packed(
        self,
        of: Sequence[int],
        windows: Sequence[Sequence[int]],
        index: Sequence[int],
        runs: Sequence[tuple[int, int, Sequence[int]]],
        padding: int = 0,
    ) -> torch.Tensor:
        """float32[tokens, vocab] of a packed call, padding left out.

        Rows with windows of a model with recurrent layers must be the first ones.

        ``windows`` [batch, query] of rows ``of``, then ``runs``, each (row, tokens it has cached, new tokens).
        """
        batch, counts = len(windows), [len(new) for *_, new in runs]
        ids = [token for new in (*windows, *(new for *_, new in runs)) for token in new]
        ends = torch.tensor([0, *counts]).cumsum(0)
        rows = torch.arange(-(-len(ids) // batch) * batch).view(batch, -1).clamp(max=len(ids) - 1)
        logits = torch.full((*rows.shape, VOCAB), float("nan"), dtype=self.dtype, device=self.device)
        named = {
            "token_ids": torch.tensor(ids + [0] * padding),
            "write_index": torch.tensor(index),
            "score_rows": rows,
            "block_table": self.table[list(of)],
            "prompt_rows": torch.tensor(
                [*torch.arange(len(runs)).repeat_interleave(torch.tensor(counts)), *[-1] * padding]
            ),
            "prompt_starts": ends,
            "prompt_index": torch.tensor([start for _, start, _ in runs]),
            "prompt_table": self.table[[row for row, *_ in runs]],
        }
        caches = dict(self.caches)
        if "state_index" in caches:
            covered = caches.pop("state_index")
            slots = torch.tensor([row for row, *_ in runs], dtype=torch.int64)
            named |= {"prompt_slots": slots, "prompt_state_index": covered[slots.to(covered.device)]}
            for row, start, new in runs:
                if new:
                    covered[row] = start + len(new) - 1
            named |= {"state_index": covered[:batch].clone(), "commit_index": named["write_index"]}
            if windows[0]:
                covered[:batch] = named["write_index"]
        dtypes = {binding.name: getattr(torch, binding.dtype) for binding in self.contract.inputs}
        on_device = {name: tensor.to(self.device, dtypes[name]).contiguous() for name, tensor in named.items()}
        self.engine.bind(on_device | {"logits": logits} | caches).run()
        return logits.float().cpu().view(-1, VOCAB)[: len(ids)]
