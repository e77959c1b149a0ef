"""PARD: a window in one run of the draft, which is what plain passes of transformers over the text and masks give."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tandemrt import LLM, SamplingParams
from tandemrt.engines.errors import BadCheckpoint
from tandemrt.engines.recipe import Recipe
from tandemrt.export.build import build
from tests.engine.test_eagle3 import Watched, answers
from tests.engine.test_invisible import REQUESTS, told
from tests.engine.test_paged_rounds import PAGED
from tests.makers import tiny_checkpoint, write_recipe

MASK, WINDOW = 319, 5  # an id that spells nothing
SHARED = [(7 * i) % 256 for i in range(150)]
ASKED = REQUESTS[1:9:3]


def pard(folder: Path, token: Any = MASK, **config: Any) -> Path:
    """A draft of the target's own weights: the first token of a window is mostly right, the others are anything."""
    path = tiny_checkpoint(folder, layers=2, seed=1, head_dim=32) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": token, "spd_type": "pard"} | config))
    return folder


def recipe(folder: Path, draft: Path, backend: str = 'name = "onnxruntime-cpu"') -> Recipe:
    drafting = f'kind = "pard"\ncheckpoint = "{draft}"\nwindow = {WINDOW}'
    target = folder / "target"
    return Recipe.load(
        write_recipe(folder / "pard.toml", target=target, drafting=drafting, backend=backend, length=256)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pard")
    tiny_checkpoint(folder / "target", layers=2, seed=1, head_dim=32)
    pard(folder / "draft")
    return folder


@pytest.fixture(scope="module", params=["linear", "paged"])
def llm(folder: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    paged = request.param == "paged"
    made = recipe(folder, folder / "draft", PAGED) if paged else recipe(folder, folder / "draft")
    bundle = build(made, folder / request.param).folder
    with LLM(bundle, device="cpu", threads=1, overlap=paged) as opened:
        yield opened


class Expected:
    """What is drafted greedily behind a text."""

    def __init__(self, folder: Path) -> None:
        self._draft = AutoModelForCausalLM.from_pretrained(folder / "draft", dtype=torch.float32).eval()

    @torch.no_grad()
    def drafts(self, text: Sequence[int], window: int) -> list[int]:
        logits = self._draft(torch.tensor([[*text, *[MASK] * (window - 1)]])).logits[0]
        found: list[int] = logits[-window:].argmax(-1).tolist()
        return found


@pytest.fixture(scope="module")
def expected(folder: Path) -> Expected:
    return Expected(folder)


def asked(**params: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params})


@pytest.mark.parametrize("length", [1, 2, 40, 65])
def test_every_round_drafts_what_one_pass_over_text_and_masks_gives(llm: LLM, expected: Expected, length: int) -> None:
    prompt = [(11 * i * i + length) % 256 for i in range(length)]
    with Watched(llm) as watched:
        output = llm.generate(prompt, asked())
        assert {count for _, count in watched.rounds} >= {2}, "drafts are accepted"
        assert watched.hold(prompt, output.token_ids, expected, least=0) >= 5


def test_rounds_that_draft_nothing_leave_no_hole(llm: LLM, expected: Expected, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = iter([0, 3, 0, 0, 1, 5, 2, 0, 4, *[5] * 30])
    monkeypatch.setattr(llm.loop.windows, "of", lambda _live: next(windows))
    with Watched(llm) as watched:
        output = llm.generate([8, *SHARED[:50]], asked())
        assert watched.hold([8, *SHARED[:50]], output.token_ids, expected) >= 5


def test_a_beginning_that_is_found_again_drafts_as_one_that_was_read(llm: LLM, expected: Expected) -> None:
    with Watched(llm) as watched:
        for prompt, cached in ((SHARED, 0), ([*SHARED, 3], 128), (SHARED[:129], 128)):
            output = llm.generate(prompt, asked(max_tokens=9))
            assert output.num_cached_tokens == cached
            assert watched.hold(prompt, output.token_ids, expected) >= 2


def test_parallel_drafts_change_no_token(llm: LLM) -> None:
    plain = [told(output) for output in answers(llm, ASKED, window=0)]
    assert [told(output) for output in answers(llm, ASKED)] == plain
    assert [told(output) for output in answers(llm, ASKED[::-1])[::-1]] == plain


def test_all_draws_of_a_window_have_laws_that_the_rejection_rule_reads(llm: LLM) -> None:
    sampled = [("noise", {"rule": "rejection", "seed": seed, "max_tokens": 30}) for seed in range(3)]
    found = answers(llm, sampled)
    assert sum(output.speculation.num_accepted_draft_tokens for output in found) > 20
    assert told(answers(llm, sampled[:1])[0]) == told(found[0])


@pytest.mark.parametrize(
    ("token", "config", "message"),
    [
        (320, {}, "pard_token should be an id below vocab_size, 320, it is 320"),
        (None, {}, "pard_token should be an id below vocab_size, 320, it is None"),
        (True, {}, "it is True"),
        (MASK, {"spd_type": "pard2"}, "spd_type is 'pard2', which the exporter does not implement"),
    ],
)
def test_checkpoints_that_are_no_pard_drafts_are_refused(
    folder: Path, tmp_path: Path, token: Any, config: Any, message: str
) -> None:
    with pytest.raises(BadCheckpoint) as caught:
        build(recipe(folder, pard(tmp_path / "draft", token, **config)), tmp_path / "bundle")
    assert message in str(caught.value)
