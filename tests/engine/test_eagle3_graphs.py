"""The graphs of EAGLE-3 and P-EAGLE heads against their definition: several drafted tokens, then another round.

One step proves little: a wrong state fed back, a map of the vocabulary taken for ids or a lost cache show from the
second on.
"""

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from tandemrt.engines.contract import contract
from tandemrt.engines.validation.errors import BadCheckpoint
from tandemrt.export.graph.builder import save_model
from tandemrt.export.graph.lowering import Lowering
from tandemrt.export.model.eagle3 import build_eagle3, build_fuse
from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.eagle3 import Eagle3Spec
from tandemrt.export.read.mtp import MtpSpec
from tandemrt.export.read.spec import ModelSpec
from tandemrt.runtime.device.backends.onnxruntime.engine import OnnxRuntimeEngine
from tests.eagle3 import LATENT, Definition, Head
from tests.engine.decoding import fused

CAPACITY, VOCAB, STEPS = 40, 61, 4
TARGET = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
}
PLAIN = Head(vocab=VOCAB, hidden=32, target_layers=8, draft_vocab=37, features=(2, 4, 5))
OUT_OF_ORDER = "ids that do not ascend"
HEADS = {
    "plain": PLAIN,
    OUT_OF_ORDER: PLAIN,
    "the names of SafeAILab": replace(PLAIN, flat=True),
    "no norm before the head": replace(PLAIN, flat=True, norm_before_head=False),
    "its residual normed": replace(PLAIN, norm_before_residual=True),
    "the normed state fed back": replace(PLAIN, norm_output=True),
    "features normed as one, the whole vocabulary": replace(PLAIN, norm_before_fc=True, draft_vocab=VOCAB),
    "three layers of qwen3, each feature normed": replace(
        PLAIN, layers=3, family="qwen3", fc_norm=True, norm_output=True, norm_before_residual=True
    ),
    "two layers, four features": replace(PLAIN, layers=2, features=(7, 0, 3, 1)),
    "latent attention, each feature normed": replace(
        PLAIN, latent=LATENT, fc_norm=True, norm_output=True, norm_before_residual=True
    ),
    "two layers with latent attention": replace(PLAIN, latent=LATENT, layers=2),
    "heads of an odd size": replace(PLAIN, head_dim=8, heads=2, kv_heads=1),
}


class Exported:
    """The graphs of a head on onnxruntime, for one text."""

    def __init__(self, folder: Path, spec: Eagle3Spec | MtpSpec, fuse: ir.Model, head: ir.Model) -> None:
        self.hidden, self.vocab = spec.layer.hidden, spec.draft_vocab
        save_model(fuse, folder / "fuse.onnx")
        save_model(head, folder / "head.onnx")
        fusing = contract.fuse(features=spec.feature_width, hidden=self.hidden, dtype="float32")
        self._fuse = OnnxRuntimeEngine.open(folder / "fuse.onnx", fusing, threads=1)
        bindings = spec.contract(capacity=CAPACITY, dtype="float32")
        self._fed_back = next((binding for binding in bindings.outputs if binding.name == "next_states"), None)
        self._head = OnnxRuntimeEngine.open(folder / "head.onnx", bindings, threads=1)
        self.caches = {b.name: torch.full(b.resolve({"batch": 1}), 3e4) for b in bindings.inputs if "past" in b.name}

    @classmethod
    def of(cls, folder: Path, lowering: Lowering = "grouped", *, parallel: bool = False) -> "Exported":
        """An EAGLE-3 head, or if ``parallel`` one of P-EAGLE."""
        checkpoint = Checkpoint.open(folder)
        spec = Eagle3Spec.from_hf(checkpoint.config, ModelSpec.from_hf(TARGET), parallel=parallel)
        head = fused(build_eagle3(spec, checkpoint, dtype="float32", capacity=CAPACITY, lowering=lowering), lowering)
        fuse = build_fuse(spec, checkpoint, dtype="float32", lowering=lowering)
        return cls(folder, spec, fused(fuse, lowering) if lowering == "basic" else fuse, head)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        states = torch.empty(len(features), self.hidden)
        self._fuse.bind({"features": features, "states": states}).run()
        return states

    def __call__(
        self, tokens: torch.Tensor, states: torch.Tensor, begin: int, *rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed pairs from position ``begin`` on; return logits and states of ``rows``. A prompt has no rows.

        The logits are of the head's own vocabulary. Layers that feed one another return the states of all tokens.
        """
        scored = torch.tensor([rows], dtype=torch.int64)
        outputs = {"logits": torch.empty(1, len(rows), self.vocab)}
        if self._fed_back is not None:
            sizes = {"batch": 1, "rows": len(rows), "query": len(tokens)}
            outputs["next_states"] = torch.empty(self._fed_back.resolve(sizes))
        inputs = {"token_ids": tokens[None], "states": states[None], "write_index": torch.tensor([begin])}
        self._head.bind({**inputs, "score_rows": scored, **outputs, **self.caches}).run()
        return outputs["logits"][0], outputs.get("next_states", outputs["logits"])[0]

    def hold(self, text: torch.Tensor, features: torch.Tensor, states: torch.Tensor, logits: torch.Tensor) -> None:
        """Feed 20 pairs in three calls, and compare with the ``states`` and ``logits`` of the definition."""
        ready, begin = self.fuse(features), 0
        for count in (9, 1, 10):
            end = begin + count
            scores, fed_back = self(text[begin:end], ready[begin:end], begin, *range(count))
            torch.testing.assert_close(scores, logits[begin:end], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(fed_back, self.fuse(states[begin:end]), atol=1e-4, rtol=1e-4)
            begin = end


@pytest.mark.parametrize(
    ("name", "lowering"),
    [(name, each) for name, head in HEADS.items() for each in ("grouped", "basic")[: 1 if head.latent else 2]],
)
def test_rounds_of_drafted_tokens_are_those_of_the_definition(tmp_path: Path, name: str, lowering: Lowering) -> None:
    head = HEADS[name]
    weights = head.weights()
    if name == OUT_OF_ORDER:
        weights["d2t"] = (weights["d2t"] + torch.arange(head.draft_vocab)).flip(0) - torch.arange(head.draft_vocab)
    if name == "heads of an odd size" and lowering == "grouped":
        lowering = "length"
    exported, defined = Exported.of(head.save(tmp_path, weights), lowering), Definition(head, weights)
    draw = torch.Generator().manual_seed(5)
    text = torch.randint(VOCAB, (24,), generator=draw)
    features = torch.randn(24, len(head.features) * 32, generator=draw)
    ids = torch.arange(VOCAB) if head.draft_vocab == VOCAB else weights["d2t"] + torch.arange(head.draft_vocab)
    ascending = ids.argsort()
    states = defined.fuse(features)
    torch.testing.assert_close(exported.fuse(features), states, atol=1e-5, rtol=1e-4)
    exported(text[1:10], states[:9], 0)  # a prompt, in a call of its own
    defined(text[1:10], states[:9])
    begin = 9
    for accepted in (3, 1, 4):  # tokens that a round emits; the next round overwrites the entries after them
        end = begin + accepted
        padded = torch.cat([text[begin + 1 : end + 1], torch.zeros(2, dtype=torch.int64)])
        logits, state = exported(padded, states[begin : end + 2], begin, accepted - 1)
        defined.keep(begin)
        expected, fed_back = (each[-1:] for each in defined(text[begin + 1 : end + 1], states[begin:end]))
        for step in range(STEPS):
            torch.testing.assert_close(logits, expected[:, ascending], atol=1e-4, rtol=1e-4)
            token = ids[expected.argmax(-1)]
            if step < STEPS - 1:
                logits, state = exported(token, state, end + step, 0)
                expected, fed_back = defined(token, fed_back)
        begin = end


@pytest.mark.parametrize(
    "norms",
    [
        {"fc_norm": True, "norm_before_residual": True},
        {"norm_before_fc": True},
        {"flat": True, "norm_before_residual": True},
    ],
)
def test_windows_of_a_parallel_head_are_those_of_the_definition(tmp_path: Path, norms: dict[str, bool]) -> None:
    """Whatever the states of masks hold that are given: the head has its own."""
    head = replace(PLAIN, layers=2, mask_token=VOCAB - 1, **norms)
    weights = head.weights()
    exported, defined = Exported.of(head.save(tmp_path, weights), parallel=True), Definition(head, weights)
    text = torch.randint(VOCAB - 1, (24,), generator=torch.Generator().manual_seed(5))
    features = torch.randn(24, len(head.features) * 32, generator=torch.Generator().manual_seed(6))
    states = defined.fuse(features)
    masks, mask_states = defined.masks(STEPS - 1)
    nothing = torch.full_like(mask_states, float("nan"))
    begin = 0
    for accepted in (9, 1, 4):
        end = begin + accepted
        tokens = torch.cat([text[begin + 1 : end + 1], masks])
        rows = range(accepted - 1, accepted - 1 + STEPS)
        logits, _ = exported(tokens, torch.cat([states[begin:end], nothing]), begin, *rows)
        defined.keep(begin)
        expected, _ = defined(tokens, torch.cat([states[begin:end], mask_states]))
        torch.testing.assert_close(logits, expected[-STEPS:], atol=1e-4, rtol=1e-4)
        begin = end


def test_a_head_without_an_embedding_needs_that_of_the_target(tmp_path: Path) -> None:
    head = replace(PLAIN, own_embedding=False)
    with pytest.raises(BadCheckpoint, match=r"'embed_tokens\.weight' is missing"):
        Exported.of(head.save(tmp_path))
