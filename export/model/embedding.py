"""Rows of the embedding table, which may be stored in 4 to 8 bits."""

from collections.abc import Mapping

import onnx_ir as ir

from tandemrt.export.graph.builder import GraphBuilder, dims_of
from tandemrt.export.graph.low_bit_format import LowBitFormat
from tandemrt.export.graph.weights import Weights
from tandemrt.export.model.rotary import call_positions
from tandemrt.export.read.spec import ModelSpec
from tandemrt.plugins.operators.low_bit_interleaved import OUTPUTS, RUNS
from tandemrt.plugins.operators.tables4 import TABLES


def embedded(b: GraphBuilder, token_ids: ir.Value, w: Weights, module: str, vocab: int, hidden: int) -> ir.Value:
    """Return the embeddings [batch, tokens, hidden] of ``token_ids`` [batch, tokens], in the compute dtype."""
    name = f"{module}.weight"
    form = w.low_bit_format(name)
    if form is None or name in w.checkpoint.tensors:  # a tied head may be a rounded copy of the table
        return b.cast(b.op("Gather", w.stored(name, (vocab, hidden)), token_ids), w.dtype)
    tensors = w.low_bit_tensors([name], [vocab], hidden, form)
    kinds = dict(zip(form.shapes(vocab, hidden), tensors, strict=True))
    rows = _interleaved_rows if form.interleaved else _rows
    embeddings = b.op("Reshape", rows(b, token_ids, kinds, form), b.constant([0, 0, hidden]))
    embeddings.shape = ir.Shape([*dims_of(token_ids), hidden])
    return b.cast(embeddings, w.dtype)


def with_learned_positions(
    b: GraphBuilder,
    embeddings: ir.Value,
    token_ids: ir.Value,
    w: Weights,
    spec: ModelSpec,
    graph_inputs: Mapping[str, ir.Value],
) -> ir.Value:
    """Add the embedding of each token's position over a linear cache, if the model has learned ones.

    Rejected tokens of a draft window and padding may lie beyond the last position. They get that of the last one.
    """
    if spec.position_offset is None:
        return embeddings
    rows = spec.max_length + spec.position_offset
    positions = call_positions(b, graph_inputs["write_index"], token_ids)
    at = b.op("Min", b.op("Add", positions, b.constant(spec.position_offset)), b.constant(rows - 1))
    table = w("model.embed_positions.weight", (rows, spec.hidden))
    total = b.op("Add", embeddings, b.op("Gather", table, at))
    total.shape = embeddings.shape  # a name of the padded dimension is lost above
    return total


def _rows(b: GraphBuilder, ids: ir.Value, kinds: Mapping[str, ir.Value], form: LowBitFormat) -> ir.Value:
    """Return rows of 8-bit integers in the layout of MatMulNBits, [batch, tokens, groups, group size]."""
    integers = b.cast(b.op("Gather", kinds["integers"], ids), "float32")
    scales = b.op("Unsqueeze", b.op("Gather", kinds["scales"], ids), b.constant([-1]))
    return b.op("Mul", b.op("Sub", integers, b.constant(float(1 << (form.bits - 1)), "float32")), scales)


def _interleaved_rows(b: GraphBuilder, ids: ir.Value, kinds: Mapping[str, ir.Value], form: LowBitFormat) -> ir.Value:
    """Return rows of a weight in the layout of low_bit_int8_matmul, [batch, tokens, groups, group size]."""
    tiles, output = b.op("Div", ids, b.constant(OUTPUTS)), b.op("Mod", ids, b.constant(OUTPUTS))
    output = b.op("Unsqueeze", output, b.constant([-1]))

    def row(kind: str, *after: int) -> ir.Value:
        """Return the values of the output [batch, tokens, ..., *after] of ``kind``, which has those of a whole tile."""
        shape, rank = b.constant([0, 0, -1, OUTPUTS, *after]), 4 + len(after)
        whole = b.op("Reshape", b.op("Gather", kinds[kind], tiles), shape)
        by_output = b.op("Transpose", whole, perm=[0, 1, 3, 2, *range(4, rank)])
        return b.op("GatherND", by_output, output, batch_dims=2)

    def of_groups(kind: str, subkind: str) -> ir.Value:
        values = b.op("Unsqueeze", row(kind), b.constant([-1]))  # batch, tokens, scales, 1
        if form.groups_per_scale == 1:
            return values
        subvalues = b.op("Reshape", row(subkind), b.constant([0, 0, -1, form.groups_per_scale]))
        products = b.op("Mul", values, b.cast(subvalues, "float32"))
        return b.op("Reshape", products, b.constant([0, 0, -1, 1]))

    integers = _integers(b, row(f"interleaved{form.group_size}", 4), form.bits)
    if form.table:
        integers = b.op("Gather", b.constant(TABLES[form.table].tolist(), "float32"), b.cast(integers, "int64"))
    integers = b.op("Reshape", integers, b.constant([0, 0, -1, form.group_size]))
    scales = of_groups("scales", "subscales")
    if form.offsets:
        return b.op("Add", b.op("Mul", integers, scales), of_groups("offsets", "suboffsets"))
    middle = b.constant(form.middle, "float32")
    if form.zeros:
        middle = b.cast(b.op("Unsqueeze", row("zeros"), b.constant([-1])), "float32")
    return b.op("Mul", b.op("Sub", integers, middle), scales)


def _integers(b: GraphBuilder, packed: ir.Value, bits: int) -> ir.Value:
    """Return the integers of ``packed`` [batch, tokens, parts of steps, 4] in float32; see ``interleaved``."""
    if bits == 8:
        return b.cast(b.op("Reshape", packed, b.constant([0, 0, -1, RUNS, 4])), "float32")
    more, pairs = bits - 4, RUNS // 2
    parts = b.op("Reshape", packed, b.constant([0, 0, -1, pairs + more, 4]))

    def part(first: int, end: int) -> ir.Value:
        return b.op("Slice", parts, b.constant([first]), b.constant([end]), b.constant([3]))

    def shifted(values: ir.Value, step: int) -> ir.Value:
        """Return the ``step`` lowest bits, the next and so on, of each byte: float32 [batch, tokens, steps, 8, 4]."""
        shifts = b.constant([[shift] for shift in range(0, 8, step)], "uint8")
        each = b.op("BitShift", b.op("Unsqueeze", values, b.constant([4])), shifts, direction="RIGHT")
        lowest = b.op("BitwiseAnd", each, b.constant((1 << step) - 1, "uint8"))
        return b.cast(b.op("Reshape", lowest, b.constant([0, 0, 0, RUNS, 4])), "float32")

    low = shifted(part(0, pairs), 4)
    if not more:
        return low
    return b.op("Add", low, b.op("Mul", shifted(part(pairs, pairs + more), more), b.constant(16.0, "float32")))
