"""Contracts that a manifest's sizes imply, for every kind of draft and of layer."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandemrt.engines.bundle.implied import require_implied
from tandemrt.engines.bundle.manifest import Manifest
from tandemrt.engines.contract import contract
from tandemrt.engines.contract.contract import CacheKind, Contract, RecurrentState
from tandemrt.engines.contract.draft_kinds import DRAFT_KINDS, DRAFT_LAYERS
from tandemrt.engines.contract.dtypes import FLOAT8
from tandemrt.engines.validation.errors import BadBundle
from tests.plain.test_bundle import write_bundle

STATE = RecurrentState((2, 8, 16), 40)
FEATURES, HIDDEN, ROW_STATES, MEMORY, DRAFT_VOCAB = 24, 16, 12, 5, 50
DTYPE = {"dtype": "float32"}
CACHE = {"layers": 2, "kv_heads": 2, "head_dim": 8, "capacity": 37, **DTYPE}
TARGET = {"target": contract.decoder(**CACHE, vocab=96, features=FEATURES)}
FUSE = {"fuse": contract.fuse(features=FEATURES, hidden=HIDDEN, **DTYPE)}
CONTEXT = {"context": contract.context(features=FEATURES, **CACHE, vocab=DRAFT_VOCAB)}


def proposing(vocab: int, *, target_ids: bool) -> dict[str, Contract]:
    return {
        name: contract.propose(vocab=vocab, **DTYPE, draft_probs=probs, target_ids=target_ids)
        for name, probs in (("propose", False), ("propose_probs", True))
    }


def head(vocab: int = 96, **options: bool) -> Contract:
    return contract.draft_head(hidden=HIDDEN, **CACHE, vocab=vocab, **options)


def block(**options: int) -> Contract:
    return contract.block(**CACHE, vocab=DRAFT_VOCAB, **options)


MARKOV = contract.markov(vocab=DRAFT_VOCAB, **DTYPE, row_states=ROW_STATES, memory=MEMORY)
WHOLE, PART = proposing(96, target_ids=False), proposing(DRAFT_VOCAB, target_ids=True)
MODEL = WHOLE | {"draft": contract.decoder(**CACHE, vocab=96)}

# kind -> the values of its entry, and the contracts of the target and of the draft's engines
DRAFTS: dict[str, tuple[dict[str, Any], dict[str, Contract]]] = {
    "model": ({}, MODEL),
    "pard": ({"mask_token": 1}, MODEL),
    "eagle3": ({"vocab": DRAFT_VOCAB}, TARGET | FUSE | PART | {"draft": head(DRAFT_VOCAB)}),
    "peagle": ({"mask_token": 1}, TARGET | FUSE | WHOLE | {"draft": head(parallel=True)}),
    "mtp": ({"layers": 2}, TARGET | FUSE | WHOLE | {"draft": head(further=True), "draft_2": head(further=True)}),
    "assistant": (
        {},
        TARGET
        | WHOLE
        | {"draft": contract.assistant(caches={1: (2, 8)}, hidden=FEATURES, capacity=37, vocab=96, **DTYPE)},
    ),
    "dflash": ({"mask_token": 1, "block": 8, "vocab": DRAFT_VOCAB}, TARGET | CONTEXT | PART | {"draft": block()}),
    "dflash2": (
        {"mask_token": 1, "block": 8},
        TARGET
        | {"context": contract.context(features=FEATURES, **CACHE, vocab=96)}
        | WHOLE
        | {
            "draft": contract.block(**CACHE, vocab=96, row_states=ROW_STATES),
            "markov": contract.markov(vocab=96, **DTYPE, row_states=ROW_STATES),
        },
    ),
    "dspark": (
        {"mask_token": 1, "block": 8, "vocab": DRAFT_VOCAB},
        TARGET | CONTEXT | PART | {"draft": block(row_states=ROW_STATES), "markov": MARKOV},
    ),
}


def drafting(folder: Path, kind: str, contracts: dict[str, Contract]) -> Manifest:
    manifest, entry = write_bundle(folder).manifest, DRAFT_KINDS[kind].entry(kind=kind, **DRAFTS[kind][0])
    engine = manifest.engines["target"]
    engines = {name: engine.model_copy(update={"contract": contract}) for name, contract in contracts.items()}
    return manifest.model_copy(update={"draft": entry, "engines": {**manifest.engines, **engines}})


def test_every_kind_of_draft_with_engines_is_in_the_table() -> None:
    assert DRAFTS.keys() == {kind for kind, traits in DRAFT_KINDS.items() if traits.engines}


@pytest.mark.parametrize("kind", DRAFTS)
def test_the_engines_of_a_draft_have_the_contracts_that_its_sizes_imply(tmp_path: Path, kind: str) -> None:
    contracts = DRAFTS[kind][1]
    manifest = drafting(tmp_path / "sample", kind, contracts)
    require_implied(manifest)
    decoders = [] if kind == "assistant" else [name for name in contracts if name in DRAFT_LAYERS]
    assert Counter(name for name, _ in manifest.caches) == dict.fromkeys(["target", *decoders], 2 * CACHE["layers"])


@pytest.mark.parametrize(
    ("kind", "engine", "side"),
    [(kind, engine, side) for kind in DRAFTS for engine in DRAFTS[kind][1] for side in ("inputs", "outputs")],
)
def test_an_engine_of_a_draft_with_a_binding_that_differs_is_rejected(
    tmp_path: Path, kind: str, engine: str, side: str
) -> None:
    contracts = DRAFTS[kind][1]
    *others, last = getattr(contracts[engine], side)
    differing = replace(contracts[engine], **{side: (*others, replace(last, dtype="bool"))})
    with pytest.raises(BadBundle, match=rf"engines\.{engine}\.contract must follow from limits.*{last.name}.*bool"):
        require_implied(drafting(tmp_path / "sample", kind, contracts | {engine: differing}))


@pytest.mark.parametrize(
    ("kind", "engine", "wider"),
    [
        ("eagle3", "fuse", contract.fuse(features=FEATURES + 1, hidden=HIDDEN, **DTYPE)),
        ("eagle3", "fuse", contract.fuse(features=FEATURES, hidden=HIDDEN + 1, **DTYPE)),
        ("dflash", "context", contract.context(features=FEATURES + 1, **CACHE, vocab=DRAFT_VOCAB)),
        ("dspark", "markov", contract.markov(vocab=DRAFT_VOCAB, **DTYPE, row_states=ROW_STATES + 1, memory=MEMORY)),
        ("dspark", "markov", contract.markov(vocab=96, **DTYPE, row_states=ROW_STATES, memory=MEMORY)),
        (
            "assistant",
            "draft",
            contract.assistant(caches={1: (2, 16)}, hidden=FEATURES, capacity=37, vocab=96, **DTYPE),
        ),
        ("model", "propose", proposing(DRAFT_VOCAB, target_ids=False)["propose"]),
    ],
)
def test_an_engine_of_a_draft_reads_as_many_values_as_another_writes(
    tmp_path: Path, kind: str, engine: str, wider: Contract
) -> None:
    with pytest.raises(BadBundle, match=rf"engines\.{engine}\.contract must follow from limits"):
        require_implied(drafting(tmp_path / "sample", kind, DRAFTS[kind][1] | {engine: wider}))


@pytest.mark.parametrize("attention", [(0,), (0, 1), (0, 1, 2)])
@pytest.mark.parametrize("recurrent", [(), (1,), (1, 2)])
def test_a_layer_with_attention_and_a_state_counts_once(
    tmp_path: Path, attention: tuple[int, ...], recurrent: tuple[int, ...]
) -> None:
    manifest = write_bundle(tmp_path / "sample").manifest
    decoder = contract.decoder(
        layers=len({*attention, *recurrent}),
        kv_heads=2,
        head_dim=8,
        capacity=37,
        vocab=96,
        dtype="float32",
        heads=dict.fromkeys(attention, (2, 8)),
        recurrent=dict.fromkeys(recurrent, STATE),
        history=7 if recurrent else 0,
    )
    target = manifest.engines["target"].model_copy(update={"contract": decoder})
    require_implied(manifest.model_copy(update={"engines": {**manifest.engines, "target": target}}))


@pytest.mark.parametrize(
    ("cache", "kv_dtype", "valid"),
    [
        ("paged", FLOAT8, True),
        ("paged", "float16", False),
        ("linear", "float32", True),
        ("linear", FLOAT8, False),
    ],
)
def test_only_a_paged_cache_may_have_other_keys_than_its_model_and_those_in_float8(
    tmp_path: Path, cache: CacheKind, kv_dtype: str, valid: bool
) -> None:
    manifest = write_bundle(tmp_path / "sample").manifest
    decoder = contract.decoder(**CACHE, vocab=96, cache=cache, kv_dtype=kv_dtype)
    target = manifest.engines["target"].model_copy(update={"contract": decoder})
    limits = manifest.limits.model_copy(update={"cache_blocks": 8 if cache == "paged" else None})
    changed = manifest.model_copy(update={"limits": limits, "engines": {**manifest.engines, "target": target}})
    if valid:
        require_implied(changed)
    else:
        with pytest.raises(BadBundle, match=r"engines\.target\.contract must follow from limits.*past_key"):
            require_implied(changed)


def test_a_bundle_of_operators_without_a_sampling_parameter_is_rejected_by_its_name(tmp_path: Path) -> None:
    manifest = write_bundle(tmp_path / "sample").manifest
    verify = manifest.engines["verify"]
    inputs = tuple(binding for binding in verify.contract.inputs if binding.name != "top_n_sigma")
    older = verify.model_copy(update={"contract": replace(verify.contract, inputs=inputs)})
    with pytest.raises(BadBundle, match=r"engines.verify.*input top_n_sigma .* is missing.*Build the bundle again"):
        require_implied(manifest.model_copy(update={"engines": {**manifest.engines, "verify": older}}))
