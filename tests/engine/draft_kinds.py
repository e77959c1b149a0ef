"""The draft kinds of test_drafts.py: random checkpoints, and the drafts of their references."""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests import dflash, dflash2, dspark, eagle3
from tests.dflash import BlockHead
from tests.dflash2 import DFlash2Head
from tests.dspark import DSparkHead
from tests.eagle3 import Head
from tests.makers import VOCAB, tiny_checkpoint
from tests.mtp import MtpLayer, add_layers, drafted

LAYERS, HIDDEN, MASK = 3, 32, 319  # the mask is an id without text
SIZES: Mapping[str, Any] = {"layers": LAYERS, "seed": 1, "head_dim": 32}
# The drafts have two tokens only. A bias makes the target choose between them, so many drafts are accepted.
EAGLE3 = Head(
    vocab=VOCAB, hidden=HIDDEN, target_layers=LAYERS, draft_vocab=2, head_dim=32, features=(2, 1), own_embedding=False
)
PEAGLE = replace(EAGLE3, mask_token=MASK, layers=2)
MTP = MtpLayer(hidden=HIDDEN, target_layers=LAYERS, head_dim=32)
DFLASH = BlockHead(
    vocab=VOCAB,
    hidden=HIDDEN,
    draft_vocab=2,
    block=6,
    mask_token=MASK,
    head_dim=32,
    features=(2, 1),
    sliding=(False, True),
)
DSPARK = DSparkHead(
    vocab=VOCAB, hidden=HIDDEN, draft_vocab=2, block=5, mask_token=MASK, head_dim=32, features=(2, 1), markov="rnn"
)
DFLASH2 = DFlash2Head(
    vocab=VOCAB, hidden=HIDDEN, draft_vocab=VOCAB, block=6, mask_token=MASK, head_dim=32, features=(2, 1)
)


class Drafts(Protocol):
    """The greedy drafts after a text."""

    def drafts(self, text: Sequence[int], window: int) -> list[int]: ...


@dataclass(frozen=True)
class Kind:
    """A draft kind under test.

    Attributes:
        save: writes the checkpoint next to the target's and returns the drafts of its reference.
        known: tokens that it drafts most.
        late: over a paged cache, it processes a prompt after the round in which the prompt ends.
        least: tokens of a text after which it drafts.
        lookahead: tokens after a block of the cache that the block depends on.
        with_target: the checkpoint is also the target's.
    """

    save: Callable[[Path, "Target"], Drafts]
    window: int
    known: Callable[[Path], Sequence[int]] = lambda _folder: ()
    late: bool = True
    least: int = 1
    lookahead: int = 0
    with_target: bool = False


class Target:
    """The target by transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Its embedding and its head."""
        return self.model.model.embed_tokens.weight, self.model.lm_head.weight

    def features(self, tokens: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """[tokens, …]: the inputs of ``layers``."""
        states = self.model(tokens[None], output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0] for layer in layers], -1)


class Eagle3Drafts:
    def __init__(self, folder: Path, target: Target) -> None:
        EAGLE3.save(folder)
        self._target, self._weights = target, EAGLE3.weights()
        self._ids = self._weights["d2t"] + torch.arange(EAGLE3.draft_vocab)

    @torch.no_grad()
    def drafts(self, text: Sequence[int], window: int) -> list[int]:
        tokens = torch.tensor(text)
        head = eagle3.Definition(EAGLE3, self._weights, self._target.model.model.embed_tokens.weight)
        fused = head.fuse(self._target.features(tokens, EAGLE3.features))
        drafted: list[int] = []
        logits, state = (each[-1:] for each in head(tokens[1:], fused[:-1]))
        while len(drafted) < window:
            drafted.append(int(self._ids[logits.argmax()]))
            logits, state = head(torch.tensor(drafted[-1:]), state)
        return drafted


class PEagleDrafts:
    def __init__(self, folder: Path, target: Target) -> None:
        PEAGLE.save(folder)
        self._target, self._weights = target, PEAGLE.weights()
        self._ids = self._weights["d2t"] + torch.arange(PEAGLE.draft_vocab)

    @torch.no_grad()
    def drafts(self, text: Sequence[int], window: int) -> list[int]:
        tokens = torch.tensor(text)
        head = eagle3.Definition(PEAGLE, self._weights, self._target.model.model.embed_tokens.weight)
        fused = head.fuse(self._target.features(tokens, PEAGLE.features))
        masks, states = head.masks(window - 1)
        logits, _ = head(torch.cat([tokens[1:], masks]), torch.cat([fused[:-1], states]))
        drafted: list[int] = self._ids[logits[-window:].argmax(-1)].tolist()
        return drafted


class MtpDrafts:
    """The layers follow those of their target in one checkpoint; the last one drafts all further tokens."""

    def __init__(self, folder: Path, target: Target) -> None:
        shutil.copytree(target.folder, folder)
        self._layers = add_layers(folder, [MTP, replace(MTP, at=1)])
        self._target = target

    @torch.no_grad()
    def drafts(self, text: Sequence[int], window: int) -> list[int]:
        tokens = torch.tensor(text)
        states = self._target.features(tokens, [LAYERS])[:-1]
        return drafted(self._layers, self._target.tables, tokens, states, window)[1]


class DFlashDrafts:
    def __init__(self, folder: Path, target: Target) -> None:
        DFLASH.save(folder)
        self._target, self._weights = target, DFLASH.weights()
        self._ids = self._weights["d2t"] + torch.arange(DFLASH.draft_vocab)

    @torch.no_grad()
    def drafts(self, text: Sequence[int], window: int) -> list[int]:
        head = dflash.Definition(DFLASH, self._weights, *self._target.tables)
        if len(text) > 1:
            head.context(self._target.features(torch.tensor(text[:-1]), DFLASH.features))
        tokens: list[int] = self._ids[head.draft(text[-1], window).argmax(-1)].tolist()
        return tokens


class DSparkDrafts:
    def __init__(self, folder: Path, target: Target) -> None:
        DSPARK.save(folder)
        self._target, self._weights = target, DSPARK.weights()
        self._ids = self._weights["d2t"] + torch.arange(DSPARK.draft_vocab)

    @torch.no_grad()
    def drafts(self, text: Sequence[int], window: int) -> list[int]:
        return self._head(text).chain(text[-1], window, lambda logits: int(self._ids[logits.argmax()]))[1]

    @torch.no_grad()
    def probs(self, text: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """float32 [drafts, vocabulary]: the probabilities after ``text`` if ``drafts`` are drawn from them."""
        drawn = iter(drafts)
        logits = self._head(text).chain(text[-1], len(drafts), lambda _: next(drawn))[0]
        return torch.zeros(len(drafts), VOCAB).index_add_(1, self._ids, logits.softmax(-1))

    def _head(self, text: Sequence[int]) -> dspark.Definition:
        """The head with the features of ``text`` but its last token."""
        head = dspark.Definition(DSPARK, self._weights, *self._target.tables)
        if len(text) > 1:
            head.context(self._target.features(torch.tensor(text[:-1]), DSPARK.features))
        return head


class DFlash2Drafts:
    """The head scores two tokens far above the others."""

    def __init__(self, folder: Path, target: Target) -> None:
        head = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(2))
        head[[70, 71]] *= 30
        self._target, self._weights = target, DFLASH2.weights() | {"lm_head.weight": head}
        DFLASH2.save(folder, self._weights)

    @torch.no_grad()
    def drafts(self, text: Sequence[int], window: int) -> list[int]:
        head = dflash2.Definition(DFLASH2, self._weights, *self._target.tables)
        if len(text) > 1:
            head.context(self._target.features(torch.tensor(text[:-1]), DFLASH2.features))
        return head.chain(text[-1], window, lambda logits: int(logits.argmax()))[1]


class PardDrafts:
    """A draft of the target's own weights: the first token of a window is mostly right, the others are anything."""

    def __init__(self, folder: Path, target: Target) -> None:
        pard(folder)
        self._target = target

    @torch.no_grad()
    def drafts(self, text: Sequence[int], window: int) -> list[int]:
        logits = self._target.model(torch.tensor([[*text, *[MASK] * (window - 1)]])).logits[0]
        tokens: list[int] = logits[-window:].argmax(-1).tolist()
        return tokens


def pard(folder: Path, token: Any = MASK, **config: Any) -> Path:
    """Write the checkpoint of a PARD draft, with ``config`` and its ``pard_token``. Returns the folder."""
    path = tiny_checkpoint(folder, **SIZES) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": token, "spd_type": "pard"} | config))
    return folder


def two_known(folder: Path) -> Sequence[int]:
    """The target ids of a head with two tokens."""
    token_ids: list[int] = (load_file(folder / "model.safetensors")["d2t"] + torch.arange(2)).tolist()
    return token_ids


def two_likely(folder: Path) -> Sequence[int]:
    """What a layer drafts whose last norm has one large number."""
    scores = load_file(folder / "model.safetensors")["lm_head.weight"][:, 3]
    return [int(scores.argmax()), int(scores.argmin())]


KINDS = {
    "eagle3": Kind(Eagle3Drafts, window=4, known=two_known, lookahead=1),
    "peagle": Kind(PEagleDrafts, window=4, known=two_known, lookahead=1),
    "mtp": Kind(MtpDrafts, window=4, known=two_likely, lookahead=2, with_target=True),
    "pard": Kind(PardDrafts, window=5, late=False, least=0),
    "dflash": Kind(DFlashDrafts, window=5, known=two_known, least=0),
    "dflash2": Kind(DFlash2Drafts, window=5, known=lambda _folder: (70, 71), least=0),
    "dspark": Kind(DSparkDrafts, window=5, known=two_known, least=0),
}
