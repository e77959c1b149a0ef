"""Draft windows by number of running requests change the speed and no text."""

from pathlib import Path
from typing import Any

import pytest

from tandemrt import LLM, SamplingParams
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.export.bundle.build import build
from tandemrt.runtime.requests.round import Round
from tests.engine.test_invisible import output_of, outputs
from tests.makers import tiny_checkpoint, write_recipe


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose draft is the target itself, so every draft with full context is accepted."""
    folder = tmp_path_factory.mktemp("twins")
    target = tiny_checkpoint(folder / "target", seed=1)
    recipe = write_recipe(folder / "twins.toml", target=target, draft=target, window=4)
    return build(Recipe.load(recipe), folder / "bundle").folder


@pytest.mark.parametrize("table", [{1: 4, 2: 2, 3: 0}, {1: 0, 3: 5}])
def test_a_window_table_changes_no_text(tiny_bundle: Path, ngram_bundle: Path, table: dict[int, int]) -> None:
    plain = [output_of(output) for output in outputs(tiny_bundle, num_draft_tokens=0)]
    assert [output_of(output) for output in outputs(tiny_bundle, num_draft_tokens=table)] == plain
    assert [output_of(output) for output in outputs(ngram_bundle, num_draft_tokens=table)] == plain


def test_a_round_uses_the_draft_window_of_its_number_of_requests(tiny_bundle: Path) -> None:
    with LLM(tiny_bundle, threads=1, num_draft_tokens={1: 5, 2: 3, 3: 0}, overlap=True) as llm:
        seen: set[tuple[int, int]] = set()
        score = llm.loop.target.score

        def record_round(round_: Round) -> None:
            seen.add((len(round_.rows), round_.window))
            score(round_)

        llm.loop.target.score = record_round  # type: ignore[method-assign]
        params = [SamplingParams(seed=1, max_tokens=n, ignore_eos=True) for n in (60, 40, 20)]
        llm.generate(["one", "two", "three"], params)
        table = {3: 0, 2: 3, 1: 5}
        assert table.items() <= seen
        assert all(window <= table[rows] for rows, window in seen)  # less where all texts end sooner
        seen.clear()
        llm.generate("one", SamplingParams(max_tokens=1))
        assert seen == {(1, 0)}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_draft_catches_up_after_rounds_without_drafts(twins: Path, overlap: bool) -> None:
    with LLM(twins, threads=1, num_draft_tokens={1: 4, 2: 0}, overlap=overlap, lookup=False) as llm:
        prompts = ["first", "other"]
        for lengths in ((70, 20), (70, 33), (80, 51)):
            params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
            first, _ = llm.generate(prompts, params)
            record = first.speculation
            assert record.num_draft_tokens > 10
            assert record.num_accepted_draft_tokens == record.num_draft_tokens


@pytest.mark.parametrize("table", [{1: 9}, {2: 4}, {}])
def test_an_invalid_table_is_rejected(tiny_bundle: Path, table: Any) -> None:
    with pytest.raises(BadRequest, match="num_draft_tokens: "):
        LLM(tiny_bundle, num_draft_tokens=table)


def test_a_round_without_an_ngram_match_drafts_no_token(ngram_bundle: Path) -> None:
    with LLM(ngram_bundle, threads=1) as llm:
        seen: list[tuple[int, int]] = []
        score = llm.loop.target.score

        def record_round(round_: Round) -> None:
            drafts = llm.loop.target.buffers.draft_len.host_view(round_.batch).tolist()
            seen.append((round_.window, max(drafts, default=0)))
            score(round_)

        llm.loop.target.score = record_round  # type: ignore[method-assign]
        params = [SamplingParams(temperature=t, seed=1, max_tokens=60, ignore_eos=True) for t in (0.0, 3.0)]
        for each in params:
            llm.generate("one two one two one two", each)
    windows = {window for window, _ in seen}
    assert 0 in windows
    assert len(windows) > 1
    assert all(window == drafted for window, drafted in seen)
