"""The graphs of a DFlash draft against its definition: two draft blocks, the second after a context in parts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from tandemrt.engines.contract.contract import Contract, table_width
from tandemrt.engines.recipe.models import HeadDraft
from tandemrt.engines.validation.errors import BadRecipe
from tandemrt.export.bundle.opened_head import DraftHead
from tandemrt.export.graph.builder import save_model
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.dflash import LOWERINGS, build_context, build_dflash
from tandemrt.export.model.draft_vocabulary import EMBEDDING, LM_HEAD
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.dflash import DFlashSpec
from tandemrt.export.read.spec import ModelSpec
from tandemrt.runtime.caches.kv_cache import no_prompts
from tandemrt.runtime.device.backends.base import Engine
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine
from tests.dflash import BlockHead, Definition
from tests.engine.decoding import fused, open_steps
from tests.engine.test_eagle3_graphs import TARGET, VOCAB
from tests.heads import Draw

CAPACITY = 40
PLAIN = BlockHead(vocab=VOCAB, hidden=32, draft_vocab=37, block=8, mask_token=60, features=(2, 4, 5))
HEADS = {
    "plain": PLAIN,
    "as z-lab writes it, the whole vocabulary": replace(PLAIN, flat=True, draft_vocab=VOCAB),
    "sampled from the anchor": replace(PLAIN, sample_from_anchor=True),
    "five layers of which some are causal, a longer block": replace(
        PLAIN, layers=5, block=16, sliding=(True, False, True, True, False)
    ),
}


class Exported:
    """The graphs of a draft on onnxruntime, for one text."""

    def __init__(
        self,
        folder: Path,
        lowering: Lowering,
        read: type[DFlashSpec] = DFlashSpec,
        build_block: Callable[..., Any] = build_dflash,
    ) -> None:
        checkpoint = Checkpoint.open(folder)
        spec = read.from_hf(checkpoint.config, ModelSpec.from_hf(TARGET))
        self.paged = lowering == "paged"
        sizes = {"dtype": "float32", "capacity": CAPACITY, "cache": "paged" if self.paged else "linear"}
        how = {"dtype": "float32", "capacity": CAPACITY, "lowering": lowering}
        draft, context = spec.contract(**sizes), spec.context(**sizes)
        self.spec, self.checkpoint = spec, checkpoint
        self._draft = self.open(
            folder / "draft", fused(build_block(spec, checkpoint, **how), lowering), draft, steps=self.paged
        )
        self._context = self.open(
            folder / "context", fused(build_context(spec, checkpoint, **how), lowering), context, steps=self.paged
        )
        width = table_width(CAPACITY)
        table = torch.arange(1, width + 1, dtype=torch.int32)[None]
        self._others = {"block_table": table} | no_prompts(table) if self.paged else {}
        self._others |= {
            b.name: torch.full(b.resolve({"batch": 1, "blocks": 1 + width}), 3e4)
            for b in draft.inputs
            if b.name.startswith("past_")
        }

    def open(self, folder: Path, graph: object, contract: Contract, *, steps: bool) -> Engine:
        folder.mkdir()
        for weights in folder.parent.glob("*.safetensors"):
            (folder / weights.name).write_bytes(weights.read_bytes())
        if steps:
            return open_steps(graph, contract, folder)  # type: ignore[arg-type]
        save_model(graph, folder / "model.onnx")  # type: ignore[arg-type]
        return OnnxRuntimeEngine.open(folder / "model.onnx", contract, threads=1)

    def context(self, features: torch.Tensor, begin: int) -> None:
        states = features if self.paged else features[None]
        self._context.bind({"features": states, "write_index": torch.tensor([begin]), **self._others}).run()

    def draft(self, newest: int, begin: int, window: int) -> dict[str, torch.Tensor]:
        """The block's logits [window, draft_vocab] of the tokens after ``newest``, and row_states."""
        ids = torch.tensor([newest, *[self.spec.mask_token] * (self.spec.block_size - 1)])
        first = 0 if self.spec.sample_from_anchor else 1
        outputs = {
            b.name: torch.empty(b.resolve({"batch": 1, "rows": window}))
            for b in self._draft.contract.outputs
            if not b.name.startswith("present_")
        }
        rows = torch.arange(first, first + window)[None]
        inputs = {"token_ids": ids if self.paged else ids[None], "score_rows": rows}
        self._draft.bind({**inputs, "write_index": torch.tensor([begin]), **outputs, **self._others}).run()
        return {name: value[0] for name, value in outputs.items()}


@pytest.mark.parametrize("lowering", ["grouped", "paged"])
@pytest.mark.parametrize("name", HEADS)
def test_blocks_after_a_context_equal_the_definition(tmp_path: Path, name: str, lowering: Lowering) -> None:
    head = HEADS[name]
    weights, tables = head.weights(), [Draw(9).matrix(VOCAB, 32) * 4, Draw(8).matrix(VOCAB, 32)]
    stored = weights | {EMBEDDING: tables[0]}
    stored.setdefault(f"{LM_HEAD}.weight", tables[1])
    exported = Exported(head.save(tmp_path, stored), lowering)
    defined = Definition(head, weights, *tables)
    features = torch.randn(24, len(head.features) * 32, generator=torch.Generator().manual_seed(5))
    begin = 0
    for accepted in (9, 1, 5):  # the next block and context overwrite the entries after them
        exported.context(features[begin : begin + accepted + 3], begin)
        defined.context(features[begin : begin + accepted])
        begin += accepted
        logits, expected = exported.draft(begin, begin, 5)["logits"], defined.draft(begin, 5)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


def test_lowerings_that_a_block_draft_has_no_graph_for_are_rejected(tmp_path: Path) -> None:
    folder = PLAIN.save(tmp_path, PLAIN.weights() | {EMBEDDING: Draw(9).matrix(VOCAB, 32)})
    section = HeadDraft(kind="dflash", checkpoint=folder, num_draft_tokens=5)
    head = DraftHead.open(section, Checkpoint.open(folder), ModelSpec.from_hf(TARGET), dtype="float32", length=32)
    for lowering in LOWERINGS:
        head.require_lowering(lowering)
    others = set(get_args(Lowering)) - set(LOWERINGS)
    assert others
    for lowering in others:
        with pytest.raises(BadRecipe, match=r"block draft .* needs .*; got heads of 16 over cache 'linear'"):
            head.require_lowering(lowering)
