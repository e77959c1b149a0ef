"""The graphs of a DSpark draft against its definition: two blocks, token by token, each form of the Markov head."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.draft_vocabulary import EMBEDDING, LM_HEAD
from tandemrt.export.model.markov import build_markov
from tandemrt.export.read.dspark import DSparkSpec
from tests.dspark import Definition, DSparkHead
from tests.engine.test_dflash_graphs import Exported
from tests.engine.test_eagle3_graphs import VOCAB
from tests.heads import Draw

PLAIN = DSparkHead(vocab=VOCAB, hidden=32, draft_vocab=37, block=6, mask_token=60, features=(2, 4, 5))
HEADS = {
    "vanilla": PLAIN,
    "vanilla, the anchor left out": replace(PLAIN, sample_from_anchor=False),
    "gated, as DeepSpec writes it": replace(PLAIN, markov="gated", flat=True, draft_vocab=VOCAB),
    "rnn": replace(PLAIN, markov="rnn"),
    "rnn, as SpecForge writes it": replace(PLAIN, markov="rnn", flat=True, nested=True, draft_vocab=VOCAB),
}


class WithMarkov(Exported):
    """The graphs of a draft on onnxruntime, for one text."""

    def __init__(self, folder: Path, attention: Lowering) -> None:
        super().__init__(folder, attention, DSparkSpec)
        assert isinstance(self.spec, DSparkSpec)
        graph = build_markov(self.spec, self.checkpoint, dtype="float32")
        self._markov = self.open(folder / "markov", graph, self.spec.markov(dtype="float32"), steps=False)
        self._remembers = self.spec.markov_head_type == "rnn"

    def chain(self, newest: int, begin: int, following: list[int]) -> torch.Tensor:
        """Logits [window, vocab] of the tokens after ``newest``. The first of these tokens are ``following``."""
        block, memory, scores = self.draft(newest, begin, len(following)), torch.zeros(1, PLAIN.rank), []
        for row, before in enumerate([newest, *following[:-1]]):
            inputs = {f"row_{name.removeprefix('row_')}": values[row][None, None] for name, values in block.items()}
            outputs = {"logits": torch.empty(1, 1, self.spec.draft_vocab)}
            if self._remembers:
                inputs["memory"], outputs["next_memory"] = memory, torch.empty_like(memory)
            self._markov.bind({"token_ids": torch.tensor([before]), **inputs, **outputs}).run()
            memory = outputs.get("next_memory", memory)
            scores.append(outputs["logits"][0, 0])
        return torch.stack(scores)


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "grouped") for name in HEADS), ("vanilla, the anchor left out", "paged"), ("rnn", "paged")],
)
def test_tokens_of_a_block_are_drawn_as_the_definition_draws_them(
    tmp_path: Path, name: str, attention: Lowering
) -> None:
    head = HEADS[name]
    weights, tables = head.weights(), [Draw(9).matrix(VOCAB, 32) * 4, Draw(8).matrix(VOCAB, 32)]
    stored = weights | {EMBEDDING: tables[0]}
    stored.setdefault(f"{LM_HEAD}.weight", tables[1])
    exported, defined = WithMarkov(head.save(tmp_path, stored), attention), Definition(head, weights, *tables)
    features = torch.randn(12, len(head.features) * 32, generator=torch.Generator().manual_seed(5))
    ids = torch.arange(VOCAB) if head.draft_vocab == VOCAB else weights["d2t"] + torch.arange(head.draft_vocab)
    window, begin = head.block if head.sample_from_anchor else head.block - 1, 0
    for accepted in (9, 2):
        exported.context(features[begin : begin + accepted], begin)
        defined.context(features[begin : begin + accepted])
        begin += accepted
        expected, tokens = defined.chain(begin, window, lambda logits: int(ids[logits.argmax()]))
        scores = exported.chain(begin, begin, tokens)
        torch.testing.assert_close(scores, expected, atol=1e-4, rtol=1e-4)
        assert (defined.draft(begin, window) - expected).abs().amax(-1).min() > 0.1, "the token in front matters"
