"""What drafts are trained on is what drafting computes."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tandemrt.export.read.checkpoint import Checkpoint
from tandemrt.export.read.dflash import DFlashSpec
from tandemrt.export.read.draft_heads import target_ids
from tandemrt.export.read.eagle3 import Eagle3Spec
from tandemrt.export.read.mtp import MtpSpec
from tandemrt.export.read.spec import ModelSpec
from tests import dflash, eagle3, mtp
from tests.engine.training import model, shaken
from tests.mtp import MtpLayer
from tools.drafts.chains import Rows
from tools.drafts.dflash import DFlash
from tools.drafts.eagle3 import Eagle3
from tools.drafts.fit import fit
from tools.drafts.kinds import Kind, Sizes, untrained
from tools.drafts.mtp import Mtp
from tools.drafts.pard import Pard
from tools.drafts.peagle import PEagle
from tools.drafts.texts import Batch, Text, batches, write

FEATURES, DRAFTED, MASK = (1, 3, 5), torch.arange(0, 64, 2), 63
EAGLE3 = eagle3.Head(vocab=64, hidden=32, target_layers=6, draft_vocab=32, features=FEATURES, own_embedding=False)
PEAGLE = replace(EAGLE3, mask_token=MASK, layers=2)
MTP = MtpLayer(hidden=32, target_layers=6)
DFLASH = dflash.BlockHead(vocab=64, hidden=32, draft_vocab=32, block=5, mask_token=MASK, heads=2, kv_heads=1)


@pytest.fixture(scope="module")
def target() -> Any:
    return model(layers=6, seed=3).requires_grad_(False)


@pytest.fixture(scope="module")
def batch() -> Batch:
    ids = torch.randint(63, (2, 14), generator=torch.Generator().manual_seed(4))
    ids[1, 12:] = -1
    return Batch(ids, torch.tensor([3, 5]))


@pytest.fixture(scope="module")
def texts(target: Any) -> list[Text]:
    torch.manual_seed(0)
    return write(target, [[1 + at] * 3 for at in range(4)], ends=62, longest=9, together=2)


def read(target: Any, text: torch.Tensor) -> torch.Tensor:
    states = target(text[None].clamp(min=0), output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in FEATURES], -1)


@torch.no_grad()
def test_each_step_of_eagle3_sees_what_a_drafted_token_sees(tmp_path: Path, target: Any, batch: Batch) -> None:
    head = shaken(Eagle3(target, DRAFTED, features=FEATURES, width=48))
    ids = batch.ids.clamp(min=0)
    features = torch.stack([read(target, row) for row in batch.ids])
    steps = head(ids, features, 3)
    head.save(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = Eagle3Spec.from_hf(checkpoint.config, ModelSpec.from_hf(target.config.to_dict()))
    drafted = target_ids(checkpoint, spec)
    assert drafted is not None
    assert drafted.tolist() == DRAFTED.tolist()
    weights = {name: each.float() for name, each in load_file(tmp_path / "model.safetensors").items()}
    for row, place in ((0, 3), (1, 8)):
        defined = eagle3.Definition(EAGLE3, weights, target.model.embed_tokens.weight)
        logits, state = defined(ids[row, 1 : place + 2], defined.fuse(features[row])[: place + 1])
        for step, seen in enumerate(steps):
            torch.testing.assert_close(seen[row, place], logits[-1], atol=1e-4, rtol=1e-3)
            logits, state = defined(ids[row, place + 2 + step, None], state[-1:])


@torch.no_grad()
def test_a_block_of_dflash_sees_what_a_drafted_block_sees(tmp_path: Path, target: Any, batch: Batch) -> None:
    draft = shaken(DFlash(target, DRAFTED, features=FEATURES, heads=2, width=48, mask=MASK, block=5))
    anchors = torch.tensor([[3, 9, 9], [11, 4, 0]])
    features = torch.stack([read(target, row) for row in batch.ids])
    drafted = draft(batch.ids.clamp(min=0), features, anchors)
    draft.save(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = DFlashSpec.from_hf(checkpoint.config, ModelSpec.from_hf(target.config.to_dict()))
    assert (spec.block_size, spec.mask_token, spec.causal) == (5, MASK, (False, False))
    weights = {name: each.float() for name, each in load_file(tmp_path / "model.safetensors").items()}
    for row, places in enumerate(anchors.tolist()):
        for at, place in enumerate(places):
            defined = dflash.Definition(DFLASH, weights, target.model.embed_tokens.weight, target.lm_head.weight)
            if place:
                defined.context(features[row, :place])
            logits = defined.draft(int(batch.ids[row, place]), window=4)
            torch.testing.assert_close(drafted[row, at], logits, atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_a_mask_of_pard_sees_the_text_up_to_its_place_and_the_masks_in_front_of_it(
    tmp_path: Path, target: Any, batch: Batch
) -> None:
    draft = model(layers=2, seed=5)
    learner = Pard(target, draft, Tokenizer(), mask=MASK, window=4, kept=0.8)
    shaken(draft)
    rows = learner.rows(batch)
    logits = draft.lm_head(learner.states(batch.ids.clamp(min=0), rows))
    learner.save(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert saved.config.pard_token == MASK
    for row, column, anchor, depth in masks(rows):
        text = torch.cat([batch.ids[row, : anchor + 1], torch.tensor([MASK] * depth)])
        torch.testing.assert_close(logits[row, column], saved(text[None]).logits[0, -1], atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(logits[0, :14], saved(batch.ids[:1]).logits[0], atol=1e-4, rtol=1e-3)


def masks(rows: Rows) -> list[tuple[int, int, int, int]]:
    """Row, column, anchor and depth of every mask after its text; a chain has up to three texts."""
    places = ((rows.depths > 0) & (rows.anchors >= 0)).nonzero()
    anchors, depths = (each[tuple(places.T)] for each in rows)
    assert set(depths.tolist()) == {1, 2, 3}
    return torch.cat([places, anchors[:, None], depths[:, None]], 1).tolist()


@torch.no_grad()
def test_a_mask_of_peagle_sees_the_pairs_up_to_its_place_and_the_masks_in_front_of_it(
    tmp_path: Path, target: Any, batch: Batch
) -> None:
    head = shaken(PEagle(target, DRAFTED, features=FEATURES, width=48, mask=MASK, window=4, kept=0.8))
    features = torch.stack([read(target, row) for row in batch.ids])
    pairs = head.pairs(batch)
    rows = head.rows(pairs)
    logits = head.lm_head(head.states(pairs.ids.clamp(min=0), features[:, :-1], rows))
    head.save(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    spec = Eagle3Spec.from_hf(checkpoint.config, ModelSpec.from_hf(target.config.to_dict()), parallel=True)
    assert (spec.mask_token, spec.layer.layers, spec.features) == (MASK, 2, FEATURES)
    weights = {name: each.float() for name, each in load_file(tmp_path / "model.safetensors").items()}
    for row, column, anchor, depth in masks(rows):
        defined = eagle3.Definition(PEAGLE, weights, target.model.embed_tokens.weight)
        tokens, states = defined.masks(depth)
        fused = torch.cat([defined.fuse(features[row, : anchor + 1]), states])
        drafted, _ = defined(torch.cat([pairs.ids[row, : anchor + 1], tokens]), fused)
        torch.testing.assert_close(logits[row, column], drafted[-1], atol=1e-4, rtol=1e-3)
        torch.testing.assert_close(logits[row, anchor], drafted[anchor], atol=1e-4, rtol=1e-3)


@torch.no_grad()
def test_each_step_of_mtp_sees_what_a_drafted_token_sees(tmp_path: Path, target: Any, batch: Batch) -> None:
    head = shaken(Mtp(target))
    ids = batch.ids.clamp(min=0)
    features = torch.stack([target.model(row[None]).last_hidden_state[0] for row in ids])
    steps = head(ids, features, 3)
    head.save(tmp_path)
    spec, *_ = MtpSpec.from_checkpoint(
        Checkpoint.open(tmp_path), ModelSpec.from_hf(target.config.to_dict()), num_draft_tokens=3
    )
    assert (spec.features, spec.embedding_first, spec.published) == ((6,), True, 1)
    weights = {name: each.float() for name, each in load_file(tmp_path / "model.safetensors").items()}
    for row, place in ((0, 3), (1, 8)):
        defined = mtp.Definition(MTP, weights, target.model.embed_tokens.weight, target.lm_head.weight, eps=1e-5)
        logits, state = defined(ids[row, 1 : place + 2], features[row, : place + 1])
        for step, seen in enumerate(steps):
            torch.testing.assert_close(seen[row, place], logits[-1], atol=1e-4, rtol=1e-3)
            logits, state = defined(ids[row, place + 2 + step, None], state[-1:])


@torch.no_grad()
def test_mtp_begins_as_the_targets_last_layer(target: Any, batch: Batch) -> None:
    ids = batch.ids.clamp(min=0)
    normed = target.model(ids).last_hidden_state
    places = torch.arange(normed.shape[1] - 1)[None]
    once_more = target.model.layers[-1](
        functional.rms_norm(normed[:, :-1], normed.shape[-1:], eps=1e-5),
        position_embeddings=target.model.rotary_emb(normed, places),
    )
    torch.testing.assert_close(Mtp(target)(ids, normed, 1)[0], target.lm_head(target.model.norm(once_more)))


def test_the_labels_of_a_row_are_the_targets_predictions_after_its_tokens(target: Any, batch: Batch) -> None:
    best, every = target(batch.ids.clamp(min=0)).logits.argmax(-1), torch.arange(64)

    def sure(tokens: torch.Tensor) -> torch.Tensor:
        return (100.0 * functional.one_hot(tokens, 64)).requires_grad_()

    def states_after(rows: Rows, first: int) -> torch.Tensor:
        return sure(best.gather(1, (rows.places + first).clamp(max=13)))

    fed_back: list[Any] = [Eagle3(target, every, features=FEATURES, width=48), Mtp(target)]
    for head in fed_back:  # a pair of the first step has the text up to its second token
        head.forward = lambda *arguments: [sure(best[:, 1 + step :]) for step in range(arguments[-1])]
    pard: Any = Pard(target, model(layers=2, seed=5), Tokenizer(), mask=MASK, window=4)
    pard.states = lambda *arguments: states_after(arguments[-1], 0)
    peagle: Any = PEagle(target, every, features=FEATURES, width=48, mask=MASK, window=4)
    peagle.states = lambda *arguments: states_after(arguments[-1], 1)
    pard.draft.lm_head = peagle.lm_head = torch.nn.Identity()
    for draft in (*fed_back, pard, peagle):
        assert [float(each) for each in draft.losses(batch)[1]] == [1.0] * 4


class Tokenizer:
    """Files of a tokenizer matter to no test here."""

    def save_pretrained(self, folder: Path) -> None: ...


@pytest.mark.parametrize("kind", Kind)
def test_a_draft_learns_what_its_target_writes(tmp_path: Path, target: Any, texts: list[Text], kind: Kind) -> None:
    torch.manual_seed(0)
    smaller = partial(model, layers=2, seed=5)
    sizes = Sizes(features=FEATURES, mask=MASK, width=48, heads=2, smaller=smaller)
    draft = untrained(kind, target, Tokenizer(), sizes, DRAFTED, seed=0)
    batch = next(batches(texts, 4, 0, "cpu"))
    before = draft.losses(batch)[0].item()
    fit(draft, batches(texts, 4, 0, "cpu"), 12, 5e-3, tmp_path / "draft")
    assert draft.losses(batch)[0].item() < 0.7 * before
    assert (tmp_path / "draft" / "model.safetensors").exists()


def test_an_interrupted_save_leaves_the_draft_that_was_saved_before(
    tmp_path: Path, target: Any, texts: list[Text], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = DFlash(target, DRAFTED, features=FEATURES, heads=2, width=48, mask=MASK, block=5)
    drawn, out = batches(texts, 4, 0, "cpu"), tmp_path / "draft"
    fit(draft, drawn, 1, 5e-3, out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    save = draft.save

    def stopped(folder: Path) -> None:
        save(folder)
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    monkeypatch.setattr(draft, "save", stopped)
    with pytest.raises(KeyboardInterrupt):
        fit(draft, drawn, 1, 5e-3, out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before
    assert [each.name for each in tmp_path.iterdir()] == ["draft"]
