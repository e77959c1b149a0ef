"""The graphs of a DFlash2 draft against its definition: two blocks, token by token, for each form of its config."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.dflash2 import build_dflash2, build_selector
from tandemrt.export.model.draft_vocabulary import EMBEDDING, LM_HEAD
from tandemrt.export.read.dflash2 import DFlash2Spec
from tests.dflash2 import Definition, DFlash2Head
from tests.engine.test_dflash_graphs import Exported
from tests.engine.test_eagle3_graphs import VOCAB
from tests.heads import Draw

PLAIN = DFlash2Head(vocab=VOCAB, hidden=32, draft_vocab=VOCAB, block=6, mask_token=60, features=(2, 4, 5))
HEADS = {
    "plain": PLAIN,
    "as z-lab writes it, three taps, a causal layer": replace(PLAIN, flat=True, taps=3),
    "a causal layer": replace(PLAIN, sliding=(True, False), group=4),
}


class WithSelector(Exported):
    """The graphs of a draft on onnxruntime, for one text."""

    def __init__(self, folder: Path, lowering: Lowering) -> None:
        super().__init__(folder, lowering, DFlash2Spec, build_dflash2)
        assert isinstance(self.spec, DFlash2Spec)
        graph = build_selector(self.spec, self.checkpoint, dtype="float32")
        self._selector = self.open(folder / "selector", graph, self.spec.markov(dtype="float32"), steps=False)

    def chain(self, newest: int, begin: int, following: list[int]) -> torch.Tensor:
        """Logits [window, vocab] of the tokens after ``newest``. The first of these tokens are ``following``."""
        block, scores = self.draft(newest, begin, len(following)), []
        for row, before in enumerate([newest, *following[:-1]]):
            inputs = {f"row_{name.removeprefix('row_')}": values[row][None, None] for name, values in block.items()}
            logits = torch.empty(1, 1, self.spec.draft_vocab)
            self._selector.bind({"token_ids": torch.tensor([before]), **inputs, "logits": logits}).run()
            scores.append(logits[0, 0])
        return torch.stack(scores)


@pytest.mark.parametrize(
    ("name", "lowering"), [*((name, "grouped") for name in HEADS), ("plain", "paged"), ("a causal layer", "paged")]
)
def test_tokens_of_a_block_are_chosen_as_the_definition_chooses_them(
    tmp_path: Path, name: str, lowering: Lowering
) -> None:
    head = HEADS[name]
    weights, tables = head.weights(), [Draw(9).matrix(VOCAB, 32) * 4, Draw(8).matrix(VOCAB, 32)]
    stored = weights | {EMBEDDING: tables[0], f"{LM_HEAD}.weight": tables[1]}
    exported, defined = WithSelector(head.save(tmp_path, stored), lowering), Definition(head, weights, *tables)
    features = torch.randn(12, len(head.features) * 32, generator=torch.Generator().manual_seed(5))
    begin = 0
    for accepted in (9, 2):
        exported.context(features[begin : begin + accepted], begin)
        defined.context(features[begin : begin + accepted])
        begin += accepted
        expected, tokens = defined.chain(begin, head.block - 1, lambda logits: int(logits.argmax()))
        scores = exported.chain(begin, begin, tokens)
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
        assert (scores.isfinite().sum(-1) == head.candidates).all()
        assert (defined.draft(begin, head.block - 1).argmax(-1) != expected.argmax(-1)).any(), (
            "the token before matters"
        )
