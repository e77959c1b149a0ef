"""Every kind of draft has one row per layer: engines, export and runtime."""

from typing import get_args

import pytest

from tandemrt.engines.contract.draft_kinds import (
    DRAFT_KINDS,
    DraftEntry,
    DraftTraits,
    FeatureEntry,
    HeadKind,
    ModelEntry,
    ModelKind,
    NgramEntry,
)
from tandemrt.engines.contract.draft_sampling import DraftSampling
from tandemrt.engines.recipe.models import Draft
from tandemrt.export.bundle.draft_kinds import FEATURE_DRAFTS, MODEL_DRAFTS
from tandemrt.runtime.llm.neural_drafts import NEURAL_DRAFTERS


def test_a_recipe_and_a_manifest_take_every_kind() -> None:
    sections = [kind for section in get_args(Draft) for kind in get_args(section.model_fields["kind"].annotation)]
    entries = get_args(get_args(DraftEntry)[0])
    assert sorted(sections) == sorted(DRAFT_KINDS)
    assert {kind: traits.entry for kind, traits in DRAFT_KINDS.items()} == {
        kind: entry for entry in entries for kind in get_args(entry.model_fields["kind"].annotation)
    }


def test_every_kind_with_a_model_is_exported_and_drafts() -> None:
    models, heads = get_args(ModelKind), get_args(HeadKind)
    assert sorted((*models, *heads)) == sorted(kind for kind, traits in DRAFT_KINDS.items() if traits.samples)
    assert sorted(heads) == sorted(kind for kind, traits in DRAFT_KINDS.items() if traits.features)
    assert (sorted(MODEL_DRAFTS), sorted(FEATURE_DRAFTS)) == (sorted(models), sorted(heads))
    assert sorted(NEURAL_DRAFTERS) == sorted((*models, *heads))


@pytest.mark.parametrize("traits", DRAFT_KINDS.values(), ids=list(DRAFT_KINDS))
def test_the_traits_of_a_kind_agree_with_its_entry_and_its_engines(traits: DraftTraits) -> None:
    entry, fields = traits.entry, traits.entry.model_fields
    assert traits.samples == issubclass(entry, DraftSampling)
    assert traits.features == issubclass(entry, FeatureEntry)
    assert traits.features == bool({"fuse", "context"} & {*traits.engines} or traits.reads_cache)
    assert traits.masks == ("mask_token" in fields)
    assert traits.block == ("block" in fields) == ("context" in traits.engines)
    assert traits.parallel == (traits.masks and not traits.block)
    assert (traits.layers > 1) == ("layers" in fields)
    assert traits.lookahead == ("fuse" in traits.engines or traits.reads_cache)
    assert traits.skips_undrafted == (entry is ModelEntry)


def test_a_lookup_is_described_by_its_least_and_most_tokens() -> None:
    assert NgramEntry(kind="ngram", ngram_min=1, ngram_max=3).description == "ngram, 1 to 3 tokens"
