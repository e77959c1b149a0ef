"""``export check --beside``: a bundle and another of the same model, on a text."""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from tandemrt.cli import app
from tandemrt.engines.bundle import Bundle
from tandemrt.engines.errors import BadRequest
from tandemrt.engines.options import RuntimeOptions
from tandemrt.runtime.check.beside import Reading, check_beside, compared
from tandemrt.runtime.check.finding import Finding


def beside(bundle: Path, text: str) -> list[Finding]:
    opened = Bundle.open(bundle)
    return list(check_beside(opened, opened, RuntimeOptions(threads=1), text))


def test_a_bundle_is_what_it_is_itself(ngram_bundle):
    found = {finding.check: finding for finding in beside(ngram_bundle, "the box and the pine " * 9)}
    assert "+0.00%" in found["perplexity of the text"].result
    assert found["logits of the text"].numbers["root_mean_square"] == 0
    drafts = found["tokens per request and round"].numbers
    assert drafts["acceptance_length"] == drafts["against"] >= 1


def test_the_figures_are_those_of_their_definitions():
    tokens, mine, theirs = [0, 1, 1], torch.tensor([[0.0, 1.0]] * 3), torch.tensor([[1.0, 0.0]] * 3)
    rows = [finding.numbers for finding in compared(Reading(mine, None), Reading(theirs, 2.5), tokens, "whole")]
    surprise = [-float(each.log_softmax(-1)[0, 1]) for each in (mine, theirs)]  # of token 1, twice
    assert rows[0]["perplexity"] == pytest.approx(torch.tensor(surprise[0]).exp().item())
    assert rows[0]["against"] == pytest.approx(torch.tensor(surprise[1]).exp().item())
    assert rows[1]["root_mean_square"] == pytest.approx(2**0.5)
    p = torch.tensor([1.0, 0.0]).softmax(-1)
    assert rows[1]["divergence"] == pytest.approx(float((p * (p / p.flip(0)).log()).sum()))
    assert rows[1]["same_largest"] == 0
    assert rows[2] == {"acceptance_length": 0.0, "against": 2.5}


def test_a_text_that_is_too_short_is_refused(ngram_bundle):
    with pytest.raises(BadRequest, match="--text: must have at least 64 tokens; it has 1;"):
        beside(ngram_bundle, "a")


def test_the_bundle_and_the_text_go_together(ngram_bundle):
    asked = ["export", "check", str(ngram_bundle), "--beside", str(ngram_bundle)]
    error = CliRunner().invoke(app, asked).exception
    assert isinstance(error, BadRequest)
    assert "--beside and --text must be given together" in str(error)
