"""A decoder in pieces on a CUDA device: onnxruntime computes the products, kernels of our own what stands between.

Nothing waits and nothing is computed on the host, so that a run, all pieces and kernels of it, can be captured into a
CUDA graph.
"""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from tandemrt.engines import segments as names
from tandemrt.engines.bundle import Bundle
from tandemrt.engines.contract import Contract
from tandemrt.engines.errors import InternalError
from tandemrt.engines.manifest import EngineName, Segments
from tandemrt.plugins.kernels.attention import AttentionLauncher
from tandemrt.plugins.kernels.attention_plan import Workspace
from tandemrt.plugins.kernels.module import KernelModule
from tandemrt.plugins.kernels.swiglu import SwigluLauncher
from tandemrt.runtime.backends.base import Call, check_tensors
from tandemrt.runtime.backends.pieces import Piece, open_piece, read_constants

_LOADING = 4  # pieces that load at a time: each holds its weights in host memory meanwhile


class SegmentedEngine:
    """A decoder cut as engines/segments.py says. Buffers between the pieces hold ``tokens`` tokens and are shared by
    all layers, so runs must follow one another on one stream."""

    capturable = True

    def __init__(
        self,
        pieces: tuple[Piece, ...],
        constants: Mapping[str, torch.Tensor],
        kernels: Path,
        segments: Segments,
        contract: Contract,
        device: torch.device,
        tokens: int,
    ) -> None:
        self.contract = contract
        self.device = device
        self._pieces = pieces
        self._constants = constants
        self._segments = segments
        self._tokens = tokens
        self._layers = len(segments.sliding_window)
        self._attention = KernelModule.open(kernels, "attention", device)
        self._swiglu = KernelModule.open(kernels, "swiglu", device)
        self._workspace = Workspace(device)
        self._widths = {_kind(name): width for piece in pieces for name, width in piece.widths.items()}
        dtype = getattr(torch, contract["logits"].dtype)
        self._buffers = {
            kind: torch.empty(tokens * width, dtype=dtype, device=device)
            for kind, width in self._widths.items()
            if kind not in {binding.name for binding in (*contract.inputs, *contract.outputs)}
        }

    @classmethod
    def open(cls, bundle: Bundle, name: EngineName, device: torch.device) -> "SegmentedEngine":
        """Open the pieces of engine ``name``. Raises BackendUnavailable or BadBundle as OnnxRuntimeEngine.open does."""
        segments, limits = bundle.engine(name).segments, bundle.limits
        assert segments is not None
        stream = torch.cuda.current_stream(device).cuda_stream  # of this thread, not of those that load
        with ThreadPoolExecutor(_LOADING) as pool:
            files = [bundle.folder / file for file in segments.files]
            pieces = tuple(pool.map(lambda file: open_piece(file, device, stream), files))
        constants = {
            name: tensor.to(device) for name, tensor in read_constants(bundle.folder / segments.constants).items()
        }
        tokens = max(limits.batch * max(2, limits.window + 1), limits.prefill_chunk)
        return cls(pieces, constants, bundle.kernels_dir, segments, bundle.contract(name), device, tokens)

    def bind(self, tensors: Mapping[str, torch.Tensor], *, filters: bool = True) -> "SegmentedCall":  # noqa: ARG002
        """See Engine.bind. Raises InternalError for a call with more tokens than the buffers between pieces hold."""
        check_tensors(self.contract, tensors, self.device)
        batch, query = tensors["token_ids"].shape
        rows = tensors["score_rows"].shape[1]
        if batch * max(query, rows) > self._tokens:
            raise InternalError(f"bind: at most {self._tokens} tokens in one call, received {batch} x {query}")
        last = self._layers - 1
        short = {names.residual(last), names.gate_up(last), names.activated(last)}  # rows without logits have ended

        def value(name: str) -> torch.Tensor:
            if name in tensors:
                return tensors[name]
            shape = (batch, rows if name in short else query, self._widths[_kind(name)])
            return self._buffers[_kind(name)][: math.prod(shape)].view(shape)

        calls: list[Call] = []
        for index, piece in enumerate(self._pieces):
            calls.append(piece.bind({name: value(name) for name in (*piece.inputs, *piece.outputs)}))
            layer = index // 2
            if layer < self._layers:
                calls.append(self._mix(layer, value, tensors) if index % 2 == 0 else self._activate(layer, value))
        return SegmentedCall(tuple(calls), dict(tensors))

    def _mix(self, layer: int, value: Any, tensors: Mapping[str, torch.Tensor]) -> Call:
        given, constants = self._segments, self._constants
        return AttentionLauncher(
            self._attention,
            value(names.qkv(layer)),
            tensors[f"past_key.{layer}"],
            tensors[f"past_value.{layer}"],
            tensors["block_table"],
            tensors["write_index"],
            constants[names.COSINE],
            constants[names.SINE],
            constants.get(names.q_norm(layer)),
            constants.get(names.k_norm(layer)),
            value(names.mixed(layer)),
            heads=given.heads,
            kv_heads=given.kv_heads,
            scale=given.scale,
            workspace=self._workspace,
            epsilon=given.epsilon,
            sliding_window=given.sliding_window[layer],
        )

    def _activate(self, layer: int, value: Any) -> Call:
        return SwigluLauncher(self._swiglu, value(names.gate_up(layer)), value(names.activated(layer)))


class SegmentedCall:
    """All pieces and kernels of a decoder, with their tensors bound."""

    def __init__(self, calls: tuple[Call, ...], keep: Mapping[str, torch.Tensor]) -> None:
        self._calls = calls
        self._keep = keep  # the pieces hold bare addresses

    def run(self) -> None:
        """Enqueue the decoder on the device's current stream."""
        for call in self._calls:
            call.run()


def _kind(name: str) -> str:
    return name.partition(".")[0]
