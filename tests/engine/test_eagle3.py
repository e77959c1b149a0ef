"""EAGLE-3 in rounds: what is drafted is what the head's definition drafts of the target's states, and changes no text.

The target's states come from transformers, the head's definition from its paper (tests/eagle3.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandemrt import LLM, RequestOutput, SamplingParams
from tandemrt.engines.recipe import Recipe
from tandemrt.export.build import build
from tandemrt.runtime.caches.kv_cache import BlockTable
from tandemrt.runtime.round.capture import capture
from tandemrt.runtime.round.round import Round
from tests.eagle3 import Definition, Head
from tests.engine.test_invisible import REQUESTS, told
from tests.engine.test_paged_rounds import PAGED
from tests.makers import VOCAB, tiny_checkpoint, write_recipe

# It knows two tokens only. Where a bias makes the target choose among them, every second draft is accepted.
HEAD = Head(vocab=VOCAB, hidden=32, target_layers=3, draft_vocab=2, head_dim=32, features=(2, 1), own_embedding=False)
KNOWN = (HEAD.weights()["d2t"] + torch.arange(2)).tolist()
AMONG = {"logit_bias": dict.fromkeys(KNOWN, 30.0), "ignore_eos": True}
WINDOW = 4
ASKED = [
    *REQUESTS[1:9:3],
    ("among two", {"temperature": 0.0, "max_tokens": 30, **AMONG}),
    ("of them " * 20, {"temperature": 0.8, "seed": 3, "max_tokens": 60, **AMONG}),
    ("and of these " * 12, {"temperature": 0.5, "seed": 4, "max_tokens": 60, **AMONG}),
]
SHARED = [(7 * i) % 256 for i in range(150)]  # two full blocks and a bit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("eagle3")
    tiny_checkpoint(folder / "target", layers=3, seed=1, head_dim=32)
    HEAD.save(folder / "head")
    return folder


@pytest.fixture(scope="module")
def bundles(folder: Path) -> dict[str, Path]:
    drafting = f'kind = "eagle3"\ncheckpoint = "{folder / "head"}"\nwindow = {WINDOW}'

    def built(name: str, backend: str) -> Path:
        recipe = write_recipe(
            folder / f"{name}.toml", target=folder / "target", drafting=drafting, backend=backend, length=256
        )
        return build(Recipe.load(recipe), folder / name).folder

    return {"linear": built("linear", 'name = "onnxruntime-cpu"'), "paged": built("paged", PAGED)}


@pytest.fixture(scope="module")
def opened(bundles: dict[str, Path]) -> Iterator[dict[str, LLM]]:
    with ExitStack() as stack:
        yield {
            kind: stack.enter_context(LLM(bundle, device="cpu", threads=1, overlap=kind == "paged"))
            for kind, bundle in bundles.items()
        }


@pytest.fixture(params=["linear", "paged"])
def llm(opened: dict[str, LLM], request: pytest.FixtureRequest) -> LLM:
    return opened[request.param]


def answers(llm: LLM, requests: Sequence[tuple[str, dict[str, Any]]], **params: Any) -> list[RequestOutput]:
    return llm.generate([prompt for prompt, _ in requests], [SamplingParams(**asked | params) for _, asked in requests])


@pytest.fixture(scope="module")
def plain(opened: dict[str, LLM]) -> list[Any]:
    return [told(output) for output in answers(opened["linear"], ASKED, window=0)]


@pytest.fixture(scope="module")
def expected(folder: Path) -> "Expected":
    return Expected(folder)


class Drafts(Protocol):
    """What is drafted greedily behind a text."""

    def drafts(self, text: Sequence[int], window: int) -> list[int]: ...


class Expected:
    """What is drafted greedily behind a text."""

    def __init__(self, folder: Path) -> None:
        self._target = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
        self._weights = HEAD.weights()
        self._ids = self._weights["d2t"] + torch.arange(HEAD.draft_vocab)

    @torch.no_grad()
    def drafts(self, text: Sequence[int], window: int) -> list[int]:
        tokens = torch.tensor(text)
        states = self._target(tokens[None], output_hidden_states=True).hidden_states
        head = Definition(HEAD, self._weights, self._target.model.embed_tokens.weight)
        fused = head.fuse(torch.cat([states[layer][0] for layer in HEAD.features], -1))
        found: list[int] = []
        logits, state = (each[-1:] for each in head(tokens[1:], fused[:-1]))
        while len(found) < window:
            found.append(int(self._ids[logits.argmax()]))
            logits, state = head(torch.tensor(found[-1:]), state)
        return found


class Watched:
    """Keeps what every round drafted for the first slot, and how many tokens it emitted."""

    def __init__(self, llm: LLM) -> None:
        self.rounds: list[tuple[list[int], int]] = []
        self._llm = llm
        self._verified = llm.loop.drafter.verified

    def __enter__(self) -> "Watched":
        self._llm.loop.drafter.verified = self  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        del self._llm.loop.drafter.verified

    def __call__(self, this: Round) -> None:
        buffers = self._llm.loop.tandem.buffers
        drafts = buffers.draft_tokens.view(this.batch, this.window)[0].tolist() if this.window else []
        self.rounds.append((drafts, buffers.count.view(this.batch)[0].item()))
        self._verified(this)

    def hold(self, prompt: Sequence[int], text: Sequence[int], expected: "Drafts", least: int = 1) -> int:
        """Every round behind more than ``least`` tokens that drafted did so as ``expected``; returns how many there
        were. Forgets them."""
        known, whole, held = len(prompt), [*prompt, *text], 0
        if isinstance(self._llm.loop.room, BlockTable):  # a prompt's states come out of the round that it ends in
            least = known
        for drafts, count in self.rounds:
            if drafts and least < known < len(whole):  # behind one token there is no state to draft from
                assert drafts == expected.drafts(whole[:known], len(drafts)), f"behind {known} tokens"
                held += 1
            known += count
        self.rounds = []
        return held


def asked(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **AMONG, **params})


@pytest.mark.parametrize("length", [1, 2, 40, 65])
def test_every_round_drafts_what_the_definition_drafts(llm: LLM, expected: Expected, length: int) -> None:
    """Behind prompts of several chunks, whatever the round before accepted."""
    prompt = [(11 * i * i + length) % 256 for i in range(length)]
    with Watched(llm) as watched:
        output = llm.generate(prompt, asked(max_tokens=40))
        assert len({count for _, count in watched.rounds}) >= 2, "drafts are accepted, and refused"
        assert watched.hold(prompt, output.token_ids, expected) >= 5


def test_rounds_that_draft_nothing_leave_no_hole(llm: LLM, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = iter([0, 3, 0, 0, 1, 4, 2, 0, 4, *[4] * 30])
    monkeypatch.setattr(llm.loop.windows, "of", lambda _live: next(windows))
    with Watched(llm) as watched:
        output = llm.generate([8, *SHARED[:50]], asked())
        assert watched.hold([8, *SHARED[:50]], output.token_ids, expected) >= 5


def test_a_beginning_that_is_found_again_drafts_as_one_that_was_read(llm: LLM, expected: Expected) -> None:
    """The last token of a block is paired with the first behind it: another one there makes another block."""
    with Watched(llm) as watched:
        for prompt, cached in (
            (SHARED, 0),
            ([*SHARED, 3], 128),
            (SHARED[:129], 64),  # one token must be read for its state
            (SHARED[:130], 128),
            ([*SHARED[:128], 255, 1], 64),
            ([*SHARED[:128], 255, 2], 128),
        ):
            output = llm.generate(prompt, asked(max_tokens=9))
            assert output.num_cached_tokens == cached
            assert watched.hold(prompt, output.token_ids, expected) >= 2


def test_heads_change_no_token(opened: dict[str, LLM], plain: list[Any]) -> None:
    speculated = answers(opened["linear"], ASKED)
    assert [told(output) for output in speculated] == plain
    assert sum(output.speculation.num_accepted_draft_tokens for output in speculated) > 5


def test_who_gives_memory_back_goes_on_with_the_same_text(bundles: dict[str, Path], plain: list[Any]) -> None:
    with LLM(bundles["paged"], device="cpu", threads=1, cache_tokens=300, window={1: 4, 3: 2, 4: 0}) as llm:
        llm._worker.prepare(partial(capture, llm.loop))  # as a GPU does
        found = answers(llm, ASKED[::-1])[::-1]
        assert llm.metrics.preemptions
    assert [told(output) for output in found] == plain


def test_the_rejection_rule_reads_the_heads_laws_and_harms_no_neighbour(
    opened: dict[str, LLM], plain: list[Any]
) -> None:
    mixed = [(p, params | ({"rule": "rejection"} if i % 2 else {})) for i, (p, params) in enumerate(ASKED[-4:])]
    found = answers(opened["linear"], mixed)
    assert [told(output) for output in found[::2]] == plain[-4::2]
    assert found[1::2][-1].speculation.num_accepted_draft_tokens > 0
