"""The parts of a decoder that differ between lowerings; export/model/layers.py has the shared parts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from tandemrt.engines.contract.dtypes import FLOAT8
from tandemrt.export.graph.builder import GraphBuilder
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.activation import (
    GatedActivation,
    joined_matmul_and_kernel,
    joined_matmul_and_swiglu,
    separate_matmuls,
)
from tandemrt.export.model.attention import Attention, AttentionMaker, LinearCacheAttention
from tandemrt.export.model.experts import Mixture, expert_branches, experts_operator, optional_inputs_of
from tandemrt.export.model.grouped_attention import GroupedAttention
from tandemrt.export.model.packed_recurrence import PackedCall
from tandemrt.export.model.paged_attention import PagedAttention, optional_inputs
from tandemrt.export.model.paged_latent_attention import PagedLatentAttention
from tandemrt.export.model.recurrence import RecurrentCall
from tandemrt.export.model.rows import gather_rows, gather_tokens
from tandemrt.export.read.recurrent_layers import RecurrentLayers
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.functions import experts, swiglu, window_attention


@dataclass(frozen=True)
class LoweringStrategies:
    """Builders of the parts of a decoder that depend on the lowering.

    Attributes:
        attention: makes the attention that all layers share.
        activation: the matmuls and the activation of an MLP.
        mixture: a mixture of experts.
        joins_shared_expert: it computes a shared expert that is like the others.
        recurrence: makes the call that all recurrent layers share.
        select_rows: selects the rows that get logits, before the last norm.
        select_rows_early: select them after the last attention instead.
        prompts_have_no_logits: a call without rows that get logits is a prompt chunk.
        accepts_padding: attention accepts padded tokens (export/model/row_padding.py).
        scaled_matmuls: float8 weights are multiplied by operators of the project.
        functions: function bodies of the project's other operators, for a model and the dtype of its cache.
    """

    attention: AttentionMaker
    activation: GatedActivation
    mixture: Mixture = field(default=expert_branches, kw_only=True)
    joins_shared_expert: bool = field(default=False, kw_only=True)
    recurrence: Callable[
        [GraphBuilder, ModelSpec, RecurrentLayers, Mapping[str, ir.Value]], RecurrentCall | PackedCall
    ] = field(default=RecurrentCall.over_slots, kw_only=True)
    select_rows: Callable[[GraphBuilder, ir.Value, ir.Value], ir.Value]
    select_rows_early: bool = False
    prompts_have_no_logits: bool = False
    accepts_padding: bool = False
    scaled_matmuls: bool = False
    functions: Callable[[ModelSpec, str], tuple[ir.Function, ...]] = lambda _spec, _kv_dtype: ()


def _paged_attention(
    b: GraphBuilder, spec: ModelSpec, graph_inputs: Mapping[str, ir.Value], *, capacity: int, dtype: str
) -> Attention:
    sizes: dict[str, Any] = {"capacity": capacity, "dtype": dtype}
    if spec.latent is not None:
        return PagedLatentAttention.over_blocks(b, spec, spec.latent, graph_inputs, **sizes)
    return PagedAttention.over_blocks(b, spec, graph_inputs, **sizes)


def _paged_functions(spec: ModelSpec, kv_dtype: str) -> tuple[ir.Function, ...]:
    optional = optional_inputs(spec)
    activation = (swiglu(),) if spec.gated and spec.activation == "silu" else ()
    mixture = (experts(optional_inputs_of(spec)),) if spec.experts is not None else ()
    attention = () if spec.latent is not None else (window_attention(optional, float8=kv_dtype == FLOAT8),)
    return *attention, *activation, *mixture


STRATEGIES: Mapping[Lowering, LoweringStrategies] = {
    "length": LoweringStrategies(LinearCacheAttention.by_length, separate_matmuls, gather_rows),
    "mask": LoweringStrategies(LinearCacheAttention.by_mask, separate_matmuls, gather_rows),
    # As mask; passes write its operators in basic ones (export/passes/basic_operators.py).
    "basic": LoweringStrategies(LinearCacheAttention.by_mask, separate_matmuls, gather_rows),
    "grouped": LoweringStrategies(
        GroupedAttention.in_place,
        joined_matmul_and_kernel,
        gather_rows,
        select_rows_early=True,
        prompts_have_no_logits=True,
        accepts_padding=True,
    ),
    "paged": LoweringStrategies(
        _paged_attention,
        joined_matmul_and_swiglu,
        gather_tokens,
        select_rows_early=True,
        mixture=experts_operator,
        joins_shared_expert=True,
        recurrence=PackedCall.over_slots,
        scaled_matmuls=True,
        functions=_paged_functions,
    ),
}
