"""``tandemrt check --compare-with``: two bundles of one model on a text."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tandemrt.engines.bundle.bundle import Bundle
from tandemrt.engines.options.options import RuntimeOptions
from tandemrt.engines.recipe.recipe import Recipe
from tandemrt.engines.validation.errors import BadRequest
from tandemrt.export.bundle.build import build
from tandemrt.runtime.check.compare_bundles import TextScores, compare_bundles, compare_scores, shared_tokens
from tandemrt.runtime.check.result import CheckResult
from tandemrt.runtime.check.run import check_bundle
from tests.command_line import app
from tests.makers import tiny_checkpoint, write_recipe

TEXT = "the box and the pine " * 9


def findings(bundle: Path, other: Path) -> list[CheckResult]:
    one, two = Bundle.open(bundle), Bundle.open(other)
    options = RuntimeOptions(threads=1)
    return list(compare_bundles(one, two, options, shared_tokens(one, two, options, TEXT)))


def test_a_bundle_equals_itself(ngram_bundle):
    results = {finding.check: finding for finding in findings(ngram_bundle, ngram_bundle)}
    assert "+0.00%" in results["perplexity of the text"].result
    assert results["logits of the text"].numbers["root_mean_square"] == 0
    drafts = results["tokens per request and round"].numbers
    assert drafts["acceptance_length"] == drafts["against"] >= 1


def test_the_second_bundle_is_the_one_compared_with(ngram_bundle, tmp_path):
    target = tiny_checkpoint(tmp_path / "target", seed=2)
    drafting = 'kind = "ngram"\nnum_draft_tokens = 8'
    recipe = Recipe.load(write_recipe(tmp_path / "other.toml", target=target, drafting=drafting))
    other = build(recipe, tmp_path / "bundle").folder
    perplexity, *_ = findings(ngram_bundle, other)
    alone = [findings(bundle, bundle)[0].numbers["perplexity"] for bundle in (ngram_bundle, other)]
    assert alone[0] != alone[1]
    assert [perplexity.numbers["perplexity"], perplexity.numbers["against"]] == alone
    assert perplexity.against == "bundle other"


def test_figures_match_their_definitions():
    tokens, mine, theirs = [0, 1, 1], torch.tensor([[0.0, 1.0]] * 3), torch.tensor([[1.0, 0.0]] * 3)
    rows = [
        finding.numbers for finding in compare_scores(TextScores(mine, None), TextScores(theirs, 2.5), tokens, "whole")
    ]
    surprise = [-float(each.log_softmax(-1)[0, 1]) for each in (mine, theirs)]  # of token 1, twice
    assert rows[0]["perplexity"] == pytest.approx(torch.tensor(surprise[0]).exp().item())
    assert rows[0]["against"] == pytest.approx(torch.tensor(surprise[1]).exp().item())
    assert rows[1]["root_mean_square"] == pytest.approx(2**0.5)
    p = torch.tensor([1.0, 0.0]).softmax(-1)
    assert rows[1]["divergence"] == pytest.approx(float((p * (p / p.flip(0)).log()).sum()))
    assert rows[1]["same_largest"] == 0
    assert rows[2] == {"acceptance_length": 0.0, "against": 2.5}


def refused(bundle: Path, other: Path, text: str, **options: int) -> str:
    """Return why a comparison is refused before the first check."""
    checks = check_bundle(bundle, RuntimeOptions(threads=1, **options), compare_with=other, text=text)
    with pytest.raises(BadRequest) as caught:
        next(checks)
    return str(caught.value)


def test_a_text_that_is_too_short_is_refused_before_any_check(ngram_bundle):
    message = refused(ngram_bundle, ngram_bundle, "a")
    assert message.startswith("--text: must have at least 64 tokens; it has 1;")


def test_a_bundle_with_other_tokens_is_refused_before_any_check(ngram_bundle, demo_bundle):
    assert "--compare-with: must have the same tokens" in refused(ngram_bundle, demo_bundle, "the box " * 40)


def test_options_that_the_other_bundle_lacks_are_refused_before_any_check(tiny_bundle, demo_bundle):
    message = refused(tiny_bundle, demo_bundle, "the box " * 40, num_draft_tokens=8)
    assert message.startswith("--compare-with: demo must fit the options: num_draft_tokens: the bundle was built for")


@pytest.mark.parametrize("option", ["--compare-with", "--text"])
def test_compare_with_and_text_require_each_other(ngram_bundle, option):
    asked = ["check", str(ngram_bundle), option, str(ngram_bundle / "bundle.json")]
    error = CliRunner().invoke(app, asked).exception
    assert isinstance(error, BadRequest)
    assert "--compare-with and --text must be given together" in str(error)
